"""Where the parameters of a group lie, and which part of them each rank owns.

A :class:`BufferPlan` knows shapes and a number of ranks, no memory, no dtype and no process group. It maps parameters,
in elements, to the *full buffer* that every rank sees while a group is gathered and to the *shard* that each rank
keeps. A *layout* is a function that gives each parameter a :class:`Cut`: for each rank the first and the past-the-last
index that it has, and the place of this part in its shard. All else follows from the cuts: what moves, for example, is
a list of strided copies, each a :class:`Piece`. Two layouts cut the full buffer::

    three parameters a (4 rows), b (3 rows), c (2 rows) over two ranks; '.' is padding, digits name the owner

    full buffer    a a a a | b b b . | c c .        the same in both layouts (up to the padding)

    even           0 0 1 1 | 0 0 1 . | 0 1 .        one piece for each parameter: its chunk, as torch.chunk cuts
    shard of 0     a0 a1 | b0 b1 | c0
    shard of 1     a2 a3 | b2 .. | c1               a part begins at the same place in all shards

    flat           0 0 0 0   0 1 1     1 1          one piece for each rank, wherever it falls
    shard of 0     a0 a1 a2 a3 b0
    shard of 1     b1 b2 c0 c1 ..                   shard r is full[r * shard_numel : (r + 1) * shard_numel]

If b has rows of 5 elements, it takes 10 in each shard (12 with the alignment), of which rank 1 uses 5. If a, which is
the chunks of the ranks end to end, is large, it is *zero-copy*: a collective can read and write it where it lies.
Zero-copy chunks come last in a shard, behind the *packed* ones, which travel together.

In *even*, a parameter may have ``cuts`` of its own: the ranks have runs of rows of any lengths, such as whole blocks.
It is packed, behind the others, at a place of its own in each shard::

    a (4 rows, blocks of 2), b and c whole     a a a a | b b b | c c
    owners                                     0 0 1 1 | 0 0 0 | 1 1
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise, takewhile
from operator import attrgetter
from typing import NamedTuple

import torch

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]  # targets and sources, for one call that copies all of them

#: Elements to which each parameter in a full buffer is aligned by default: 16 bytes of the smallest dtype, 64 of fp32.
ALIGNMENT = 16
DEFAULT_LAYOUT = "even", ALIGNMENT
#: The same for chunks in a shard: what vector units take in one go. More would be multiplied by the ranks.
CHUNK_ALIGNMENT = 4
#: Elements of a chunk from which a parameter may be zero-copy: 256 KiB of fp32. Small ones are cheaper to copy.
LEAST_ZERO_COPY = 2**16
#: If several collectives are one launch, a parameter may be zero-copy if it has this number of elements, and at least
#: 1/``MOST_TOGETHER`` of all elements. NCCL divides the bytes of a launch over about 16 channels, with at least 32 KiB
#: for each. Within these bounds, several messages use as many channels as one, and each channel has one message.
LEAST_TOGETHER = 2**14
MOST_TOGETHER = 16


@dataclass(frozen=True)
class ParamShape:
    """One parameter as a BufferPlan sees it."""

    name: str  # how errors call it
    shape: tuple[int, ...]
    dim: int | None = 0  # along which *even* cuts it; ``None`` keeps all of it on every rank, as for a scalar
    cuts: tuple[int, ...] | None = None  # where along ``dim`` the part of each rank begins, and the size, if chosen
    part_of: int = 0  # elements of the parameter, if this is a part of one

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"parameter '{self.name}' has a negative size in its shape {self.shape}")
        if self.dim is not None and not 0 <= self.dim < len(self.shape):
            raise ValueError(
                f"parameter '{self.name}' of shape {self.shape} cannot be sharded along dim {self.dim}: "
                f"expected a dim from 0 to {len(self.shape) - 1}"
            )
        if self.cuts is not None:
            size = 0 if self.dim is None else self.shape[self.dim]
            if self.dim is None or (self.cuts[0], self.cuts[-1]) != (0, size) or list(self.cuts) != sorted(self.cuts):
                raise ValueError(
                    f"parameter '{self.name}' of shape {self.shape} cannot be cut along dim {self.dim} at {self.cuts}: "
                    f"expected rising numbers from 0 to {size}"
                )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def cut(self, ranks: int, start: int = 0) -> Cut:
        """As ``torch.chunk`` cuts it, or at its ``cuts``. It begins at ``start`` in the full buffer, at 0 in shards."""
        if self.dim is None:
            shares = [Share(range(ranks), 0, 1)]
        elif self.cuts is not None:
            both = enumerate(pairwise(self.cuts))
            shares = [Share(range(rank, rank + 1), first, stop - first) for rank, (first, stop) in both]
        else:
            size = self.shape[self.dim]
            length = -(-size // ranks)
            count, rest = divmod(size, length) if length else (0, 0)  # ``count`` ranks have it, one has the rest
            edges = pairwise([0, count, count + (rest > 0), ranks])
            parts = zip(edges, (0, count * length, size), (length, rest, 0), strict=True)
            shares = [Share(range(*edge), first, number) for edge, first, number in parts if edge[0] < edge[1]]
        return Cut(self, tuple(shares), start, is_uniform=self.cuts is None)


_Dim = tuple[int, int, int]  # the size of a dim, its stride in the full buffer and its stride in shards


@dataclass(frozen=True)
class Piece:
    """Elements that lie regularly in the full buffer and in a shard, or in the shards of all ranks: a strided copy.

    Shapes have as few dims as both sides allow: most pieces are contiguous and have one. Of 3 rows of 8 elements, cut
    along dim 1 over 4 ranks, rank 2 has ``Piece((3, 2), 4, (8, 1), 0, (2, 1))``.
    """

    shape: tuple[int, ...]
    full_start: int
    full_stride: tuple[int, ...]
    shard_start: int  # if it is one of all ranks, in the shard of rank 0
    shard_stride: tuple[int, ...]  # if it is one of all ranks, from rank to rank in memory with the shards of all
    is_kept: bool = False  # whether every rank has all of it, so that a gather takes nothing from other ranks
    section: int = 0  # which section of a group it belongs to, where there are several plans
    part_of: int = field(default=0, compare=False)  # elements of its parameter, over all ranks

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """The elements of one index along the first dim."""
        return math.prod(self.shape[1:])

    @property
    def is_run(self) -> bool:
        """Whether it is contiguous in the full buffer."""
        return self.full_stride == (1,)

    def of_full(self, full: torch.Tensor) -> torch.Tensor:
        """The piece in a full buffer, as a view."""
        return full.as_strided(self.shape, self.full_stride, full.storage_offset() + self.full_start)

    def of_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """The piece in a shard, as a view; ``shard`` is that of rank 0 if it is one of all ranks."""
        return shard.as_strided(self.shape, self.shard_stride, shard.storage_offset() + self.shard_start)

    def part(self, first: int, stop: int) -> Piece:
        """The indices from ``first`` to ``stop`` along the first dim."""
        (_, full, shard), *others = zip(self.shape, self.full_stride, self.shard_stride, strict=True)
        starts = self.full_start + first * full, self.shard_start + first * shard
        return _piece([(stop - first, full, shard), *others], *starts, self.is_kept, self.section, self.part_of)

    def split(self, numel: int) -> tuple[Piece | None, Piece | None]:
        """The largest part of at most ``numel`` elements from the front, cut along the first dim; the rest."""
        count, size = numel // self.row, self.shape[0]
        if count >= size:
            return self, None
        return (self.part(0, count), self.part(count, size)) if count else (None, self)


class Share(NamedTuple):
    """Ranks that follow one another and have parts of one length, each part behind that of the rank before."""

    ranks: range
    first: int  # where along the dim the part of the first of them begins
    length: int  # of each part along the dim; 0 for ranks that have nothing
    place: int = 0  # where the part begins in the shard of each
    message: int = 0  # the same in the messages, if these are the full buffer


_first_rank = attrgetter("ranks.start")


@dataclass(frozen=True)
class Cut:
    """Which part of a parameter each rank has, and where it lies in the rank's shard. Equal parts are one share, so
    that a cut is small for any number of ranks."""

    param: ParamShape
    shares: tuple[Share, ...]  # of all ranks, in their order
    start: int = 0  # where the parameter begins in the full buffer
    apart: int | None = None  # elements from one message to the next, if the full buffer has those of all ranks
    is_uniform: bool = True  # whether a part has the same place in all shards, and that of rank 0 is the largest

    def share(self, rank: int) -> Share:
        return self.shares[bisect_right(self.shares, rank, key=_first_rank) - 1]

    def chunk(self, rank: int) -> tuple[int, int]:
        """The first and the past-the-last index along the dim that ``rank`` has; equal if it has none."""
        ranks, first, length, *_ = self.share(rank)
        first += 0 if self.param.dim is None else (rank - ranks.start) * length
        return first, first + length

    def chunk_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of this part; 0 along the dim if the rank has nothing."""
        shape, dim = self.param.shape, self.param.dim
        return shape if dim is None else (*shape[:dim], self.share(rank).length, *shape[dim + 1 :])

    @property
    def is_whole(self) -> bool:
        """Whether the parameter is the parts of all ranks end to end, of one size."""
        param = self.param
        is_cut = self.is_uniform and param.dim is not None and math.prod(param.shape[: param.dim]) == 1
        return is_cut and math.prod(self.chunk_shape(0)) * self.shares[-1].ranks.stop == param.numel

    def at(self, places: Sequence[int]) -> Cut:
        """The same parts at other places in the shards, one for each rank."""
        return replace(self, shares=tuple([Share(*s[:3], places[s.ranks.start], s.message) for s in self.shares]))


