"""Between a group's buffers and what a collective moves: one tensor with the messages of all ranks end to end.

Owns the layout of a message, which is the sections of a shard end to end, and the copies between the messages of all
ranks and the full buffers. They are strided copies, at most two for each parameter: ``torch.chunk`` gives some ranks
chunks of equal size, at most one rank a smaller one and the rest none. The transport decides what runs when.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from fullshard.buffer.plan import Plan
from fullshard.comm.backend import backend_name
from fullshard.comm.routes import Copies, alias
from fullshard.comm.staging import SHARED, Lease, align
from fullshard.comm.transport import Transfer
from fullshard.policies import Comm
from fullshard.torch_private import storage_id

Bound = TypeVar("Bound")

#: A piece of staging memory: where it is, and how many bytes from there.
Memory = tuple[Lease, int]


@dataclass(frozen=True)
class Message:
    """The message that one rank contributes or receives.

    Args:
        starts: where each section begins, in bytes.
        nbytes: size.
        dtype: what the collective sees. Bytes move in any dtype, also in those that a backend does not know.
    """

    starts: tuple[int, ...]
    nbytes: int
    dtype: torch.dtype


def lay_out_message(plans: Sequence[Plan], dtypes: Sequence[torch.dtype], as_bytes: bool) -> Message:
    """Sections end to end, each on a boundary on which the sections of a shard lie too.

    Args:
        plans: of the sections.
        dtypes: of the sections.
        as_bytes: whether to hide the dtype also if there is only one.
    """
    starts, end = [], 0
    for plan, dtype in zip(plans, dtypes, strict=True):
        starts.append(align(end))
        end = starts[-1] + plan.shard_numel * dtype.itemsize
    if len(set(dtypes)) == 1 and not as_bytes:
        return Message(tuple(starts), end, dtypes[0])
    return Message(tuple(starts), -(-end // _LARGEST_ITEM) * _LARGEST_ITEM, torch.uint8)


_LARGEST_ITEM = 16  # bytes: each rank's message begins where an element of any dtype may


@dataclass(frozen=True)
class Chunks:
    """Chunks of one parameter that lie regularly, in the full buffer and in the messages of all ranks.

    Args:
        shape: of all of them together.
        full_start: where the first lies in the full buffer, in elements.
        full_stride: strides in the full buffer.
        message_start: where the first lies in the messages, in elements from the section's start in that of rank 0.
        message_stride: strides in the messages.
        kept_whole: whether every rank keeps all of it, so that a gather takes nothing from other ranks.
    """

    shape: tuple[int, ...]
    full_start: int
    full_stride: tuple[int, ...]
    message_start: int
    message_stride: tuple[int, ...]
    kept_whole: bool = False

    def of_full(self, full: torch.Tensor) -> torch.Tensor:
        return full.as_strided(self.shape, self.full_stride, full.storage_offset() + self.full_start)


def chunks_of(plan: Plan, row: int) -> Iterator[Chunks]:
    """All that ranks own of the full buffer, when their messages begin ``row`` elements apart.

    Parameters of one shape at equal distances, as norms and projections often are, are one piece.
    """
    forms: dict[tuple[object, ...], list[Chunks]] = {}
    for chunks in _chunks_of_each(plan, row):
        forms.setdefault((chunks.shape, chunks.full_stride, chunks.message_stride), []).append(chunks)
    for alike in forms.values():
        while alike:
            first, *others = alike
            steps = [(b.full_start - a.full_start, b.message_start - a.message_start) for a, b in pairwise(alike)]
            count = 0 if first.kept_whole else sum(1 for _ in takewhile(steps[:1].__contains__, steps))
            alike = others[count:]
            if count == 0:
                yield first
                continue
            shape, (full, message) = (count + 1, *first.shape), steps[0]
            full_stride, message_stride = (full, *first.full_stride), (message, *first.message_stride)
            yield Chunks(shape, first.full_start, full_stride, first.message_start, message_stride)


def _chunks_of_each(plan: Plan, row: int) -> Iterator[Chunks]:
    world_size = plan.world_size
    if plan.layout == "flat":
        yield Chunks((world_size, plan.shard_numel), 0, (plan.shard_numel, 1), 0, (row, 1))
        return
    for param, full_start, start in zip(plan.params, plan.full_offsets, plan.shard_offsets, strict=True):
        if param.numel == 0:
            continue
        if param.dim is None:
            yield Chunks((world_size, param.numel), full_start, (0, 1), start, (row, 1), kept_whole=True)
            continue
        size = param.shape[param.dim]
        outer = torch.Size(param.shape[: param.dim]).numel()
        inner = param.numel // (size * outer)
        length = param.chunk(0, world_size)[1] * inner  # of one row of a full chunk
        count, rest = divmod(size * inner, length)
        stride = size * inner
        yield Chunks((count, outer, length), full_start, (length, stride, 1), start, (row, length, 1))
        if rest:
            yield Chunks((outer, rest), full_start + count * length, (stride, 1), start + count * row, (rest, 1))


@dataclass(frozen=True)
class Gather:
    """Tensors of an all-gather: copies before it, what it writes and reads, copies after it."""

    before: Copies
    output: torch.Tensor
    input: torch.Tensor
    after: Copies


class _Packing(Generic[Bound]):
    """The tensors on which the collectives of some transfers work.

    Args:
        transfers: checked ones.
        comm: the user's collective, which allocates what it works on; any other may work on the buffers themselves.
    """

    def __init__(self, transfers: Sequence[Transfer], comm: Comm | None) -> None:
        self._plans = [transfer.plan for transfer in transfers]
        self._fulls = [alias(transfer.full) for transfer in transfers]
        self._comm = comm
        self._bound: dict[int, Bound] = {}
        self.device = transfers[0].full.device
        self.is_host = self.device.type == "cpu"
        #: The staging that is needed: bytes and dtype of each piece.
        self.sizes: list[tuple[int, torch.dtype]] = []

    def bind(self) -> tuple[Lease | None, Bound]:
        """The tensors to work on, in memory that the user's collective brings or in that of a lease.

        They are kept for the next time the same memory is leased, or if none is needed.
        """
        if self._comm is not None and self.sizes:
            pieces = [
                self._comm.allocate((nbytes // dtype.itemsize,), dtype=dtype, device=self.device)
                for nbytes, dtype in self.sizes
            ]
            return None, self._make([(Lease(piece), 0) for piece in pieces])
        lease = SHARED.lease(self._nbytes, self.device) if self.sizes else None
        index = -1 if lease is None else lease.index
        bound = self._bound.get(index)
        if bound is None:
            ends = accumulate((align(nbytes) for nbytes, _ in self.sizes), initial=0)
            memory = [(lease, start) for start, _ in zip(ends, self.sizes, strict=False)] if lease is not None else []
            bound = self._bound[index] = self._make(memory)
        return lease, bound

    @cached_property
    def _nbytes(self) -> int:
        return sum(align(nbytes) for nbytes, _ in self.sizes)

    def _make(self, memory: Sequence[Memory]) -> Bound:
        raise NotImplementedError


class GatherPacking(_Packing[Gather]):
    """How some transfers become one all-gather; ``rank`` is this rank."""

    def __init__(self, transfers: Sequence[Transfer], rank: int, comm: Comm | None) -> None:
        super().__init__(transfers, comm)
        self._shards = [alias(transfer.shard) for transfer in transfers]
        self._rank = rank
        self._message = lay_out_message(self._plans, [full.dtype for full in self._fulls], as_bytes=comm is None)
        self.is_empty = self._message.nbytes == 0
        self._is_direct = comm is None and len(transfers) == 1 and _is_rank_major(self._plans[0])
        if not self._is_direct:
            self.sizes.append((self._message.nbytes * self._plans[0].world_size, self._message.dtype))

    @torch.inference_mode(False)
    def _make(self, memory: Sequence[Memory]) -> Gather:
        if self._is_direct:
            return Gather(([], []), self._fulls[0].view(torch.uint8), self._shards[0].view(torch.uint8), ([], []))
        (lease, start), message, world_size = memory[0], self._message, self._plans[0].world_size
        length = message.nbytes // message.dtype.itemsize
        output = lease.view(message.dtype, start, (world_size * length,))
        source = self._contiguous_shards() if self._comm is None else None
        before: Copies = ([], [])
        if source is None:
            source = output[self._rank * length : (self._rank + 1) * length]
            own = start + self._rank * message.nbytes
            for shard, section in zip(self._shards, message.starts, strict=True):
                before[0].append(lease.view(shard.dtype, own + section, shard.shape))
                before[1].append(shard)
        after: Copies = ([], [])
        for plan, full, shard, section in zip(self._plans, self._fulls, self._shards, message.starts, strict=True):
            for chunks in chunks_of(plan, message.nbytes // full.dtype.itemsize):
                if chunks.kept_whole:
                    numel = chunks.shape[1]
                    after[0].append(full[chunks.full_start : chunks.full_start + numel])
                    after[1].append(shard[chunks.message_start : chunks.message_start + numel])
                else:
                    after[0].append(chunks.of_full(full))
                    after[1].append(_of_messages(lease, start + section, full.dtype, chunks))
        return Gather(before, as_real(output), as_real(source), after)

    def _contiguous_shards(self) -> torch.Tensor | None:
        """The shards as one message, if they lie in memory as sections do in one."""
        message, first = self._message, self._shards[0]
        origin = first.storage_offset() * first.dtype.itemsize
        for shard, start in zip(self._shards, message.starts, strict=True):
            if storage_id(shard) != storage_id(first) or shard.storage_offset() * shard.itemsize != origin + start:
                return None
        if origin % message.dtype.itemsize or origin + message.nbytes > first.untyped_storage().nbytes():
            return None
        shape = (message.nbytes // message.dtype.itemsize,)
        empty = torch.empty(0, dtype=message.dtype, device=first.device)
        return empty.set_(first.untyped_storage(), origin // message.dtype.itemsize, shape, (1,))


@dataclass(frozen=True)
class Batch:
    """The transfers of one dtype, which one reduce-scatter serves.

    Args:
        dtype: what travels.
        members: which of the transfers they are.
        before: copies before it.
        input: what it reads.
        output: what it writes; ``None`` for the shard of the only member itself.
        parts: the part of ``output`` that each member gets.
    """

    dtype: torch.dtype
    members: tuple[int, ...]
    before: Copies
    input: torch.Tensor
    output: torch.Tensor | None
    parts: list[torch.Tensor]


@dataclass(frozen=True)
class _BatchLayout:
    dtype: torch.dtype
    members: tuple[int, ...]
    message: Message
    direct_input: bool
    direct_output: bool


class ReducePacking(_Packing[list[Batch]]):
    """How some transfers become one reduce-scatter of ``process_group`` for each dtype.

    Of their shards only the dtype matters: each call may bring others.
    """

    def __init__(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, comm: Comm | None) -> None:
        super().__init__(transfers, comm)
        self.world_size = process_group.size()
        self.backend = backend_name(process_group, self.device)
        self._layouts: list[_BatchLayout] = []
        for dtype in dict.fromkeys(full.dtype for full in self._fulls):
            members = tuple(i for i, full in enumerate(self._fulls) if full.dtype == dtype)
            message = lay_out_message([self._plans[i] for i in members], [dtype] * len(members), as_bytes=False)
            if message.nbytes == 0:
                continue
            alone = comm is None and len(members) == 1
            direct_input = alone and _is_rank_major(self._plans[members[0]])
            direct_output = alone and transfers[members[0]].shard.dtype == dtype
            self._layouts.append(_BatchLayout(dtype, members, message, direct_input, direct_output))
            if not direct_input:
                self.sizes.append((message.nbytes * self.world_size, dtype))
            if not direct_output:
                self.sizes.append((message.nbytes, dtype))

    @torch.inference_mode(False)
    def _make(self, memory: Sequence[Memory]) -> list[Batch]:
        remaining = iter(memory)
        batches = []
        for layout in self._layouts:
            dtype, message = layout.dtype, layout.message
            length = message.nbytes // dtype.itemsize
            before: Copies = ([], [])
            source = self._fulls[layout.members[0]]
            if not layout.direct_input:
                lease, start = next(remaining)
                source = lease.view(dtype, start, (self.world_size * length,))
                for member, section in zip(layout.members, message.starts, strict=True):
                    for chunks in chunks_of(self._plans[member], length):
                        before[0].append(_of_messages(lease, start + section, dtype, chunks))
                        before[1].append(chunks.of_full(self._fulls[member]))
            output, parts = None, []
            if not layout.direct_output:
                lease, start = next(remaining)
                output = lease.view(dtype, start, (length,))
                for member, section in zip(layout.members, message.starts, strict=True):
                    parts.append(lease.view(dtype, start + section, (self._plans[member].shard_numel,)))
            batches.append(Batch(dtype, layout.members, before, source, output, parts))
        return batches


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: not every backend moves and adds them as they are."""
    return tensor.view(tensor.dtype.to_real()) if tensor.is_complex() else tensor


def _is_rank_major(plan: Plan) -> bool:
    """Whether the shards of all ranks end to end are the full buffer."""
    is_whole = plan.world_size == 1 and plan.full_offsets == plan.shard_offsets
    return plan.layout == "flat" or (is_whole and plan.full_numel == plan.shard_numel)


def _of_messages(lease: Lease, start: int, dtype: torch.dtype, chunks: Chunks) -> torch.Tensor:
    start += chunks.message_start * dtype.itemsize
    return lease.view(dtype, start, chunks.shape, chunks.message_stride)
