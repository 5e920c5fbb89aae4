"""The common parts of the routes of all transports.

Owns the check of the caller's tensors, which is made once for each route and not at every start, and the aliases of
these tensors. How values travel is up to each transport.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.comm.transport import Transfer

#: Targets and sources, for one call that copies all of them.
Copies = tuple[list[torch.Tensor], list[torch.Tensor]]


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same storage that counts its versions apart.

    A copy into a view of ``tensor`` itself would look to autograd like a change of what it saved from it.
    """
    return tensor.data


def wait_for(work: dist.Work, what: str) -> None:
    """Wait for a collective. If another rank was lost, backends say so, but not where to look."""
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} lost another rank in {what}, look on the others for the first error: {error}"
        ) from error


def check_transfers(transfers: Sequence[Transfer], world_size: int, one_dtype: bool) -> None:
    """Refuse tensors that do not fit their plan, or of two dtypes in one transfer if there is to be ``one_dtype``.

    Raises:
        ValueError: names the first parameter of the plan, what was found and what the plan asks for.
    """
    for transfer in transfers:
        plan, full, shard = transfer.plan, transfer.full, transfer.shard
        where = f"of the group of parameter '{plan.params[0].name}'" if plan.params else "of a group without parameters"
        if plan.world_size != world_size:
            raise ValueError(
                f"the plan {where} is for {plan.world_size} ranks, but the process group has {world_size}: "
                f"make a plan for {world_size} ranks"
            )
        for what, tensor, numel in (("full buffer", full, plan.full_numel), ("shard", shard, plan.shard_numel)):
            if tensor.ndim != 1 or tensor.numel() != numel or not tensor.is_contiguous():
                raise ValueError(
                    f"the {what} {where} must be a contiguous 1-D tensor of {numel} elements, "
                    f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
                )
        if full.device != shard.device:
            raise ValueError(f"the full buffer {where} is on {full.device}, but its shard is on {shard.device}")
        if one_dtype and full.dtype != shard.dtype:
            raise ValueError(
                f"an all-gather {where} moves bytes and casts nothing, but its full buffer has dtype {full.dtype} and "
                f"its shard {shard.dtype}: cast the shard first"
            )
