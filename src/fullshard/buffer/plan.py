"""Where the parameters of a group lie, and which part of them each rank owns.

A :class:`Plan` knows shapes and a number of ranks, no memory, no dtype and no process group. It maps parameters, in
elements, to the *full buffer* that every rank sees while a group is gathered and to the *shard* that each rank keeps.
Together these are a list of strided copies, each a :class:`Piece`. Two layouts cut the full buffer::

    three parameters a (4 rows), b (3 rows), c (2 rows) over two ranks; '.' is padding, digits name the owner

    full buffer    a a a a | b b b . | c c .        the same in both layouts (up to the padding)

    even           0 0 1 1 | 0 0 1 . | 0 1 .        one piece for each parameter: its chunk, as torch.chunk cuts
    shard of 0     a0 a1 | b0 b1 | c0
    shard of 1     a2 a3 | b2 .. | c1               every rank has the same offsets, those of rank 0, the largest

    flat           0 0 0 0   0 1 1     1 1          one piece for each rank, wherever it falls
    shard of 0     a0 a1 a2 a3 b0
    shard of 1     b1 b2 c0 c1 ..                   shard r is full[r * shard_numel : (r + 1) * shard_numel]

If b has rows of 5 elements, it takes 10 in each shard (12 with the alignment), of which rank 1 uses 5. If a, which is
the chunks of the ranks end to end, is large, it is *zero-copy*: a collective can read and write it where it lies.
Zero-copy chunks come last in a shard, behind the *packed* ones, which travel together.

In *even*, a parameter with ``cuts`` is *ragged*: the ranks have runs of rows of any lengths, cut by :func:`balance`
between blocks. It is packed, behind the others, and each rank has offsets of its own for it::

    a (4 rows, blocks of 2), b and c whole     a a a a | b b b | c c
    owners                                     0 0 1 1 | 0 0 0 | 1 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise, takewhile
from typing import Literal

import torch

LayoutName = Literal["even", "flat"]
Copies = tuple[list[torch.Tensor], list[torch.Tensor]]  # targets and sources, for one call that copies all of them

#: Elements to which each parameter in a full buffer is aligned by default: 16 bytes of the smallest dtype, 64 of fp32.
ALIGNMENT = 16
#: The same for chunks in a shard: what vector units take in one go. More would be multiplied by the ranks.
CHUNK_ALIGNMENT = 4
#: Elements of a chunk from which a parameter may be zero-copy: 256 KiB of fp32. Small ones are cheaper to copy.
LEAST_ZERO_COPY = 2**16
#: The same of a whole parameter where several collectives are one launch, if it is also a part of all parameters as
#: large as one of so many. NCCL divides the bytes of a launch over about 16 channels, and gives no channel less than 32
#: KiB: with these bounds a launch of many has the same channels as one message, and none has several to do in turn.
LEAST_TOGETHER = 2**14
MOST_TOGETHER = 16


@dataclass(frozen=True)
class ParamShape:
    """One parameter as a BufferPlan sees it."""

    name: str  # how errors call it
    shape: tuple[int, ...]
    dim: int | None = 0  # along which *even* cuts it; ``None`` keeps all of it on every rank, as for a scalar
    cuts: tuple[int, ...] | None = None  # if ragged: where along ``dim`` the part of each rank begins, and the size
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

    def chunk(self, rank: int, world_size: int) -> tuple[int, int]:
        """The first and the past-the-last index along ``dim`` that ``rank`` has: as ``torch.chunk`` cuts, or ragged."""
        if self.dim is None:
            return 0, 1
        if self.cuts is not None:
            return self.cuts[rank], self.cuts[rank + 1]
        size = self.shape[self.dim]
        step = -(-size // world_size)
        return min(rank * step, size), min((rank + 1) * step, size)

    def chunk_shape(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The shape of that chunk; 0 along ``dim`` for a rank that holds nothing."""
        start, stop = self.chunk(rank, world_size)
        return self.shape if self.dim is None else (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])


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


