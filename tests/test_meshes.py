"""Meshes: which are taken, what parameters look like on them, and worlds of up to 1024 ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard.buffer.plan import ALIGNMENT
from fullshard.meshes import data_mesh, group_of
from tests.fully_shard.cases import BOTH, Library, assert_close, first_of, groups_of, inputs, local, shard_mlp, twins
from tests.harness import World, fake_world, ranks
from tests.harness.compare import each_block, kept
from tests.harness.models import MLP, Transformer, seeded


def test_a_mesh_of_two_dims_without_names_and_one_of_three_are_refused() -> None:
    with fake_world(8) as world:
        with pytest.raises(AssertionError, match="needs mesh_dim_names"):
            data_mesh(world.mesh(2, 4))
        with pytest.raises(ValueError, match="expects a 1D or 2D DeviceMesh"):
            data_mesh(world.mesh(2, 2, 2, names=("a", "b", "c")))


def test_the_process_group_of_some_ranks_is_made_once() -> None:
    with fake_world(4):
        assert group_of(range(4)) is None
        made = group_of([1, 0])
        assert made is group_of([0, 1])
        assert made is not None
        assert made.size() == 2


@pytest.mark.parametrize("size", [8, 64, 100, 1024])
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_shapes_padding_and_bytes_of_shards(size: int, rank: int) -> None:
    with fake_world(size, rank):
        model = nn.Linear(130, 515)
        model.scale = nn.Parameter(torch.ones(7))
        fullshard.fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        (group,) = groups_of(model)
        used = 0
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            rows = math.ceil(parameter.shape[0] / size)
            mine = max(0, min(rows, parameter.shape[0] - rank * rows))
            assert local(parameter).shape == (mine, *parameter.shape[1:])
            used += rows * parameter.shape[1:].numel() * 4
        assert used <= group.shard.nbytes <= used + 3 * (ALIGNMENT - 1) * 4 + 63


@pytest.mark.parametrize("size", [8, 1024])
@pytest.mark.parametrize("limit", [0, 1])
def test_a_step_has_a_gather_and_a_reduction_for_each_group(size: int, limit: int) -> None:
    with fake_world(size, 1):
        model = seeded(lambda: Transformer(layers=3))
        each_block(reshard_after_forward=True, mesh=init_device_mesh("cpu", (size,)))(fullshard, model)
        model.set_prefetch_limit(limit)
        model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
        with CommDebugMode() as counter:
            model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
        counts: dict[str, int] = {}
        for name, count in counter.get_comm_counts().items():
            kind = "gather" if "gather" in str(name) else "scatter" if "scatter" in str(name) else str(name)
            counts[kind] = counts.get(kind, 0) + count
        groups = len(groups_of(model))
        assert set(counts) == {"gather", "scatter"}
        assert counts["scatter"] == groups
        assert groups <= counts["gather"] <= 2 * groups


@pytest.mark.parametrize("shape", [(4, 2), (128, 8)])
def test_a_hybrid_step_has_an_all_reduce_for_each_group_too(shape: tuple[int, int]) -> None:
    with fake_world(math.prod(shape)):
        model = seeded(lambda: Transformer(layers=3))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        each_block(mesh=mesh)(fullshard, model)
        assert all(parameter.placements == (Replicate(), Shard(0)) for parameter in model.parameters())
        model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
        with CommDebugMode() as counter:
            model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
        counts = {str(name): count for name, count in counter.get_comm_counts().items()}
        assert sum(count for name, count in counts.items() if "all_reduce" in name or "allreduce" in name) == 4


@pytest.mark.parametrize("size", [8, 1024])
def test_a_parameter_of_fewer_rows_than_ranks(size: int) -> None:
    with fake_world(size, size - 1):
        model = nn.Linear(6, 5)
        fullshard.fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        assert local(model.weight).shape == (0, 6)
        model(inputs()).sum().backward()
        model.reshard()
        assert model.weight.grad is not None
        assert local(model.weight.grad).shape == (0, 6)


@pytest.mark.parametrize("choice", [2, 4, 64, 512])
def test_resting_on_any_divisor(choice: int) -> None:
    with fake_world(1024, 5):
        model = nn.Linear(6, 1024)
        fullshard.fully_shard(model, mesh=init_device_mesh("cpu", (1024,)), reshard_after_forward=choice)
        model(inputs())
        assert model.weight.device_mesh.shape == (1024 // choice, choice)
        assert local(model.weight).shape == (1024 // choice, 6)


@pytest.mark.parametrize(("choice", "sharded"), [(1, False), (8, True)])
def test_the_trivial_divisors_are_false_and_true(choice: int, sharded: bool) -> None:
    with fake_world(8):
        model = nn.Linear(6, 5)
        fullshard.fully_shard(model, reshard_after_forward=choice)
        model(inputs())
        assert isinstance(model.weight, DTensor) is sharded


@ranks(2)
def test_names_that_contradict_the_places_of_dims_are_refused(world: World) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "dp_replicate"))
    with pytest.raises(ValueError, match=r"replicates over the first dim .* \('dp_shard', 'dp_replicate'\): exchange"):
        fullshard.fully_shard(nn.Linear(2, 2), mesh=mesh)


@ranks(2)
@BOTH
def test_no_mesh_is_all_ranks(world: World, fsdp: Library) -> None:
    model = shard_mlp(fsdp)
    assert model.scale.device_mesh.shape == (world.size,)


def replicated(mesh: DeviceMesh) -> MLP:
    """An MLP whose parameters are DTensors, whole on every rank."""
    model = seeded(MLP)
    distribute_module(model, mesh)
    return model


def check_gradients(parameters: Iterable[Any], reference: nn.Module, seeds: Iterable[int], ranks: int) -> None:
    """Gradients are the mean over the ranks of those that the whole model has of all batches."""
    for seed in seeds:
        (reference(inputs(seed)).sum() / ranks).backward()
    for parameter, expected in zip(parameters, reference.parameters(), strict=True):
        assert_close(kept(parameter.grad), expected.grad, "gradient")


def _on(mesh: DeviceMesh, batch: torch.Tensor) -> Any:
    return DTensor.from_local(batch, mesh, [Shard(0)] * mesh.ndim, run_check=False)


@ranks(4)
@first_of("reshard", True, False, 2)
def test_named_dims_of_a_full_mesh(world: World, reshard: bool | int) -> None:
    names = ("a", "b")
    mesh = world.mesh(2, 2, names=names)
    model, reference = replicated(mesh), seeded(MLP)
    dims = fullshard.DataParallelMeshDims(shard=names)
    each_block(mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=reshard)(fullshard, model)
    assert local(model.blocks[0][0].weight).shape[0] == (2 if world.rank < 3 else 1)
    parameters = list(model.parameters())
    for seed in range(2):
        model(_on(mesh, inputs(4 * seed + world.rank))).to_local().sum().backward()
    check_gradients(parameters, reference, range(8), 4)


@ranks(4)
@first_of("reshard", True, False)
def test_named_dims_beside_tensor_parallel(world: World, reshard: bool) -> None:
    mesh = world.mesh(2, 2, names=("data", "tensor"))

    def build() -> Any:
        return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))

    model, reference = build(), build()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fullshard.fully_shard(model, mesh=mesh["data"], reshard_after_forward=reshard)
    parameters = list(model.parameters())
    assert {parameter.device_mesh.ndim for parameter in parameters} == {2}
    for _ in range(2):
        model(inputs(world.rank // 2)).sum().backward()
    check_gradients(parameters, reference, (0, 1, 0, 1), 2)


@ranks(4)
@first_of("reshard", True, 1, False, quick=2)
def test_a_full_mesh_with_tensor_parallel(world: World, reshard: bool | int) -> None:
    mesh = world.mesh(2, 2, names=("data", "tensor"))
    model, reference = seeded(lambda: nn.Linear(6, 8)), seeded(lambda: nn.Linear(6, 8))
    for name, parameter in list(model.named_parameters()):
        value = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate(), Shard(0)]))
        model.register_parameter(name, value)
    dims = fullshard.DataParallelMeshDims(shard="data")
    fullshard.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=reshard)
    parameters = list(model.parameters())
    assert local(model.weight).shape == (2, 6)
    x = DTensor.from_local(inputs(world.rank // 2), mesh, [Shard(0), Replicate()], run_check=False)
    model(x).to_local().sum().backward()
    check_gradients(parameters, reference, range(2), 2)


@ranks(4)
def test_experts_on_a_mesh_of_their_own(world: World) -> None:
    """On a mesh of one dimension, beside them, the mean is that of its own ranks."""
    mesh = world.mesh(2, 2, names=("copies", "experts"))["experts"]

    def place(parameter: nn.Parameter) -> Any:
        return fullshard.ShardPlacementResult(Shard(0), mesh) if parameter.ndim == 2 else None

    model, reference = seeded(MLP), seeded(MLP)
    each_block(mesh=world.mesh(), shard_placement_fn=place)(fullshard, model)
    assert model.blocks[0][0].weight.device_mesh == mesh
    assert model.blocks[0][0].bias.device_mesh.shape == (4,)
    assert len(groups_of(model.blocks[0])) == 2
    weight = model.blocks[0][0].weight
    model(inputs(world.rank)).sum().backward()
    first = world.rank // 2 * 2
    for rank in (first, first + 1):
        (reference(inputs(rank)).sum() / 2).backward()
    assert_close(kept(weight.grad), reference.blocks[0][0].weight.grad, "gradient")


class Expert(nn.Linear):
    """Each rank computes with the rows that it has of a distributed weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, DTensor)
        return x @ self.weight.to_local().T * self.bias.sum()


