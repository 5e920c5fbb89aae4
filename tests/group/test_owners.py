"""Which group took a parameter object: found by the object, and forgotten with it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import fullshard
from fullshard.group import owners
from fullshard.group.owners import owner_of, refuse_gradients
from tests.fully_shard.cases import groups_of
from tests.harness import World, fake_world, ranks


def test_a_group_is_found_by_what_it_took_and_by_what_it_shows() -> None:
    with fake_world(2):
        model = nn.Linear(4, 4)
        weight, bias = model.weight, model.bias
        fullshard.fully_shard(model)
        (group,) = groups_of(model)
        assert owner_of(weight) == owner_of(model.weight) == (group, 0)
        assert owner_of(bias) == owner_of(model.bias) == (group, 1)
        assert weight is not model.weight


def test_what_no_group_took_has_no_owner() -> None:
    for stranger in (None, torch.zeros(1), nn.Parameter(torch.zeros(1))):
        assert owner_of(stranger) is None


def test_what_is_gone_is_forgotten() -> None:
    """An object of later may have the same id."""
    with fake_world(2):
        model = nn.Linear(4, 4)
        weight = model.weight
        fullshard.fully_shard(model)
        assert owner_of(weight) is not None
        del model
        gc.collect()
        assert owner_of(weight) is None  # its group is gone
        assert id(weight) not in owners._owners
        del weight
        gc.collect()


@ranks(2)
def test_a_gradient_for_what_was_before_sharding_is_refused(world: World) -> None:
    before = nn.Parameter(torch.ones(3))
    refuse_gradients(before, "layer.weight")
    with pytest.raises(RuntimeError, match=r"a gradient arrived at parameter 'layer.weight' as it was before"):
        before.sum().backward()
