"""Parity of flat parameters (`use_orig_params=False`): what they hold on each rank, and what stands on the modules."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from tests.harness import World, ranks
from tests.harness.compare import adamw, compare, mean_square
from tests.harness.models import MLP, Branches, OddParameters, random_batch, seeded
from tests.harness.slow import slow
from tests.harness.wrapper import (
    EACH_WRAPPER,
    WRAPPERS,
    assert_all_see,
    training,
    wrap,
    wrap_blocks,
    wrap_whole,
)

EACH_STRATEGY = pytest.mark.parametrize("strategy", ["FULL_SHARD", *slow("SHARD_GRAD_OP"), "NO_SHARD"])
UNITS = pytest.mark.parametrize("units", [wrap_blocks, wrap_whole])


@ranks(1, 2, 3, 4, transport="shm")
@EACH_STRATEGY
@UNITS
def test_flat_parameters_have_torchs_names_sizes_and_values(world: World, strategy: str, units: Any) -> None:
    def observe(fsdp: ModuleType) -> dict[str, Any]:
        model = units(strategy=strategy, original=False)(fsdp, seeded(MLP))
        return {name: (list(p.shape), p.dtype, p.tolist()) for name, p in model.named_parameters()}

    assert_all_see(observe)


@ranks(2, 3, transport="shm")
@EACH_STRATEGY
def test_so_do_their_gradients(world: World, strategy: str) -> None:
    def observe(fsdp: ModuleType) -> dict[str, Any]:
        model = wrap_blocks(strategy=strategy, original=False)(fsdp, seeded(MLP))
        mean_square(model, random_batch(4, 6)(world.rank)).backward()
        parameters = dict(model.named_parameters())
        assert all(p.grad is not None and p.grad.shape == p.shape for p in parameters.values())
        return {name: (list(p.grad.shape), p.grad.dtype) for name, p in parameters.items() if p.grad is not None}

    assert_all_see(observe)


@ranks(2)
def test_the_padding_of_a_gradient_is_zero(world: World) -> None:
    """Whatever is in new memory, as NaN is in deterministic mode."""
    torch.use_deterministic_algorithms(True)
    try:
        model = wrap_blocks(original=False)(fullshard, seeded(MLP))
        mean_square(model, random_batch(4, 6)(world.rank)).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    sizes = [(each._unpadded_unsharded_size, each._padded_unsharded_size) for each in model.parameters()]
    assert any(size != padded for size, padded in sizes)
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()


@ranks(2, transport="shm")
@EACH_WRAPPER
def test_a_flat_parameter_is_known_by_its_class(world: World, library: str) -> None:
    fsdp = WRAPPERS[library]
    model = wrap_blocks(original=False)(fsdp, seeded(MLP))
    parameters = list(model.parameters())
    assert len(parameters) == 5
    assert all(isinstance(p, fsdp.FlatParameter) and isinstance(p, nn.Parameter) for p in parameters)
    assert not isinstance(nn.Parameter(torch.zeros(3)), fsdp.FlatParameter)
    assert not isinstance(torch.zeros(3), fsdp.FlatParameter)
    with fsdp.FullyShardedDataParallel.summon_full_params(model):
        assert not any(isinstance(p, fsdp.FlatParameter) for p in model.parameters())


@ranks(2, transport="shm")
@EACH_STRATEGY
def test_modules_have_tensors_where_their_parameters_were(world: World, strategy: str) -> None:
    def observe(fsdp: ModuleType) -> list[Any]:
        model = wrap_blocks(strategy=strategy, original=False)(fsdp, seeded(MLP))
        linear = model.blocks[0][0]

        def attributes() -> Any:
            return [(isinstance(x, Tensor), list(x.shape)) for x in (linear.weight, linear.bias)]

        seen: list[Any] = [list(linear._parameters)]
        output = model(*random_batch(4, 6)(world.rank))
        seen += [attributes(), list(linear._parameters)]
        output.square().mean().backward()
        seen += [attributes(), list(linear._parameters)]
        with fsdp.FullyShardedDataParallel.summon_full_params(model):
            seen += [attributes(), list(linear._parameters)]
        return [*seen, attributes(), list(linear._parameters)]

    assert_all_see(observe)


@ranks(2, 3, transport="shm")
@pytest.mark.parametrize("frozen", [[0], [1, 2, 3], *slow([3], [0, 1])])
def test_frozen_units(world: World, frozen: list[int]) -> None:
    def build() -> nn.Module:
        model = seeded(MLP)
        for index in frozen:
            model.blocks[index].requires_grad_(False)
        return model

    compare(world, training(wrap_blocks(original=False), build=build))


@ranks(2, transport="shm")
@EACH_WRAPPER
def test_trained_and_frozen_parameters_cannot_be_in_one(world: World, library: str) -> None:
    model = seeded(lambda: OddParameters(scalar=False, non_contiguous=False))
    with pytest.raises(ValueError, match=r"requires_grad|frozen"):
        wrap(WRAPPERS[library], model, original=False)


@ranks(2, transport="shm")
@EACH_WRAPPER
@pytest.mark.parametrize("original", [False, True])
def test_integer_parameters_are_refused(world: World, library: str, original: bool) -> None:
    model = nn.Linear(3, 3)
    model.register_parameter("count", nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False))
    with pytest.raises(ValueError, match=r"int64|[Ii]nteger|floating"):
        wrap(WRAPPERS[library], model, original=original)


@ranks(2, transport="shm")
def test_unused_parameters_have_gradients_of_zero(world: World) -> None:
    def batch(seed: int) -> tuple[Tensor, ...]:
        return (*random_batch(4, 6)(seed), torch.tensor([1, 1, 0]))

    build = {"build": lambda: seeded(Branches), "batch": batch, "optimizer": adamw}
    compare(world, training(wrap_whole(original=False), **build, unused_are_zero=True))
    compare(world, training(wrap_blocks(original=False), **build, unused_are_zero=lambda name: name == "spare"))


@ranks(2, transport="shm")
@EACH_WRAPPER
@EACH_STRATEGY
def test_values_that_a_user_sets_in_a_flat_parameter(world: World, library: str, strategy: str) -> None:
    model = wrap_blocks(strategy=strategy, original=False)(WRAPPERS[library], seeded(MLP))
    reference = seeded(MLP)
    batch = random_batch(4, 6)(0)
    for _ in range(2):
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.data.mul_(1.5)
        assert torch.allclose(model(*batch), reference(*batch), rtol=1e-6, atol=1e-7)
        mean_square(model, batch).backward()


@ranks(2, transport="shm")
@EACH_WRAPPER
def test_a_unit_without_parameters(world: World, library: str) -> None:
    fsdp = WRAPPERS[library]
    model = wrap(fsdp, nn.Sequential(wrap(fsdp, nn.Linear(6, 3), original=False), nn.Tanh()), original=False)
    assert [name.rpartition(".")[2] for name, _ in model.named_parameters()] == ["_flat_param"]
    mean_square(model, random_batch(4, 6)(world.rank)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
