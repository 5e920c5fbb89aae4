"""A group between its states: what modules show in each, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.group.full_buffer import State
from fullshard.group.param_group import ParamGroup
from tests.fully_shard.cases import groups_of
from tests.harness import World, ranks


def sharded(model: nn.Module) -> ParamGroup:
    (group,) = groups_of(fullshard.fully_shard(model))
    return group


@ranks(2)
def test_modules_show_dtensors_then_whole_tensors_then_the_same_dtensors(world: World) -> None:
    model = nn.Linear(4, 6)
    whole = model.weight.detach().clone()
    torch.distributed.broadcast(whole, 0)
    nn.Module.load_state_dict(model, {"weight": whole, "bias": torch.zeros(6)})
    group = sharded(model)
    before = model.weight
    assert isinstance(before, DTensor)
    for _ in range(2):
        group.unshard()
        group.wait_for_unshard()
        assert not isinstance(model.weight, DTensor)
        assert isinstance(model.weight, nn.Parameter)
        assert model.weight.is_leaf
        assert torch.equal(model.weight, whole)
        leaf = model.weight
        group.unshard()  # nothing is left to do
        group.wait_for_unshard()
        assert model.weight is leaf
        group.reshard()
        assert model.weight is before
        group.reshard()
        assert (model.weight is before, group.full.state) == (True, State.SHARDED)


@ranks(2)
def test_what_is_on_meta_is_named_and_not_gathered(world: World) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    group = sharded(model)
    with pytest.raises(RuntimeError, match=r"still on the meta device: \['weight', 'bias'\]"):
        group.unshard()
    assert group.full.state is State.SHARDED
    model.to_empty(device="cpu")
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    model(torch.ones(1, 4))


@ranks(2)
def test_a_group_is_not_gathered_inside_of_summon_full_params(world: World) -> None:
    model = nn.Linear(4, 4)
    group = sharded(model)
    with (
        fullshard.summon_full_params(model),
        pytest.raises(RuntimeError, match="was used inside summon_full_params: leave it before forward or backward"),
    ):
        group.unshard()
