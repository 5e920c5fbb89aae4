"""Sums of the values of all ranks, block by block, in a precision that does not depend on which rank is first.

Low precision is added in fp32, in the order of ranks. Owns the arithmetic; transports bring the terms here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fullshard.comm.messages import Piece
from fullshard.comm.scaling import divide_
from fullshard.comm.transport import Transfer

#: Elements that are added up at a time: what is added and its sum fit in a cache.
BLOCK = 2**17

SUM_DTYPES = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}


@dataclass
class Sum:
    """One block of a shard: the sum of as many terms as there are ranks, in their order."""

    section: int  # which of the shards
    start: int  # where in the shard
    terms: list[torch.Tensor]
    total: torch.Tensor | None  # where to add them up, if not in the shard itself
    term: torch.Tensor | None  # where to convert each to the dtype of the sum, if it is another

    def write(self, shards: Sequence[torch.Tensor], divisor: float) -> None:
        first, *others = self.terms
        place = shards[self.section][self.start : self.start + first.numel()].view(first.shape)
        total = place if self.total is None else self.total
        if self.term is None and others:
            torch.add(first, others[0], out=total)
            others = others[1:]
        else:
            total.copy_(first)
        for other in others:
            total.add_(other if self.term is None else self.term.copy_(other))
        divide_(total, divisor)
        if total is not place:
            place.copy_(total)


def blocks(piece: Piece, itemsize: int) -> Iterator[Piece]:
    """A piece in parts that fit in a cache; those of one in staging follow each other there."""
    offset = piece.offset
    rest: Piece | None = piece
    while rest is not None:
        block, rest = rest.split(BLOCK)
        assert block is not None
        yield replace(block, offset=offset)
        offset += block.numel * itemsize


def check_summable(transfers: Sequence[Transfer]) -> None:
    """Refuse dtypes that cannot be added up.

    Raises:
        TypeError: names the dtype.
    """
    for transfer in transfers:
        if transfer.full.dtype not in SUM_DTYPES:
            raise TypeError(
                f"point-to-point reductions add {', '.join(map(str, SUM_DTYPES))}, got {transfer.full.dtype}: "
                f"reduce in one of these, or set FULLSHARD_TRANSPORT=collective"
            )


def block_sum(
    piece: Piece,
    terms: list[torch.Tensor],
    shard_dtype: torch.dtype,
    scratch: Callable[[torch.dtype, int, tuple[int, ...]], torch.Tensor],
) -> Sum:
    """The sum of a block's ``terms``.

    Args:
        scratch: tensors of a dtype, from a byte on, of a shape, in :func:`scratch_bytes` of memory.
    """
    dtype, sum_dtype = terms[0].dtype, SUM_DTYPES[terms[0].dtype]
    total = scratch(sum_dtype, 0, piece.shape) if sum_dtype != shard_dtype else None
    term = scratch(sum_dtype, BLOCK * sum_dtype.itemsize, piece.shape) if sum_dtype != dtype else None
    return Sum(piece.section, piece.shard_start, terms, total, term)


def scratch_bytes(dtype: torch.dtype, shard_dtype: torch.dtype) -> int:
    """Bytes for one block of a sum and one of a term, where they cannot be added up in the shard itself."""
    sum_dtype = SUM_DTYPES[dtype]
    return 0 if shard_dtype == sum_dtype == dtype else 2 * BLOCK * sum_dtype.itemsize


def view_piece(full: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Where a piece lies in a full buffer."""
    if piece.rows == 1:
        return full[piece.full_start : piece.full_start + piece.length]
    return full.as_strided(piece.shape, (piece.stride, 1), full.storage_offset() + piece.full_start)
