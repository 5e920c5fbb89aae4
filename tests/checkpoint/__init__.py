"""Tests of what is saved and loaded."""
