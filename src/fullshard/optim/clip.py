"""Clipping by the norm of all gradients, of which each rank has a part.

Owns the arithmetic, and one warning. The caller says which parameters are sharded, and over which ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import reduce

import torch
import torch.distributed as dist

from fullshard.comm.process_group import all_reduce
from fullshard.policies import warn
from fullshard.torch_private import foreach_norm, foreach_scale


@torch.no_grad()
def clip_local_shards(
    sharded: Mapping[torch.Tensor, int],
    whole: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    process_group: dist.ProcessGroup | None,
    device: torch.device,
) -> torch.Tensor:
    """Scale gradients in place so that their norm, seen as one vector, is at most ``max_norm``.

    All ranks of ``process_group`` must call it. Without sharded parameters each rank may call it for itself.

    Args:
        sharded: parameters of which each rank has a part of the gradient (a plain tensor, perhaps with 0 elements) or
            ``None``; and for each the number of ranks of ``process_group`` with the same part, which counts once. No
            parameter may be given twice.
        whole: parameters whose gradients are the same on every rank.
        max_norm: the largest norm after scaling.
        norm_type: the p of the norm, a number above 0; ``math.inf`` or ``"inf"`` for the largest absolute value.
        process_group: the ranks that have the parts.
        device: the device on which the norm is computed. ``process_group`` must be able to communicate from it.

    Returns:
        the norm before scaling, the same on all ranks, a 0-dim tensor on ``device``. It is computed in fp32, and
        returned in the dtype to which the dtypes of this rank's gradients promote. fp16 counts as fp32 there, because a
        norm may exceed its range. If this rank has no gradient, it is fp32, and a UserWarning says so.

    Raises:
        ValueError: ``norm_type`` is not above 0.
    """
    max_norm, p = float(max_norm), float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type is {norm_type!r}; expected a number above 0, such as 2.0 or math.inf")
    parts: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for param, copies in sharded.items():
        if param.grad is not None:
            parts[copies].append(param.grad)
    whole_grads = [param.grad for param in whole if param.grad is not None]
    total, whole_norm = torch.zeros((), device=device), _norm(whole_grads, p, device)
    is_largest = p == math.inf
    for copies, part in parts.items():
        norm = _norm(part, p, device)
        total = torch.maximum(total, norm) if is_largest else total + norm**p / copies
    # Non-negative floats have the same order as their bits. A maximum of floats may lose a NaN; that of bits does not.
    total = torch.maximum(total, whole_norm).abs() if is_largest else total
    if sharded:
        message, op = (total.view(torch.int32), dist.ReduceOp.MAX) if is_largest else (total, dist.ReduceOp.SUM)
        all_reduce(message, process_group, "the norm of the gradients", op)
    if not is_largest:
        total = (total + whole_norm**p) ** (1 / p)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    grads = sum(parts.values(), whole_grads)
    for (where, dtype), same in _by_kind(grads).items():
        foreach_scale(same, factor.to(where, dtype))
    if sharded and not grads:
        warn(
            f"clip_grad_norm_ found no gradient on rank {dist.get_rank(process_group)}; it returns the norm of all "
            f"ranks' gradients as {total.dtype}, which need not be the dtype that other ranks return"
        )
    dtypes = (torch.float32 if grad.dtype is torch.float16 else grad.dtype for grad in grads)
    return total.to(reduce(torch.promote_types, dtypes)) if grads else total


def _norm(grads: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """The norm of all gradients as one vector, in fp32."""
    norms = [torch.zeros((), device=device)]
    for (_, dtype), same in _by_kind(grads).items():
        each = foreach_norm(same, p, torch.promote_types(dtype, torch.float32))
        norms.append(torch.linalg.vector_norm(torch.stack(each), p).to(device, torch.float32))
    return torch.linalg.vector_norm(torch.stack(norms), p) if len(norms) > 1 else norms[0]


def _by_kind(grads: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """The gradients that have elements, by device and dtype: one foreach call takes one such list."""
    kinds = defaultdict(list)
    for grad in grads:
        if grad.numel():
            kinds[grad.device, grad.dtype].append(grad)
    return kinds
