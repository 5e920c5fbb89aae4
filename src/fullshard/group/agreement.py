"""Whether all ranks of a mesh are about to shard the same parameters.

Buffers of ranks that disagree on a name, a shape, a dtype or an order would be taken for one another without notice.
Owns the comparison, one small collective for each group at the time of sharding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import ShardedParameter


def check_agreement(params: Sequence[ShardedParameter], data: DataMesh, device: torch.device) -> None:
    """Compare the parameters with those of the other ranks; every rank of the mesh must call it.

    Raises:
        ValueError: on every rank, naming the first difference and the ranks.
    """
    described = [f"'{p.name}' of shape {tuple(p.shape)}, {p.dtype}, sharded along dim {p.dim}" for p in params]
    for group in (data.shard_group, data.replicate_group):
        if group is not None and group.size() > 1 and dist.get_backend(group) != "fake":
            _compare(described, group, device)


def _compare(described: list[str], group: dist.ProcessGroup, device: torch.device) -> None:
    digest = hashlib.sha256("\n".join(described).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    every = torch.empty(group.size() * mine.numel(), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(every, mine, group=group)
    if bool((every.view(group.size(), -1) == mine).all().item()):
        return
    others: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(others, described, group=group)
    ranks = dist.get_process_group_ranks(group)
    first = others[0]
    for rank, other in zip(ranks, others, strict=True):
        if other == first:
            continue
        for index in range(max(len(first), len(other))):
            here = first[index] if index < len(first) else "no parameter"
            there = other[index] if index < len(other) else "no parameter"
            if here != there:
                raise ValueError(
                    f"the ranks do not shard the same parameters: as number {index} of this group, rank {ranks[0]} has "
                    f"{here} and rank {rank} has {there}. Every rank must build the same model and make the same calls"
                )
