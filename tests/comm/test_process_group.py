"""What ranks tell each other, as objects of Python."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import process_group
from fullshard.comm.process_group import gather_objects
from tests.harness import World, ranks


@ranks(1, 3)
def test_objects_of_every_size_arrive_whole_and_in_order(world: World) -> None:
    for size in (0, 200, *range(230, 250), 5000):
        for largest in range(world.size):
            said = [rank * b"\0" + bytes(size if rank == largest else 7 * rank) for rank in range(world.size)]
            assert gather_objects(said[world.rank], None) == said


class Long:
    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return len, (bytes(self.number),)


@ranks(1)
def test_long_objects_of_many_ranks_are_not_all_copied_at_once(world: World) -> None:
    size, number = 32, 2**20

    def from_equal_ranks(every: torch.Tensor, padded: torch.Tensor, group: object) -> None:
        every.view(size, -1).copy_(padded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda group: size)
        patch.setattr(process_group, "all_gather_single", from_equal_ranks)
        tracemalloc.start()  # of objects of Python: the tensor that has what all ranks said is none
        said = gather_objects(Long(number), None)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert said == [number] * size
    assert most < size / 2 * number
