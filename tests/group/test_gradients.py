"""How a group takes gradients from autograd: when they wait, what is known of them meanwhile, and what drops them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.group import gradient_buffer, reduction
from tests.fully_shard.cases import groups_of, twins
from tests.harness import World, ranks
from tests.harness.models import seeded


def backward_of(world: World, model: Any, factor: float = 1.0) -> None:
    (factor * (world.rank + 1) * model(torch.ones(1, 4))).sum().backward()


@ranks(2)
@pytest.mark.parametrize("limit", [1 << 20, 0], ids=["wait for one copy", "copied at once"])
def test_gradients_that_are_not_reduced_add_up_and_are_then_averaged(world: World, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buffer, "MOST_WAITING", limit)
        model = fullshard.fully_shard(nn.Linear(4, 2))
        (group,) = groups_of(model)
        model.set_requires_gradient_sync(False)
        for number in range(2):
            backward_of(world, model)
            assert group.gradients.pending
            assert group.gradients.has_any
            found = {index: grad.clone() for index, grad in group.gradients.unreduced()}
            assert {index: grad.unique().tolist() for index, grad in found.items()} == {
                0: [(number + 1) * (world.rank + 1)],
                1: [(number + 1) * (world.rank + 1)],
            }
            assert not model.weight.grad.full_tensor().any()
        model.set_requires_gradient_sync(True)
        backward_of(world, model)
        assert not group.gradients.has_any
        assert model.weight.grad.full_tensor().eq(3 * (1 + 2) / 2).all()


@ranks(2)
def test_a_reset_drops_what_waits(world: World) -> None:
    model = fullshard.fully_shard(nn.Linear(4, 2))
    (group,) = groups_of(model)
    model.set_requires_gradient_sync(False)
    backward_of(world, model, factor=100)
    model.set_requires_gradient_sync(True)
    model.reset_iter_state()
    assert not group.gradients.has_any
    backward_of(world, model)
    assert model.weight.grad.full_tensor().eq(1.5).all()


@ranks(2)
def test_frozen_parameters_have_no_gradient_to_wait_for(world: World) -> None:
    model = nn.Linear(4, 2)
    model.bias.requires_grad_(False)
    fullshard.fully_shard(model)
    (group,) = groups_of(model)
    model.set_requires_gradient_sync(False)
    backward_of(world, model)
    assert [index for index, _ in group.gradients.unreduced()] == [0]
    model.set_requires_gradient_sync(True)
    backward_of(world, model)
    assert model.bias.grad is None


class DropsLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = list(range(8))
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in self.used])
        self.blocks: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        for index in self.used:
            x = x + self.layers[index](x)
        return x


@ranks(2)
def test_the_plans_of_random_sets_of_parameters_are_few(world: World) -> None:
    pair, draw = twins(world, lambda: seeded(DropsLayers)), random.Random(0)
    (group,) = groups_of(pair.sharded)
    for _ in range(60):
        used = draw.sample(range(8), draw.randint(1, 8))
        pair.sharded.used = pair.whole.used = used
        pair.step(lr=1e-3)
    assert len(group.gradients._reducer.plans) == reduction.MOST_PLANS
