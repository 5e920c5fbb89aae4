"""Tests of fullshard.compat and of the commands."""
