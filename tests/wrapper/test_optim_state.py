"""Optimizer state by the names of the original parameters: against torch's wrapper, and from any sharding to any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

from fullshard.wrapper.optim_methods import OptimStateMethods
from tests.checkpoint.cases import (
    OPTIMIZERS,
    OURS,
    SHARDINGS,
    TORCHS,
    assert_same,
    both_ways,
    choose,
    optimizer_of,
    quiet,
    to_dict,
    to_load,
    train,
    whole,
    with_optimizer,
    wrapped,
)
from tests.fully_shard.cases import first_of
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded, shard_each


class Tied(nn.Module):
    """Two blocks, of which the second has a weight that it uses twice; one parameter is frozen, one of the root's."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        inner[2].weight = inner[0].weight
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 5), nn.Tanh()), inner])
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def by_name(model: nn.Module, optimizer: Optimizer) -> Any:
    return OptimStateMethods.rekey_optim_state_dict(
        optimizer.state_dict(), OURS.settings.OptimStateKeyType.PARAM_NAME, model, optim=optimizer
    )


@ranks(1, 2, 3)
@first_of("optimizer", "Adam", *(each for each in OPTIMIZERS if each != "Adam"))
@both_ways
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("build", [MLP, Tied])
def test_full_state_is_that_of_torch(
    world: World, optimizer: str, use_orig_params: bool, strategy: str, build: Any
) -> None:
    dicts = []
    for library in (OURS, TORCHS):
        model = wrapped(library, build, strategy=strategy, use_orig_params=use_orig_params)
        stepped = optimizer_of(model, optimizer)
        choose(library, model, "FULL", offload_to_cpu=False)
        with quiet():
            before = library.methods.optim_state_dict(model, stepped)
            train(model, stepped, range(2), world.rank)
            dicts.append([before, library.methods.optim_state_dict(model, stepped)])
    assert_same(dicts[0], dicts[1])
    if build is Tied and optimizer != "SGD":  # which has no state
        names = dicts[0][1]["state"].keys()
        assert ("blocks.1.0.weight" in names, "blocks.1.2.weight" in names) == (True, False)


@ranks(2, 3)
@pytest.mark.parametrize("kind", ["SHARDED", "LOCAL"])
@both_ways
def test_sharded_state_has_the_values_of_torch(world: World, kind: str, use_orig_params: bool) -> None:
    dicts = []
    for library in (OURS, TORCHS):
        model, stepped = with_optimizer(wrapped(library, use_orig_params=use_orig_params), "Adam")
        choose(library, model, kind, offload_to_cpu=False)
        with quiet():
            train(model, stepped, range(2), world.rank)
            dicts.append(library.methods.optim_state_dict(model, stepped))
    assert all(isinstance(state["exp_avg"], DTensor) for state in dicts[0]["state"].values())
    assert_same(dicts[0], dicts[1])


@ranks(1, 2, 3)
@both_ways
@pytest.mark.parametrize("build", [MLP, Tied])
def test_what_is_loaded_is_that_of_torch(world: World, use_orig_params: bool, build: Any) -> None:
    plain, optimizer = with_optimizer(seeded(build), "AdamW", 2)
    saved, loaded = by_name(plain, optimizer), []
    for library in (OURS, TORCHS):
        model = wrapped(library, build, use_orig_params=use_orig_params)
        with quiet():
            loaded.append(library.methods.optim_state_dict_to_load(model, optimizer_of(model, "AdamW"), saved))
    assert_same(loaded[0], loaded[1])


@ranks(1, 2, 3)
@pytest.mark.parametrize(("kind", "offload"), [("FULL", False), ("FULL", True), ("SHARDED", True), ("LOCAL", False)])
@pytest.mark.parametrize("read", SHARDINGS)
@pytest.mark.parametrize("written", SHARDINGS)
def test_training_goes_on_as_if_never_interrupted(
    world: World, kind: str, offload: bool, written: str, read: str
) -> None:
    models = [wrapped(use_orig_params=SHARDINGS[each]) for each in (written, read)]
    first, second = models
    stepped, fresh = (optimizer_of(model, "AdamW") for model in models)
    train(first, stepped, range(2), world.rank)
    second.load_state_dict(first.state_dict())
    for model in models:
        choose(OURS, model, kind, offload_to_cpu=offload)
    to_load(second, fresh, to_dict(first, stepped), load_directly=True)
    steps = range(2, 5)
    assert train(second, fresh, steps, world.rank) == pytest.approx(train(first, stepped, steps, world.rank), rel=1e-6)


