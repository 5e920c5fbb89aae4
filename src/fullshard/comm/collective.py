"""The native collectives, on any backend and device: the reference for all transports.

Owns the copies between buffers and the one tensor that a collective wants, with the *messages* of all ranks end to end.
A message is the sections of a shard end to end. Where the full buffer is such a tensor already, as in the *flat*
layout, one transfer moves without a copy. Everything else is staged, so that one gather serves sections of several
dtypes as bytes (a reduction: one for each dtype)::

    shard of rank r    a_r | b_r                            two sections, the message of rank r
    staging            a_0 b_0 | a_1 b_1 | a_2 b_2          rank-major
    full buffers       a_0 a_1 a_2     b_0 b_1 b_2          parameter-major

The copies between the last two are the pieces of the plans: few, whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.buffer.sections import starts, views
from fullshard.buffer.slots import NO_LEASE, SHARED, Lease
from fullshard.comm.process_group import backend_name
from fullshard.comm.sums import Scaling, choose_scaling, divide_
from fullshard.comm.transport import PLAIN_SUM, Copies, Direction, Reduction, Route, Transfer, Transport, alias
from fullshard.comm.waits import WAITS, Wait, lost
from fullshard.device import Pending, is_host
from fullshard.policies import AllGather, Comm, ReduceScatter
from fullshard.torch_private import (
    Collective,
    all_gather_over,
    allocating_backend,
    foreach_copy,
    reduce_scatter_over,
    storage_id,
    symm_mem,
)

_LARGEST_ITEM = 16  # bytes: each rank's message begins where an element of any dtype may
_NO_COPIES: Copies = ([], [])


class CollectiveTransport(Transport):
    """Moves buffers by all-gather and reduce-scatter of the process group's backend, or by the user's own.

    Args:
        all_gather: replaces the backend's all-gather, and allocates what it reads and writes.
        reduce_scatter: replaces the backend's reduce-scatter, and allocates what it reads and writes.
    """

    name = "collective"
    ends_processes = True

    def __init__(
        self, all_gather: AllGather | _Memory | None = None, reduce_scatter: ReduceScatter | _Memory | None = None
    ) -> None:
        self._all_gather = all_gather
        self._reduce_scatter = reduce_scatter

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._all_gather is not None:
            return self._all_gather.allocate((nbytes,), dtype=torch.uint8, device=device)
        return super().allocate(nbytes, device)

    def _route(
        self, direction: Direction, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int
    ) -> Route:
        """The order of calls is enough: ``tag`` is only for errors."""
        comm = self._all_gather if direction == "gather" else self._reduce_scatter
        wait = Wait("an all-gather" if direction == "gather" else "a reduce-scatter", process_group, tag)
        return _CollectiveRoute(direction, transfers, process_group, comm, wait)


class _Messages:
    """The messages of all ranks that one collective moves.

    Args:
        transfers: of the route.
        members: which of them travel in these messages.
        comm: the user's collective, which allocates what it works on; any other may work on the buffers themselves.
        reduces: whether values are added up. If not, they move as bytes, also in dtypes that a backend lacks.

    Attributes:
        dtype: what the collective sees.
        numel: elements of one message.
        is_full: whether the full buffer is the messages of all ranks end to end, and no copy is needed.
        is_shard: whether this rank's message needs no memory beside the shard and those of all ranks.
    """

    def __init__(
        self, transfers: Sequence[Transfer], members: Sequence[int], comm: Comm | _Memory | None, reduces: bool
    ) -> None:
        self.members = members
        self._plans = [transfers[i].plan for i in members]
        self._fulls = [alias(transfers[i].full) for i in members]
        self._numels = [plan.shard_numel for plan in self._plans]
        self._dtypes = [full.dtype for full in self._fulls]
        *self._starts, _ = starts(self._numels, self._dtypes)
        self._nbytes = self._starts[-1] + self._numels[-1] * self._dtypes[-1].itemsize
        self.dtype = self._dtypes[0]
        if (comm is None and not reduces) or len(set(self._dtypes)) > 1:
            self.dtype = torch.uint8
            self._nbytes = -(-self._nbytes // _LARGEST_ITEM) * _LARGEST_ITEM
        self.numel = self._nbytes // self.dtype.itemsize
        is_alone = comm is None and len(members) == 1
        self.is_full = is_alone and self._plans[0].is_rank_major
        self.is_shard = not reduces or (is_alone and transfers[members[0]].shard.dtype == self._dtypes[0])

    @property
    def full(self) -> torch.Tensor:
        """The full buffer, as the messages of all ranks."""
        return self._fulls[0].view(self.dtype)

    def sections(self, message: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return views(message.view(torch.uint8), self._numels, self._dtypes)

    def pieces(self, messages: torch.Tensor, with_kept: bool) -> Copies:
        """The views of the pieces in the messages of all ranks, and those in the full buffers."""
        there, here = [], []
        for plan, full, section in zip(self._plans, self._fulls, self.sections(messages), strict=True):
            for piece in plan.pieces_of_all(self._nbytes // full.itemsize):
                if with_kept or not piece.is_kept:
                    there.append(piece.of_shard(section))
                    here.append(piece.of_full(full))
        return there, here

    def in_shards(self, shards: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The shards as one message of bytes, if they lie in memory as sections do in one."""
        first, *_ = shards
        origin = first.storage_offset() * first.itemsize
        for shard, start in zip(shards, self._starts, strict=True):
            if storage_id(shard) != storage_id(first) or shard.storage_offset() * shard.itemsize != origin + start:
                return None
        is_inside = origin + self._nbytes <= first.untyped_storage().nbytes()
        return Lease(first).view(torch.uint8, 0, (self._nbytes,)) if is_inside else None


