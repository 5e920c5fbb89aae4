"""How a group takes gradients from autograd: when they wait, what is known of them meanwhile, and what drops them."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.comm.select import NAMES
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


class Chosen(nn.ModuleList):
    """Layers of which a forward runs some."""

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        for number in chosen:
            x = torch.tanh(self[number](x))
        return x


@ranks(2)
@pytest.mark.parametrize("transport", [pytest.param(name, marks=pytest.mark.transport(name)) for name in NAMES])
def test_any_parameters_of_a_group_may_be_the_ones_that_are_used(world: World, transport: str) -> None:
    whole = seeded(lambda: Chosen([nn.Linear(4, 4) for _ in range(4)]))
    model = fullshard.fully_shard(copy.deepcopy(whole))
    for used in ((1, 2, 3), (0, 2, 3), (0, 1, 2)):
        whole.zero_grad()
        model.zero_grad()
        batches = [torch.full((2, 4), float(rank)) for rank in range(2)]
        (sum(whole(each, used).square().mean() for each in batches) / 2).backward()
        model(batches[world.rank], used).square().mean().backward()
        for expected, found in zip(whole.parameters(), model.parameters(), strict=True):
            assert (expected.grad is None) is (found.grad is None)
            if expected.grad is not None:
                assert torch.allclose(found.grad.full_tensor(), expected.grad, atol=1e-6), used  # type: ignore[union-attr]
