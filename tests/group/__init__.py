"""Tests of `fullshard.group`: the parameters that travel together."""
