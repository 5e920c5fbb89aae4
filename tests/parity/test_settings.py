"""Parity of the settings of `FSDPModule`, of meshes named for single parameters, and of parameters on a full mesh."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_fsdp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fullshard
from tests.harness import World, ranks
from tests.harness.compare import Precision, Training, compare, each_block
from tests.harness.models import MLP, Transformer, random_batch, seeded, token_batch
from tests.harness.slow import slow, some


@ranks(2)
@pytest.mark.parametrize("buffers", [1, 2])
def test_several_reductions_in_flight_over_a_group_of_their_own(world: World, buffers: int) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        each_block()(fsdp, model)
        model.set_reduce_scatter_max_input_buffers(buffers)
        model.set_separate_reduce_scatter_group(True)

    compare(world, Training(build=partial(seeded, MLP), shard=shard, batch=random_batch(4, 6)))


@ranks(2)
def test_embedding_that_is_not_gathered_in_backward(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        fsdp.fully_shard(model.tokens)
        each_block()(fsdp, model)
        model.tokens.set_unshard_in_backward(False)

    compare(world, Training(build=partial(seeded, Transformer), shard=shard, batch=token_batch(3, 5)))


@ranks(2)
def test_two_roots_that_share_their_communication(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        for block in model.blocks:
            fsdp.fully_shard(block)
        fsdp.share_comm_ctx(list(model.blocks))

    def build() -> nn.Module:
        model = seeded(MLP)
        model.scale.requires_grad_(False)
        return model

    compare(world, Training(build=build, shard=shard, batch=random_batch(4, 6)))


def placed(fsdp: ModuleType, mesh: DeviceMesh) -> Any:
    """What a `shard_placement_fn` returns for a parameter to be sharded over a (replicate, shard) mesh."""
    if fsdp is fullshard:
        return fullshard.ShardPlacementResult(Shard(0), mesh)
    return torch_fsdp.ShardPlacementResult(
        Shard(0), torch_fsdp.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    )


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("param_dtype", [None, *slow(torch.bfloat16)])
def test_some_parameters_over_another_mesh(world: World, param_dtype: torch.dtype | None) -> None:
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    precision = Precision(param_dtype, torch.float32)

    def shard(fsdp: ModuleType, model: Any) -> None:
        def place(parameter: nn.Parameter) -> Any:
            return placed(fsdp, mesh) if parameter.ndim == 2 else None

        each_block(shard_placement_fn=place, precision=precision)(fsdp, model)

    training = Training(build=partial(seeded, MLP), shard=shard, batch=random_batch(4, 6), precision=precision)
    compare(world, training)


def distribute(model: nn.Module, mesh: DeviceMesh, batch: list[Any]) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            everywhere = distribute_tensor(parameter.detach(), mesh, [Replicate()] * mesh.ndim)
            module.register_parameter(name, nn.Parameter(everywhere))

    def to_mesh(module: nn.Module, args: tuple[Tensor]) -> DTensor:
        return DTensor.from_local(args[0], mesh, batch, run_check=False)

    def to_local(module: nn.Module, args: tuple[DTensor], output: DTensor) -> Tensor:
        return output.to_local()

    model.register_forward_pre_hook(to_mesh)
    model.register_forward_hook(to_local)


#: The dims of a full mesh of which each parameter is replicated over all, and how batches are cut.
DIMS: dict[str, tuple[dict[str, str], list[Any]]] = {
    "shard": ({"shard": "data"}, [Shard(0), Replicate()]),
    "shard and replicate": ({"shard": "data", "replicate": "other"}, [Shard(0), Shard(0)]),
    "replicate": ({"replicate": "data"}, [Shard(0)]),
    "all shard": ({"shard": "data"}, [Shard(0)]),
}


@ranks(2, 4)
@pytest.mark.parametrize("kind", some(DIMS, ("replicate", "shard and replicate")))
@pytest.mark.parametrize("reshard", [True, False])
def test_dims_of_a_full_mesh(world: World, kind: str, reshard: bool) -> None:
    dims, batch = DIMS[kind]
    shape = (2, world.size // 2) if len(batch) == 2 else (world.size,)
    mesh = world.mesh(*shape, names=("data", "other")[: len(shape)])
    rests = kind == "all shard" and world.size == 4 and reshard  # on a smaller mesh

    def shard(fsdp: ModuleType, model: Any) -> None:
        distribute(model, mesh, batch)
        after = None if "shard" not in dims else 2 if rests else reshard
        each_block(mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(**dims), reshard_after_forward=after)(fsdp, model)

    training = Training(build=partial(seeded, MLP), shard=shard, batch=random_batch(4, 6))
    place = (mesh.get_local_rank("data"), 2) if Replicate() in batch else None
    compare(world, training, data_parallel=place, with_torch=kind != "all shard")
