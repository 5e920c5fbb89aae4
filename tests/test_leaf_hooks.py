"""Hooks on the gradients of sharded parameters are called, whenever they were registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.leaf_hooks import hooks_of_users
from tests.fully_shard.cases import assert_close, inputs
from tests.harness import World, ranks
from tests.harness.compare import kept

SHARD = {
    "fully_shard": fullshard.fully_shard,
    "fragments": lambda model: fullshard.FullyShardedDataParallel(model, use_orig_params=True),
    "whole": lambda model: fullshard.FullyShardedDataParallel(
        model, use_orig_params=True, sharding_strategy=fullshard.ShardingStrategy.NO_SHARD
    ),
}


@ranks(2)
@pytest.mark.parametrize("shard", SHARD)
@pytest.mark.parametrize("when", ["before sharding", "after it", "after a step"])
def test_hooks_on_gradients_are_called_with_whole_gradients(world: World, shard: str, when: str) -> None:
    plain, reference, shapes = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False), list[Any]()
    reference.load_state_dict(plain.state_dict())

    def triple(grad: Tensor) -> Tensor:
        shapes.append(tuple(grad.shape))
        return 3 * grad

    handle = plain.weight.register_hook(triple) if when == "before sharding" else None
    model: Any = SHARD[shard](plain)
    if when == "after a step":
        model(inputs()).sum().backward()
        model.zero_grad()
    handle = handle or next(model.parameters()).register_hook(triple)
    for _ in range(2):
        model(inputs()).sum().backward()
    (6 * reference(inputs()).sum()).backward()
    assert shapes == [(5, 6)] * 2
    (grad,) = [param.grad for param in model.parameters()]
    expected = torch.as_tensor(reference.weight.grad)
    if shard == "fragments":  # each rank has a half of the elements
        expected = expected.reshape(-1).chunk(2)[world.rank]
    assert_close(kept(grad) if shard == "fully_shard" else grad, expected, "gradient")


@ranks(2)
def test_a_hook_that_was_removed_is_not_called(world: World) -> None:
    model: Any = fullshard.fully_shard(nn.Linear(6, 5))
    handle = model.weight.register_hook(lambda grad: 3 * grad)
    model(inputs()).sum().backward()
    handle.remove()
    assert hooks_of_users(model.weight) == []
    before = model.weight.grad.full_tensor()
    model(inputs()).sum().backward()
    assert_close(kept(model.weight.grad), before * 4 / 3, "gradient")


@ranks(2)
def test_hooks_on_flat_parameters_are_warned_of(world: World) -> None:
    model = fullshard.FullyShardedDataParallel(nn.Linear(6, 5))
    next(model.parameters()).register_hook(lambda grad: 3 * grad)
    with pytest.warns(UserWarning, match="hooks on a FlatParameter .* are not called"):
        model(inputs())