@dataclass(frozen=True)
class _Call:
    """The tensors of one call of a collective.

    Args:
        before: copies before it.
        input: what it reads.
        output: what it writes; ``None`` for the shard itself.
        after: copies after a gather.
        reduced: after a reduction, the index of each shard and its part of ``output``.
    """

    before: Copies
    input: torch.Tensor
    output: torch.Tensor | None
    after: Copies = _NO_COPIES
    reduced: Sequence[tuple[int, torch.Tensor | None]] = ()


class _CollectiveRoute:
    """Collectives, and the memory that they work on beside the buffers: one for each dtype that is added up."""

    def __init__(
        self,
        direction: Direction,
        transfers: Sequence[Transfer],
        process_group: dist.ProcessGroup,
        comm: Comm | _Memory | None,
        wait: Wait,
    ) -> None:
        self._wait = wait
        self._gathers = direction == "gather"
        gathered = transfers if self._gathers else ()  # each reduction brings other shards
        self._transfers = [Transfer(plan, alias(full), alias(shard)) for plan, full, shard in gathered]
        members: dict[torch.dtype | None, list[int]] = {}
        for index, transfer in enumerate(transfers):
            members.setdefault(None if self._gathers else transfer.full.dtype, []).append(index)
        every = [_Messages(transfers, each, comm, not self._gathers) for each in members.values()]
        self._messages = [messages for messages in every if messages.numel]
        staging = []
        for messages in self._messages:
            staging += [] if messages.is_full else [(process_group.size() * messages.numel, messages.dtype)]
            staging += [] if messages.is_shard else [(messages.numel, messages.dtype)]
        self._numels, self._dtypes = [numel for numel, _ in staging], [dtype for _, dtype in staging]
        self._nbytes = starts(self._numels, self._dtypes)[-1] if comm is None else 0  # that we bring
        self._group, self._device, self._comm = process_group, transfers[0].full.device, comm
        self._bound: dict[int, list[_Call]] = {}
        self._reduction: Reduction | None = None
        self._collectives: list[tuple[Collective, Scaling]] = []  # one for each of the messages

    def start(self, shards: Sequence[torch.Tensor] = (), reduction: Reduction = PLAIN_SUM) -> Pending:
        lease = SHARED.lease(self._nbytes, self._device) if self._nbytes else NO_LEASE
        calls = self._bound.get(lease.index) or self._bind(lease)
        if reduction != self._reduction:
            self._choose(reduction)
        started: list[tuple[dist.Work | None, _Call, float]] = []
        for call, (collective, scaling) in zip(calls, self._collectives, strict=True):
            if call.before[0]:
                foreach_copy(*call.before)
            if scaling.before != 1:
                divide_(call.input, scaling.before)
            output, source = call.output, call.input
            if output is None:
                output = shards[call.reduced[0][0]]
            if source.dtype.is_complex:
                output, source = as_real(output), as_real(source)
            started += [(collective(output, source), call, scaling.after)]
        return _PendingCollectives(self._wait, started, shards, lease)

    def _choose(self, reduction: Reduction) -> None:
        """Choose the collectives, and how they divide: as a rule the same in every step."""
        group, by_host, comm = self._group, is_host(self._device), self._comm
        self._reduction, self._collectives = reduction, []
        for messages in self._messages:
            scaling, op = Scaling(), {}
            if not self._gathers:
                backend = backend_name(group, self._device)
                scaling = choose_scaling(messages.dtype, group.size(), *reduction, backend)
                op = {"op": scaling.op}
            if callable(comm):
                collective: Collective = partial(comm, group=group, async_op=by_host, **op)
            elif self._gathers:
                collective = all_gather_over(group, by_host)
            else:
                collective = reduce_scatter_over(group, scaling.op, by_host)
            if isinstance(comm, _Memory):
                collective = partial(comm.call, collective)
            self._collectives.append((collective, scaling))

    @torch.inference_mode(False)
    def _bind(self, lease: Lease) -> list[_Call]:
        """The calls in the memory of a lease, kept for the next time that it comes, or in that of the user's."""
        make = self._gather if self._gathers else self._reduce
        if self._comm is None or not self._numels:
            staging = iter(views(lease.view(torch.uint8, 0, (self._nbytes,)), self._numels, self._dtypes))
            calls = self._bound[lease.index] = [make(messages, staging) for messages in self._messages]
            return calls
        each = zip(self._numels, self._dtypes, strict=True)
        memory = (self._comm.allocate((numel,), dtype=dtype, device=self._device) for numel, dtype in each)
        return [make(messages, memory) for messages in self._messages]

    def _gather(self, messages: _Messages, memory: Iterator[torch.Tensor]) -> _Call:
        shards, rank = [transfer.shard for transfer in self._transfers], self._group.rank()
        if messages.is_full:
            return _Call(_NO_COPIES, shards[0].view(torch.uint8), messages.full)
        before, output = _NO_COPIES, next(memory)
        source = messages.in_shards(shards) if self._comm is None else None
        if source is None:
            source = output[rank * messages.numel : (rank + 1) * messages.numel]
            before = list(messages.sections(source)), shards
        there, here = messages.pieces(output, with_kept=False)
        for plan, full, shard in self._transfers:
            kept = [piece for piece in plan.pieces(rank) if piece.is_kept]
            there += [piece.of_shard(shard) for piece in kept]
            here += [piece.of_full(full) for piece in kept]
        return _Call(before, source, output, (here, there))

    def _reduce(self, messages: _Messages, memory: Iterator[torch.Tensor]) -> _Call:
        source = messages.full if messages.is_full else next(memory)
        before = _NO_COPIES if messages.is_full else messages.pieces(source, with_kept=True)
        output = None if messages.is_shard else next(memory)
        parts = (None,) if output is None else messages.sections(output)
        return _Call(before, source, output, reduced=tuple(zip(messages.members, parts, strict=True)))