@pytest.mark.slow
@ranks(2)
@first_of("use_orig_params", True, False)
def test_a_state_from_before_the_first_step_changes_no_step(world: World, use_orig_params: bool) -> None:
    for build in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adamax):
        losses = []
        for loads in (False, True):
            model = wrapped(use_orig_params=use_orig_params)
            optimizer = build(model.parameters(), lr=1e-2)
            choose(OURS, model, "SHARDED")
            if loads:
                to_load(model, optimizer, to_dict(model, optimizer), load_directly=True)
            losses.append(train(model, optimizer, range(3), world.rank))
        assert losses[0] == losses[1], build


@ranks(2)
@both_ways
@first_of("optimizer", "AdamW", "momentum")
def test_a_model_without_sharding_goes_on(world: World, use_orig_params: bool, optimizer: str) -> None:
    model, stepped = with_optimizer(wrapped(use_orig_params=use_orig_params), optimizer, 2)
    plain = seeded(MLP)
    plain.load_state_dict(model.state_dict())
    fresh = optimizer_of(plain, optimizer)
    saved = to_dict(model, stepped)
    ids = OptimStateMethods.rekey_optim_state_dict(saved, OURS.settings.OptimStateKeyType.PARAM_ID, plain, optim=fresh)
    fresh.load_state_dict(ids)
    steps = range(2, 5)
    assert train(plain, fresh, steps) == pytest.approx(train(model, stepped, steps), rel=1e-5)
    again = optimizer_of(model, optimizer)
    to_load(model, again, by_name(plain, fresh), load_directly=True)
    assert_same(to_dict(model, again), to_dict(model, stepped))


@ranks(2, 3)
@both_ways
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_interchange_with_fully_shard(world: World, use_orig_params: bool, kind: str) -> None:
    model, stepped = with_optimizer(wrapped(use_orig_params=use_orig_params), "AdamW", 2, world.rank)
    choose(OURS, model, kind)
    saved = to_dict(model, stepped)

    other = seeded(MLP)
    shard_each(*other.blocks, other)
    fresh = optimizer_of(other, "AdamW")
    options = StateDictOptions(full_state_dict=kind == "FULL")
    set_optimizer_state_dict(other, fresh, saved, options=options)
    assert_same(to_dict(model, stepped)["state"], get_optimizer_state_dict(other, fresh, options=options)["state"])
    again = optimizer_of(model, "AdamW")
    to_load(model, again, get_optimizer_state_dict(other, fresh, options=options), load_directly=True)
    assert_same(again.state_dict()["state"], stepped.state_dict()["state"])


@ranks(2)
def test_fully_shard_models_are_known_too(world: World) -> None:
    model = seeded(MLP)
    shard_each(*model.blocks, model)
    stepped = optimizer_of(model, "AdamW")
    train(model, stepped, range(2), world.rank)
    saved, fresh = to_dict(model, stepped), optimizer_of(model, "AdamW")
    assert_same(saved["state"], get_optimizer_state_dict(model, stepped)["state"])
    loaded = to_load(model, fresh, saved)
    assert isinstance(loaded["state"][0]["exp_avg"], DTensor)
    assert_same(loaded["state"], stepped.state_dict()["state"])
    assert_same(to_load(model, fresh, get_optimizer_state_dict(model, stepped))["state"], loaded["state"])


@ranks(2)
@both_ways
def test_whole_tensors_are_cut_without_communication(world: World, use_orig_params: bool) -> None:
    model, optimizer = with_optimizer(wrapped(use_orig_params=use_orig_params), "AdamW", 1)
    saved, counts = {}, {}
    for kind in ("FULL", "SHARDED"):
        choose(OURS, model, kind)
        saved = to_dict(model, optimizer)
        with CommDebugMode() as communicated:
            to_load(model, optimizer, saved)
        counts[kind] = communicated.get_total_counts()
    assert counts == {"FULL": 0, "SHARDED": 2 * len(list(seeded(MLP).parameters()))}


@ranks(2)
@both_ways
def test_the_sharded_state_of_an_optimizer_without_a_step_is_zeros(world: World, use_orig_params: bool) -> None:
    """What is loaded in place, as torch's checkpoints are, needs memory to be loaded into."""
    model, plain = wrapped(use_orig_params=use_orig_params), seeded(MLP)
    optimizer, stepped = optimizer_of(model, "AdamW"), optimizer_of(plain, "AdamW")
    before = [param.detach().clone() for param in model.parameters()]
    choose(OURS, model, "SHARDED")
    saved = to_dict(model, optimizer)
    assert not optimizer.state
    assert all(map(torch.equal, model.parameters(), before))
    train(plain, stepped, range(1))
    expected = {name: stepped.state[param] for name, param in plain.named_parameters()}
    assert saved["state"].keys() == expected.keys()
    for name, state in expected.items():
        assert saved["state"][name].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(whole(saved["state"][name][key]).reshape(value.shape), torch.zeros_like(value)), key
