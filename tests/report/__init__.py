"""Tests of what is predicted and what is recorded."""
