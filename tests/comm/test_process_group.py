"""What ranks tell each other, as objects of Python."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import process_group
from fullshard.comm.process_group import gather_objects, wait_for_message
from tests.harness import World, ranks


@ranks(1, 3)
def test_objects_of_every_size_arrive_whole_and_in_order(world: World) -> None:
    for size in (0, 200, *range(230, 250), 5000):
        for largest in range(world.size):
            said = [rank * b"\0" + bytes(size if rank == largest else 7 * rank) for rank in range(world.size)]
            assert gather_objects(said[world.rank], None) == said


@ranks(2)
def test_a_message_has_the_timeout_that_its_process_group_was_given_last(world: World) -> None:
    """A wait of gloo by itself has the one with which processes connected."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=30))  # type: ignore[union-attr]
    values = torch.full((2,), float(world.rank))
    if world.rank == 1:
        time.sleep(1.5)
        dist.send(values, group=group, group_dst=0)
    else:
        wait_for_message(dist.irecv(values, group=group, group_src=1), group)
        assert values.tolist() == [1.0, 1.0]
    dist.destroy_process_group(group)


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
