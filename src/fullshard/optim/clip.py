"""Clipping by the norm of all gradients, where each rank has a part of them.

Owns the arithmetic and its one message. Which parameters are sharded, and over which ranks, is the caller's to say.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import reduce

import torch
import torch.distributed as dist

from fullshard.comm.waits import waiting
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

    Of ``sharded`` parameters each rank has a part of the gradient (a plain tensor, perhaps of 0 elements) or ``None``,
    and so many ranks of ``process_group`` have the same part, which counts once. The gradients of ``whole`` ones are
    the same on every rank. All ranks of ``process_group`` must call, and without
    sharded parameters each for itself. No parameter may be given twice. ``norm_type`` is any p above 0, else it is a
    ValueError; ``math.inf``, or ``"inf"``, is for the largest absolute value.

    Returns the norm before scaling, the same on all ranks, 0-dim on ``device``, which ``process_group`` can reach. It
    is computed in fp32 and given in the dtype to which those of this rank's gradients promote. It is fp32 in place of
    fp16, whose range a norm exceeds, and where this rank has no gradient, of which a UserWarning tells.
    """
    max_norm, p = float(max_norm), float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type is {norm_type!r}; expected a number above 0, such as 2.0 or math.inf")
    parts: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for param, copies in sharded.items():
        if param.grad is not None:
            parts[copies].append(param.grad)
    rest = [param.grad for param in whole if param.grad is not None]
    total, besides = torch.zeros((), device=device), _norm(rest, p, device)
    is_largest = p == math.inf
    for copies, part in parts.items():
        norm = _norm(part, p, device)
        total = torch.maximum(total, norm) if is_largest else total + norm**p / copies
    # Floats from 0 up have the order of their bits. A maximum of floats may lose a NaN, that of bits does not.
    total = torch.maximum(total, besides).abs() if is_largest else total
    if sharded:
        said, op = (total.view(torch.int32), dist.ReduceOp.MAX) if is_largest else (total, dist.ReduceOp.SUM)
        with waiting("the norm of the gradients", process_group):
            dist.all_reduce(said, op, process_group)
    if not is_largest:
        total = (total + besides**p) ** (1 / p)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    grads = sum(parts.values(), rest)
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
    """The norm of all of them as one vector, in fp32."""
    norms = [torch.zeros((), device=device)]
    for (_, dtype), same in _by_kind(grads).items():
        each = foreach_norm(same, p, torch.promote_types(dtype, torch.float32))
        norms.append(torch.linalg.vector_norm(torch.stack(each), p).to(device, torch.float32))
    return torch.linalg.vector_norm(torch.stack(norms), p) if len(norms) > 1 else norms[0]


def _by_kind(grads: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Those that have elements, by device and dtype: what one foreach call takes."""
    kinds = defaultdict(list)
    for grad in grads:
        if grad.numel():
            kinds[grad.device, grad.dtype].append(grad)
    return kinds
