"""Optimizers over sharded parameters."""

from fullshard.optim.grad_scaler import ShardedGradScaler
from fullshard.optim.local_step import local_step
from fullshard.optim.local_steps import LocalSteps

__all__ = ["LocalSteps", "ShardedGradScaler", "local_step"]
