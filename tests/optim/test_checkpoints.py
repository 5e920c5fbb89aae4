"""Checkpoints of optimizers that step on local tensors: `state_dict()`, and DCP into other numbers of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.harness import World, ranks
from tests.harness.slow import slow
from tests.optim.cases import (
    FOREACH,
    FUSED,
    LOOP,
    Pair,
    assert_same,
    assert_same_state,
    backward,
    on_dtensors,
    runs_on_local,
    sharded,
)

HOW = pytest.mark.parametrize("how", [FOREACH, *slow(LOOP, FUSED)], ids=["foreach", "loop", "fused"])


@ranks(1, 2, 3)
@HOW
def test_a_state_dict_is_that_of_steps_on_dtensors(world: World, how: dict[str, bool]) -> None:
    pair = Pair(torch.optim.AdamW, **how)
    pair.step()
    for whole in (False, True):
        options = StateDictOptions(full_state_dict=whole)
        mine, theirs = (get_optimizer_state_dict(*each, options=options) for each in pair.both)
        assert list(mine["state"]) == list(theirs["state"])
        for name, entry in mine["state"].items():
            for key, value in entry.items():
                other = theirs["state"][name][key]
                assert type(value) is type(other)
                assert torch.equal(*(x.to_local() if isinstance(x, DTensor) else x for x in (value, other)))
        assert mine["param_groups"] == theirs["param_groups"]


@ranks(2)
@HOW
def test_a_state_dict_goes_to_another_optimizer_and_back(world: World, how: dict[str, bool]) -> None:
    pair = Pair(torch.optim.AdamW, **how)
    pair.step(0)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    for number, model in enumerate(pair.models):  # each goes on with the other's
        cls = (torch.optim.AdamW, on_dtensors(torch.optim.AdamW))[number]
        pair.optimizers[number] = cls(model.parameters(), lr=0.5, **how)
        pair.optimizers[number].load_state_dict(states[1 - number])
    pair.step(1)
    pair.step(2)


@ranks(2)
@HOW
def test_set_state_dict_before_the_first_step(world: World, how: dict[str, bool]) -> None:
    pair = Pair(torch.optim.AdamW, **how)
    pair.step(0)
    model, optimizer = sharded(), None
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    model_state, optimizer_state = get_state_dict(pair.models[0], pair.optimizers[0])
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_same(model.parameters(), pair.models[1].parameters())
    assert_same_state(optimizer, pair.optimizers[1])
    pair.models[0], pair.optimizers[0] = model, optimizer
    pair.step(1)


@ranks(2)
def test_a_copied_optimizer_is_served_too(world: World) -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model, 0)
    optimizer.step()
    other = torch.optim.AdamW(model.parameters())
    other.__setstate__(optimizer.__getstate__())
    backward(model, 1)
    assert runs_on_local(other)
    assert runs_on_local(optimizer)
    assert other.state is optimizer.state
    assert {entry["step"].item() for entry in optimizer.state.values()} == {3.0}
