"""Sums of the values of all ranks: how they become means, and how they are added where no backend does it.

Owns the choice of what is divided before values travel, by the backend and after (:func:`choose_scaling`), and sums
block by block: low precision is added in fp32, in the order of ranks. Transports bring the terms here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.buffer.messages import zero_copy_in
from fullshard.buffer.plan import Piece
from fullshard.buffer.slots import Lease
from fullshard.comm.transport import Peers, Request, alias
from fullshard.torch_private import premultiplied_sum

Sources = list[tuple[Piece, torch.Tensor]]  # pieces, and where their values are
BLOCK = 2**17  # elements that are added up at a time: what is added and its sum fit in a cache

_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
SUM_DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32, **dict(zip(_WIDE, _WIDE, strict=True))}


class Scaling(NamedTuple):
    """A division in three places."""

    before: float = 1.0  # of this rank's values, before they travel
    op: Any = dist.ReduceOp.SUM  # what the collective does
    after: float = 1.0  # of the result


@lru_cache(maxsize=256)
def choose_scaling(dtype: torch.dtype, world_size: int, divisor: float, sum_only: bool, divides: bool) -> Scaling:
    """Divide by ``divisor`` where it costs least and loses nothing: in the backend, if it ``divides``.

    fp16 is divided in two steps, because the sum could overflow without the first and small values would vanish if it
    were the only one. The first is the smallest power of two that is not below the square root, as in torch, and exact.
    """
    if dtype == torch.float16:
        before = 2.0 ** math.ceil(math.log2(abs(divisor)) / 2)
        return Scaling(before, after=divisor / before)
    if not divides or sum_only or divisor == 1 or not dtype.is_floating_point:
        return Scaling(after=divisor)
    if divisor == world_size:
        return Scaling(op=dist.ReduceOp.AVG)
    return Scaling(op=premultiplied_sum(1 / divisor))


def divide_(tensor: torch.Tensor, divisor: float) -> None:
    """``tensor /= divisor``, by a multiplication, which takes half the time, where that gives the same bits."""
    if divisor == 1:
        return
    if math.frexp(divisor)[0] == 0.5:
        tensor.mul_(1 / divisor)
    else:
        tensor.div_(divisor)


class PieceRoute:
    """The base of routes that copy or add up piece by piece: their ranks, their tensors, and the dtypes of sections.
    Gradients that are not in a buffer (*zero-copy*) are sections of their own, behind the others."""

    def __init__(self, request: Request) -> None:
        direction, transfers, group, *_, peers = request
        self.gathers, self.rank, self.size = direction == "gather", group.rank(), group.size()
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        sources, targets, self.most_peers, self.writes_kept = peers or Peers(others, others, len(others))
        #: The ranks that send messages to this one, and those to which it sends.
        self.senders, self.receivers = (sources, targets) if self.gathers else (targets, sources)
        self.in_order = sorted((*self.senders, self.rank))  # the ranks whose values are added up
        self.plans = plans = [transfer.plan for transfer in transfers]
        self.fulls = [alias(transfer.full) for transfer in transfers]
        self.shards = [alias(transfer.shard) for transfer in transfers if self.gathers]  # each reduction brings others
        self.zero_copy = zero_copy_in(plans) if any(plan.is_messages for plan in plans) else []
        sections = [*range(len(plans)), *(each.section for each in self.zero_copy)]
        self.dtypes = tuple(self.fulls[section].dtype for section in sections)
        self.shard_dtypes = [transfers[section].shard.dtype for section in sections]
        if not self.gathers and (refused := {*self.dtypes} - SUM_DTYPES.keys()):
            raise TypeError(
                f"point-to-point reductions add {', '.join(map(str, SUM_DTYPES))}, got {refused.pop()}: "
                f"reduce in one of these, or set FULLSHARD_TRANSPORT=collective"
            )
        #: Bytes of staging with which its sums begin.
        self.scratch = 0 if self.gathers else max(map(scratch_bytes, self.dtypes, self.shard_dtypes))


class Sum:
    """Adds the terms of all ranks, in order, for one block of a shard. At most one term is ``None``: its values are in
    the shard. A term is a piece if its values are in a full buffer that :meth:`write` gets. The first
    :func:`scratch_bytes` of ``scratch`` are for this sum alone. A shard that has the third term or a later one needs
    as much scratch as one whose dtype is not that of the sum."""

    def __init__(
        self, route: PieceRoute, block: Piece, terms: Sequence[torch.Tensor | Piece | None], scratch: Lease
    ) -> None:
        dtype, shard_dtype = route.dtypes[block.section], route.shard_dtypes[block.section]
        sum_dtype = SUM_DTYPES[dtype]
        self.block, self.terms = block, terms
        #: Where to add them up, if not in the shard itself; where to convert each to the dtype of the sum.
        is_apart = sum_dtype != shard_dtype or any(term is None for term in terms[2:])
        self.total = scratch.view(sum_dtype, 0, block.shape) if is_apart else None
        self.term = scratch.view(sum_dtype, BLOCK * sum_dtype.itemsize, block.shape) if sum_dtype != dtype else None

    def write(self, shards: Sequence[torch.Tensor], divisor: float, fulls: Sequence[torch.Tensor] = ()) -> None:
        target = self.block.of_shard(shards[self.block.section])
        terms = [term.of_full(fulls[term.section]) if isinstance(term, Piece) else term for term in self.terms]
        first, *others = [target if term is None else term for term in terms]
        total = target if self.total is None else self.total
        if self.term is None and others:
            torch.add(first, others[0], out=total)
            others = others[1:]
        else:
            total.copy_(first)
        for other in others:
            total.add_(other if self.term is None else self.term.copy_(other))
        divide_(total, divisor)
        if total is not target:
            target.copy_(total)


def blocks(piece: Piece, numel: int = BLOCK) -> Iterator[Piece]:
    """A piece in parts of at most ``numel`` elements, which fit in a cache, in the order of the shard."""
    rows = numel // piece.row
    for first in range(0, piece.shape[0], max(1, rows)):
        block = piece.part(first, min(first + max(1, rows), piece.shape[0]))
        yield from [block] if rows else blocks(block, numel)


def scratch_bytes(dtype: torch.dtype, shard_dtype: torch.dtype) -> int:
    """Bytes for one block of a sum and one of a term, where they cannot be added up in the shard itself."""
    sum_dtype = SUM_DTYPES[dtype]
    return 0 if shard_dtype == sum_dtype == dtype else 2 * BLOCK * sum_dtype.itemsize
