"""How a sum over ranks becomes a mean: what is divided before it travels, by the backend, and after.

Owns the choice among the three, :func:`choose_scaling`, and the division itself; transports decide who reduces and
where the values lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from fullshard.torch_private import premultiplied_sum


@dataclass(frozen=True)
class Scaling:
    """A division in three places."""

    before: float  # of this rank's values, before they travel
    op: Any  # what the collective does
    after: float  # of the result


@lru_cache(maxsize=256)
def choose_scaling(dtype: torch.dtype, world_size: int, divisor: float, sum_only: bool, backend: str) -> Scaling:
    """Divide by ``divisor`` where it costs least and loses nothing.

    NCCL divides while it reduces. fp16 is divided in two steps of about the square root, because the sum could
    overflow without the first and small values would vanish if it were the only one. The first is the smallest power of
    two that is not below the square root, as in torch, and so exact.

    ``world_size`` ranks reduce in ``dtype``; with ``sum_only`` the collective can do nothing but sum.
    """
    if dtype == torch.float16:
        before = 2.0 ** math.ceil(math.log2(abs(divisor)) / 2)
        return Scaling(before, dist.ReduceOp.SUM, divisor / before)
    if backend != "nccl" or sum_only or divisor == 1 or not dtype.is_floating_point:
        return Scaling(1.0, dist.ReduceOp.SUM, divisor)
    if divisor == world_size:
        return Scaling(1.0, dist.ReduceOp.AVG, 1.0)
    return Scaling(1.0, premultiplied_sum(1 / divisor), 1.0)


def divide_(tensor: torch.Tensor, divisor: float) -> None:
    """``tensor /= divisor``, by a multiplication, which takes half the time, where that gives the same bits."""
    if divisor == 1:
        return
    if math.frexp(divisor)[0] == 0.5:
        tensor.mul_(1 / divisor)
    else:
        tensor.div_(divisor)
