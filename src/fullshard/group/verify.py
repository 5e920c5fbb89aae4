"""Checks that all ranks of a mesh are about to shard the same parameters, and agrees on a tag for their messages.

If ranks disagreed on a name, a shape, a dtype or an order, they would read wrong values without an error. Owns the
comparison, which is small, once for each group at the time of sharding.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch.distributed as dist

from fullshard.comm.process_group import gather_objects, has_peers
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import ShardedParameter

_next_tag = 0


def verify_parameters(params: Sequence[ShardedParameter], data: DataMesh, policies: Mapping[str, object]) -> int:
    """:func:`compare` the parameters with those of the other ranks, and return a tag, the same on all of them, that no
    earlier group of any of them has: they may hold different stages of a pipeline."""
    transport = os.environ.get("FULLSHARD_TRANSPORT", "")
    described = [f"{name}={policy}" for name, policy in policies.items()]
    described += [f"outer_zero_stage={int(data.shards_replicas)}", f"FULLSHARD_TRANSPORT={transport!r}"]
    described += [
        f"'{p.name}' of shape {tuple(p.shape)}, {p.dtype}, sharded along dim {p.dim}, {p.placement or 'equally'}, "
        f"{'trainable' if p.sharded.requires_grad else 'frozen'}, computed in {p.overridden_dtype or 'param_dtype'}, "
        f"gradients in {p.grad_dtype}"
        for p in params
    ]
    global _next_tag
    tag = _next_tag
    for group in (data.replicate_group, data.shard_group):
        tag = compare(described, tag, group, "do not shard the same parameters")
    _next_tag = tag + 1
    return tag


def verify_next(name: str, tag: int, process_group: dist.ProcessGroup) -> None:
    """Compare the group that this rank gathers next with what the other ranks gather; all of them must call it, and
    raise RuntimeError if some gather another one."""
    if not has_peers(process_group):
        return
    ranks = zip(dist.get_process_group_ranks(process_group), gather_objects(tag, process_group), strict=True)
    if others := [rank for rank, found in ranks if found != tag]:
        raise RuntimeError(
            f"rank {dist.get_rank()} gathers the parameters of '{name}' and ranks {others} gather different ones: "
            f"every rank must run the same sharded modules in the same order"
        )


_SAME_MODEL = "Every rank must build the same model and make the same calls of fully_shard in the same order"


def compare(
    described: Sequence[str], tag: int, group: dist.ProcessGroup | None, problem: str, advice: str = _SAME_MODEL
) -> int:
    """The largest tag of the ranks, all of which must have the same description; every rank must call it.

    Raises:
        ValueError: on every rank, naming the first difference and the ranks.
    """
    if not has_peers(group):
        return tag
    digest = hashlib.sha256("\n".join(described).encode()).digest()
    found = gather_objects((digest, tag), group)
    if all(other == found[0][0] for other, _ in found):
        return max(tag for _, tag in found)
    one, here, other, there = first_difference(
        dict(zip(dist.get_process_group_ranks(group), gather_objects(described, group), strict=True))
    )
    error = ValueError(f"the ranks {problem}: rank {one} has {here} where rank {other} has {there}. {advice}")
    error.shown_by_rank = dist.get_process_group_ranks(group)[0]  # type: ignore[attr-defined]
    raise error


def first_difference(described: Mapping[int, Sequence[str]]) -> tuple[int, str, int, str]:
    """From descriptions by rank that differ: a rank, what it has, another rank, and what that one has instead."""
    (first, ours), *_ = described.items()
    for rank, theirs in described.items():
        for here, there in zip_longest(ours, theirs, fillvalue="nothing"):
            if here != there:
                return first, here, rank, there
    raise AssertionError("digests differ where descriptions do not")
