"""The messages of all ranks: how the sections of a group lie in the one tensor that a collective moves.

A message is a rank's chunks, section after section. Owns the order of chunks and gaps in it, that of the *zero-copy*
parameters, which travel beside the messages, and the copies between messages and whole parameters::

    shard of rank r    a_r b_r . s_r | c_r                        two sections; s is zero-copy, '.' is a gap
    messages           a_0 b_0 . c_0 | a_1 b_1 . c_1 | ...        rank-major
    full buffers       a_0 a_1 ... b_0 b_1 ... | c_0 c_1 ...      parameter-major

The copies between the last two are the pieces of the plans: few, whatever the number of ranks. The messages of a single
section are rows, which one operation may fill with whole parameters, or cut into them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from fullshard.buffer.plan import BufferPlan, Copies, ParamShape, Piece, make_plan
from fullshard.buffer.sections import Dtypes, starts, views
from fullshard.buffer.slots import Lease
from fullshard.torch_private import chunk_cat, storage_id

_dtype_of = attrgetter("dtype")
_LARGEST_ITEM = 16  # bytes: each rank's message begins where an element of any dtype may


class ZeroCopy(NamedTuple):
    """A zero-copy parameter of some sections: its section, and its position in the plan."""

    section: int
    param: int
    chunk: slice  # in a shard
    whole: slice | None  # in the full buffer, unless that is messages
    numel: int  # of a rank
    number: int


def zero_copy_in(plans: Iterable[BufferPlan]) -> list[ZeroCopy]:
    """The zero-copy parameters of sections, in the order in which they travel."""
    found = list[ZeroCopy]()
    for section, plan in enumerate(plans):
        for param in plan.zero_copy:
            numel, start, full_start = plan.params[param].numel, plan.shard_offsets[param], plan.full_offsets[param]
            whole = None if plan.is_messages else slice(full_start, full_start + numel)
            numel //= plan.world_size
            found.append(ZeroCopy(section, param, slice(start, start + numel), whole, numel, len(found)))
    return found


def vectors(plans: Sequence[BufferPlan], joined: bool = True) -> tuple[BufferPlan, ...]:
    """The plans of sections. If their full buffers are messages, a plan of each zero-copy parameter follows: a
    vector. With ``joined``, a full buffer that is all shards end to end is a vector too, with a run for each rank."""
    if not any(plan.is_messages for plan in plans):
        return tuple(plans)
    packed = [plan.packed for plan in plans]
    numels = [plan.full_numel if joined and plan.is_rank_major else 0 for plan in packed]
    numels += [each.numel * plans[0].world_size for each in zero_copy_in(plans)]
    found = [make_plan([ParamShape("messages", (numel,))], plans[0].world_size) for numel in numels]
    return tuple(vector if vector.full_numel else plan for vector, plan in zip_longest(found, packed))


def pieces_alone(plan: BufferPlan, at: int, pitch: int) -> tuple[Piece, ...]:
    """The copies of one whole parameter, alone in its memory, to messages that lie ``pitch`` elements apart."""
    cut = plan.cuts[at].at([0] * plan.world_size) if plan.cuts[at].is_uniform else plan.cuts[at]
    alone = replace(plan, params=plan.params[at : at + 1], cuts=(replace(cut, start=0, apart=None),))
    return alone.pieces_of_all(pitch)


def _row(plan: BufferPlan, pitch: int) -> list[tuple[int, int]]:
    """The message of one section: the position of each parameter in it, -1 for a gap, and their elements."""
    row, end = list[tuple[int, int]](), 0
    for at, start in enumerate(plan.shard_offsets):
        numel = math.prod(plan.cuts[at].chunk_shape(0))
        if numel and at not in plan.zero_copy:
            row += [(-1, start - end)] * (end < start) + [(at, numel)]
            end = start + numel
    return row + [(-1, pitch - end)] * (end < pitch)


class Rows:
    """The messages of one section, which one operation fills with all of its parameters. These are cut along their
    first dim, and have the indices ``members``."""

    def __init__(self, plan: BufferPlan, members: Sequence[int], messages: torch.Tensor) -> None:
        self._rows, size = messages.view(plan.world_size, -1), plan.world_size
        row = _row(plan, self._rows.shape[1])
        self._indices = [members[at] if at >= 0 else -1 for at, _ in row]
        self._gaps: list[Any] = [None if at >= 0 else messages.new_zeros(size * numel) for at, numel in row]
        self.members = frozenset(self._indices) - {-1}

    def fill(self, values: Mapping[int, torch.Tensor]) -> bool:
        """Write whole parameters to the messages, if torch can for their dtypes."""
        parts: list[torch.Tensor] = [*map(values.get, self._indices, self._gaps)]
        _, *others = {*map(_dtype_of, parts)}
        if others:  # zeros for gaps have the dtype of the messages
            dtypes = {values[index].dtype for index in self.members}
            if dtypes != {torch.bfloat16} or self._rows.dtype != torch.float32:
                return False  # torch has no kernel for these
            parts = [part.to(torch.bfloat16) for part in parts]
        chunk_cat(parts, num_chunks=self._rows.shape[0], out=self._rows)
        return True


class Messages:
    """The messages of all ranks that one collective moves: those of some ``members`` of the sections.

    Attributes:
        dtype: what the collective sees: bytes if that is asked for, or if there are several dtypes.
        numel: elements of one message.
        is_full: whether the full buffer is the messages of all ranks end to end, and no copy is needed.
        zero-copy: what moves beside the messages; ``is_single``: whether one tensor moves in all.
        own_bytes: of this rank in all that moves.
    """

    def __init__(self, plans: Sequence[BufferPlan], dtypes: Dtypes, members: Sequence[int], as_bytes: bool) -> None:
        self.members = members
        self._plans, self._dtypes = [plans[i].packed for i in members], [dtypes[i] for i in members]
        self._numels = [plan.shard_numel for plan in self._plans]
        *self._starts, _ = starts(self._numels, self._dtypes)
        self._nbytes, self.dtype = self._starts[-1] + self._numels[-1] * self._dtypes[-1].itemsize, self._dtypes[0]
        self.is_full = len(members) == 1 and self._plans[0].is_rank_major
        if as_bytes or len(set(self._dtypes)) > 1:
            self.dtype = torch.uint8
            self._nbytes += 0 if self.is_full else -self._nbytes % _LARGEST_ITEM
        self.numel = self._nbytes // self.dtype.itemsize
        self.zero_copy = [each for each in zero_copy_in(plans) if each.section in members]
        zero_copy = [[each.numel for each in self.zero_copy if each.section == i] for i in members]
        self._cuts = [[numel, *others] for numel, others in zip(self._numels, zero_copy, strict=True)]
        self.is_single = (self.numel > 0) + len(self.zero_copy) == 1
        #: Whether there is one section, of whole parameters that are the chunks of all ranks end to end.
        is_one = len(members) == 1 and not self._plans[0].is_messages
        self._is_rows = is_one and all(cut.is_whole for cut in self._plans[0].cuts)
        self.own_bytes = self._nbytes + sum(each.numel * dtypes[each.section].itemsize for each in self.zero_copy)

    def sections(self, message: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return views(message.view(torch.uint8), self._numels, self._dtypes)

    def parts(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The front of each member's shard, with all that is packed; each zero-copy chunk; the first shard, whole."""
        parts = list(map(torch.unsafe_split_with_sizes, map(shards.__getitem__, self.members), self._cuts))
        return [*(part[0] for part in parts), *chain(*(part[1:] for part in parts)), shards[self.members[0]]]

    def pieces(self, messages: torch.Tensor, fulls: Sequence[torch.Tensor], with_kept: bool) -> Copies:
        """The views of the pieces in the messages of all ranks, and those in the full buffers."""
        there, here = [], []
        for member, plan, section in zip(self.members, self._plans, self.sections(messages), strict=True):
            for piece in plan.pieces_of_all(self._nbytes // section.itemsize):
                if with_kept or not piece.is_kept:
                    there.append(piece.of_shard(section))
                    here.append(piece.of_full(fulls[member]))
        return there, here

    def join(self, messages: torch.Tensor, full: torch.Tensor) -> Callable[[], object] | None:
        """One operation that copies a full buffer to the messages of all ranks; ``None`` unless they are rows."""
        if not self._is_rows:
            return None
        plan = self._plans[0]
        rows = Rows(plan, range(len(plan.params)), messages.view(full.dtype))
        pairs = zip(plan.params, plan.full_offsets, strict=True)
        wholes = {i: full[start:][: each.numel].view(each.shape) for i, (each, start) in enumerate(pairs)}
        return partial(rows.fill, wholes)

    def cut(self, messages: torch.Tensor, full: torch.Tensor) -> Callable[[], object] | None:
        """One operation that copies the messages of all ranks to a full buffer; ``None`` unless they are rows."""
        if not self._is_rows:
            return None
        plan, size = self._plans[0], self._plans[0].world_size
        rows = messages.view(full.dtype).view(size, -1)
        row = _row(plan, rows.shape[1])
        out = [
            full.new_empty(size, numel) if at < 0 else full[plan.full_offsets[at] :][: size * numel].view(size, numel)
            for at, numel in row
        ]
        return partial(torch.split_with_sizes_copy, rows, [numel for _, numel in row], dim=1, out=out)

    def in_shards(self, shards: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The shards as one message of bytes, if they lie in memory as sections do in one."""
        begins = [shard.storage_offset() * shard.itemsize for shard in shards]
        origin, first = begins[0], shards[0]
        in_order = [begin - origin for begin in begins] == self._starts and len({*map(storage_id, shards)}) == 1
        is_inside = origin + self._nbytes <= first.untyped_storage().nbytes()
        return Lease(first).view(torch.uint8, 0, (self._nbytes,)) if in_order and is_inside else None
