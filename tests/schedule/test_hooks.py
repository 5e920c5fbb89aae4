"""The hooks on modules: whoever listens hears of each unit once, and state dicts see what is sharded."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.schedule import hooks
from fullshard.schedule.unit import Unit, unit_of
from tests.fully_shard.cases import groups_of, inputs, shard_mlp
from tests.harness import World, fake_world, ranks


def test_listeners_hear_of_each_unit_once_it_is_sharded() -> None:
    heard = list[tuple[Unit, bool]]()
    listener = hooks.when_sharded(lambda unit: heard.append((unit, bool(unit.groups))))
    try:
        with fake_world(2):
            model = shard_mlp()
    finally:
        hooks._listeners.remove(listener)
    units = [unit_of(module) for module in (*model.blocks, model)]
    assert heard == [(unit, True) for unit in units]


@ranks(2)
def test_a_copy_of_a_module_has_hooks_of_its_own_unit(world: World) -> None:
    model = shard_mlp()
    other = copy.deepcopy(model)
    other(inputs())
    assert unit_of(other).schedule is not None  # type: ignore[union-attr]
    assert unit_of(model).schedule is None  # type: ignore[union-attr]


@ranks(2)
def test_before_a_state_dict_is_made_or_loaded_modules_show_what_is_sharded(world: World) -> None:
    model = fullshard.fully_shard(nn.Linear(4, 4))
    (group,) = groups_of(model)
    state = model.state_dict()
    for use in (model.state_dict, lambda: model.load_state_dict(state)):
        model.unshard()
        assert not isinstance(model.weight, DTensor)
        use()
        assert isinstance(model.weight, DTensor)
        assert not group.full.state.is_unsharded


@ranks(2)
def test_a_state_dict_that_assigns_keeps_the_dtype_that_was_chosen_for_gradients(world: World) -> None:
    model = nn.Linear(4, 4)
    model.weight.grad_dtype = torch.float64  # type: ignore[attr-defined]
    fullshard.fully_shard(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert groups_of(model)[0].params[0].sharded is model.weight
    assert model.weight.grad_dtype == torch.float64  # type: ignore[attr-defined]
