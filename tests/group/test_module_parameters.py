"""What the modules show: DTensors, full tensors or smaller shards, when, and what happens to what users do to them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fullshard
from tests.fully_shard.cases import (
    BOTH,
    Library,
    Twins,
    are_sharded,
    assert_close,
    first_of,
    inputs,
    local,
    shard_mlp,
    twins,
)
from tests.harness import World, fake_world, ranks
from tests.harness.compare import each_block, kept, sgd
from tests.harness.models import MLP, seeded


@BOTH
def test_classes_are_those_of_the_modules_and_of_the_library(fsdp: Library) -> None:
    with fake_world(2):
        model = shard_mlp(fsdp)
        assert type(model).__name__ == "FSDPMLP"
        assert type(model).__mro__[1:3] == (fsdp.FSDPModule, MLP)
        assert type(model.blocks[0]).__name__ == "FSDPSequential"
        assert type(model.blocks[0]) is type(model.blocks[1])
        assert type(model.blocks[0][0]) is nn.Linear
        model = seeded(MLP)
        blocks = list(model.blocks)[:2]
        assert fsdp.fully_shard(blocks) is blocks
        assert fsdp.fully_shard(model) is model
        layers = [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)]
        model = fsdp.fully_shard(nn.Sequential(*layers))
        assert type(model[:2]) is nn.Sequential
        assert list(model[:2]) == layers[:2]
        assert model[0] is layers[0]


@BOTH
@pytest.mark.parametrize(("size", "shape"), [(3, (3,)), (4, (2, 2))], ids=["sharded", "hybrid"])
def test_sharded_parameters_are_dtensors_on_dim_0(fsdp: Library, size: int, shape: tuple[int, ...]) -> None:
    for rank in range(size):
        with fake_world(size, rank) as world:
            mesh = world.mesh(*shape, names=("replicate", "shard")[-len(shape) :])
            model, reference = shard_mlp(fsdp, mesh=mesh), seeded(MLP)
            for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert isinstance(parameter, nn.Parameter), name
                assert isinstance(parameter, DTensor), name
                assert parameter.placements == (Replicate(), Shard(0))[-len(shape) :], name
                assert parameter.device_mesh == mesh, name
                assert (parameter.shape, parameter.stride()) == (expected.shape, expected.stride()), name
                assert torch.equal(local(parameter), chunk(expected, shape[-1], rank % shape[-1])), name


def chunk(value: Tensor, size: int, rank: int) -> Tensor:
    """The part of a rank of a whole tensor."""
    chunks = value.detach().chunk(size)
    return chunks[rank] if rank < len(chunks) else value.detach()[:0]


@ranks(2)
@BOTH
@pytest.mark.parametrize("reshard", [True, False])
def test_what_is_registered_after_forward(world: World, fsdp: Library, reshard: bool) -> None:
    model, reference = shard_mlp(fsdp, reshard_after_forward=reshard), seeded(MLP)
    output = model(inputs())
    assert are_sharded(model) is reshard
    if not reshard:
        assert torch.equal(model.blocks[1][0].weight, reference.blocks[1][0].weight)
    output.sum().backward()
    assert are_sharded(model)


@pytest.mark.slow
@ranks(4)
@BOTH
def test_an_int_registers_shards_of_the_smaller_mesh_after_forward(world: World, fsdp: Library) -> None:
    model, reference = shard_mlp(fsdp, reshard_after_forward=2), seeded(MLP)
    optimized = list(model.parameters())
    output = model(inputs())
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.shape == (2, 2)
        assert parameter.placements == (Replicate(), Shard(0))
        if fsdp.name == "fullshard" or expected.shape[0] % 4 == 0:  # torch shows wrong rows if they are uneven
            assert torch.equal(local(parameter), chunk(expected, 2, world.rank % 2))
    if fsdp.name == "fullshard":
        model.blocks[0].reshard()
        assert model.blocks[0][0].weight.device_mesh.shape == (4,)
    output.sum().backward()
    assert all(shown is known for shown, known in zip(model.parameters(), optimized, strict=True))


@ranks(2)
@BOTH
def test_autograd_and_optimizers_see_the_same_tensors_in_each_step(world: World, fsdp: Library) -> None:
    seen: list[list[int]] = []
    model = shard_mlp(fsdp)
    before = list(model.parameters())
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: seen.append([id(p) for p in module.parameters()]))
    optimizer = sgd(model.parameters())
    for _ in range(2):
        model(inputs()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[: len(model.blocks)] == seen[len(model.blocks) :]
    assert all(parameter is known for parameter, known in zip(model.parameters(), before, strict=True))


@ranks(2)
@BOTH
def test_changes_between_forward_and_backward_are_seen_by_backward(world: World, fsdp: Library) -> None:
    for how in ("optimizer", "copy", "local"):
        model, reference = shard_mlp(fsdp, reshard_after_forward=True), seeded(MLP)
        found, expected = model(inputs()), reference(inputs())
        with torch.no_grad():
            for parameter in model.parameters():
                if how == "optimizer":
                    parameter.mul_(2)
                elif how == "copy":
                    parameter.copy_(parameter * 2)
                else:
                    local(parameter).mul_(2)
            for parameter in reference.parameters():
                parameter.data.mul_(2)
        parameters = list(model.parameters())
        found.sum().backward()
        expected.sum().backward()
        for parameter, other in zip(parameters, reference.parameters(), strict=True):
            assert_close(kept(parameter.grad), other.grad, f"gradient with the changed parameters: {how}")


@ranks(2)
@first_of("dtype", torch.float64, torch.bfloat16)
def test_a_model_changes_its_dtype_and_trains_on(world: World, dtype: torch.dtype) -> None:
    pair = twins(world, reshard_after_forward=False)
    pair.step()
    pair.sharded(inputs())
    assert not are_sharded(pair.sharded)
    model, reference = pair.sharded.to(dtype), pair.whole.to(dtype)
    assert are_sharded(model)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    parameters = list(model.parameters())
    found, expected = model(inputs().to(dtype)), reference(inputs().to(dtype))
    assert found.dtype is dtype
    assert_close(found, expected, "output")
    found.sum().backward()
    expected.sum().backward()
    for parameter, other in zip(parameters, reference.parameters(), strict=True):
        assert parameter.grad.dtype is dtype
        assert_close(kept(parameter.grad), other.grad, "gradient")


@ranks(2)
@BOTH
def test_a_model_from_meta_is_materialized_after_sharding(world: World, fsdp: Library) -> None:
    model, reference = meta_mlp(), seeded(MLP)
    each_block()(fsdp, model)
    assert all(parameter.is_meta and isinstance(parameter, DTensor) for parameter in model.parameters())
    model.to_empty(device="cpu")
    assert are_sharded(model)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), reference.parameters(), strict=True):
            local(parameter).copy_(chunk(value, world.size, world.rank))
    pair = Twins(world, model, reference)
    pair.step()
    pair.step()


def meta_mlp() -> Any:
    with torch.device("meta"):
        return MLP()


@ranks(2)
def test_a_non_persistent_buffer_that_was_replaced_is_not_named(world: World) -> None:
    """Modules that compute a table again often assign it: a new tensor, which nobody wrote in place either."""
    model = meta_mlp()
    with torch.device("meta"):
        model.register_buffer("table", torch.ones(5), persistent=False)
    each_block()(fullshard, model)
    model.to_empty(device="cpu")
    model.table = torch.ones(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(inputs())
