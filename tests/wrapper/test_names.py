"""Names of parameters below a root, whatever shards them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fullshard
from fullshard.wrapper.flat import FlatParameter
from fullshard.wrapper.optim_state import shown_parameters
from tests.checkpoint.cases import SHARDINGS, wrapped
from tests.harness import World, ranks
from tests.harness.models import MLP, Transformer, seeded

both_ways = pytest.mark.parametrize("use_orig_params", SHARDINGS.values(), ids=SHARDINGS)


def names(root: nn.Module) -> set[str]:
    return {place.name for inside in shown_parameters(root).values() for place in inside}


def originals(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def checkpointed() -> MLP:
    model = MLP()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


@ranks(1, 2)
@both_ways
@pytest.mark.parametrize("build", [MLP, checkpointed])
def test_names_are_those_without_wrappers(world: World, use_orig_params: bool, build: type[MLP]) -> None:
    model = wrapped(build=build, use_orig_params=use_orig_params)
    assert names(model) == originals(seeded(MLP))
    shown = shown_parameters(model)
    assert set(shown) == set(model.parameters())
    for param, places in shown.items():
        assert len(places) == (1 if use_orig_params or len(places) == 1 else 2)
        for place in places:
            assert place.param.sharded is param
            assert place.param.shape == seeded(MLP).get_parameter(place.name).shape


@ranks(2)
@both_ways
def test_names_are_relative_to_the_root(world: World, use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    assert names(model.blocks[0]) == {"0.weight", "0.bias"}
    assert names(model.blocks) == {name.removeprefix("blocks.") for name in originals(seeded(MLP))} - {"scale"}
    outer = nn.Sequential(nn.Linear(2, 2), model)
    assert names(outer) == {"0.weight", "0.bias"} | {f"1.{name}" for name in originals(seeded(MLP))}
    assert [place.group for place in shown_parameters(outer)[outer[0].weight]] == [None]


@ranks(2)
@both_ways
def test_flat_parameters_hold_their_parameters_in_order(world: World, use_orig_params: bool) -> None:
    for param, places in shown_parameters(wrapped(use_orig_params=use_orig_params)).items():
        assert isinstance(param, FlatParameter) is not use_orig_params
        if not use_orig_params:
            assert tuple(place.name.rpartition(".")[2] for place in places) == tuple(
                name.rpartition(".")[2] for name in param._fqns
            )


@ranks(2)
@pytest.mark.parametrize("wrapper", [True, False], ids=["wrapper", "fully_shard"])
def test_tied_parameters_have_the_first_name(world: World, wrapper: bool) -> None:
    expected = originals(seeded(lambda: Transformer(tied=True)))
    if wrapper:
        model = wrapped(build=lambda: Transformer(tied=True), use_orig_params=True)
    else:
        model = seeded(lambda: Transformer(tied=True))
        for module in (*model.blocks, model):
            fullshard.fully_shard(module)
    assert names(model) == expected
    assert "tokens.weight" in expected
    assert "head.weight" not in expected


@ranks(2)
def test_unsharded_parameters_are_not_taken_for_others(world: World) -> None:
    model = wrapped(strategy="SHARD_GRAD_OP", use_orig_params=True)

    def shown() -> dict[torch.nn.Parameter, list[tuple[object, ...]]]:
        return {
            param: [(place.name, place.group, place.index, place.param) for place in places]
            for param, places in shown_parameters(model).items()
        }

    before = shown()
    model(torch.ones(2, 6)).sum()
    assert set(model.parameters()) != set(before)
    assert shown() == before
