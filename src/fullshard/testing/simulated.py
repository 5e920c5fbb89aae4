"""A world of many ranks in one process, for shapes, memory and the order of collectives, which move nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fullshard import torch_private
from fullshard.testing.rank import World


@contextmanager
def simulated_world(size: int, rank: int = 0) -> Iterator[World]:
    """A context in which this process is rank ``rank`` of a simulated world of ``size`` ranks, 1,024 or more.

    Collectives return at once and move nothing. Shapes, placements, memory and the order of calls are right; the values
    that a collective returns are whatever was there before.

    Ranks: this process alone.

    Raises:
        RuntimeError: if this process has a default process group.
    """
    if dist.is_initialized():
        raise RuntimeError("simulated_world() needs a process without a default process group: destroy it first")
    with torch_private.simulated_world(size, rank):
        yield World(rank, size)
