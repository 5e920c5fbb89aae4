"""`summon_full_params`: every combination of its switches, what is written back, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from tests.fully_shard.cases import Twins, are_sharded, assert_close, inputs, kinds, shard_mlp, twins
from tests.harness import World, ranks
from tests.harness.compare import each_block, kept, whole
from tests.harness.models import MLP, MixedDtypes, OddParameters, Transformer, seeded, shard_each

SWITCHES = ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")


@ranks(2)
@pytest.mark.parametrize("with_grads", [False, True])
@pytest.mark.parametrize("writeback", [False, True])
def test_every_combination_shows_what_it_says_or_is_refused(world: World, writeback: bool, with_grads: bool) -> None:
    for values in itertools.product([False, True], repeat=3):
        recurse, rank0_only, offload = values
        switches = dict(zip(SWITCHES, (recurse, writeback, rank0_only, offload, with_grads), strict=True))
        model, reference = shard_mlp(), seeded(MLP)
        model(inputs()).sum().backward()
        reference(inputs()).sum().backward()
        refused = [("writeback", "rank0_only")] if writeback and rank0_only else []
        refused += [("with_grads", "offload_to_cpu")] if with_grads and offload else []
        if refused:
            with (
                pytest.raises((ValueError, NotImplementedError), match=".*".join(refused[0])),
                fullshard.summon_full_params(model, **switches),
            ):
                pass
            continue
        shown_here = not rank0_only or world.rank == 0
        with fullshard.summon_full_params(model, **switches):
            for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
                is_full = shown_here and (recurse or name == "scale")
                assert isinstance(parameter, nn.Parameter)
                assert isinstance(parameter, DTensor) is not is_full, (name, switches)
                if not is_full:
                    continue
                assert torch.equal(parameter, expected), (name, switches)
                if with_grads:
                    assert_close(parameter.grad, expected.grad, f"{name}, {switches}")
                else:
                    assert parameter.grad is None
                with torch.no_grad():
                    parameter.mul_(2)
                    if with_grads:
                        parameter.grad.mul_(3)
        assert are_sharded(model)
        for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            is_written = writeback and (recurse or name == "scale")
            assert_close(kept(parameter), expected * (2 if is_written else 1), f"{name}, {switches}")
            factor = 3 if is_written and with_grads else 1
            assert_close(kept(parameter.grad), expected.grad * factor, f"gradient {name}, {switches}")


@ranks(2)
@pytest.mark.parametrize("before", ["nothing", "forward", "unshard", "step"])
def test_training_goes_on_after_it(world: World, before: str) -> None:
    pair = twins(world)
    if before == "forward":
        pair.sharded(inputs())
    elif before == "unshard":
        pair.sharded.blocks[0].unshard()
    elif before == "step":
        pair.step()
    with fullshard.summon_full_params(pair.sharded), torch.no_grad():
        for parameter in (*pair.sharded.parameters(), *pair.whole.parameters()):
            parameter.add_(0.1)
    for _ in range(2):
        pair.step()


@ranks(2)
def test_parameters_are_the_same_objects_after_it(world: World) -> None:
    model = shard_mlp()
    before = list(model.parameters())
    with fullshard.summon_full_params(model):
        pass
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


@ranks(2)
def test_it_shows_the_original_dtype(world: World) -> None:
    model, reference = seeded(MLP), seeded(MLP)
    each_block(mp_policy=fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16))(fullshard, model)
    model(inputs())
    with fullshard.summon_full_params(model):
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(parameter, expected)


@ranks(3)
@pytest.mark.parametrize("build", [OddParameters, MixedDtypes])
def test_it_shows_odd_parameters(world: World, build: Any) -> None:
    model, reference = seeded(build), seeded(build)
    each_block()(fullshard, model)
    with fullshard.summon_full_params(model):
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(parameter, expected)
            assert parameter.requires_grad is expected.requires_grad
            assert parameter.stride() == expected.stride()


@ranks(4)
@pytest.mark.parametrize("rank0_only", [True, False])
def test_it_shows_hybrid_parameters(world: World, rank0_only: bool) -> None:
    model, reference = seeded(MLP), seeded(MLP)
    each_block(mesh=world.mesh(2, 2, names=("replicate", "shard")))(fullshard, model)
    with fullshard.summon_full_params(model, writeback=False, rank0_only=rank0_only):
        full = not any(kinds(model).values())
        assert full is (not rank0_only or world.rank % 2 == 0), "the first of the ranks that shard together"
        if full:
            assert torch.equal(model.blocks[1][0].weight, reference.blocks[1][0].weight)


@ranks(2)
def test_tied_parameters_are_one_parameter_inside(world: World) -> None:
    model = seeded(lambda: Transformer(tied=True))
    shard_each(model.tokens, *model.blocks, model.head, model)
    with fullshard.summon_full_params(model):
        assert model.head.weight is model.tokens.weight
        assert not isinstance(model.head.weight, DTensor)
    assert model.head.weight is model.tokens.weight
    assert isinstance(model.head.weight, DTensor)


@ranks(2)
def test_after_an_error_inside_the_sharded_parameters_are_back_unchanged(world: World) -> None:
    model, reference = shard_mlp(), seeded(MLP)

    def fail_inside() -> None:
        with fullshard.summon_full_params(model), torch.no_grad():
            model.scale.mul_(2)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert are_sharded(model)
    assert torch.equal(whole(model.scale), reference.scale)


@ranks(2)
def test_full_parameters_are_no_views_of_the_engine(world: World) -> None:
    model = shard_mlp()
    with fullshard.summon_full_params(model):
        kept = model.blocks[0][0].weight
    expected = kept.clone()
    model(inputs()).sum().backward()
    assert torch.equal(kept, expected)


@ranks(2)
def test_it_does_nothing_to_a_plain_module(world: World) -> None:
    model = seeded(MLP)
    before = list(model.parameters())
    with fullshard.summon_full_params(model):
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


@ranks(2)
def test_a_forward_inside_is_refused(world: World) -> None:
    model, reference = shard_mlp(), seeded(MLP)
    with fullshard.summon_full_params(model), pytest.raises(RuntimeError, match="summon_full_params"):
        model(inputs())
    model.reset_iter_state()
    Twins(world, model, reference).step()


@ranks(2)
def test_what_is_replaced_after_it_is_noticed_on_ranks_that_it_showed_nothing(world: World) -> None:
    model, reference = shard_mlp(), seeded(MLP)
    x = inputs()
    model(x)
    with fullshard.summon_full_params(model, writeback=False, rank0_only=True):
        pass
    values = {name: (param.detach() * 0.9).requires_grad_() for name, param in reference.named_parameters()}
    found, expected = (torch.func.functional_call(each, values, (x,)).sum() for each in (model, reference))
    assert_close(found, expected, "loss")
    assert all(grad is not None for grad in torch.autograd.grad(found, list(values.values())))