@dataclass(frozen=True)
class BufferPlan:
    """Where parameters begin in the full buffer and in the shards of all ranks. Made by :func:`make_plan`."""

    params: tuple[ParamShape, ...]
    world_size: int
    layout: LayoutName
    full_offsets: tuple[int, ...]
    full_numel: int  # ``world_size * shard_numel`` in *flat*
    shard_offsets: tuple[int, ...]  # the same in every shard; 0 for what is ragged; empty in *flat*
    shard_numel: int  # the same for every rank
    alignment: int
    least_zero_copy: int  # elements of a parameter from which it is large
    zero_copy: tuple[int, ...] = ()  # the zero-copy parameters, in the order of shards, where they come last
    is_messages: bool = False  # whether the full buffer has the shards of all ranks end to end, but what is zero-copy
    ragged_offsets: tuple[tuple[int, ...], ...] = ()  # of each parameter, in the shard of each rank, if any is ragged
    message_offsets: tuple[tuple[int, ...], ...] = ()  # the same in the messages that the full buffer has

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
        """What all ranks own of the full buffer, when their shards begin ``pitch`` elements apart.

        At most two pieces for each parameter: ``torch.chunk`` gives some ranks chunks of equal size, at most one rank a
        smaller one and the rest none. A ragged parameter has one for each rank with rows. Parameters of one shape at
        equal distances, as norms often are, are one piece.
        """
        return tuple(_joined(_pieces(self, range(self.world_size), pitch)))

    @property
    def is_rank_major(self) -> bool:
        """Whether the shards of all ranks, end to end, are the full buffer."""
        pieces = self.pieces_of_all(self.shard_numel)
        same = all((p.full_start, p.full_stride) == (p.shard_start, p.shard_stride) for p in pieces)
        return same and self.full_numel == self.world_size * self.shard_numel

    def is_whole(self, param: ParamShape) -> bool:
        """Whether a parameter is the chunks of all ranks end to end, of one size (*even*)."""
        chunk = math.prod(param.chunk_shape(0, self.world_size))
        is_cut = param.dim is not None and param.cuts is None and math.prod(param.shape[: param.dim]) == 1
        return is_cut and chunk * self.world_size == param.numel

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
        plan = replace(self, full_offsets=offsets, shard_offsets=offsets, full_numel=small.shard_numel)
        return replace(plan, zero_copy=large, is_messages=True)

    @property
    def messages(self) -> BufferPlan:
        """The same cut, for a full buffer that has the messages of all ranks (*even* only)."""
        numel = self.packed.shard_numel
        plan = replace(self, full_offsets=self.shard_offsets, full_numel=self.world_size * numel, is_messages=True)
        return replace(plan, message_offsets=self.ragged_offsets)

    def locate_chunk(self, index: int, rank: int) -> tuple[int, tuple[int, ...]]:
        """Where in its shard ``rank`` holds its part of parameter ``index``, and the shape of that part. In *flat* that
        is a run of elements, or all of the parameter where one rank keeps everything."""
        param = self.params[index]
        if self.layout == "even":
            start = self.shard_offsets[index] if param.cuts is None else self.ragged_offsets[index][rank]
            return start, param.chunk_shape(rank, self.world_size)
        start, stop = self.fragment(index, rank)
        if self.world_size == 1:
            return self.full_offsets[index], param.shape
        begin = self.full_offsets[index] + start - rank * self.shard_numel
        return begin if start < stop else 0, (stop - start,)

    def fragment(self, index: int, rank: int) -> tuple[int, int]:
        """First and past-the-last element of parameter ``index`` that ``rank`` holds (*flat*); equal if none."""
        start = rank * self.shard_numel - self.full_offsets[index]
        numel = self.params[index].numel
        return min(max(start, 0), numel), min(max(start + self.shard_numel, 0), numel)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The parts of the full buffer that no parameter fills: where each begins and ends."""
        ends = [start + param.numel for param, start in zip(self.params, self.full_offsets, strict=True)]
        edges = zip([0, *ends], [*self.full_offsets, self.full_numel], strict=True)
        return [(end, start) for end, start in edges if end < start]

    def over(self, ranks: int) -> BufferPlan:
        """The same parameters where they lie, each as a vector, cut by *even* over another number of ranks."""
        params = tuple(ParamShape(param.name, (param.numel,)) for param in self.params)
        least = self.least_zero_copy // self.world_size * ranks
        plan = replace(self, params=params, world_size=ranks, layout="even", least_zero_copy=least, zero_copy=())
        return _cut(replace(plan, is_messages=False, message_offsets=()))

    def inside(self, rank: int, parts: int) -> BufferPlan:
        """The shard of ``rank`` as a full buffer, where each parameter's chunk is cut again into ``parts`` (*even*)."""
        shapes = (each.chunk_shape(rank, self.world_size) for each in self.params)
        both = zip(self.params, shapes, strict=True)
        params = tuple(replace(each, shape=shape, part_of=each.part_of or each.numel) for each, shape in both)
        least = self.least_zero_copy // self.world_size * parts
        plan = replace(self, params=params, world_size=parts, least_zero_copy=least, zero_copy=(), is_messages=False)
        return _cut(replace(plan, full_offsets=self.shard_offsets, full_numel=self.shard_numel, message_offsets=()))

    def select(self, indices: Iterable[int]) -> BufferPlan:
        """The plan of some of the parameters: cut as here, at the same place in the full buffer, in another shard. Of
        *flat* it is the plan itself, which cannot leave any out."""
        chosen = tuple(indices)
        if self.layout == "flat" or chosen == tuple(range(len(self.params))):
            return self
        params, starts = [self.params[i] for i in chosen], [self.full_offsets[i] for i in chosen]
        in_messages = tuple(self.message_offsets[i] for i in chosen) if self.message_offsets else ()
        return _cut(replace(self, params=tuple(params), full_offsets=tuple(starts), message_offsets=in_messages))


