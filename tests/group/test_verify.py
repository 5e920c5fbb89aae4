"""Ranks that begin with different values are told so on request."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import fullshard
from fullshard.group.verify import compare, first_difference
from tests.harness import World, ranks
from tests.harness.models import MLP, MixedDtypes, seeded


def test_the_first_difference_names_both_ranks_and_what_one_of_them_lacks() -> None:
    assert first_difference({3: ["a", "b"], 5: ["a", "b"], 7: ["a", "c"]}) == (3, "b", 7, "c")
    assert first_difference({0: ["a"], 1: ["a", "b"]}) == (0, "nothing", 1, "b")


@ranks(2)
def test_the_largest_tag_is_agreed_on(world: World) -> None:
    assert compare(["same"], world.rank + 5, torch.distributed.group.WORLD, "differ") == 6
    assert compare(["alone"], world.rank, None, "differ") == world.rank


def altered(model: nn.Module, rank: int) -> str:
    """Let rank 1 have another value in the last parameter, whose name is returned."""
    name, param = list(model.named_parameters())[-1]
    if rank == 1:
        param.data.view(-1)[-1] += 1
    return name


@ranks(2)
@pytest.mark.parametrize("build", [MLP, MixedDtypes])
def test_the_first_parameter_that_differs_is_named_on_request(world: World, build: type[nn.Module]) -> None:
    model = seeded(build)
    name = altered(model, world.rank)
    fullshard.fully_shard(copy.deepcopy(model))
    with pytest.raises(ValueError, match=rf"with different values: rank 0 has '{name}' with .* rank 1 has"):
        fullshard.fully_shard(model, check_values=True)


@ranks(2)
def test_values_whose_bits_cancel_out_are_told_apart(world: World) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, world.rank)
    nn.init.zeros_(model.bias)
    with pytest.raises(ValueError, match="'weight' with values of hash 0"):
        fullshard.fully_shard_blocks(model, check_values=True)


@ranks(2)
def test_equal_values_and_none_are_right(world: World) -> None:
    model = nn.Sequential(seeded(MLP), nn.Linear(0, 2, bias=False), nn.Linear(2, 2, dtype=torch.complex64))
    torch.manual_seed(0)
    model[2].reset_parameters()
    fullshard.fully_shard(model, check_values=True)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    fullshard.fully_shard(model, check_values=True)


@ranks(2, 4)
def test_replicas_are_compared_too(world: World) -> None:
    mesh = world.mesh(2, world.size // 2, names=("replicate", "shard"))
    model = nn.Linear(2, 2)
    for param in model.parameters():
        nn.init.constant_(param, mesh.get_local_rank("replicate"))
    with pytest.raises(ValueError, match="begin with different values"):
        fullshard.fully_shard(model, mesh=mesh, check_values=True)
