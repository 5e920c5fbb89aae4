"""Mistakes with optimizer state: the same types of errors as from torch's wrapper, where it has any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.wrapper.settings import settings_of
from tests.checkpoint.cases import (
    LIBRARIES,
    OURS,
    both_ways,
    choose,
    libraries,
    optimizer_of,
    quiet,
    to_dict,
    to_load,
    train,
    with_optimizer,
    wrapped,
)
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded


def trained(library: Any = OURS, rank: int = 0, **options: Any) -> Any:
    model, optimizer = with_optimizer(wrapped(library, **options), "Adam")
    choose(library, model, "FULL", offload_to_cpu=False)
    train(model, optimizer, range(1), rank)
    return model, optimizer


@ranks(2)
@libraries
@both_ways
def test_parameters_of_another_model(world: World, name: str, use_orig_params: bool) -> None:
    model, _ = trained(LIBRARIES[name], use_orig_params=use_orig_params)
    other = torch.optim.Adam([*model.parameters(), nn.Parameter(torch.ones(3))])
    with pytest.raises(KeyError):
        LIBRARIES[name].methods.optim_state_dict(model, other)
    named = {"state": {"a": {}}, "param_groups": [{"params": ["a"], "lr": 1}]}
    with pytest.raises(KeyError):
        LIBRARIES[name].methods.optim_state_dict(model, other, named)


@ranks(2)
@libraries
@both_ways
def test_names_that_the_optimizer_does_not_know(world: World, name: str, use_orig_params: bool) -> None:
    library = LIBRARIES[name]
    model, optimizer = trained(library, use_orig_params=use_orig_params)
    saved = library.methods.optim_state_dict(model, optimizer)
    saved["param_groups"][0]["params"].append("nowhere")
    with pytest.raises(KeyError, match="nowhere"):
        library.methods.optim_state_dict_to_load(model, optimizer, saved)
    with pytest.raises(ValueError, match="state"):
        library.methods.optim_state_dict_to_load(model, optimizer, {"param_groups": []})


#: What makes the state of one parameter unlike those that it is flattened with.
DAMAGES: dict[str, dict[str, Any]] = {
    "shape": {"exp_avg": torch.zeros(3, 3)},
    "dtype": {"exp_avg": torch.zeros(7, 6, dtype=torch.float64)},
    "name": {"more": 1},
    "type": {"step": 1.0},
    "kind": {"exp_avg": torch.tensor(0.0)},
    "value": {"step": torch.tensor(9.0)},
}


@ranks(2)
@libraries
def test_states_that_do_not_make_one_flat_state(world: World, name: str) -> None:
    library = LIBRARIES[name]
    model, optimizer = trained(library)
    for damage in (*DAMAGES, "missing"):
        saved = library.methods.optim_state_dict(model, optimizer)
        if damage == "missing":
            del saved["state"]["blocks.0.0.bias"]
        else:
            saved["state"]["blocks.0.0.weight"].update(DAMAGES[damage])
        with pytest.raises(ValueError, match=r"blocks\.0\.0|shape"):
            library.methods.optim_state_dict_to_load(model, optimizer, saved)


@ranks(2)
def test_a_part_without_tensors_is_zeros(world: World) -> None:
    model, optimizer = with_optimizer(wrapped(), "momentum", 1)
    saved = to_dict(model, optimizer)
    del saved["state"]["blocks.0.0.bias"]
    to_load(model, optimizer, saved, load_directly=True)
    again = to_dict(model, optimizer)["state"]
    assert torch.equal(again["blocks.0.0.bias"]["momentum_buffer"], torch.zeros(7))
    found, expected = (each["blocks.0.0.weight"]["momentum_buffer"] for each in (again, saved["state"]))
    assert torch.equal(found, expected)


@ranks(2)
def test_a_fragment_is_not_cut_from_another_shape(world: World) -> None:
    model, optimizer = trained(use_orig_params=True)
    saved = to_dict(model, optimizer)
    saved["state"]["blocks.0.0.weight"].update(DAMAGES["shape"])
    with pytest.raises(ValueError, match=r"blocks\.0\.0\.weight.*\(3, 3\).*expected \(7, 6\)"):
        to_load(model, optimizer, saved)


@ranks(2)
@both_ways
def test_states_that_are_not_like_their_parameter_are_not_gathered(world: World, use_orig_params: bool) -> None:
    model, optimizer = trained(use_orig_params=use_orig_params)
    for param, state in optimizer.state.items():
        state["factor"] = torch.zeros(param.numel() + 5)
    with pytest.raises(ValueError, match="'factor' of parameter"):
        to_dict(model, optimizer)


@ranks(2)
@libraries
def test_ranks_without_the_states_of_the_first(world: World, name: str) -> None:
    model, optimizer = trained(LIBRARIES[name])
    if world.rank == 1:
        optimizer.state.clear()
    with pytest.raises(RuntimeError, match="missing"):
        LIBRARIES[name].methods.optim_state_dict(model, optimizer)


@ranks(2)
@libraries
def test_ranks_that_do_not_agree_on_a_value(world: World, name: str) -> None:
    model, optimizer = trained(LIBRARIES[name], use_orig_params=True)
    for state in optimizer.state.values():
        state["step"] = torch.tensor(float(world.rank))
    with pytest.raises(AssertionError, match="step"):
        LIBRARIES[name].methods.optim_state_dict(model, optimizer)


@ranks(2)
@libraries
def test_settings_that_differ(world: World, name: str) -> None:
    library = LIBRARIES[name]
    model, optimizer = trained(library)
    choose(library, model.module.blocks[0], "SHARDED")
    for call in (
        lambda: library.methods.optim_state_dict(model, optimizer),
        lambda: library.methods.optim_state_dict_to_load(model, optimizer, {"state": {}}),
    ):
        with pytest.raises(AssertionError, match=r"same|different"):
            call()


@ranks(2)
@libraries
def test_use_orig_params_that_differs(world: World, name: str) -> None:
    library = LIBRARIES[name]
    model = wrapped(library)
    model._use_orig_params = True
    optimizer = optimizer_of(model, "Adam")
    methods, empty = library.methods, {"state": {}}
    for call in (
        lambda: methods.optim_state_dict(model, optimizer),
        lambda: methods.optim_state_dict_to_load(model, optimizer, empty),
        lambda: methods.full_optim_state_dict(model, optimizer),
        lambda: methods.sharded_optim_state_dict(model, optimizer),
        lambda: methods.shard_full_optim_state_dict(empty, model, optim=optimizer),
        lambda: methods.scatter_full_optim_state_dict(empty, model, optim=optimizer),
        lambda: methods.flatten_sharded_optim_state_dict(empty, model, optimizer),
    ):
        with quiet(), pytest.raises(AssertionError, match="use_orig_params"):
            call()


def test_settings_of_a_model_without_wrappers() -> None:
    settings = settings_of(seeded(MLP))
    assert settings.state_dict_type is OURS.settings.StateDictType.FULL_STATE_DICT
