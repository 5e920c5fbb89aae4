"""Optimizers over sharded parameters."""

from fullshard.optim.grad_scaler import ShardedGradScaler
from fullshard.optim.local_step import local_step

__all__ = ["ShardedGradScaler", "local_step"]
