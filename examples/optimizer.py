"""The optimizer: AdamW, a learning rate that warms up and then stays, gradients clipped to a norm.

The learning rate depends on the step alone and not on how many are planned, so that a run that is given more steps
later is the run that had them from the start. Nothing here differs between sharded parameters and whole ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import FullyShardedDataParallel
from settings import Settings

WARM_UP_STEPS = 40
LARGEST_NORM = 1.0


def build(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Make the optimizer of a model whose parameters are final: build it after sharding."""
    return torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings, step: int) -> Tensor:
    """Clip the gradients, step the optimizer, and return the norm that the gradients of the whole model had."""
    if isinstance(model, FullyShardedDataParallel):  # whose gradients are parts of which torch knows nothing
        norm = model.clip_grad_norm_(LARGEST_NORM)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    for group in optimizer.param_groups:
        group["lr"] = settings.lr * min(1.0, (step + 1) / WARM_UP_STEPS)
    optimizer.step()
    # The norm of sharded gradients is a DTensor: each rank knows its own part until full_tensor() adds them up.
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
