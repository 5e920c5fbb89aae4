"""A fake world: one process that takes itself for a rank of many, with collectives that move nothing.

It serves tests of integer arithmetic, order and cost at world sizes that no machine here could run. Results of
collectives are whatever was in the output before, so nothing may be asserted about values.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness.rank import World, forget_meshes


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[World]:
    """Be rank `rank` of `size` (1 to 1,024 or more) inside the block, in this process, with the backend "fake"."""
    if dist.is_initialized():
        raise RuntimeError("fake_world() needs a process without a default group, but one exists; destroy it first.")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield World(rank, size)
    finally:
        forget_meshes()
        dist.destroy_process_group()
