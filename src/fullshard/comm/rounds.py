"""Which messages carry a group's buffers between two ranks: integers only, and the same on both sides.

What a rank owns of a group (the *owner* is the sender of a gather and the receiver of a reduction) is cut into
pieces, and how a piece travels depends on its size and shape:

=========  =======================================  ============================================================
kind       gather (owner sends to everybody)        reduction (everybody sends to the owner)
=========  =======================================  ============================================================
unstaged   large and contiguous: a message of its   --
           own, received where it is read
whole      large and strided: a message of its      large and contiguous: a message of its own, received in
           own, received in staging                 staging, or where the sum will be, and added
packed     small: all in one message, through       small or strided: all in one message, through staging on
           staging on both sides                    both sides
=========  =======================================  ============================================================

Pieces that need staging travel in rounds of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from fullshard.buffer.plan import BufferPlan, Piece
from fullshard.buffer.sections import align
from fullshard.comm.transport import Direction


class Staged(NamedTuple):
    """A piece, and its place in the staging of its round, where it is contiguous: bytes from the beginning."""

    piece: Piece
    offset: int


class Round(NamedTuple):
    """What travels between two ranks at a time. Sizes are in bytes."""

    unstaged: tuple[Piece, ...] = ()  # pieces that need no staging
    whole: tuple[Staged, ...] = ()  # pieces with messages of their own
    packed: tuple[Staged, ...] = ()  # pieces that share a message
    nbytes: int = 0  # the staging at the receiver, which that message ends

    @property
    def packed_start(self) -> int:
        """Where in staging the shared message begins."""
        return self.packed[0].offset if self.packed else self.nbytes

    @property
    def packed_bytes(self) -> int:
        return self.nbytes - self.packed_start

    def sent_bytes(self, itemsizes: Sequence[int]) -> int:
        """Bytes of its messages; ``itemsizes`` are those of the sections."""
        alone = [*self.unstaged, *(piece for piece, _ in self.whole)]
        return sum(piece.numel * itemsizes[piece.section] for piece in alone) + self.packed_bytes


@lru_cache(maxsize=2048)
def plan_rounds(
    plans: tuple[BufferPlan, ...],
    itemsizes: tuple[int, ...],
    owner: int,
    large: int,
    capacity: int,
    direction: Direction,
) -> tuple[Round, ...]:
    """The rounds in which the parts of ``owner`` get from it to any other rank (``gather``), or from any other to it. A
    piece of ``large`` bytes or more gets a message of its own; ``capacity`` is the staging of a round, in bytes."""
    unstaged, whole, packed = list[Piece](), list[Piece](), list[Piece]()

    def choose(piece: Piece, is_large: bool) -> list[Piece]:
        if direction == "gather" and is_large:
            return unstaged if piece.is_run else whole
        return whole if is_large and piece.is_run else packed

    for piece in _pieces(plans, itemsizes, owner, large, with_kept=direction == "reduce"):
        choose(piece, piece.numel * itemsizes[piece.section] >= large).append(piece)
    if len(packed) == 1:
        choose(packed[0], is_large=True).append(packed.pop())
    rounds = list(_fill(whole, packed, itemsizes, large, capacity))
    if unstaged:
        rounds[:1] = [(rounds[0] if rounds else Round())._replace(unstaged=tuple(unstaged))]
    return tuple(rounds)


def _pieces(
    plans: Sequence[BufferPlan], itemsizes: Sequence[int], owner: int, large: int, with_kept: bool
) -> Iterator[Piece]:
    """The pieces of ``owner``; rows that are large are pieces of their own."""
    for section, (plan, itemsize) in enumerate(zip(plans, itemsizes, strict=True)):
        for piece in plan.pieces(owner, section):
            if piece.is_kept and not with_kept:
                continue
            rows = piece.shape[0] if len(piece.shape) > 1 and piece.row * itemsize >= large else 0
            yield from [piece.part(row, row + 1) for row in range(rows)] or [piece]


def _fill(
    whole: Sequence[Piece], packed: Sequence[Piece], itemsizes: Sequence[int], large: int, capacity: int
) -> Iterator[Round]:
    """Rounds of at most ``capacity`` bytes, in which pieces that do not fit go on in the next."""
    apart, shared, end = list[Staged](), list[Staged](), 0
    for piece, chosen in [*((piece, apart) for piece in whole), *((piece, shared) for piece in packed)]:
        itemsize = itemsizes[piece.section]
        rest: Piece | None = piece
        while rest is not None:
            room = capacity - end
            is_worthwhile = room >= min(large, rest.numel * itemsize)
            head, rest = rest.split(room // itemsize) if is_worthwhile else (None, rest)
            if head is not None:
                chosen.append(Staged(head, end))
                end = align(end + head.numel * itemsize)
            if rest is not None:
                yield Round((), tuple(apart), tuple(shared), end)
                apart.clear()
                shared.clear()
                end = 0
    if end:
        yield Round((), tuple(apart), tuple(shared), end)
