"""Tests of what is foretold and what is recorded."""
