"""Fully sharded data parallelism for PyTorch."""

from fullshard import optim as optim
from fullshard.full_params import summon_full_params
from fullshard.fully_shard import fully_shard, fully_shard_blocks
from fullshard.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from fullshard.policies import (
    AllGather,
    Comm,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
    ShardPlacementResult,
)

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
    "UnshardHandle",
    "fully_shard",
    "fully_shard_blocks",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "summon_full_params",
]
