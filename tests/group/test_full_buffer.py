"""The states of a full buffer: which may follow which, and that a transition that fails takes nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import fullshard
from fullshard.group.full_buffer import LEGAL, State
from tests.fully_shard.cases import groups_of, slots_in_use
from tests.harness import World, fake_world, ranks


def test_only_a_legal_transition_is_made() -> None:
    with fake_world(2):
        (group,) = groups_of(fullshard.fully_shard(nn.Linear(4, 4)))
        for before, after in itertools.product(State, State):
            group.full.state = before
            if after in LEGAL[before]:
                group.full.change_state(after)
                assert group.full.state is after
            else:
                with pytest.raises(RuntimeError, match=f"cannot go from {before.name} to {after.name}"):
                    group.full.change_state(after)
                assert group.full.state is before
        group.full.state = State.SHARDED


def test_from_every_state_it_can_become_sharded_again() -> None:
    for state in State:
        reached = {state}
        for _ in State:
            reached |= {after for before in reached for after in LEGAL[before]}
        assert State.SHARDED in reached, state


@ranks(2, transport="p2p")
def test_a_gather_brings_the_values_of_all_ranks_and_gives_the_memory_back(world: World) -> None:
    model = nn.Linear(5, 3)
    nn.init.constant_(model.weight, 1)
    fullshard.fully_shard(model)
    (group,) = groups_of(model)
    with torch.no_grad():
        model.weight.to_local().fill_(world.rank + 1)
    group.unshard()
    assert group.full.state is State.GATHERING
    assert slots_in_use(group.parameter_pool) == 1
    group.wait_for_unshard()
    assert group.full.state is State.UNSHARDED
    assert model.weight[:, 0].tolist() == [1, 1, 2]
    assert group.full.is_current()
    group.reshard()
    assert group.full.state is State.SHARDED
    assert slots_in_use(group.parameter_pool) == 0


@ranks(2, transport="p2p")
def test_values_that_were_written_since_are_gathered_again(world: World) -> None:
    model = nn.Linear(4, 4)
    fullshard.fully_shard(model)
    (group,) = groups_of(model)
    group.unshard()
    group.wait_for_unshard()
    with torch.no_grad():
        group.params[0].sharded.to_local().fill_(7)
    assert not group.full.is_current()
    group.unshard()
    assert group.full.state is State.GATHERING
    group.wait_for_unshard()
    assert model.weight.eq(7).all()
    group.reshard()
