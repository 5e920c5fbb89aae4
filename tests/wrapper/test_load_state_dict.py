"""`load_state_dict` of a wrapped model, and state dicts that travel: between kinds, wrappers, APIs and world sizes."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fullshard
from tests.checkpoint.state_dicts import (
    KINDS,
    assert_equal_states,
    build,
    mesh_options,
    speaking,
    whole,
    wrapped,
)
from tests.fully_shard.cases import first_of
from tests.harness import World, ranks
from tests.harness.compare import mean_square
from tests.harness.models import MixedDtypes, OddParameters, Transformer, random_batch, seeded, shard_each
from tests.harness.wrapper import EACH_WRAPPER, HYBRID, ORIGINAL, STRATEGIES, WRAPPERS, wrap

BATCH = random_batch(4, 6)


def assert_holds(model: Any, seed: int) -> None:
    """The wrapped `Net` has the values of `build(seed)`, and computes with them."""
    expected = build(seed)
    assert_equal_states(model.state_dict(), expected.state_dict())
    model.eval(), expected.eval()
    assert torch.allclose(model(*BATCH(0)), expected(*BATCH(0)), atol=1e-6)


@ranks(1, 2, 3)
@first_of("strategy", *STRATEGIES)
@ORIGINAL
def test_what_was_saved_is_loaded(world: World, strategy: str, original: bool) -> None:
    options = {"strategy": strategy, "original": original}
    for kind in KINDS:
        saved, model = wrapped(fullshard, build(1), **options), wrapped(fullshard, build(2), **options)
        before = [id(parameter) for parameter in model.parameters()]
        with speaking(fullshard, saved, kind), speaking(fullshard, model, kind):
            for part, from_part in ((model.module.blocks[0], saved.module.blocks[0]), (model, saved)):
                keys = part.load_state_dict(from_part.state_dict())
                assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        assert before == [id(parameter) for parameter in model.parameters()]
        assert_holds(model, 1)


@ranks(4)
@first_of("strategy", *HYBRID)
def test_what_a_hybrid_saved_is_loaded(world: World, strategy: str) -> None:
    options = {"strategy": strategy, **mesh_options(world, strategy)}
    for kind in KINDS:
        saved, model = wrapped(fullshard, build(1), **options), wrapped(fullshard, build(2), **options)
        with speaking(fullshard, saved, kind), speaking(fullshard, model, kind):
            model.load_state_dict(saved.state_dict())
        assert_holds(model, 1)


@ranks(2)
@EACH_WRAPPER
@ORIGINAL
@pytest.mark.parametrize("around", [False, True], ids=["root", "plain"])
def test_of_a_plain_model(world: World, library: str, original: bool, around: bool) -> None:
    """Which the wrapped one, and a plain module around wrappers, load as they are."""
    fsdp = WRAPPERS[library]
    if around:
        model: Any = build(2)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap(fsdp, block, original=original)
    else:
        model = wrapped(fsdp, build(2), original=original)
    keys = model.load_state_dict(build(1).state_dict())
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert_equal_states(model.state_dict(), build(1).state_dict())


@ranks(2, 3)
@ORIGINAL
def test_torch_loads_what_we_save_and_the_other_way_round(world: World, original: bool) -> None:
    for kind, target in itertools.product(("FULL", "SHARDED"), WRAPPERS):
        models = {
            name: wrapped(fsdp, build(seed), original=original, **mesh_options(world))
            for seed, (name, fsdp) in enumerate(WRAPPERS.items())
        }
        (source,) = models.keys() - {target}
        with speaking(WRAPPERS[source], models[source], kind), speaking(WRAPPERS[target], models[target], kind):
            models[target].load_state_dict(models[source].state_dict())
        assert_equal_states(models[target].state_dict(), build(list(WRAPPERS).index(source)).state_dict())


def composable(seed: int) -> Any:
    model = build(seed)
    shard_each(*model.blocks, model)
    return model


@ranks(2, 3)
@ORIGINAL
def test_one_api_loads_what_the_other_saves(world: World, original: bool) -> None:
    model, other = wrapped(fullshard, build(1), original=original), composable(2)
    with speaking(fullshard, model, "SHARDED"):
        other.load_state_dict(model.state_dict())
        assert_equal_states(whole(other.state_dict()), build(1).state_dict())
        model.load_state_dict(composable(3).state_dict())
        assert_equal_states(whole(model.state_dict()), build(3).state_dict())
    plain = build(4)
    plain.load_state_dict(model.state_dict())
    assert_equal_states(plain.state_dict(), build(3).state_dict())


@ranks(2)
@ORIGINAL
def test_files_of_torch_save(world: World, original: bool, tmp_path: Path) -> None:
    for kind in KINDS:
        saved, model = (wrapped(fullshard, build(seed), original=original) for seed in (1, 2))
        path = tmp_path / f"{world.rank}-{kind}.pt"
        with speaking(fullshard, saved, kind), speaking(fullshard, model, kind):
            torch.save(saved.state_dict(), path)
            model.load_state_dict(torch.load(path, weights_only=False))
        assert_holds(model, 1)


@ranks(2)
@EACH_WRAPPER
@ORIGINAL
def test_missing_and_unexpected_keys(world: World, library: str, original: bool) -> None:
    """By their plain names; what is missing stays as it was."""
    model = wrapped(WRAPPERS[library], build(2), original=original)
    state = build(1).state_dict()
    for name in ("gain", "blocks.1.0.weight", "shift"):
        del state[name]
    state.update({"extra": torch.ones(1), "blocks.0.0.extra": torch.ones(1)})
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state)
    for name in ("gain", "blocks.1.0.weight", "shift", "extra", "blocks.0.0.extra"):
        assert name in str(error.value)
    keys = model.load_state_dict(state, strict=False)
    if library == "fullshard":
        assert sorted(keys.missing_keys) == ["blocks.1.0.weight", "gain", "shift"]
        assert sorted(keys.unexpected_keys) == ["blocks.0.0.extra", "extra"]
    expected = build(2)
    expected.load_state_dict(state, strict=False)
    assert_equal_states(model.state_dict(), expected.state_dict())


@ranks(2)
@EACH_WRAPPER
@ORIGINAL
def test_sizes_that_do_not_fit(world: World, library: str, original: bool) -> None:
    """Are named, and the rest of the model stays usable."""
    model = wrapped(WRAPPERS[library], build(2), original=original)
    state = build(1).state_dict()
    state["first.bias"] = torch.zeros(8)
    with pytest.raises(RuntimeError, match=r"first\.bias.*\n*.*\[8\].*\[7\]"):
        model.load_state_dict(state)
    mean_square(model, BATCH(0)).backward()
    model.load_state_dict(build(1).state_dict())
    assert_equal_states(model.state_dict(), build(1).state_dict())


@ranks(2)
@ORIGINAL
@pytest.mark.parametrize("where", ["root", "plain"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_after_an_error_in_the_middle_the_model_is_usable(world: World, original: bool, where: str, when: str) -> None:
    """An optimizer that is built then finds the parameters of before: whole ones would take the memory of the model."""
    inner = build(2)

    def fail(*args: Any) -> None:
        raise KeyError("a hook of the user")

    linear = inner.blocks[1][0]
    handle = getattr(linear, "register_load_state_dict_" + ("pre_hook" if when == "before" else "post_hook"))(fail)
    model: Any = inner
    if where == "root":
        model = wrapped(fullshard, inner, original=original)
    else:
        for index, block in enumerate(inner.blocks):
            inner.blocks[index] = wrap(fullshard, block, original=original)
    before = [(name, id(param), param.shape) for name, param in model.named_parameters()]
    with pytest.raises(KeyError, match="a hook of the user"):
        model.load_state_dict(build(1).state_dict())
    if where == "root":
        assert [(name, id(param), param.shape) for name, param in model.named_parameters()] == before
    handle.remove()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_square(model, BATCH(0)).backward()
    optimizer.step()
    model.load_state_dict(build(3).state_dict())
    assert_equal_states(model.state_dict(), build(3).state_dict())
    model.eval()
    assert torch.allclose(model(*BATCH(0)), build(3).eval()(*BATCH(0)), atol=1e-6)


@ranks(2)
@ORIGINAL
def test_assign(world: World, original: bool) -> None:
    """Parameters stay the objects that they were, for the sake of optimizers; they take the values."""
    for kind in ("FULL", "SHARDED"):
        saved, model = (wrapped(fullshard, build(seed), original=original) for seed in (1, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [id(parameter) for parameter in model.parameters()]
        with speaking(fullshard, saved, kind), speaking(fullshard, model, kind):
            model.load_state_dict(saved.state_dict(), assign=True)
        assert before == [id(parameter) for parameter in model.parameters()]
        assert_equal_states(model.state_dict(), build(1).state_dict())
        mean_square(model, BATCH(0)).backward()
        optimizer.step()
        assert not torch.equal(model.state_dict()["gain"], build(1).gain)


@pytest.mark.slow
@ranks(2)
@ORIGINAL
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_ties_across_units(world: World, original: bool, strategy: str) -> None:
    """The names are all there, as in the plain model, and loading either loads both."""

    def tied(seed: int, units: tuple[str, ...]) -> Any:
        model: Any = seeded(lambda: Transformer(tied=True), seed)
        for unit in units:
            setattr(model, unit, wrap(fullshard, getattr(model, unit), original=original, strategy=strategy))
        return wrap(fullshard, model, original=original, strategy=strategy)

    plain = seeded(lambda: Transformer(tied=True), 1).state_dict()
    ids = torch.arange(6).view(1, 6)
    orders = (("head",), ("tokens",), ("tokens", "head"), ("head", "tokens"))
    for kind, units in itertools.product(KINDS, orders):
        saved, model = tied(1, units), tied(2, units)
        with speaking(fullshard, saved, kind), speaking(fullshard, model, kind):
            state = saved.state_dict()
            if kind != "LOCAL":
                assert_equal_states(whole(state), plain)
            model.load_state_dict(state)
        assert_equal_states(model.state_dict(), plain)
        assert torch.allclose(model(ids), saved(ids), atol=1e-6)


@ranks(2)
@first_of("original", False, True)
def test_checkpoint_wrappers_and_none_are_interchangeable(world: World, original: bool) -> None:
    for kind in KINDS:
        model: Any = build(1)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap(fullshard, checkpoint_wrapper(block), original=original)
        model = wrap(fullshard, model, original=original)
        without, target = (wrapped(fullshard, build(seed), original=original) for seed in (2, 3))
        for source, goal in ((model, target), (without, model)):
            with speaking(fullshard, source, kind), speaking(fullshard, goal, kind):
                goal.load_state_dict(source.state_dict())
        assert_equal_states(target.state_dict(), build(1).state_dict())
        assert_equal_states(model.state_dict(), build(2).state_dict())


@ranks(2)
def test_what_is_missing_of_a_parameter_that_is_not_contiguous_stays(world: World) -> None:
    model = wrap(fullshard, seeded(OddParameters))
    state = seeded(OddParameters).state_dict()
    del state["crossed"]
    assert model.load_state_dict(state, strict=False).missing_keys == ["crossed"]
    assert_equal_states(model.state_dict(), seeded(OddParameters).state_dict())


@ranks(2)
@pytest.mark.parametrize(("model", "original"), [(OddParameters, True), (MixedDtypes, True), (MixedDtypes, False)])
def test_odd_parameters(world: World, original: bool, model: Any) -> None:
    """Scalars, non-contiguous ones, several dtypes; frozen beside trained with original parameters."""
    for kind in KINDS:
        saved, other = (wrap(fullshard, seeded(model, seed), original=original) for seed in (1, 2))
        with speaking(fullshard, saved, kind), speaking(fullshard, other, kind):
            state = saved.state_dict()
            if kind != "LOCAL":
                assert_equal_states(whole(state), seeded(model, 1).state_dict())
            other.load_state_dict(state)
        assert_equal_states(other.state_dict(), seeded(model, 1).state_dict())


@ranks(2)
@ORIGINAL
def test_buffers_in_low_precision_take_values_of_full_precision(world: World, original: bool) -> None:
    flags = {"buffer_dtype": torch.bfloat16}
    model = wrap(fullshard, build(2), original=original, flags=flags)
    assert model.check_is_root()
    model.load_state_dict(build(1).state_dict())
    assert model.module.shift.dtype == torch.bfloat16
    assert torch.equal(model.module.shift, build(1).shift.bfloat16())


@ranks(2)
@ORIGINAL
def test_inside_of_summon_full_params(world: World, original: bool) -> None:
    model = wrapped(fullshard, build(2), original=original)
    with fullshard.FullyShardedDataParallel.summon_full_params(model):
        model.load_state_dict(build(1).state_dict())
        assert torch.equal(model.module.first.weight, build(1).first.weight)
    assert_holds(model, 1)


@ranks(2)
@ORIGINAL
def test_copies_save_and_load_apart(world: World, original: bool) -> None:
    model = wrapped(fullshard, build(2), original=original)
    twin = copy.deepcopy(model)
    twin.load_state_dict(build(1).state_dict())
    assert_holds(twin, 1)
    assert_equal_states(model.state_dict(), build(2).state_dict())


@ranks(2)
@ORIGINAL
def test_the_local_state_dict_of_another_sharding(world: World, original: bool) -> None:
    small, large = (wrap(fullshard, nn.Linear(3, rows), original=original) for rows in (4, 5))
    with speaking(fullshard, small, "LOCAL"), speaking(fullshard, large, "LOCAL"):
        with pytest.raises(RuntimeError, match="_flat_param"):
            large.load_state_dict(small.state_dict())
        large.load_state_dict(large.state_dict())
