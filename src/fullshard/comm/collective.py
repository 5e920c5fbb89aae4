"""The native collectives, on any backend and device: the reference for all transports.

A collective moves one tensor, the messages of all ranks end to end, which :mod:`fullshard.buffer.messages` lays out.
Where the full buffer is such a tensor already, as in the *flat* layout, one transfer moves without a copy. So does each
*zero-copy* parameter, beside the messages: NCCL takes all in one call, other backends one after the other. Everything
else is staged, so that one gather serves sections of several dtypes as bytes (a reduction: one for each dtype).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.buffer.messages import Messages
from fullshard.buffer.sections import starts, views
from fullshard.buffer.slots import NO_LEASE, SHARED, Lease
from fullshard.comm.backend_memory import BackendMemory
from fullshard.comm.backends import backend_of
from fullshard.comm.encoded import Carrier, EncodedRoute
from fullshard.comm.sums import Scaling, choose_scaling, divide_
from fullshard.comm.transport import PLAIN_SUM, Ranks, Reduction, Request, Route, Shards, Transport, alias
from fullshard.comm.waits import WAITS, Wait, lost, wait_for_others, waiting
from fullshard.device import CPU, Done, Pending, is_host
from fullshard.policies import AllGather, Comm, ReduceScatter
from fullshard.torch_private import Collective, Collectives, all_gather_over, foreach_copy, reduce_scatter_over

#: Strided copies, each a kernel, from which one operation that cuts rows is better.
_MANY_COPIES = 3


class CollectiveTransport(Transport):
    """Moves buffers by all-gather and reduce-scatter of the process group's backend, or by the user's own, which
    allocate what they read and write."""

    name = "collective"
    ends_processes = True

    def __init__(
        self,
        all_gather: AllGather | BackendMemory | None = None,
        reduce_scatter: ReduceScatter | BackendMemory | None = None,
    ) -> None:
        self._all_gather = all_gather
        self._reduce_scatter = reduce_scatter
        self.takes_messages = reduce_scatter is None
        self.registers_memory = all_gather is not None
        self.is_custom = callable(all_gather) or callable(reduce_scatter)

    def launches_together(self, over: Ranks, device: torch.device) -> bool:
        return over is not None and backend_of(over, device).launches_together

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._all_gather is not None:
            return self._all_gather.allocate((nbytes,), dtype=torch.uint8, device=device)
        return super().allocate(nbytes, device)

    def _route(self, request: Request) -> Route:
        if request.wire is not None:
            return EncodedRoute(request, _CollectiveCarrier)
        return _CollectiveRoute(request, self._all_gather if request.direction == "gather" else self._reduce_scatter)


class HookTransport(Transport):
    """Reduces each section by a communication hook of the user, which itself compresses, sums and divides."""

    name = "hook"

    def __init__(self, hook: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        self._hook = hook

    def _route(self, request: Request) -> Route:
        return _HookRoute(self._hook, request)


class _HookRoute:
    staging = 0

    def __init__(self, hook: Callable[[torch.Tensor, torch.Tensor], object], request: Request) -> None:
        self._hook, self._fulls = hook, [transfer.full for transfer in request.transfers]
        self._wait = "a reduction by a hook", request.process_group, request.tag
        size = request.process_group.size()
        self.sent = sum(full.nbytes // size * (size - 1) for full in self._fulls)  # assumed: a reduce-scatter

    def start(self, shards: Shards = (), *_: object) -> Pending:
        with waiting(*self._wait):
            for full, shard in zip(self._fulls, shards, strict=True):
                # Compressing hooks replace the data of their arguments. Give them aliases: our views are used again.
                reduced = torch.empty(shard.shape, dtype=full.dtype, device=full.device)
                self._hook(full.detach(), reduced)
                shard.copy_(reduced)
        return Done()


class _CollectiveCarrier(Carrier):
    """Encoded messages that travel in one collective: an all-gather, or an all-to-all and a local sum. Ranks start
    their collectives in one order."""

    def close(self) -> None:
        memory, group, by_host = self.memory, self.process_group, is_host(self.memory.all_received.device)
        received, sent = (list(map(torch.Tensor.numel, each)) for each in (memory.received, memory.sent))
        with waiting(*self.waits_for):
            if self.waits_for.gathers:
                self._work = all_gather_over(group, by_host)[0](memory.all_received, memory.sent[group.rank()])
            else:
                given = memory.all_received, memory.all_sent, received, sent, group
                self._work = dist.all_to_all_single(*given, async_op=by_host)

    def wait(self) -> None:
        with waiting(*self.waits_for):
            if self._work is not None:
                self._work.wait()


class _Call(NamedTuple):
    """The tensors of one call of a collective. A *target* is a shard or, if there are several outputs, a part."""

    before: Callable[[], object] | None  # copies before it, if any
    inputs: list[Any]  # what it reads; a number is that of a zero-copy parameter that the start brings
    outputs: list[Any]  # what it writes; a number is that of a target
    after: Callable[[], object] | None  # copies after a gather
    #: After a reduction, targets and what is copied to them, or ``None`` where they are written already.
    reduced: Sequence[tuple[int, torch.Tensor | None]]


class _CollectiveRoute:
    """Collectives, and the memory that they work on beside the buffers: one for each dtype that is added up."""

    def __init__(self, request: Request, comm: Comm | BackendMemory | None) -> None:
        direction, transfers, process_group, tag, *_ = request
        self._gathers, self._comm = direction == "gather", comm
        what = "an all-gather" if self._gathers else "a reduce-scatter"
        self._wait = Wait(what, process_group, tag, self._gathers)  # the tag is for errors: calls match by their order
        #: The user's collectives see one tensor, with the zero-copy parameters in it.
        self._plans = [each.plan if comm is None else replace(each.plan, zero_copy=()) for each in transfers]
        self._fulls = [alias(transfer.full) for transfer in transfers]
        self._shards = [alias(transfer.shard) for transfer in transfers if self._gathers]  # reductions bring others
        #: For each transfer, whether reduced values are copied to the shard after the collective.
        self._casts = [comm is not None or full.dtype != shard.dtype for _, full, shard in transfers]
        dtypes = [full.dtype for full in self._fulls]
        kinds = [None] * len(dtypes) if self._gathers else dtypes
        every_members = ([i for i, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds))
        as_bytes = comm is None and self._gathers  # what is not added up, also in dtypes that a backend lacks
        every = [Messages(self._plans, dtypes, members, as_bytes) for members in every_members]
        self._messages = [messages for messages in every if messages.numel or messages.zero_copy]
        staging = []
        for messages in self._messages:
            if messages.numel and not (comm is None and messages.is_full):
                staging.append((process_group.size() * messages.numel, messages.dtype))
            if messages.numel and not self._is_shard(messages):
                staging.append((messages.numel, messages.dtype))
            staging += [(each.numel, messages.dtype) for each in messages.zero_copy if self._casts[each.section]]
        self._numels, self._dtypes = [numel for numel, _ in staging], [dtype for _, dtype in staging]
        self.staging = starts(self._numels, self._dtypes)[-1] if comm is None else 0  # that we bring
        self._group, self._device = process_group, transfers[0].full.device
        sums_all = is_host(self._device) and backend_of(process_group, CPU).sums_all  # also for routes on meta
        self._adds_in_place = sums_all and comm is None and not self._gathers
        own_bytes = sum(messages.own_bytes for messages in self._messages)
        self.sent = (1 + self._adds_in_place) * (process_group.size() - 1) * own_bytes
        self._bound: dict[int, list[_Call]] = {}
        self._reduction: Reduction | None = None
        #: For each of the messages: the collective, one for all tensors at once if there is any, and the scaling.
        self._collectives: list[tuple[Collective, Collectives | None, Scaling]] = []

    def start(self, shards: Shards = (), reduction: Reduction = PLAIN_SUM, *zero_copy: torch.Tensor) -> Pending:
        lease = SHARED.lease(self.staging, self._device) if self.staging else NO_LEASE
        pending = _PendingCollectives(self._wait, [], [], lease)
        try:
            calls = self._bound[lease.index] if lease.index in self._bound else self._bind(lease)
            if reduction != self._reduction:
                self._choose(reduction)
            each_call = zip(calls, self._messages, self._collectives, strict=True)
            for call, messages, (collective, together, scaling) in each_call:
                if call.before is not None:
                    call.before()
                outputs, inputs, targets = call.outputs, call.inputs, shards
                if not self._gathers:
                    targets = shards if messages.is_single else messages.parts(shards)
                    outputs = [targets[each] if each.__class__ is int else each for each in outputs]
                    if zero_copy:
                        inputs = [zero_copy[each] if each.__class__ is int else each for each in inputs]
                    for source in inputs if scaling.before != 1 else ():
                        divide_(source, scaling.before)
                if inputs[0].dtype.is_complex:
                    outputs, inputs = [*map(as_real, outputs)], [*map(as_real, inputs)]
                pending.works += [together(outputs, inputs)] if together else map(collective, outputs, inputs)
                pending.started += [(call, targets, scaling.after)]
        except BaseException as error:
            wait_for_others(pending.works)
            if lease is not NO_LEASE:
                lease.give_back()
            if isinstance(error, RuntimeError):
                raise lost(self._wait, error) from error
            raise
        return pending

    def _choose(self, reduction: Reduction) -> None:
        """Choose the collectives, and how they divide: as a rule the same in every step."""
        group, by_host, comm = self._group, is_host(self._device), self._comm
        backend = backend_of(group, self._device)
        self._reduction, self._collectives = reduction, []
        for messages in self._messages:
            scaling, op, together = Scaling(), {}, None
            if not self._gathers:
                scaling = choose_scaling(messages.dtype, group.size(), *reduction, backend.divides)
                op = {"op": scaling.op}
            if callable(comm):
                collective: Collective = partial(comm, group=group, async_op=by_host, **op)
            elif self._gathers:
                collective, together = all_gather_over(group, by_host)
            elif self._adds_in_place:
                collective = partial(_SumInPlace, group)
            else:
                collective, together = reduce_scatter_over(group, scaling.op, by_host)
            if isinstance(comm, BackendMemory):
                collective = partial(comm.call, collective)
            collective = collective if by_host else partial(_one_at_a_time, self._wait, collective)
            is_launch = backend.launches_together and not messages.is_single
            self._collectives.append((collective, together if is_launch else None, scaling))

    @torch.inference_mode(False)
    def _bind(self, lease: Lease) -> list[_Call]:
        """The calls in the memory of a lease, kept for the next time that it comes, or in that of the user's."""
        make = self._gather if self._gathers else self._reduce
        if self._comm is None or not self._numels:
            staging = iter(views(lease.view(torch.uint8, 0, (self.staging,)), self._numels, self._dtypes))
            return self._bound.setdefault(lease.index, [make(messages, staging) for messages in self._messages])
        each = zip(self._numels, self._dtypes, strict=True)
        memory = (self._comm.allocate((numel,), dtype=dtype, device=self._device) for numel, dtype in each)
        return [make(messages, memory) for messages in self._messages]

    def _is_shard(self, messages: Messages) -> bool:
        """Whether this rank's message needs no memory beside the shard and those of all ranks."""
        first, *others = messages.members
        return self._gathers or not (others or self._casts[first])

    def _gather(self, messages: Messages, memory: Iterator[torch.Tensor]) -> _Call:
        shards, fulls, rank = self._shards, self._fulls, self._group.rank()
        before = None
        after: Callable[[], object] | None = None
        inputs, outputs = list[Any](), list[Any]()
        if messages.is_full and self._comm is None:
            inputs, outputs = [shards[0].view(torch.uint8)], [fulls[0].view(torch.uint8)]
        elif messages.numel:
            output = next(memory)
            source = messages.in_shards(shards) if self._comm is None else None
            if source is None:
                source = output[rank * messages.numel : (rank + 1) * messages.numel]
                sections = list(messages.sections(source))
                sources = [shard[: part.numel()] for shard, part in zip(shards, sections, strict=True)]
                before = partial(foreach_copy, sections, sources)
            there, here = messages.pieces(output, fulls, with_kept=False)
            for plan, full, shard in zip(self._plans, fulls, shards, strict=True):
                kept = [piece for piece in plan.pieces(rank) if piece.is_kept]
                there += [piece.of_shard(shard) for piece in kept]
                here += [piece.of_full(full) for piece in kept]
            inputs, outputs, after = [source], [output], partial(foreach_copy, here, there) if here else None
            if len(here) > _MANY_COPIES and self._comm is None:
                after = messages.cut(output, fulls[0]) or after
        for each in messages.zero_copy:
            inputs.append(shards[each.section][each.chunk].view(torch.uint8))
            outputs.append(fulls[each.section][each.whole].view(torch.uint8))
        return _Call(before, inputs, outputs, after, ())

    def _reduce(self, messages: Messages, memory: Iterator[torch.Tensor]) -> _Call:
        before: Callable[[], object] | None = None
        inputs, outputs, reduced = list[Any](), list[Any](), list[tuple[int, torch.Tensor | None]]()
        members, is_single = messages.members, messages.is_single
        fronts = members if is_single else range(len(members))
        if messages.numel:
            is_full = messages.is_full and self._comm is None
            source = self._fulls[members[0]] if is_full else next(memory)
            if not is_full:
                there, here = messages.pieces(source, self._fulls, with_kept=True)
                before = partial(foreach_copy, there, here) if here else None
                if len(here) > _MANY_COPIES and self._comm is None:
                    before = messages.join(source, self._fulls[members[0]]) or before
            inputs, outputs = [source], [fronts[0]]
            if not self._is_shard(messages):
                outputs = [output := next(memory)]
                parts = zip(fronts, messages.sections(output), strict=True)
                reduced = [(front, part) for front, part in parts if part.numel()]
        for at, each in enumerate(messages.zero_copy, start=len(members)):
            target = each.section if is_single else at
            staged = next(memory) if self._casts[each.section] else None
            inputs.append(each.number if each.whole is None else self._fulls[each.section][each.whole])
            outputs.append(target if staged is None else staged)
            reduced.append((target, staged))
        if self._is_shard(messages):  # all of it is written in place, and divided at once
            reduced = [(members[0] if is_single else -1, None)]
        return _Call(before, inputs, outputs, None, reduced)


