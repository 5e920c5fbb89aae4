"""The data-parallel part of a device mesh: which ranks shard a group together, and which replicate it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(eq=False)
class DataMesh:
    """Ranks that hold different data."""

    mesh: DeviceMesh  # 1-D, or 2-D as replicate by shard; as shard by replicate if ``shards_replicas``
    shard_group: dist.ProcessGroup | None = None  # ``None`` for a mesh that only replicates
    replicate_group: dist.ProcessGroup | None = None  # ``None`` for a mesh that only shards
    spmd_mesh: DeviceMesh | None = None  # the full mesh on which the parameters are already DTensors, if one was given
    shard_dims: tuple[int, ...] = ()  # which of its dims shard
    spmd_dims: tuple[int, ...] = ()  # which of its dims are data-parallel
    shards_replicas: bool = False  # whether each shard is cut again over the replicas between steps

    def __post_init__(self) -> None:
        shard, other = self.shard_group, self.replicate_group
        self.shard_size, self.shard_rank = (shard.size(), shard.rank()) if shard is not None else (1, 0)
        self.replicate_size, self.replicate_rank = (other.size(), other.rank()) if other is not None else (1, 0)
