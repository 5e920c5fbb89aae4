"""What encodings have lost of gradients stays with the parameter when the layout of gradients changes, and goes with
gradients that are given up."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.optim import SGD

import fullshard
from fullshard import WirePolicy
from fullshard.group.feedback import GradientFeedback
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import local_tensor
from fullshard.optim import ShardedGradScaler
from fullshard.schedule.unit import units_in
from tests.fully_shard.cases import first_of
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded

WIRE = WirePolicy(reduce="int4", block=32, min_numel=0)


def loss_of(model: Any, world: World) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(4, 40, generator=torch.Generator().manual_seed(world.rank))).square().sum()
    return loss


def trained(world: World, transport: str, **options: Any) -> tuple[Any, ParamGroup]:
    """A model in one group after a backward."""
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model: Any = fullshard.fully_shard(seeded(lambda: MLP((40, 33, 24))), **{"wire_policy": WIRE, **options})
    loss_of(model, world).backward()
    (group,) = (group for unit in units_in(model) for group in unit.groups)
    return model, group


@ranks(2)
@first_of("transport", "p2p", "collective")
def test_what_was_lost_stays_when_other_parameters_are_frozen(world: World, transport: str) -> None:
    model, group = trained(world, transport)
    before = group.gradients.lost()
    (frozen,) = (i for i, param in enumerate(group.params) if param.sharded is model.blocks[0][0].weight)
    model.blocks[0][0].weight.requires_grad_(False)
    with torch.no_grad():
        model(torch.ones(4, 40))
    after = group.gradients.lost()
    assert after.keys() == before.keys() - {frozen}
    assert all(torch.equal(after[index], before[index]) for index in after)
    assert any(bool(value.any()) for value in after.values())


@ranks(2)
@first_of("transport", "p2p", "collective")
def test_what_was_lost_stays_when_parameters_are_gathered_differently_and_when_it_is_looked_at(
    world: World, transport: str
) -> None:
    _, group = trained(world, transport)
    before, again = group.gradients.lost(), group.gradients.lost()
    group.rebuild()
    after = group.gradients.lost()
    assert after.keys() == before.keys()
    assert all(torch.equal(each[index], before[index]) for each in (again, after) for index in before)


@ranks(2)
def test_exact_reductions_keep_no_memory(world: World) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    model: Any = fullshard.fully_shard(seeded(MLP), wire_policy=WirePolicy(gather="int8", min_numel=0))
    model(torch.ones(2, 6)).sum().backward()
    (group,) = (group for unit in units_in(model) for group in unit.groups)
    feedback: GradientFeedback = group.gradients.feedback
    assert not feedback.tensors()
    assert group.gradients.lost() == {}


def is_forgotten(group: ParamGroup) -> bool:
    return not any(bool(value.any()) for value in group.gradients.lost().values())


@ranks(2)
@first_of("transport", "p2p", "collective")
@pytest.mark.parametrize("steps", [0, 1])
def test_a_step_that_a_scaler_skips_leaves_nothing(world: World, transport: str, steps: int) -> None:
    model, group = trained(world, transport)
    optimizer, scaler = SGD(model.parameters(), lr=0.1), ShardedGradScaler("cpu", init_scale=2.0**10)
    for step in range(steps + 1):
        optimizer.zero_grad()
        (scaler.scale(loss_of(model, world)) * (torch.inf if (step, world.rank) == (steps, 0) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert is_forgotten(group)


@ranks(2)
def test_what_was_lost_follows_the_scale(world: World) -> None:
    model, group = trained(world, "p2p")
    optimizer, scaler = SGD(model.parameters(), lr=0.1), ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(loss_of(model, world)).backward()
    before = group.gradients.lost()
    scaler.step(optimizer)
    scaler.update()
    after = group.gradients.lost()
    assert any(bool(value.any()) for value in before.values())
    assert all(torch.equal(after[index], 2 * before[index]) for index in before)


@ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_without_a_step_leave_nothing(world: World, set_to_none: bool) -> None:
    model, group = trained(world, "p2p")
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    assert not is_forgotten(group), "after a step it stays"
    loss_of(model, world).backward()
    assert not is_forgotten(group)
    optimizer.zero_grad(set_to_none)
    assert is_forgotten(group)
    loss_of(model, world).backward()
    loss_of(model, world).backward()
    assert not is_forgotten(group), "gradients accumulate"


@ranks(2)
def test_what_was_lost_between_replicas_stays_when_other_parameters_are_frozen(world: World) -> None:
    mesh = world.mesh(2, 1, names=("replicate", "shard"))
    model, _ = trained(world, "p2p", mesh=mesh, outer_zero_stage=1, outer_wire_policy=WIRE)
    model.blocks[0][0].weight.requires_grad_(False)
    model.zero_grad()
    (loss_of(model, world) * 0).backward()
    assert bool(local_tensor(model.blocks[1][0].weight.grad).any())
