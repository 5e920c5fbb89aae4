"""What encodings have lost of gradients stays with the parameter when the layout of gradients changes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import fullshard
from fullshard import WirePolicy
from fullshard.group.param_group import ParamGroup
from fullshard.schedule.unit import units_in
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded

WIRE = WirePolicy(reduce="int4", block=32, min_numel=0)


def trained(world: World, transport: str) -> tuple[Any, ParamGroup]:
    """A model in one group after a backward."""
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model: Any = fullshard.fully_shard(seeded(lambda: MLP((40, 33, 24))), wire_policy=WIRE)
    model(torch.randn(4, 40, generator=torch.Generator().manual_seed(world.rank))).square().sum().backward()
    (group,) = (group for unit in units_in(model) for group in unit.groups)
    return model, group


@ranks(2)
@pytest.mark.parametrize("transport", ["p2p", "collective"])
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
@pytest.mark.parametrize("transport", ["p2p", "collective"])
def test_what_was_lost_stays_when_parameters_are_gathered_differently(world: World, transport: str) -> None:
    _, group = trained(world, transport)
    before = group.gradients.lost()
    group.rebuild()
    after = group.gradients.lost()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[index], before[index]) for index in after)


@ranks(2)
def test_to_look_at_it_changes_nothing(world: World) -> None:
    _, group = trained(world, "p2p")
    first, second = group.gradients.lost(), group.gradients.lost()
    assert all(torch.equal(first[index], second[index]) for index in first)


@ranks(2)
def test_exact_reductions_keep_no_memory(world: World) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    model: Any = fullshard.fully_shard(seeded(MLP), wire_policy=WirePolicy(gather="int8", min_numel=0))
    model(torch.ones(2, 6)).sum().backward()
    (group,) = (group for unit in units_in(model) for group in unit.groups)
    assert not group.gradients.feedback.has_lost
    assert group.gradients.lost() == {}