@dataclass(eq=False, slots=True)
class _PendingCollectives:
    """Collectives on their way: each its work, its tensors, and by what the result is still to be divided."""

    wait: Wait
    started: Sequence[tuple[dist.Work | None, _Call, float]]
    shards: Sequence[torch.Tensor]
    lease: Lease

    def finish(self) -> None:
        WAITS.current = self.wait
        WAITS.count += 1
        try:
            for work, _, _ in self.started:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise lost(self.wait, "another rank", error) from error
        finally:
            WAITS.current = None
        for _, call, divisor in self.started:
            if call.after[0]:
                foreach_copy(*call.after)
            for index, part in call.reduced:
                shard = self.shards[index]
                if part is not None and part.itemsize >= shard.itemsize:  # divided in the dtype that has more bits
                    divide_(part, divisor)
                    shard.copy_(part)
                    continue
                if part is not None:
                    shard.copy_(part)
                divide_(shard, divisor)
        if self.lease is not NO_LEASE:
            SHARED.give_back(self.lease)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: not every backend moves and adds them as they are."""
    return tensor.view(tensor.dtype.to_real()) if tensor.is_complex() else tensor


class _Memory(NamedTuple):
    """Memory for the backend's own collectives; ``make_known`` tells the other ranks of tensors before their use."""

    allocate: Callable[..., torch.Tensor]
    make_known: Callable[..., object] = lambda *_: None

    def call(self, collective: Collective, output: torch.Tensor, source: torch.Tensor) -> dist.Work | None:
        self.make_known(output, source)
        return collective(output, source)


def process_group_memory(group: Any) -> CollectiveTransport:
    """Collectives in memory that ``group`` allocates; its backend must have an allocator for the device."""

    def allocate(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend = allocating_backend(group, device)
        assert backend is not None, f"{group} has no allocator for {device}"
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(tuple(size))

    memory = _Memory(allocate)
    return CollectiveTransport(memory, memory)


def symmetric_memory(group: Any, backend: str = "NCCL") -> CollectiveTransport:
    """Collectives in symmetric memory of ``backend``.

    Raises:
        ValueError: another backend than NCCL.
    """
    if backend != "NCCL":
        raise ValueError(f"symmetric memory is supported with the NCCL backend, got {backend!r}")
    known: set[int] = set()

    def allocate(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symm_mem.get_mem_pool(device)):
            return torch.empty(tuple(size), dtype=dtype, device=device)

    def make_known(*tensors: torch.Tensor) -> None:
        """Every rank makes its memory known to the others, once for each piece."""
        for tensor in tensors:
            place = tensor.untyped_storage().data_ptr()
            if place not in known:
                symm_mem.rendezvous(tensor, group=group)
                known.add(place)

    memory = _Memory(allocate, make_known)
    return CollectiveTransport(memory, memory)
