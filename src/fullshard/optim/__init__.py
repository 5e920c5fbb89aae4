"""Optimizers over sharded parameters."""

from fullshard.optim.local_step import local_step

__all__ = ["local_step"]
