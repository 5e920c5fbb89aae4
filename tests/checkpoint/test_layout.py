"""The part of a tensor that a rank holds, as boxes: they cover it once, whatever the sharding, and in order."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fullshard
from fullshard.checkpoint.layout import ONLY_HERE, Box, Copies, Layout, _boxes_of_run, layout_of
from tests.fully_shard.cases import groups_of
from tests.harness import World, fake_world, ranks


def elements(shape: tuple[int, ...], boxes: Any) -> list[int]:
    """The numbers of the elements in boxes, in their order."""
    whole = torch.arange(math.prod(shape)).view(shape)
    found = list[int]()
    for offsets, sizes in boxes:
        found += whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].flatten().tolist()
    return found


def test_the_boxes_of_a_run_are_its_elements_in_order() -> None:
    for shape in ((), (7,), (4, 5), (3, 2, 4), (1, 6), (2, 1, 3, 2)):
        for start, stop in combinations_with_replacement(range(math.prod(shape) + 1), 2):
            found = elements(shape, _boxes_of_run(shape, start, stop))
            assert found == list(range(start, stop)), (shape, start, stop)


def test_whole_rows_of_a_run_are_one_box() -> None:
    assert list(_boxes_of_run((4, 5), 3, 16)) == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 1))]


@pytest.mark.parametrize(("rank", "rows"), [(0, (0, 2)), (2, (4, 5)), (3, None)])
def test_a_dtensor_is_one_box_and_a_rank_without_elements_has_none(rank: int, rows: tuple[int, int] | None) -> None:
    with fake_world(4, rank) as world:
        tensor = distribute_tensor(torch.zeros(5, 3), world.mesh(), [Shard(0)], src_data_rank=None)
        layout = layout_of(tensor)
    assert layout.shape == (5, 3)
    assert layout.boxes == (() if rows is None else (((rows[0], 0), (rows[1] - rows[0], 3)),))
    assert layout.has_first is (rank == 0)
    assert layout.copies[1:] == (0, 1, 4)


def test_replicas_know_their_number() -> None:
    with fake_world(6, 4) as world:  # the second of three replicas of the first half
        mesh = world.mesh(3, 2, names=("replicate", "shard"))
        layout = layout_of(distribute_tensor(torch.zeros(4, 3), mesh, [Replicate(), Shard(1)], src_data_rank=None))
    assert layout.boxes == (((0, 0), (4, 2)),)
    assert layout.copies[1:] == (2, 3, 6)


def test_a_dim_that_was_cut_twice_is_where_torch_has_it() -> None:
    with fake_world(4, 3) as world:
        mesh = world.mesh(2, 2, names=("data", "tensor"))
        layout = layout_of(distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0), Shard(0)], src_data_rank=None))
    assert layout.boxes == (((6, 0), (2, 3)),)


def test_a_plain_tensor_is_whole_on_all_ranks() -> None:
    for value in (torch.zeros(3, 2), torch.tensor(1.0), torch.zeros(0, 4)):
        with fake_world(3, 2):
            layout = layout_of(value)
        assert layout.boxes == (((0,) * value.ndim, tuple(value.shape)),)
        assert layout.copies == Copies("all", 2, 3, 3)


@ranks(2)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_fragments_boxes_are_its_run(world: World, channels_last: bool) -> None:
    conv = nn.Conv2d(3, 5, 2, bias=False)
    if channels_last:
        conv = conv.to(memory_format=torch.channels_last)
    values = conv.weight.detach().clone()
    model = fullshard.FullyShardedDataParallel(conv, use_orig_params=True)
    (fragment,) = groups_of(model)[0].params
    layout = layout_of(fragment)
    assert layout.shape == (5, 3, 2, 2)
    parts = layout.split("weight", fragment.values)
    covered = torch.zeros(5, 3, 2, 2, dtype=torch.int64)
    for (offsets, sizes), part in zip(layout.boxes, parts, strict=True):
        where = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        assert torch.equal(part, values[where])
        covered[where] += 1
    torch.distributed.all_reduce(covered)
    assert covered.eq(1).all()


def test_parts_are_views_of_the_values() -> None:
    local = torch.arange(8.0)
    layout = Layout((4, 5), tuple(_boxes_of_run((4, 5), 3, 11)), ONLY_HERE, (0, 1))
    parts = layout.split("x", local)
    assert [part.shape for part in parts] == [(1, 2), (1, 5), (1, 1)]
    assert torch.cat([part.flatten() for part in parts]).tolist() == local.tolist()
    parts[1].fill_(9)
    assert local[2:7].eq(9).all()
    assert Layout((2, 0), (((0, 0), (2, 0)),), ONLY_HERE).split("x", torch.zeros(0))[0].shape == (2, 0)


def test_a_box_has_a_key_where_others_may_have_it_unseen() -> None:
    box = Box(("a", "b"), (4, 5), (2, 0), Copies("x", 0, 1, 2))
    assert box.key(2) == ""
    assert box.key(4) == "a at (2, 0)"
    assert box._replace(copies=Copies("all", 0, 4, 4)).key(4) == "a"
    assert Layout((4, 5), (((2, 0), (2, 5)),), ONLY_HERE).named(("a",)) == (Box(("a",), (4, 5), (2, 0), ONLY_HERE),)
