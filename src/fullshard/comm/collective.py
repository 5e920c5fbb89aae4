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
from typing import Any

import torch
import torch.distributed as dist

from fullshard.buffer.sections import starts, views
from fullshard.buffer.slots import NO_LEASE, SHARED, Lease
from fullshard.comm.process_group import backend_name, lost_in
from fullshard.comm.sums import Scaling, choose_scaling, divide_
from fullshard.comm.transport import Copies, GatherRoute, Nowhere, ReduceRoute, Reduction, Transfer, Transport, alias
from fullshard.device import Pending
from fullshard.policies import AllGather, Comm, ReduceScatter
from fullshard.torch_private import (
    Collective,
    all_gather_over,
    all_gather_single,
    allocating_backend,
    foreach_copy,
    reduce_scatter_over,
    reduce_scatter_single,
    storage_id,
    symm_mem,
)

_LARGEST_ITEM = 16  # bytes: each rank's message begins where an element of any dtype may


class CollectiveTransport(Transport):
    """Moves buffers by all-gather and reduce-scatter of the process group's backend, or by the user's own.

    Args:
        all_gather: replaces the backend's all-gather, and allocates what it reads and writes.
        reduce_scatter: replaces the backend's reduce-scatter, and allocates what it reads and writes.
    """

    name = "collective"

    def __init__(self, all_gather: AllGather | None = None, reduce_scatter: ReduceScatter | None = None) -> None:
        self._all_gather = all_gather
        self._reduce_scatter = reduce_scatter

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._all_gather is not None:
            return self._all_gather.allocate((nbytes,), dtype=torch.uint8, device=device)
        return super().allocate(nbytes, device)

    def _gather_route(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> GatherRoute:
        """The order of calls is enough, ``tag`` is not used."""
        if not any(transfer.shard.numel() for transfer in transfers):
            return Nowhere()
        return _AllGatherRoute(transfers, process_group, self._all_gather)

    def _reduce_route(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> ReduceRoute:
        """The order of calls is enough, ``tag`` is not used."""
        return _ReduceScatterRoute(transfers, process_group, self._reduce_scatter)


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

    def __init__(self, transfers: Sequence[Transfer], members: Sequence[int], comm: Comm | None, reduces: bool) -> None:
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
        members: which of the transfers it serves.
        before: copies before it.
        input: what it reads.
        output: what it writes; ``None`` for the shard of the only member itself.
        after: makes the copies after a gather.
        parts: the parts of ``output`` that are reduced for each member.
    """

    members: Sequence[int]
    before: Copies
    input: torch.Tensor
    output: torch.Tensor | None
    after: Callable[[], object] | None = None
    parts: Sequence[torch.Tensor] = ()


class _Route:
    """Collectives, one for each of ``messages``, and the memory that they work on beside the buffers."""

    def __init__(
        self,
        messages: Sequence[_Messages],
        process_group: dist.ProcessGroup,
        device: torch.device,
        comm: Comm | None,
    ) -> None:
        self._messages = messages
        staging = []
        for each in messages:
            staging += [] if each.is_full else [(process_group.size() * each.numel, each.dtype)]
            staging += [] if each.is_shard else [(each.numel, each.dtype)]
        self._numels, self._dtypes = [numel for numel, _ in staging], [dtype for _, dtype in staging]
        self._nbytes = starts(self._numels, self._dtypes)[-1] if comm is None else 0  # that we bring
        self._group = process_group
        self._device = device
        self._is_host = device.type == "cpu"
        self._comm = comm
        self._bound: dict[int, list[_Call]] = {}

    @torch.inference_mode(False)
    def _bind(self, lease: Lease) -> list[_Call]:
        """The calls in the memory of a lease, kept for the next time that it comes, or in that of the user's."""
        if self._comm is not None and self._numels:
            each = zip(self._numels, self._dtypes, strict=True)
            memory = [self._comm.allocate((numel,), dtype=dtype, device=self._device) for numel, dtype in each]
            return self._make(iter(memory))
        staging = views(lease.view(torch.uint8, 0, (self._nbytes,)), self._numels, self._dtypes)
        calls = self._bound[lease.index] = self._make(iter(staging))
        return calls

    def _make(self, memory: Iterator[torch.Tensor]) -> list[_Call]:
        """The calls; ``memory`` has the pieces of staging."""
        raise NotImplementedError


class _AllGatherRoute(_Route):
    def __init__(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, comm: AllGather | None) -> None:
        messages = _Messages(transfers, range(len(transfers)), comm, reduces=False)
        super().__init__([messages], process_group, transfers[0].full.device, comm)
        self._transfers = [Transfer(plan, alias(full), alias(shard)) for plan, full, shard in transfers]
        self._collective: Collective = all_gather_over(process_group, self._is_host)
        if comm is not None:
            self._collective = partial(comm, group=process_group, async_op=self._is_host)

    def start(self) -> Pending:
        lease = SHARED.lease(self._nbytes, self._device) if self._nbytes else NO_LEASE
        (call,) = self._bound.get(lease.index) or self._bind(lease)
        assert call.output is not None
        if call.before[0]:
            foreach_copy(*call.before)
        work = self._collective(call.output, call.input)
        return _PendingCollectives("an all-gather", [(work, call)], call.after, lease)

    def _make(self, memory: Iterator[torch.Tensor]) -> list[_Call]:
        (messages,), shards, rank = self._messages, [transfer.shard for transfer in self._transfers], self._group.rank()
        before: Copies = ([], [])
        if messages.is_full:
            return [_Call(messages.members, before, shards[0].view(torch.uint8), messages.full)]
        output = next(memory)
        source = messages.in_shards(shards) if self._comm is None else None
        if source is None:
            source = output[rank * messages.numel : (rank + 1) * messages.numel]
            before = list(messages.sections(source)), shards
        there, here = messages.pieces(output, with_kept=False)
        for plan, full, shard in self._transfers:
            kept = [piece for piece in plan.pieces(rank) if piece.is_kept]
            there += [piece.of_shard(shard) for piece in kept]
            here += [piece.of_full(full) for piece in kept]
        after = partial(foreach_copy, here, there) if here else None
        return [_Call(messages.members, before, as_real(source), as_real(output), after)]


class _ReduceScatterRoute(_Route):
    """Of the shards of ``transfers`` only the dtype matters: each start brings others."""

    def __init__(
        self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, comm: ReduceScatter | None
    ) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, transfer in enumerate(transfers):
            by_dtype.setdefault(transfer.full.dtype, []).append(index)
        sent = [_Messages(transfers, members, comm, reduces=True) for members in by_dtype.values()]
        sent = [messages for messages in sent if messages.numel]
        super().__init__(sent, process_group, transfers[0].full.device, comm)
        self._size, self._backend = process_group.size(), backend_name(process_group, self._device)
        self._collective: Callable[..., Any] | None = comm
        self._reduction: Reduction | None = None
        self._scaled: list[tuple[Scaling, Collective]] = []  # for each of the messages, how it is reduced

    def _scale(self, reduction: Reduction) -> None:
        """Choose how values are divided, as a rule the same in every step."""
        self._reduction, self._scaled = reduction, []
        for messages in self._messages:
            scaling = choose_scaling(messages.dtype, self._size, *reduction, self._backend)
            collective: Collective = reduce_scatter_over(self._group, scaling.op, self._is_host)
            if self._collective is not None:
                collective = partial(self._collective, op=scaling.op, group=self._group, async_op=self._is_host)
            self._scaled.append((scaling, collective))

    def start(self, shards: Sequence[torch.Tensor], reduction: Reduction) -> Pending:
        lease = SHARED.lease(self._nbytes, self._device) if self._nbytes else NO_LEASE
        calls = self._bound.get(lease.index) or self._bind(lease)
        if reduction != self._reduction:
            self._scale(reduction)
        started = []
        for call, (scaling, collective) in zip(calls, self._scaled, strict=True):
            if call.before[0]:
                foreach_copy(*call.before)
            if scaling.before != 1:
                divide_(call.input, scaling.before)
            output = shards[call.members[0]] if call.output is None else call.output
            source = call.input
            if source.dtype.is_complex:
                output, source = as_real(output), as_real(source)
            started.append((collective(output, source), call, scaling))
        return _PendingCollectives("a reduce-scatter", started, partial(_divide, started, shards), lease)

    def _make(self, memory: Iterator[torch.Tensor]) -> list[_Call]:
        calls = []
        for messages in self._messages:
            source = messages.full if messages.is_full else next(memory)
            before: Copies = ([], []) if messages.is_full else messages.pieces(source, with_kept=True)
            output = None if messages.is_shard else next(memory)
            parts = () if output is None else messages.sections(output)
            calls.append(_Call(messages.members, before, source, output, parts=parts))
        return calls


@dataclass(eq=False, slots=True)
class _PendingCollectives:
    """Collectives on their way, ``started`` as tuples that begin with their works, and what follows them."""

    what: str
    started: Sequence[tuple[Any, ...]]
    complete: Callable[[], object] | None
    lease: Lease

    def finish(self) -> None:
        for work, *_ in self.started:
            if work is not None:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise lost_in(self.what, error) from error
        if self.complete is not None:
            self.complete()
        if self.lease is not NO_LEASE:
            SHARED.give_back(self.lease)


def _divide(started: Sequence[tuple[object, _Call, Scaling]], shards: Sequence[torch.Tensor]) -> None:
    """Copy what was reduced to its shards, and divide it in the dtype that has more bits."""
    for _, call, scaling in started:
        if call.output is None:
            divide_(shards[call.members[0]], scaling.after)
        for member, part in zip(call.members, call.parts, strict=False):
            shard = shards[member]
            if part.itemsize < shard.itemsize:
                shard.copy_(part)
                divide_(shard, scaling.after)
            else:
                divide_(part, scaling.after)
                shard.copy_(part)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: not every backend moves and adds them as they are."""
    return tensor.view(tensor.dtype.to_real()) if tensor.is_complex() else tensor


def process_group_memory(group: Any) -> CollectiveTransport:
    """Collectives in memory that ``group`` allocates; its backend must have an allocator for the device."""

    def allocate(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend = allocating_backend(group, device)
        assert backend is not None, f"{group} has no allocator for {device}"
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(tuple(size))

    return CollectiveTransport(_GatherIn(allocate), _ReduceIn(allocate))


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
            if tensor.data_ptr() not in known:
                symm_mem.rendezvous(tensor, group=group)
                known.add(tensor.data_ptr())

    return CollectiveTransport(_GatherIn(allocate, make_known), _ReduceIn(allocate, make_known))


class _In(Comm):
    """A collective in memory that ``allocate`` makes; ``make_known`` tells the other ranks of tensors before use."""

    def __init__(
        self, allocate: Callable[..., torch.Tensor], make_known: Callable[..., None] = lambda *_: None
    ) -> None:
        self._allocate, self._make_known = allocate, make_known

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._allocate(size, dtype, device)


class _GatherIn(_In, AllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._make_known(output_tensor)
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceIn(_In, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._make_known(input_tensor, output_tensor)
        return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
