"""The data-parallel part of a device mesh: which ranks shard a group together, and which replicate it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class DataMesh:
    """Ranks that hold different data."""

    mesh: DeviceMesh  # 1-D, or 2-D as replicate by shard; as shard by replicate if ``shards_replicas``
    shard_group: dist.ProcessGroup | None = None  # ``None`` for a mesh that only replicates
    replicate_group: dist.ProcessGroup | None = None  # ``None`` for a mesh that only shards
    spmd_mesh: DeviceMesh | None = None  # the full mesh on which the parameters are already DTensors, if one was given
    shard_dims: tuple[int, ...] = ()  # which of its dims shard
    spmd_dims: tuple[int, ...] = ()  # which of its dims are data-parallel
    shards_replicas: bool = False  # whether each shard is cut again over the replicas between steps

    @cached_property
    def shard_size(self) -> int:
        return self.shard_group.size() if self.shard_group is not None else 1

    @cached_property
    def shard_rank(self) -> int:
        return self.shard_group.rank() if self.shard_group is not None else 0

    @cached_property
    def replicate_size(self) -> int:
        return self.replicate_group.size() if self.replicate_group is not None else 1

    @cached_property
    def replicate_rank(self) -> int:
        return self.replicate_group.rank() if self.replicate_group is not None else 0
