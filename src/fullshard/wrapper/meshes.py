"""Makes the mesh over which a wrapped module is sharded and replicated, from a strategy, process groups or a mesh.

Owns the node-local groups of hybrid strategies, which are made once for all instances, and the fallback to ``NO_SHARD``
if there is only one rank to shard over. ``meshes.py`` above checks meshes.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.comm.process_group import gather_objects
from fullshard.group.mesh import DataMesh
from fullshard.meshes import data_mesh
from fullshard.policies import expect, warn
from fullshard.wrapper.settings import ShardingStrategy

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_NAMES = ("replicate", "shard")

#: The same object for the same mesh and process groups.
_data_mesh = lru_cache(maxsize=64)(DataMesh)


def strategy_and_mesh(
    strategy: ShardingStrategy, process_group: Any, device_mesh: DeviceMesh | None, has_policy: bool, device_type: str
) -> tuple[ShardingStrategy, DataMesh]:
    """The effective strategy, and the mesh over which it shards and replicates.

    The mesh is the same object for the same groups. All ranks must call it, because hybrid strategies communicate:
    without groups they make them, within nodes and across nodes; with a pair of groups they gather its ranks. With
    ``has_policy``, one call makes all instances, so they get the same groups.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("process_group and device_mesh are both given: each says over which ranks to shard, give one")
    if not dist.is_initialized():
        raise ValueError(
            "there is no default process group: call torch.distributed.init_process_group() first, and start the "
            "program with a launcher such as torchrun"
        )
    if device_mesh is not None:
        mesh = _fitting(device_mesh, strategy)
    elif strategy not in HYBRID:
        group = process_group if process_group is not None else dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"process_group must be a ProcessGroup that has this rank for {strategy}, got {group!r}")
        mesh = _mesh_of(device_type, dist.group.WORLD, group)
    elif process_group is None:
        if not has_policy:
            raise ValueError(
                f"{strategy} without an auto_wrap_policy needs process_group or device_mesh: make a mesh of nodes by "
                f"ranks once, and give it to each instance"
            )
        mesh = _mesh_of(device_type, dist.group.WORLD)
    else:
        pair = process_group if isinstance(process_group, tuple) else ()
        is_pair = len(pair) == 2 and all(isinstance(group, dist.ProcessGroup) for group in pair)
        requested = "a tuple of two process groups that have this rank, to shard over and to replicate over"
        expect(is_pair, f"process_group for {strategy}", process_group, requested, ValueError)
        mesh = _mesh_of(device_type, dist.group.WORLD, *pair)
    data = data_mesh(mesh)
    if data.shard_size == 1:
        if strategy is not ShardingStrategy.NO_SHARD:
            warn(f"NO_SHARD is used instead of {strategy}: there is only one rank to shard over")
        strategy = ShardingStrategy.NO_SHARD
    elif strategy is ShardingStrategy.NO_SHARD:
        warn("NO_SHARD is deprecated for more than one rank: DistributedDataParallel does the same", FutureWarning)
    if strategy is not ShardingStrategy.NO_SHARD:
        return strategy, _data_mesh(mesh, data.shard_group, data.replicate_group)
    if mesh.ndim == 2 and mesh.mesh_dim_names:  # a hybrid mesh with one rank to shard over keeps its replicas
        mesh = mesh[mesh.mesh_dim_names[0]]
    return strategy, _data_mesh(mesh, None, mesh.get_group())


@lru_cache(maxsize=64)
def _mesh_of(device_type: str, made_in: object, *groups: dist.ProcessGroup) -> DeviceMesh:
    """The mesh of one group, of a group to shard over and one to replicate over, or of the nodes of the world. Cached
    for the world ``made_in``."""
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type)
    return _mesh_of_groups(device_type, *groups) if groups else _mesh_of_nodes(device_type)


def _fitting(mesh: DeviceMesh, strategy: ShardingStrategy) -> DeviceMesh:
    """The dims of a user's mesh that a strategy uses; two dims get names."""
    expect(isinstance(mesh, DeviceMesh), "device_mesh", mesh, "a DeviceMesh", ValueError)
    if strategy in HYBRID:
        if mesh.ndim != 2:
            raise ValueError(f"{strategy} expects a device_mesh of 2 dims, replicate by shard, got {mesh}")
        if mesh.mesh_dim_names is None:
            groups, rows = [mesh.get_group(dim) for dim in range(2)], mesh.mesh
            return DeviceMesh.from_group(groups, mesh.device_type, mesh=rows, mesh_dim_names=_NAMES)
    elif mesh.ndim > 1:
        if mesh.size() > mesh.size(0):
            warn(
                f"{strategy} uses the first dim of {mesh} only: ranks along the others are not kept in step. Give a "
                f"mesh of one dim, or choose HYBRID_SHARD"
            )
        return DeviceMesh.from_group(mesh.get_group(0), mesh.device_type)
    return mesh


def _mesh_of_nodes(device_type: str) -> DeviceMesh:
    """A mesh of nodes by ranks of a node. A node has one rank for each device; on the CPU, ``LOCAL_WORLD_SIZE``
    ranks."""
    world = dist.get_world_size()
    if device_type in ("cpu", "meta"):  # meta stands for devices that are not here
        size, source = int(os.environ.get("LOCAL_WORLD_SIZE", world)), "LOCAL_WORLD_SIZE"
    else:
        size, source = torch.accelerator.device_count(), "the number of devices"
    if size < 1 or world % size != 0:
        raise ValueError(
            f"the world of {world} ranks does not divide into nodes of {size} ranks, as {source} says: give "
            f"process_group or device_mesh"
        )
    return init_device_mesh(device_type, (world // size, size), mesh_dim_names=_NAMES)


def _mesh_of_groups(device_type: str, shard: dist.ProcessGroup, replicate: dist.ProcessGroup) -> DeviceMesh:
    """The grid in which ``shard`` is this rank's row and ``replicate`` its column."""
    row, column = dist.get_process_group_ranks(shard), dist.get_process_group_ranks(replicate)
    rank = dist.get_rank()
    # A fake backend gathers nothing: then assume that all rows look like this one.
    rows = [[each + other - rank for each in row] for other in column]
    if dist.get_backend(replicate) != "fake":
        rows = gather_objects(row, replicate)
    position = row.index(rank)
    if set(row) & set(column) != {rank} or [other[position] for other in rows if len(other) == len(row)] != column:
        raise ValueError(
            f"process_group is the ranks {row} to shard over and {column} to replicate over: they must be row and "
            f"column of one grid of ranks, with rank {rank} in common and no other"
        )
    return DeviceMesh.from_group([replicate, shard], device_type, mesh=rows, mesh_dim_names=_NAMES)
