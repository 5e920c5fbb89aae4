"""Names of parameters below a root, whatever shards them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fullshard
from fullshard.original_parameters import shown_parameters
from fullshard.wrapper.flat import FlatParameter
from tests.checkpoint.cases import both_ways, wrapped
from tests.harness import World, fake_world, ranks
from tests.harness.compare import each_block
from tests.harness.models import MLP, Transformer, seeded


def names(root: nn.Module) -> set[str]:
    return {place.name for inside in shown_parameters(root).values() for place in inside}


def originals(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def checkpointed() -> MLP:
    model = MLP()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


@pytest.mark.parametrize("size", [1, 2])
@both_ways
@pytest.mark.parametrize("build", [MLP, checkpointed])
def test_names_are_those_without_wrappers(size: int, use_orig_params: bool, build: type[MLP]) -> None:
    with fake_world(size):
        model = wrapped(build=build, use_orig_params=use_orig_params)
        assert names(model) == originals(seeded(MLP))
        shown = shown_parameters(model)
        assert list(shown) == list(model.parameters())
        for param, places in shown.items():
            assert isinstance(param, FlatParameter) is not use_orig_params
            assert len(places) == (1 if use_orig_params or len(places) == 1 else 2)
            if not use_orig_params:
                held = [place.name.rpartition(".")[2] for place in places]
                assert held == [name.rpartition(".")[2] for name in param._fqns]
            for place in places:
                assert place.param.sharded is param
                assert place.param.shape == seeded(MLP).get_parameter(place.name).shape


@both_ways
def test_names_are_relative_to_the_root(use_orig_params: bool) -> None:
    with fake_world(2):
        model = wrapped(use_orig_params=use_orig_params)
        assert names(model.blocks[0]) == {"0.weight", "0.bias"}
        assert names(model.blocks) == {name.removeprefix("blocks.") for name in originals(seeded(MLP))} - {"scale"}
        outer = nn.Sequential(nn.Linear(2, 2), model)
        assert names(outer) == {"0.weight", "0.bias"} | {f"1.{name}" for name in originals(seeded(MLP))}
        assert [place.group for place in shown_parameters(outer)[outer[0].weight]] == [None]


@pytest.mark.parametrize("wrapper", [True, False], ids=["wrapper", "fully_shard"])
def test_tied_parameters_have_the_first_name(wrapper: bool) -> None:
    expected = originals(seeded(lambda: Transformer(tied=True)))
    with fake_world(2):
        if wrapper:
            model = wrapped(build=lambda: Transformer(tied=True), use_orig_params=True)
        else:
            model = seeded(lambda: Transformer(tied=True))
            each_block()(fullshard, model)
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