@dataclass(eq=False, slots=True)
class _PendingCollectives:
    """Collectives on their way."""

    wait: Wait
    works: list[dist.Work | None]
    started: list[tuple[_Call, Sequence[torch.Tensor], float]]  # calls, their targets, and what still divides these
    lease: Lease

    def finish(self) -> None:
        WAITS.current, begin = self.wait, WAITS.clock() if WAITS.listeners else 0
        WAITS.count += 1
        try:
            for work in self.works:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise lost(self.wait, error, works=self.works) from error
        finally:
            WAITS.current = None
            if begin:
                WAITS.tell(self.wait, begin)
        for call, targets, divisor in self.started:
            if call.after is not None:
                call.after()
                continue
            copies = [(targets[number], staged) for number, staged in call.reduced if staged is not None]
            for target, staged in copies:
                if staged.itemsize >= target.itemsize:  # divided in the dtype that has more bits
                    divide_(staged, divisor)
            if copies:
                foreach_copy([target for target, _ in copies], [staged for _, staged in copies])
            for number, written in call.reduced:
                if written is None or written.itemsize < targets[number].itemsize:
                    divide_(targets[number], divisor)
        if self.lease is not NO_LEASE:
            self.lease.give_back()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: not every backend moves and adds them as they are."""
    return tensor.view(tensor.dtype.to_real()) if tensor.is_complex() else tensor


def _one_at_a_time(wait: Wait, collective: Collective, output: torch.Tensor, source: torch.Tensor) -> None:
    """Start a collective on a device, and let its stream wait for it: not every backend can tell apart several that run
    at once. With gloo, the host waits."""
    WAITS.current = wait
    WAITS.count += 1
    try:
        if (work := collective(output, source)) is not None:
            work.wait()
    finally:
        WAITS.current = None


class _SumInPlace(dist.Work):
    """A reduce-scatter by an all-reduce of the ``source`` in place. The backend's own would all-reduce a copy of it."""

    def __init__(self, group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor) -> None:
        super().__init__()
        self._output, self._part = output, source.view(group.size(), *output.shape)[group.rank()]
        self._work = group.allreduce([source])

    def wait(self, *_: object) -> bool:
        self._work.wait()
        self._output.copy_(self._part)
        del self._work, self._part  # the memory of the source, before the next result takes some
        return True
