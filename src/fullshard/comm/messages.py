"""Which messages carry a group's buffers between two ranks: integers only, and the same on both sides.

What a rank owns of a group (the *owner* is the sender of a gather and the receiver of a reduction) is cut into
pieces, and how a piece travels depends on its size and shape:

=========  =======================================  ============================================================
kind       gather (owner sends to everybody)        reduction (everybody sends to the owner)
=========  =======================================  ============================================================
straight   large and contiguous: a message of its   --
           own, received where it is read
whole      large and strided: a message of its      large and contiguous: a message of its own, received in
           own, received in staging                 staging and added to the sum
packed     small: all in one message, through       small or strided: all in one message, through staging on
           staging on both sides                    both sides
=========  =======================================  ============================================================

Pieces that need staging travel in rounds of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fullshard.buffer.plan import Extent, Plan
from fullshard.comm.staging import align


@dataclass(frozen=True)
class Piece(Extent):
    """Some of an extent of a section, and where it lies in the staging of its round, in bytes."""

    section: int = 0
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,) if self.rows == 1 else (self.rows, self.length)

    def split(self, numel: int) -> tuple[Piece | None, Piece | None]:
        """The largest part of at most ``numel`` elements from the front, whole rows if it has several; the rest."""
        if numel >= self.numel:
            return self, None
        count = numel if self.rows == 1 else numel // self.length
        if count == 0:
            return None, self
        if self.rows == 1:
            return replace(self, length=count), self._from(count, count, length=self.length - count)
        return replace(self, rows=count), self._from(count * self.stride, count * self.length, rows=self.rows - count)

    def _from(self, full: int, shard: int, **shape: int) -> Piece:
        """The extent that begins so many elements further on in the full buffer and in the shard."""
        return replace(self, full_start=self.full_start + full, shard_start=self.shard_start + shard, **shape)

    def single_rows(self) -> Iterator[Piece]:
        for row in range(self.rows):
            yield self._from(row * self.stride, row * self.length, rows=1, stride=0)


def whole_extent(section: int, extent: Extent) -> Piece:
    """An extent in one piece."""
    return Piece(**vars(extent), section=section)


@dataclass(frozen=True)
class Round:
    """What travels between two ranks at a time. Sizes are in bytes."""

    straight: tuple[Piece, ...] = ()  # pieces that need no staging
    whole: tuple[Piece, ...] = ()  # pieces with messages of their own
    packed: tuple[Piece, ...] = ()  # pieces that share a message
    packed_start: int = 0  # where in staging that message begins
    nbytes: int = 0  # the staging at the receiver, which that message ends

    @property
    def packed_bytes(self) -> int:
        return self.nbytes - self.packed_start if self.packed else 0


@lru_cache(maxsize=1024)
def gather_rounds(
    plans: tuple[Plan, ...], itemsizes: tuple[int, ...], owner: int, large: int, capacity: int
) -> tuple[Round, ...]:
    """The rounds in which the parts of ``owner`` get to any other rank.

    A piece of ``large`` bytes or more gets a message of its own; ``capacity`` is the staging of a round, in bytes.
    """
    straight: list[Piece] = []
    whole: list[Piece] = []
    packed: list[Piece] = []
    for piece in _pieces(plans, itemsizes, owner, large, with_kept_whole=False):
        if piece.numel * itemsizes[piece.section] < large:
            packed.append(piece)
        else:
            (straight if piece.rows == 1 else whole).append(piece)
    if len(packed) == 1:
        (straight if packed[0].rows == 1 else whole).append(packed.pop())
    rounds = list(_fill(whole, packed, itemsizes, large, capacity))
    if straight:
        rounds[:1] = [replace(rounds[0] if rounds else Round(), straight=tuple(straight))]
    return tuple(rounds)


@lru_cache(maxsize=1024)
def reduce_rounds(
    plans: tuple[Plan, ...], itemsizes: tuple[int, ...], owner: int, large: int, capacity: int
) -> tuple[Round, ...]:
    """The rounds in which ``owner`` gets its parts from any other rank; arguments as for :func:`gather_rounds`."""
    whole: list[Piece] = []
    packed: list[Piece] = []
    for piece in _pieces(plans, itemsizes, owner, large, with_kept_whole=True):
        is_large = piece.numel * itemsizes[piece.section] >= large
        (whole if is_large and piece.rows == 1 else packed).append(piece)
    if len(packed) == 1 and packed[0].rows == 1:
        whole.append(packed.pop())
    return tuple(_fill(whole, packed, itemsizes, large, capacity))


def _pieces(
    plans: Sequence[Plan], itemsizes: Sequence[int], owner: int, large: int, with_kept_whole: bool
) -> Iterator[Piece]:
    """The extents of ``owner``; rows that are large are pieces of their own."""
    for section, (plan, itemsize) in enumerate(zip(plans, itemsizes, strict=True)):
        skipped = set()
        if not with_kept_whole:
            offsets = zip(plan.params, plan.full_offsets, strict=True)
            skipped = {offset for param, offset in offsets if plan.kept_whole(param) and param.numel}
        for extent in plan.extents(owner):
            if extent.full_start in skipped:
                continue
            piece = whole_extent(section, extent)
            if extent.rows > 1 and extent.length * itemsize >= large:
                yield from piece.single_rows()
            else:
                yield piece


def _fill(
    whole: Sequence[Piece], packed: Sequence[Piece], itemsizes: Sequence[int], large: int, capacity: int
) -> Iterator[Round]:
    """Rounds of at most ``capacity`` bytes, in which pieces that do not fit go on in the next."""
    chosen: tuple[list[Piece], list[Piece]] = ([], [])
    packed_start = end = 0
    for pieces, taken in ((whole, chosen[0]), (packed, chosen[1])):
        packed_start = end
        for piece in pieces:
            itemsize = itemsizes[piece.section]
            rest: Piece | None = piece
            while rest is not None:
                room = capacity - end
                is_worthwhile = room >= min(large, rest.numel * itemsize)
                head, tail = rest.split(room // itemsize) if is_worthwhile else (None, rest)
                if head is None:
                    yield Round((), tuple(chosen[0]), tuple(chosen[1]), packed_start, end)
                    chosen[0].clear()
                    chosen[1].clear()
                    packed_start = end = 0
                else:
                    taken.append(replace(head, offset=end))
                    end = align(end + head.numel * itemsize)
                rest = tail
    if end:
        yield Round((), tuple(chosen[0]), tuple(chosen[1]), packed_start, end)
