"""Finds the process groups to shard and to replicate over in the mesh that a user gives.

Owns the validation of meshes, the mesh of all ranks, and the smaller meshes of ``reshard_after_forward=size``. It makes
each mesh and each process group once.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.comm.waits import waiting
from fullshard.device import default_device_type
from fullshard.group.mesh import DataMesh
from fullshard.policies import DataParallelMeshDims
from fullshard.torch_private import concatenate_meshes, flatten_mesh


def default_mesh() -> DeviceMesh:
    """The mesh of all ranks, on the accelerator if there is one, otherwise on the CPU. Initializes torch.distributed if
    that was not done, and raises ValueError if no launcher started the process. All ranks must call it."""
    if not dist.is_initialized():
        _refuse_without_launcher()
        dist.init_process_group()
    key = default_device_type(), weakref.ref(dist.group.WORLD)
    mesh = _default_meshes.get(key) or init_device_mesh(key[0], (dist.get_world_size(),))
    return _default_meshes.setdefault(key, mesh)


def _refuse_without_launcher() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        program = os.path.basename(sys.argv[0]) or "train.py"
        raise ValueError(
            f"this process cannot find the other ranks: the environment variables {', '.join(missing)}, which a "
            f"launcher sets, are missing. Start the program with a launcher, also for one rank: torchrun "
            f"--nproc-per-node=2 {program}"
        )


#: One mesh for all calls: the time to make one, and to compare two, grows with the number of ranks.
_default_meshes: weakref.WeakValueDictionary[object, DeviceMesh] = weakref.WeakValueDictionary()


def data_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None, shards: bool = True) -> DataMesh:
    """Check ``mesh`` and find its groups. Unless it ``shards``, all its data-parallel dims replicate. Raises ValueError
    if its dims, their names or its ranks do not fit, AssertionError if it is 2-D and has no names, RuntimeError if it
    has no process groups or they were destroyed."""
    if dims is not None:
        names = mesh.mesh_dim_names or ()
        replicate = None if shards else tuple(sorted(dims.names, key=lambda name: [*names, name].index(name)))
        return _named(mesh, DataParallelMeshDims(replicate=replicate) if replicate else dims)
    if mesh.ndim == 1:
        group = _process_group(mesh, 0)
        return DataMesh(mesh, group) if shards else DataMesh(mesh, None, group)
    if mesh.ndim != 2:
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}; name its data-parallel dims with dp_mesh_dims"
        )
    assert mesh.mesh_dim_names is not None, (
        f"the 2D mesh {mesh} needs mesh_dim_names, as in init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))"
    )
    first, second = mesh.mesh_dim_names
    if shards and "shard" in first and "replicate" in second:
        raise ValueError(
            f"fully_shard replicates over the first dim of a 2-D mesh and shards over the second, but their names are "
            f"{mesh.mesh_dim_names}: exchange the dims, or say which is which with dp_mesh_dims"
        )
    if shards:
        return DataMesh(mesh, _process_group(mesh, 1), _process_group(mesh, 0))
    return data_mesh(flatten_mesh(mesh, "_".join(mesh.mesh_dim_names)), shards=False)


def shard_replicas(data: DataMesh) -> DataMesh:
    """The same ranks, where each shard is cut again over the replicas. Raises ValueError if there are no replicas, or
    other parallelisms beside them."""
    if data.spmd_mesh is not None or data.shard_group is None or data.replicate_group is None:
        has = f"{data.mesh} only " + ("replicates" if data.shard_group is None else "shards")
        has = has if data.spmd_mesh is None else "dp_mesh_dims names dims beside other parallelisms"
        raise ValueError(
            f"outer_zero_stage=1 shards the optimizer state over the replicas too. It needs a 2-D mesh, which "
            f"replicates over its first dim and shards over its second, but {has}"
        )
    mesh = _transposed(data.mesh, dist.group.WORLD)
    return DataMesh(mesh, data.shard_group, data.replicate_group, shards_replicas=True)


@lru_cache(maxsize=64)
def _transposed(mesh: DeviceMesh, made_in: object) -> DeviceMesh:
    """A 2-D mesh with its dims exchanged: placements apply in the order of the dims, and replicas cut shards. It is
    valid until ``made_in``, the default process group, is destroyed."""
    names = tuple(reversed(mesh.mesh_dim_names or ()))
    groups = [_process_group(mesh, 1), _process_group(mesh, 0)]
    ranks = mesh.mesh.T.contiguous()
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=names)


def _named(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataMesh:
    known = mesh.mesh_dim_names
    if known is None:
        raise ValueError(f"dp_mesh_dims names dims of the mesh, but {mesh} was made without mesh_dim_names")
    for name in dims.names:
        if name not in known:
            raise ValueError(f"dp_mesh_dims names '{name}', which is not a dim of the mesh {known}")
    shard, replicate = _axis(mesh, dims.shard_names), _axis(mesh, dims.replicate_names)
    axes = [axis for axis in (replicate, shard) if axis is not None]
    return DataMesh(
        concatenate_meshes(axes) if len(axes) == 2 else axes[0],
        _process_group(shard, 0) if shard is not None else None,
        _process_group(replicate, 0) if replicate is not None else None,
        mesh,
        tuple(map(known.index, dims.shard_names)),
        tuple(map(known.index, dims.names)),
    )


def _axis(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    """The named dims of a mesh as one dim; ``None`` without names."""
    if len(names) > 1:
        return flatten_mesh(mesh[tuple(names)], "_".join(names))
    return mesh[names[0]] if names else None


def _process_group(mesh: DeviceMesh, dim: int) -> dist.ProcessGroup:
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh {mesh}, whose ranks are {mesh.mesh.tolist()}: call fully_shard "
            f"on the ranks of the mesh only, or give each rank a mesh that it is in"
        )
    try:
        return mesh.get_group(dim)
    except RuntimeError as error:
        raise RuntimeError(
            f"the mesh {mesh} has no process group for its dim {dim}: it was destroyed (destroy_process_group), or the "
            f"mesh was made without any. Make a new mesh, for example with init_device_mesh, and shard over that one"
        ) from error


def group_of(ranks: Iterable[int]) -> dist.ProcessGroup | None:
    """The process group of these ranks, made once; ``None`` if they are all ranks. Each of them must call it."""
    members = tuple(sorted(set(ranks)))
    return None if len(members) == dist.get_world_size() else _made_group(members, dist.group.WORLD)


@lru_cache(maxsize=64)
def _made_group(ranks: tuple[int, ...], made_in: object) -> dist.ProcessGroup:
    """A new process group. It is valid until ``made_in``, the default process group, is destroyed."""
    return new_group(ranks)


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A new process group of the library's own, which only ``ranks`` must make."""
    with waiting("a process group to be made", None):
        return dist.new_group(list(ranks), use_local_synchronization=True, group_desc="fullshard")


def smaller_mesh(data: DataMesh, size: int) -> DataMesh:
    """The mesh over which parameters are sharded between forward and backward with ``reshard_after_forward=size``.

    All ranks of ``data`` must call it in the same order: it makes process groups, once for each mesh and size.
    """
    rows = data.mesh.mesh.T if data.shards_replicas else data.mesh.mesh
    ranks = tuple(rows.flatten().tolist())
    return _smaller_mesh(ranks, size, data.mesh.device_type, dist.group.WORLD)


@lru_cache(maxsize=64)
def _smaller_mesh(ranks: tuple[int, ...], size: int, device_type: str, made_in: object) -> DataMesh:
    rows = torch.tensor(ranks, device="cpu").view(-1, size)
    row, column = (rows == dist.get_rank()).nonzero()[0]
    shard, replicate = (_made_group(tuple(some.tolist()), made_in) for some in (rows[row], rows[:, column]))
    mesh = DeviceMesh.from_group([replicate, shard], device_type, mesh=rows, mesh_dim_names=("replicate", "shard"))
    return DataMesh(mesh, shard, replicate)
