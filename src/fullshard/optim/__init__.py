"""Optimizers over sharded parameters."""

import importlib
from typing import TYPE_CHECKING, Any

from fullshard.optim.grad_scaler import ShardedGradScaler
from fullshard.optim.local_step import local_step

if TYPE_CHECKING:
    from fullshard.optim.local_steps import LocalSteps

__all__ = ["LocalSteps", "ShardedGradScaler", "local_step"]

if not TYPE_CHECKING:  # which would accept any name

    def __getattr__(name: str) -> Any:
        if name == "LocalSteps":
            return importlib.import_module("fullshard.optim.local_steps").LocalSteps
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
