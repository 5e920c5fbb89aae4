"""Tests of `fullshard.schedule`: which group is gathered and reduced when."""
