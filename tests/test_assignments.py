"""Assignments to ``data`` of sharded parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard.assignments import follow_assignments
from tests.fully_shard.cases import assert_close, environment, inputs, shard_mlp
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_two_models_exchange_the_data_of_their_parameters(world: World, transport: str) -> None:
    with environment(FULLSHARD_TRANSPORT=transport):
        model, reference = shard_mlp(), seeded(MLP)
        average, averaged = copy.deepcopy(model), copy.deepcopy(reference)
        for one, other in ((model, average), (reference, averaged)):
            with torch.no_grad():
                one(inputs())
                for param in other.parameters():
                    param.mul_(0.5)
            for param, mean in zip(one.parameters(), other.parameters(), strict=True):
                param.data, mean.data = mean.data, param.data
        for found, expected in ((model, reference), (average, averaged)):
            with torch.no_grad():
                assert_close(found(inputs()), expected(inputs()), "output")
        for found, expected in ((model, reference), (average, averaged)):
            for param, plain in zip(found.parameters(), expected.parameters(), strict=True):
                assert_close(param.full_tensor(), plain, "parameter")


@ranks(2)
def test_data_that_does_not_fit_is_refused_by_name(world: World) -> None:
    model: Any = shard_mlp()
    weight = model.blocks[1][0].weight
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' was given data that is a plain tensor"):
        weight.data = torch.zeros(weight.shape)
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' was given data of shape \(5, 3\) where \(5, 7\)"):
        weight.data = weight.data[:, :3]


@ranks(2)
def test_a_parameter_that_no_group_has_gets_data_that_is_sharded_alike(world: World) -> None:
    follow_assignments(None)
    param = nn.Parameter(distribute_tensor(torch.ones(4), world.mesh(), [Shard(0)]))
    param.data = other = param.data * 2
    other.mul_(2)
    assert_close(param.full_tensor(), torch.full((4,), 2.0), "assigned")
    param.data = distribute_tensor(torch.ones(4), world.mesh(), [Replicate()])
    assert isinstance(param.data, DTensor)
    assert_close(param.full_tensor(), torch.full((4,), 2.0), "not assigned, as in torch")


@ranks(2)
def test_data_is_assigned_right_after_a_load_that_assigns(world: World) -> None:
    model: Any = shard_mlp()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    for param in model.parameters():
        param.data = param.data * 0
    with torch.no_grad():
        assert not model(inputs()).any()