@ranks(2)
def test_experts_that_all_ranks_hold_in_parts_get_a_mesh_of_their_own(world: World) -> None:
    """Expert parallelism over all ranks that the other parameters are sharded over, as in torchtitan."""
    meshes = world.mesh(1, 2, names=("shard", "experts"))
    model = seeded(lambda: Expert(3, 4))
    nn.init.ones_(model.bias)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), meshes["experts"], [Shard(0)]))

    def place(parameter: nn.Parameter) -> Any:
        return fullshard.ShardPlacementResult(Shard(0), mesh) if isinstance(parameter, DTensor) else None

    mesh = world.mesh()
    with pytest.raises(ValueError, match="'weight' of a Expert is already a DTensor"):
        fullshard.fully_shard(model, mesh=world.mesh(), shard_placement_fn=place)
    mesh = meshes["shard"]
    fullshard.fully_shard(model, mesh=world.mesh(), shard_placement_fn=place)
    assert model.weight.device_mesh.shape == (1, 2)
    model(torch.full((1, 3), world.rank + 1.0)).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(local(model.weight.grad), torch.full((2, 3), 4 * (world.rank + 1.0)))


@ranks(4)
def test_two_sub_meshes_train_apart(world: World) -> None:
    mesh = world.mesh(2, 2, names=("models", "shard"))["shard"]
    pair = twins(World(world.rank % 2, 2), mesh=mesh)
    for _ in range(2):
        pair.step()
