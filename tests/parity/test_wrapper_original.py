"""Parity of modules that keep their original parameters: what optimizers and users do to fragments between steps."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import World, ranks
from tests.harness.compare import Batch, Call, Precision, adamw, compare, mean_square, sgd, whole_parameters
from tests.harness.models import MLP, Branches, OddParameters, Transformer, random_batch, seeded, token_batch
from tests.harness.slow import slow
from tests.harness.wrapper import (
    EACH_WRAPPER,
    ORIGINAL,
    SHARDED,
    STRATEGIES,
    WRAPPERS,
    assert_all_see,
    training,
    wrap_blocks,
    wrap_whole,
)

EACH_STRATEGY = pytest.mark.parametrize("strategy", ["FULL_SHARD", *slow("SHARD_GRAD_OP"), "NO_SHARD"])
UNITS = pytest.mark.parametrize("units", [wrap_blocks, wrap_whole])


def with_two_groups(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW that decays every second parameter only, and moves the others faster.

    Fragments have one dimension, so that an optimizer has to tell parameters apart by something else: here their place.
    """
    every = list(parameters)
    groups = [{"params": every[::2], "weight_decay": 0.5}, {"params": every[1::2], "weight_decay": 0.0, "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-2)


@ranks(1, 2, 3, transport="shm")
@UNITS
def test_groups_of_an_optimizer(world: World, units: Any) -> None:
    compare(world, training(units(), optimizer=with_two_groups, steps=3))


@ranks(2, transport="shm")
@EACH_STRATEGY
def test_an_optimizer_built_before_wrapping(world: World, strategy: str) -> None:
    optimizers: list[torch.optim.Optimizer] = []

    def build() -> nn.Module:
        model = seeded(MLP)
        optimizers.append(adamw(model.parameters()))
        return model

    case = training(wrap_blocks(strategy=strategy), build=build, optimizer=lambda parameters: optimizers[-1], steps=3)
    compare(world, case)


@ranks(1, 2, 3, 4, transport="shm")
@EACH_STRATEGY
def test_fragments_are_those_of_torch(world: World, strategy: str) -> None:
    """Their shapes, in which a parameter of 5 or 7 rows may be cut anywhere or be missing, and those of gradients."""

    def shapes(fsdp: ModuleType) -> list[Any]:
        model = wrap_whole(strategy=strategy)(fsdp, seeded(lambda: OddParameters(scalar=False, non_contiguous=False)))
        at_rest = {name: (p.tolist(), list(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()}
        mean_square(model, random_batch(4, 6)(world.rank)).backward()
        after = {name: p.grad if p.grad is None else list(p.grad.shape) for name, p in model.named_parameters()}
        return [at_rest, after, {name: list(p.shape) for name, p in model.named_parameters()}]

    assert_all_see(shapes)


@pytest.mark.slow
@ranks(2, 3, transport="shm")
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, None), (torch.bfloat16, torch.float32), (None, torch.bfloat16)])
def test_fragments_are_those_of_torch_in_low_precision(world: World, dtypes: Any) -> None:
    """Parameters begin at multiples of 16 bytes in the dtype in which they are gathered, which moves the cuts."""

    def sizes(fsdp: ModuleType) -> dict[str, int]:
        model = wrap_whole(precision=Precision(*dtypes))(fsdp, seeded(MLP))
        return {name: parameter.numel() for name, parameter in model.named_parameters()}

    assert_all_see(sizes)


@pytest.mark.slow
@ranks(2, transport="shm")
@EACH_STRATEGY
def test_what_parameters_look_like_after_forward(world: World, strategy: str) -> None:
    """Unsharded where nothing was resharded, which a program may have come to rely on."""

    def shapes(fsdp: ModuleType) -> dict[str, list[int]]:
        model = wrap_blocks(strategy=strategy)(fsdp, seeded(MLP))
        model(*random_batch(4, 6)(world.rank))
        return {name: list(parameter.shape) for name, parameter in model.named_parameters()}

    assert_all_see(shapes)


@pytest.mark.slow
@ranks(2, 3, transport="shm")
@UNITS
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_frozen_and_trained_parameters_in_one_unit(world: World, units: Any, optimizer: Any) -> None:
    def build() -> nn.Module:
        return seeded(lambda: OddParameters(scalar=False, non_contiguous=False))

    compare(world, training(units(), build=build, optimizer=optimizer))


def branches_batch(used: list[list[int]]) -> Any:
    """Batches of `Branches`; the branches that are used go by the seed."""

    def batch(seed: int) -> Batch:
        return (*random_batch(4, 6)(seed), torch.tensor(used[seed % len(used)]))

    return batch


@ranks(2, transport="shm")
@pytest.mark.parametrize("used", [[[1, 0, 0], [0, 1, 0]], *slow([[1, 1, 0]], [[1, 0, 0]] * 2 + [[0, 0, 1]] * 2)])
@pytest.mark.parametrize("strategy", SHARDED)
def test_parameters_that_one_unit_does_not_use_have_gradients_of_zero(
    world: World, used: list[list[int]], strategy: str
) -> None:
    case = training(
        wrap_whole(strategy=strategy),
        build=lambda: seeded(Branches),
        batch=branches_batch(used),
        unused_are_zero=True,
        optimizer=adamw,
    )
    compare(world, case)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@UNITS
@ORIGINAL
def test_a_weight_shared_within_a_unit(world: World, strategy: str, units: Any, original: bool) -> None:
    case = training(
        units(strategy=strategy, original=original),
        build=lambda: seeded(lambda: Transformer(tied=True)),
        batch=token_batch(3, 5),
        optimizer=adamw,
    )
    compare(world, case)


@ranks(2, 3, transport="shm")
@pytest.mark.parametrize("widths", [(3, 5, 7), (2, 1, 3), *slow((7, 1, 3), (5, 5, 2))])
@UNITS
@ORIGINAL
def test_odd_shapes(world: World, widths: tuple[int, ...], units: Any, original: bool) -> None:
    case = training(
        units(original=original), build=lambda: seeded(lambda: MLP(widths)), batch=random_batch(4, widths[0])
    )
    compare(world, case)


@pytest.mark.slow
@ranks(2, transport="shm")
@EACH_STRATEGY
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(world: World, strategy: str, set_to_none: bool) -> None:
    """Whichever way gradients go away after a step, the next starts from nothing."""

    def optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        made = adamw(parameters)
        clear = made.zero_grad
        made.zero_grad = lambda: clear(set_to_none=set_to_none)  # type: ignore[assignment, misc]
        return made

    compare(world, training(wrap_blocks(strategy=strategy), optimizer=optimizer, steps=3))


@ranks(2)
@EACH_WRAPPER
@EACH_STRATEGY
@pytest.mark.parametrize("how", ["new data", "in place", "grown in full"])
def test_values_that_a_user_sets_between_steps(world: World, library: str, strategy: str, how: str) -> None:
    fsdp = WRAPPERS[library]
    model = wrap_blocks(strategy=strategy)(fsdp, seeded(MLP))
    reference = seeded(MLP)
    batch = random_batch(4, 6)(0)
    for _ in range(2):
        mean_square(model, batch).backward()
        mean_square(reference, batch).backward()
        model.zero_grad()
        reference.zero_grad()
        for parameter in reference.parameters():
            parameter.data.mul_(1.5)
        if how == "grown in full":
            with fsdp.FullyShardedDataParallel.summon_full_params(model):
                for parameter in model.parameters():
                    parameter.data.mul_(1.5)
        else:
            for parameter in model.parameters():
                if how == "new data":
                    parameter.data = parameter.data * 1.5
                else:
                    parameter.data.mul_(1.5)
        assert torch.allclose(model(*batch), reference(*batch), rtol=1e-6, atol=1e-7)
    expected = dict(reference.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in whole_parameters(fsdp, model).items())


@ranks(2)
@EACH_WRAPPER
def test_values_that_a_user_sets_after_a_forward_that_nobody_goes_back_through(world: World, library: str) -> None:
    """With NO_SHARD what is shown are the parameters, at any time between a forward and the next."""
    model = wrap_blocks(strategy="NO_SHARD")(WRAPPERS[library], seeded(MLP))
    reference = seeded(MLP)
    batch = random_batch(4, 6)(0)
    for _ in range(2):
        model(*batch)
        with torch.no_grad():
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.mul_(1.5)
        assert torch.allclose(model(*batch), reference(*batch), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@ranks(2)
@UNITS
@pytest.mark.parametrize("strategy", SHARDED)
def test_two_forwards_before_one_backward(world: World, units: Any, strategy: str) -> None:
    def loss(call: Call, batch: Batch) -> Tensor:
        (x,) = batch
        first, second = call(x), call(0.5 * x)
        return (first * second).mean()

    compare(world, training(units(strategy=strategy), loss=loss))
