"""Tests of what optimizers do with sharded parameters."""