@dataclass(frozen=True)
class BufferPlan:
    """Where parameters begin in the full buffer and in the shards of all ranks. Made by :func:`make_plan`."""

    params: tuple[ParamShape, ...]
    world_size: int
    layout: str  # a name in :data:`LAYOUTS`
    full_offsets: tuple[int, ...]
    full_numel: int
    shard_numel: int  # the same for every rank
    alignment: int
    least_zero_copy: int  # elements of a parameter from which it is large
    cuts: tuple[Cut, ...] = field(default=(), hash=False)  # of the parameters
    shard_offsets: tuple[int, ...] = ()  # where each part begins in every shard; 0 if it begins elsewhere in each
    #: How all elements are cut as one vector, if they move as one: also those of frozen parameters, and the padding.
    whole: Cut | None = field(default=None, hash=False)
    zero_copy: tuple[int, ...] = ()  # the zero-copy parameters, in the order of shards, where they come last
    is_messages: bool = False  # whether the full buffer is all ranks' shards end to end, without zero-copy parameters

    @property
    def end(self) -> int:
        """Where in the full buffer the last parameter ends; what follows is padding."""
        return self.full_offsets[-1] + self.params[-1].numel if self.params else 0

    def owned_numel(self, rank: int) -> int:
        """Elements of the full buffer that ``rank`` owns."""
        return sum(piece.numel for piece in self.pieces(rank))

    def pieces(self, rank: int, section: int = 0) -> tuple[Piece, ...]:
        """What ``rank`` owns of the full buffer, in the order of its shard, without padding."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the plan's {self.world_size}")
        return _pieces(self, range(rank, rank + 1), 0, section)

    def pieces_of_all(self, pitch: int) -> tuple[Piece, ...]:
        """What all ranks own of the full buffer, when their shards begin ``pitch`` elements apart. A share is one
        piece, and so are equal parameters at equal distances, as norms often are."""
        return tuple(_joined(_pieces(self, range(self.world_size), pitch)))

    @property
    def is_rank_major(self) -> bool:
        """Whether the shards of all ranks, end to end, are the full buffer."""
        pieces = self.pieces_of_all(self.shard_numel)
        same = all((p.full_start, p.full_stride) == (p.shard_start, p.shard_stride) for p in pieces)
        return same and self.full_numel == self.world_size * self.shard_numel

    @property
    def packed(self) -> BufferPlan:
        """The plan of the parameters that are not zero-copy: its shard is the front of this one's."""
        return self.select(i for i in range(len(self.params)) if i not in self.zero_copy) if self.zero_copy else self

    def without(self, least: int) -> BufferPlan:
        """The messages of a single rank, in which parameters of ``least`` elements and more are zero-copy."""
        large = tuple(i for i, param in enumerate(self.params) if param.numel >= least)
        small = self.select(i for i in range(len(self.params)) if i not in large)
        starts = iter(small.shard_offsets)
        offsets = tuple(0 if i in large else next(starts) for i in range(len(self.params)))
        cuts = [replace(cut.at((start,)), start=start) for cut, start in zip(self.cuts, offsets, strict=True)]
        plan = replace(self, full_offsets=offsets, shard_offsets=offsets, full_numel=small.shard_numel)
        return replace(plan, cuts=tuple(cuts), zero_copy=large, is_messages=True)

    @property
    def messages(self) -> BufferPlan:
        """The same parts, for a full buffer that has the messages of all ranks."""
        numel = self.packed.shard_numel
        plan = replace(self, full_offsets=self.shard_offsets, full_numel=self.world_size * numel, is_messages=True)
        shares = [tuple([each._replace(message=each.place) for each in cut.shares]) for cut in self.cuts]
        both = zip(self.cuts, shares, strict=True)
        return replace(plan, cuts=tuple([replace(cut, shares=each, apart=numel) for cut, each in both]))

    def locate_chunk(self, index: int, rank: int) -> tuple[int, tuple[int, ...]]:
        """Where in its shard ``rank`` holds its part of parameter ``index``, and the shape of that part."""
        cut = self.cuts[index]
        shape = self.params[index].shape if self.world_size == 1 else cut.chunk_shape(rank)
        return cut.share(rank).place, shape

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The parts of the full buffer that no parameter fills: where each begins and ends."""
        ends = [start + param.numel for param, start in zip(self.params, self.full_offsets, strict=True)]
        edges = zip([0, *ends], [*self.full_offsets, self.full_numel], strict=True)
        return [(end, start) for end, start in edges if end < start]

    def over(self, ranks: int) -> BufferPlan:
        """A plan of the same full buffer. It cuts each parameter as a vector over another number of ranks (*even*)."""
        return self._evenly([ParamShape(param.name, (param.numel,)) for param in self.params], ranks)

    def inside(self, rank: int, parts: int) -> BufferPlan:
        """A plan whose full buffer is the shard of ``rank``, and which cuts each part again into ``parts`` (*even*)."""
        held = [(cut.param, *self.locate_chunk(i, rank)) for i, cut in enumerate(self.cuts)]
        params = [replace(p, shape=shape, cuts=None, part_of=p.part_of or p.numel) for p, _, shape in held]
        starts = tuple([start for _, start, _ in held])
        return replace(self, full_offsets=starts, full_numel=self.shard_numel)._evenly(params, parts)

    def _evenly(self, params: Sequence[ParamShape], ranks: int) -> BufferPlan:
        least = self.least_zero_copy // self.world_size * ranks
        plan = replace(self, params=tuple(params), world_size=ranks, layout="even", least_zero_copy=least)
        return even(replace(plan, zero_copy=(), is_messages=False, whole=None))

    def select(self, indices: Iterable[int]) -> BufferPlan:
        """The plan of some of the parameters: cut as here, at the same place in the full buffer, in another shard. What
        moves as one is the plan itself, which cannot leave any out."""
        chosen = tuple(indices)
        if self.whole is not None or chosen == tuple(range(len(self.params))):
            return self
        params, cuts = [self.params[i] for i in chosen], [self.cuts[i] for i in chosen]
        starts = [self.full_offsets[i] for i in chosen]
        return pack(replace(self, params=tuple(params), full_offsets=tuple(starts), cuts=tuple(cuts)))


def make_plan(
    params: Sequence[ParamShape],
    world_size: int,
    layout: str = DEFAULT_LAYOUT[0],
    alignment: int = DEFAULT_LAYOUT[1],
    together: bool = False,
) -> BufferPlan:
    """Lay out ``params``, in the order in which they lie, over ``world_size`` ranks.

    Each parameter in the full buffer, and the shard of each rank (*even*), begins on a multiple of ``alignment``, which
    is in elements. Zero-copy ones may be smaller if they move ``together``, in one launch.
    """
    if world_size < 1:
        raise ValueError(f"a plan needs at least one rank, got world_size={world_size}")
    if alignment < 1:
        raise ValueError(f"alignment counts elements and must be at least 1, got {alignment}")
    return _make_plan(tuple(params), world_size, layout, alignment, together)


@lru_cache(maxsize=4096)
def _make_plan(
    params: tuple[ParamShape, ...], world_size: int, layout: str, alignment: int, together: bool
) -> BufferPlan:
    full_offsets, full_numel = _end_to_end((param.numel for param in params), alignment)
    least = LEAST_ZERO_COPY * world_size
    if together:
        least = min(least, max(LEAST_TOGETHER, full_numel // MOST_TOGETHER))
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be {' or '.join(map(repr, LAYOUTS))}, got {layout!r}")
    return LAYOUTS[layout](BufferPlan(params, world_size, layout, full_offsets, full_numel, 0, alignment, least))


def even(plan: BufferPlan) -> BufferPlan:
    """Each parameter is cut along its dim, as ``torch.chunk`` does or at its ``cuts``."""
    both = zip(plan.params, plan.full_offsets, strict=True)
    return pack(replace(plan, cuts=tuple([param.cut(plan.world_size, start) for param, start in both])))


def flat(plan: BufferPlan) -> BufferPlan:
    """All elements, with the padding between parameters, are cut as one vector. Shards are not aligned, so that cuts
    fall where users of torch's wrapper expect them."""
    ranks, size, cuts = plan.world_size, -(-plan.end // plan.world_size), list[Cut]()
    for param, start in zip(plan.params, plan.full_offsets, strict=True):
        numel, shares = param.numel, list[Share]()
        those = range(start // size, -(-(start + numel) // size) + 1) if numel else ()  # who have some, and the next
        for rank, following in pairwise(sorted({0, ranks, *those})):
            first, stop = (min(max(edge - start, 0), numel) for edge in (rank * size, (rank + 1) * size))
            place = start + first - rank * size if first < stop else 0
            shares.append(Share(range(rank, following), first, stop - first, place))
        cuts.append(Cut(ParamShape(param.name, (numel,)), tuple(shares), start, is_uniform=False))
    whole = ParamShape("all", (plan.end,)).cut(ranks)
    return replace(plan, cuts=tuple(cuts), whole=whole, full_numel=ranks * size, shard_numel=size)


#: What a parameter may ask for, by name. A layout gets a plan that says where parameters begin in the full buffer, and
#: adds their cuts, with places in the shards (which :func:`pack` may choose), and the size of a shard.
LAYOUTS: dict[str, Callable[[BufferPlan], BufferPlan]] = {"even": even, "flat": flat}


@lru_cache(maxsize=4096)
def pack(plan: BufferPlan) -> BufferPlan:
    """Give the parts of a plan places in the shards. The shard of a rank that has everything is the full buffer."""
    alignment = math.gcd(CHUNK_ALIGNMENT, plan.alignment) if plan.world_size > 1 else plan.alignment
    ranks, cuts = range(plan.world_size), plan.cuts
    numels = [math.prod(cut.chunk_shape(0)) for cut in cuts]
    large = [i for i, param in enumerate(plan.params) if param.numel >= plan.least_zero_copy and cuts[i].is_whole]
    zero_copy = [i for i in large if len(ranks) > 1 and numels[i] % plan.alignment == 0]
    own = [i for i, cut in enumerate(cuts) if not cut.is_uniform]
    packed = [i for i in range(len(numels)) if i not in zero_copy and i not in own]
    fronts, end = _end_to_end((numels[i] for i in packed), alignment)
    places = dict[int, Sequence[int]]()
    if own:
        rows = {i: cuts[i].param.numel // (cuts[i].param.shape[cuts[i].param.dim or 0] or 1) for i in own}
        chunks = ([each.length * rows[i] for each in cuts[i].shares for _ in each.ranks] for i in own)
        begins, ends = zip(*(_end_to_end(each, alignment, end) for each in zip(*chunks, strict=True)), strict=True)
        places, end = dict(zip(own, zip(*begins, strict=True), strict=True)), max(ends)
    end = -(-end // plan.alignment) * plan.alignment
    backs, shard_numel = _end_to_end((numels[i] for i in zero_copy), plan.alignment, end)
    starts = dict(zip([*packed, *zero_copy], fronts + backs, strict=True))
    places |= {i: [start] * len(ranks) for i, start in starts.items()}
    return replace(
        plan,
        cuts=tuple([cut.at(places[i]) for i, cut in enumerate(cuts)]),
        shard_offsets=tuple([starts.get(i, 0) for i in range(len(cuts))]),
        shard_numel=shard_numel,  # aligned, so that the next rank's begins on a boundary too
        zero_copy=tuple(zero_copy),
    )


def _end_to_end(numels: Iterable[int], alignment: int, start: int = 0) -> tuple[tuple[int, ...], int]:
    """Where each begins, on multiples of ``alignment`` from ``start`` on, and where the last ends."""
    ends = list(accumulate(numels, lambda end, numel: -(-(end + numel) // alignment) * alignment, initial=start))
    return tuple(ends[:-1]), ends[-1]


@lru_cache(maxsize=4096)
def _pieces(plan: BufferPlan, ranks: range, pitch: int, section: int = 0) -> tuple[Piece, ...]:
    """What ``ranks`` own, when their shards begin ``pitch`` elements apart: at most one piece for each share."""
    pieces = list[Piece]()
    for cut in plan.cuts if plan.whole is None else (plan.whole,):
        param, is_kept, dim = cut.param, cut.param.dim is None, cut.param.dim or 0
        outer, inner = math.prod(param.shape[:dim]), param.numel if is_kept else math.prod(param.shape[dim + 1 :])
        for share in cut.shares[bisect_right(cut.shares, ranks.start, key=_first_rank) - 1 :]:
            first, stop = max(share.ranks.start, ranks.start), min(share.ranks.stop, ranks.stop)
            if first >= stop:
                break
            if outer * (width := share.length * inner):
                step, row = 0 if is_kept else width, param.numel // outer
                full = cut.start + share.first * inner + (first - share.ranks.start) * step
                if cut.apart is not None:
                    full, step, row = share.message + first * cut.apart, cut.apart, width
                dims = [(stop - first, step, pitch), (outer, row, width), (width, 1, 1)]
                place = share.place + (first - ranks.start) * pitch
                pieces.append(_piece(dims, full, place, is_kept, section, param.part_of or param.numel))
    return tuple(pieces)


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Joins pieces of one form at equal distances."""
    forms: dict[Piece, list[Piece]] = {}
    for piece in pieces:
        forms.setdefault(replace(piece, full_start=0, shard_start=0), []).append(piece)
    for form, alike in forms.items():
        dims = list(zip(form.shape, form.full_stride, form.shard_stride, strict=True))
        while alike:
            first, *others = alike
            steps = [(b.full_start - a.full_start, b.shard_start - a.shard_start) for a, b in pairwise(alike)]
            step = steps[0] if steps and steps[0][1] > 0 else (0, 0)  # a later rank's part may lie before
            count = sum(1 for _ in takewhile(step.__eq__, steps))
            yield _piece([(count + 1, *step), *dims], first.full_start, first.shard_start, first.is_kept)
            alike = others[count:]


def _piece(
    dims: Iterable[_Dim], full_start: int, shard_start: int, is_kept: bool = False, section: int = 0, part_of: int = 0
) -> Piece:
    """A piece with as few dims as can be."""
    fewest: list[_Dim] = []
    for size, full, shard in dims:
        if fewest and fewest[-1][1:] == (size * full, size * shard):
            fewest[-1] = (fewest[-1][0] * size, full, shard)
        elif size != 1:
            fewest.append((size, full, shard))
    shape, full_stride, shard_stride = zip(*fewest or [(1, 1, 1)], strict=True)
    return Piece(shape, full_start, full_stride, shard_start, shard_stride, is_kept, section, part_of)
