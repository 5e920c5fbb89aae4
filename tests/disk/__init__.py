"""Tests of values on a disk."""