def make_plan(
    params: Sequence[ParamShape],
    world_size: int,
    layout: LayoutName = "even",
    alignment: int = ALIGNMENT,
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
    params: tuple[ParamShape, ...], world_size: int, layout: LayoutName, alignment: int, together: bool
) -> BufferPlan:
    full_offsets, full_numel = _end_to_end((param.numel for param in params), alignment)
    least = LEAST_ZERO_COPY * world_size
    if together:
        least = min(least, max(LEAST_TOGETHER, full_numel // MOST_TOGETHER))
    plan = BufferPlan(params, world_size, layout, full_offsets, full_numel, (), 0, alignment, least)
    if layout == "even":
        return _cut(plan)
    if layout != "flat":
        raise ValueError(f"layout must be 'even' or 'flat', got {layout!r}")
    shard_numel = -(-plan.end // world_size)  # not aligned: so cuts fall where users of torch's wrapper expect them
    return replace(plan, full_numel=world_size * shard_numel, shard_numel=shard_numel)


@lru_cache(maxsize=4096)
def _cut(plan: BufferPlan) -> BufferPlan:
    """The plan with the shards of *even*; that of a single rank is the full buffer, if it has all parameters."""
    alignment = math.gcd(CHUNK_ALIGNMENT, plan.alignment) if plan.world_size > 1 else plan.alignment
    numels = [math.prod(param.chunk_shape(0, plan.world_size)) for param in plan.params]
    large = [i for i, param in enumerate(plan.params) if param.numel >= plan.least_zero_copy and plan.is_whole(param)]
    zero_copy = [i for i in large if plan.world_size > 1 and numels[i] % plan.alignment == 0]
    ragged = [i for i, param in enumerate(plan.params) if param.cuts is not None]
    packed = [i for i in range(len(numels)) if i not in zero_copy and i not in ragged]
    fronts, end = _end_to_end((numels[i] for i in packed), alignment)
    own: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(numels) if ragged else 0), ())
    if ragged:
        size, params = plan.world_size, [plan.params[i] for i in ragged]
        chunks = ([math.prod(param.chunk_shape(rank, size)) for param in params] for rank in range(size))
        begins, ends = zip(*(_end_to_end(each, alignment, end) for each in chunks), strict=True)
        own, end = own | dict(zip(ragged, zip(*begins, strict=True), strict=True)), max(ends)
    backs, shard_numel = _end_to_end((numels[i] for i in zero_copy), plan.alignment, _align(end, plan.alignment))
    starts = dict.fromkeys(ragged, 0) | dict(zip([*packed, *zero_copy], fronts + backs, strict=True))
    return replace(
        plan,
        shard_offsets=tuple(map(starts.__getitem__, range(len(numels)))),
        shard_numel=shard_numel,  # aligned, so that the next rank's begins on a boundary too
        zero_copy=tuple(zero_copy),
        ragged_offsets=tuple(own.values()),
    )


def balance(blocks: Sequence[tuple[int, int]], world_size: int, first: int = 0) -> list[tuple[int, ...]]:
    """Give the blocks of parameters to ranks so that these have nearly the same numbers of bytes.

    The parameters with the largest blocks are first, and each block goes to the rank that has least so far. So no rank
    has more than the mean by a block. Among equal ranks, ``first`` is the first.

    Args:
        blocks: of each parameter the number of blocks, and the bytes of one.

    Returns:
        of each parameter, the numbers of the blocks at which the part of each rank begins, and where the last ends.
    """
    cuts: list[tuple[int, ...]] = [()] * len(blocks)
    loads, turns = [0] * world_size, [(first + turn) % world_size for turn in range(world_size)]
    for index in sorted(range(len(blocks)), key=lambda index: -blocks[index][1]):
        count, nbytes = blocks[index]
        level, above = 0, max(loads) + (count + 1) * max(nbytes, 1)  # every rank is filled up to a level
        while above - level > 1:
            middle = (level + above) // 2
            fits = sum(max(0, middle - load) // max(nbytes, 1) for load in loads) <= count
            level, above = (middle, above) if fits else (level, middle)
        counts = [max(0, level - load) // max(nbytes, 1) for load in loads]
        loads = [load + number * nbytes for load, number in zip(loads, counts, strict=True)]
        for _ in range(count - sum(counts)):
            least = min(turns, key=loads.__getitem__)
            counts[least] += 1
            loads[least] += nbytes
        cuts[index] = tuple(accumulate(counts, initial=0))
    return cuts


def _end_to_end(numels: Iterable[int], alignment: int, start: int = 0) -> tuple[tuple[int, ...], int]:
    """Where each begins, on multiples of ``alignment`` from ``start`` on, and where the last ends."""
    ends = list(accumulate(numels, lambda end, numel: _align(end + numel, alignment), initial=start))
    return tuple(ends[:-1]), ends[-1]


def _align(numel: int, alignment: int) -> int:
    return -(-numel // alignment) * alignment


@lru_cache(maxsize=4096)
def _pieces(plan: BufferPlan, ranks: range, pitch: int, section: int = 0) -> tuple[Piece, ...]:
    """What ``ranks`` own, when their shards begin ``pitch`` elements apart: two pieces for each parameter, or fewer."""
    params = zip(plan.params, plan.full_offsets, plan.shard_offsets, strict=plan.layout == "even")
    if plan.layout == "flat":  # cut like one parameter, with the padding between parameters and not that at the tail
        params = zip((ParamShape("all", (plan.end,)),), (0,), (0,), strict=True)
    apart = plan.full_numel // plan.world_size if plan.is_messages else 0  # messages in the full buffer
    pieces = []
    for index, (param, full_start, shard_start) in enumerate(params):
        whole = param.part_of or param.numel
        if param.dim is None:
            dims = [(len(ranks), apart, pitch), (param.numel, 1, 1)]
            pieces += [_piece(dims, full_start, shard_start, True, section, whole)] if param.numel else []
            continue
        outer, inner = math.prod(param.shape[: param.dim]), math.prod(param.shape[param.dim + 1 :])
        for rank in ranks if param.cuts is not None else ():
            first, stop = param.chunk(rank, plan.world_size)
            start, row, numel = full_start + first * inner, param.shape[param.dim] * inner, (stop - first) * inner
            if plan.is_messages:
                start, row = rank * apart + plan.message_offsets[index][rank], numel
            if numel * outer:
                begin = plan.ragged_offsets[index][rank] + (rank - ranks.start) * pitch
                pieces.append(_piece([(outer, row, numel), (numel, 1, 1)], start, begin, False, section, whole))
        if param.cuts is not None:
            continue
        row, length = param.shape[param.dim] * inner, param.chunk(0, plan.world_size)[1] * inner
        if length * outer == 0:
            continue
        count, rest = divmod(row, length)  # so many ranks have chunks with rows of this length, and one has the rest
        for numel, first, stop in ((length, 0, count), (rest, count, count + 1)):
            first, stop = max(first, ranks.start), min(stop, ranks.stop)
            if numel and first < stop:
                step, row = (apart, numel) if plan.is_messages else (length, row)
                dims = [(stop - first, step, pitch), (outer, row, numel), (numel, 1, 1)]
                starts = full_start + first * step, shard_start + (first - ranks.start) * pitch
                pieces.append(_piece(dims, *starts, False, section, whole))
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
            step = steps[0] if steps and steps[0][1] > 0 else (0, 0)  # the part of a later rank may lie before
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
