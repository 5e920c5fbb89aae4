"""The native collectives, on any backend and device: the reference for all transports.

Owns the copies between buffers and the one tensor that a collective wants, with the *messages* of all ranks end to end.
A message is the sections of a shard end to end. Where the full buffer is such a tensor already, as in the *flat*
layout, one transfer moves without a copy. So does each *straight* parameter, beside the messages: NCCL takes all in one
call, other backends one after the other. Everything else is staged, so that one gather serves sections of several
dtypes as bytes (a reduction: one for each dtype)::

    shard of rank r    a_r | b_r                            two sections, the message of rank r
    staging            a_0 b_0 | a_1 b_1 | a_2 b_2          rank-major
    full buffers       a_0 a_1 a_2     b_0 b_1 b_2          parameter-major

The copies between the last two are the pieces of the plans: few, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.buffer.sections import starts, views
from fullshard.buffer.slots import NO_LEASE, SHARED, Lease
from fullshard.comm.backend_memory import BackendMemory
from fullshard.comm.process_group import backend_name
from fullshard.comm.sums import Scaling, choose_scaling, divide_
from fullshard.comm.transport import PLAIN_SUM, Copies, Direction, Reduction, Request, Route, Transfer, Transport, alias
from fullshard.comm.waits import WAITS, Wait, comes_from_backend, lost
from fullshard.device import Pending, is_host
from fullshard.policies import AllGather, Comm, ReduceScatter
from fullshard.torch_private import (
    Collective,
    Collectives,
    all_gather_over,
    foreach_copy,
    reduce_scatter_over,
    storage_id,
)

_LARGEST_ITEM = 16  # bytes: each rank's message begins where an element of any dtype may
#: Backends that launch several collectives as one. That of gloo copies what it is given.
_LAUNCHES_TOGETHER = ("nccl",)
_NO_COPIES: Copies = ([], [])
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

    def launches_together(self, process_group: dist.ProcessGroup | None, device: torch.device) -> bool:
        return process_group is not None and backend_name(process_group, device) in _LAUNCHES_TOGETHER

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._all_gather is not None:
            return self._all_gather.allocate((nbytes,), dtype=torch.uint8, device=device)
        return super().allocate(nbytes, device)

    def _route(self, request: Request) -> Route:
        """The order of calls is enough: ``tag`` is only for errors."""
        direction, transfers, process_group, tag = request
        gathers = direction == "gather"
        comm = self._all_gather if gathers else self._reduce_scatter
        wait = Wait("an all-gather" if gathers else "a reduce-scatter", process_group, tag, gathers)
        return _CollectiveRoute(direction, transfers, process_group, comm, wait)


class _Straight(NamedTuple):
    """A straight parameter in a route."""

    transfer: int
    part: int  # of those into which the plan cuts a shard
    numel: int  # of a rank
    number: int  # among those of all transfers
    full: torch.Tensor | None  # where it lies whole; ``None`` if each reduction brings it
    casts: bool  # whether it is reduced in another dtype than that of the shard


class _Messages:
    """The messages of all ranks that one collective moves: those of some ``members`` of the transfers.

    The user's ``comm`` allocates what it works on; any other may work on the buffers themselves. What is not added up
    moves as bytes, also in dtypes that a backend lacks.

    Attributes:
        dtype: what the collective sees.
        numel: elements of one message; a user's collective has the straight parameters in it too.
        is_full: whether the full buffer is the messages of all ranks end to end, and no copy is needed.
        is_shard: whether this rank's message needs no memory beside the shard and those of all ranks.
        own_bytes: of this rank in all that moves.
        straight: what moves beside the messages.
    """

    def __init__(
        self, transfers: Sequence[Transfer], members: Sequence[int], comm: Comm | BackendMemory | None, reduces: bool
    ) -> None:
        self.members = members
        self._plans = [transfers[i].plan.packed if comm is None else transfers[i].plan for i in members]
        self._fulls = [alias(transfers[i].full) for i in members]
        self._numels = [plan.shard_numel for plan in self._plans]
        self._dtypes = [full.dtype for full in self._fulls]
        *self._starts, _ = starts(self._numels, self._dtypes)
        self._nbytes = self._starts[-1] + self._numels[-1] * self._dtypes[-1].itemsize
        self.dtype = self._dtypes[0]
        is_alone = comm is None and len(members) == 1
        self.is_full = is_alone and self._plans[0].is_rank_major
        if (comm is None and not reduces) or len(set(self._dtypes)) > 1:
            self.dtype = torch.uint8
            self._nbytes += 0 if self.is_full else -self._nbytes % _LARGEST_ITEM
        self.numel = self._nbytes // self.dtype.itemsize
        self.is_shard = not reduces or (is_alone and transfers[members[0]].shard.dtype == self._dtypes[0])
        self.straight: list[_Straight] = []
        before = accumulate((len(transfer.plan.straight) for transfer in transfers), initial=0)
        for index, (first, (plan, full, shard)) in enumerate(zip(before, transfers, strict=False)):
            for at, i in enumerate(plan.straight if comm is None and index in members else ()):
                numel, start, casts = plan.params[i].numel, plan.full_offsets[i], full.dtype != shard.dtype
                place = None if plan.is_messages else alias(full)[start : start + numel]
                part = len(plan.cuts) - len(plan.straight) + at
                self.straight.append(_Straight(index, part, numel // plan.world_size, first + at, place, casts))
        straight = (each.numel * transfers[each.transfer].full.itemsize for each in self.straight)
        self.own_bytes = self._nbytes + sum(straight)

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

    def rows(self, messages: torch.Tensor) -> tuple[torch.Tensor, list[int], list[torch.Tensor]] | None:
        """The messages of all ranks as rows, into which parts they fall, and where in the full buffer each of these is
        a row for each rank; ``None`` unless every parameter is the chunks of all ranks end to end."""
        plan, full = self._plans[0], self._fulls[0]
        if len(self._plans) > 1 or plan.layout != "even" or not all(map(plan.is_whole, plan.params)):
            return None
        sizes, places, pitch = list[int](), list[torch.Tensor](), self._nbytes // full.itemsize
        for param, start, at in zip(plan.params, plan.full_offsets, plan.shard_offsets, strict=True):
            for gap in [at - sum(sizes)] if at > sum(sizes) else []:
                sizes.append(gap)
                places.append(full.new_empty(plan.world_size, gap))
            sizes.append(param.numel // plan.world_size)
            places.append(full[start : start + param.numel].view(plan.world_size, -1))
        if sum(sizes) < pitch:
            places.append(full.new_empty(plan.world_size, pitch - sum(sizes)))
            sizes.append(pitch - sum(sizes))
        return messages.view(full.dtype).view(plan.world_size, pitch), sizes, places

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
        members: the transfers that it serves.
        before: copies before it.
        inputs: what it reads; a number is that of a straight parameter that the start brings.
        outputs: what it writes; a number is that of a *place*.
        after: copies after a gather.
        reduced: after a reduction, places and what is copied to them, or ``None`` where they are written already.
        is_single: whether it has one input and one output. Then places are the shards, and otherwise their parts.
    """

    members: Sequence[int]
    before: Copies
    inputs: list[Any]
    outputs: list[Any]
    after: Callable[[], object] | None
    reduced: Sequence[tuple[int, torch.Tensor | None]]
    is_single: bool


#: For one tensor, for several in one call if the backend takes them, and how both divide.
_Chosen = tuple[Collective, Collectives | None, Scaling]
#: What is waited for, a call, its places, and by what its result is still to be divided.
_Started = tuple[Sequence[dist.Work | None], _Call, Sequence[torch.Tensor], float]


class _CollectiveRoute:
    """Collectives, and the memory that they work on beside the buffers: one for each dtype that is added up."""

    def __init__(
        self,
        direction: Direction,
        transfers: Sequence[Transfer],
        process_group: dist.ProcessGroup,
        comm: Comm | BackendMemory | None,
        wait: Wait,
    ) -> None:
        self._wait = wait
        self._gathers = direction == "gather"
        gathered = transfers if self._gathers else ()  # each reduction brings other shards
        self._transfers = [Transfer(plan, alias(full), alias(shard)) for plan, full, shard in gathered]
        self._cuts = [transfer.plan.cuts for transfer in transfers]
        members: dict[torch.dtype | None, list[int]] = {}
        for index, transfer in enumerate(transfers):
            members.setdefault(None if self._gathers else transfer.full.dtype, []).append(index)
        every = [_Messages(transfers, each, comm, not self._gathers) for each in members.values()]
        self._messages = [messages for messages in every if messages.numel or messages.straight]
        staging = []
        for messages in self._messages:
            if messages.numel:
                staging += [] if messages.is_full else [(process_group.size() * messages.numel, messages.dtype)]
                staging += [] if messages.is_shard else [(messages.numel, messages.dtype)]
            staging += [(each.numel, messages.dtype) for each in messages.straight if each.casts and not self._gathers]
        self._numels, self._dtypes = [numel for numel, _ in staging], [dtype for _, dtype in staging]
        self.staging = starts(self._numels, self._dtypes)[-1] if comm is None else 0  # that we bring
        self._group, self._device, self._comm = process_group, transfers[0].full.device, comm
        is_gloo = is_host(self._device) and dist.get_backend(process_group) == "gloo"
        self._adds_in_place = is_gloo and comm is None and not self._gathers
        own_bytes = sum(messages.own_bytes for messages in self._messages)
        self.sent = (1 + self._adds_in_place) * (process_group.size() - 1) * own_bytes
        self._bound: dict[int, list[_Call]] = {}
        self._reduction: Reduction | None = None
        self._collectives: list[_Chosen] = []  # one for each of the messages

    def start(
        self, shards: Sequence[torch.Tensor] = (), reduction: Reduction = PLAIN_SUM, *straight: torch.Tensor
    ) -> Pending:
        lease = SHARED.lease(self.staging, self._device) if self.staging else NO_LEASE
        pending = _PendingCollectives(self._wait, [], lease)
        try:
            calls = self._bound.get(lease.index) or self._bind(lease)
            if reduction != self._reduction:
                self._choose(reduction)
            for call, chosen in zip(calls, self._collectives, strict=True):
                if call.before[0]:
                    foreach_copy(*call.before)
                collective, together, scaling = chosen
                if not call.is_single:
                    outputs, inputs = call.outputs, call.inputs
                    places: Sequence[torch.Tensor] = ()
                    if not self._gathers:
                        places, outputs, inputs = self._place(call, scaling, shards, straight)
                    works: list[dist.Work | None] = []
                    pending.started += [(works, call, places, scaling.after)]
                    works += [together(outputs, inputs)] if together is not None else map(collective, outputs, inputs)
                    continue
                output, source = call.outputs[0], call.inputs[0]
                output = shards[output] if output.__class__ is int else output
                source = straight[source] if source.__class__ is int else source
                if scaling.before != 1:
                    divide_(source, scaling.before)
                if source.dtype.is_complex:
                    output, source = as_real(output), as_real(source)
                pending.started += [((collective(output, source),), call, shards, scaling.after)]
        except BaseException:
            with suppress(RuntimeError):
                pending.finish()  # what was started writes to the buffers
            raise
        return pending

    def _place(
        self, call: _Call, scaling: Scaling, shards: Sequence[torch.Tensor], straight: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """The places of a reduction of several tensors: parts of its shards, one whole. What it writes and reads."""
        places: list[torch.Tensor] = []
        for index in call.members:
            places += torch.unsafe_split_with_sizes(shards[index], self._cuts[index])
        places.append(shards[call.members[0]])
        outputs = [places[each] if isinstance(each, int) else each for each in call.outputs]
        inputs = [straight[each] if isinstance(each, int) else each for each in call.inputs]
        if scaling.before != 1:
            for source in inputs:
                divide_(source, scaling.before)
        return places, [*map(as_real, outputs)], [*map(as_real, inputs)]

    def _choose(self, reduction: Reduction) -> None:
        """Choose the collectives, and how they divide: as a rule the same in every step."""
        group, by_host, comm = self._group, is_host(self._device), self._comm
        backend = backend_name(group, self._device)
        self._reduction, self._collectives = reduction, []
        for messages in self._messages:
            scaling, op, together = Scaling(), {}, None
            if not self._gathers:
                scaling = choose_scaling(messages.dtype, group.size(), *reduction, backend)
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
            collective = collective if by_host else partial(_one_at_a_time, collective)
            self._collectives.append((collective, together if backend in _LAUNCHES_TOGETHER else None, scaling))

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

    def _gather(self, messages: _Messages, memory: Iterator[torch.Tensor]) -> _Call:
        shards, rank = [transfer.shard for transfer in self._transfers], self._group.rank()
        before = _NO_COPIES
        after: Callable[[], object] | None = None
        inputs: list[torch.Tensor | int] = []
        outputs: list[torch.Tensor | int] = []
        if messages.is_full:
            inputs, outputs = [shards[0].view(torch.uint8)], [messages.full]
        elif messages.numel:
            output = next(memory)
            source = messages.in_shards(shards) if self._comm is None else None
            if source is None:
                source = output[rank * messages.numel : (rank + 1) * messages.numel]
                sections = list(messages.sections(source))
                before = sections, [shard[: part.numel()] for shard, part in zip(shards, sections, strict=True)]
            there, here = messages.pieces(output, with_kept=False)
            for plan, full, shard in self._transfers:
                kept = [piece for piece in plan.pieces(rank) if piece.is_kept]
                there += [piece.of_shard(shard) for piece in kept]
                here += [piece.of_full(full) for piece in kept]
            inputs, outputs, after = [source], [output], partial(foreach_copy, here, there) if here else None
            if len(here) > _MANY_COPIES and self._comm is None and (rows := messages.rows(output)) is not None:
                after = partial(torch.split_with_sizes_copy, *rows[:2], dim=1, out=rows[2])
        for each in messages.straight:
            assert each.full is not None
            chunk = shards[each.transfer].split(self._cuts[each.transfer])[each.part]
            inputs.append(chunk.view(torch.uint8))
            outputs.append(each.full.view(torch.uint8))
        return _Call(messages.members, before, inputs, outputs, after, (), len(inputs) == 1)

    def _reduce(self, messages: _Messages, memory: Iterator[torch.Tensor]) -> _Call:
        before = _NO_COPIES
        inputs: list[torch.Tensor | int] = []
        outputs: list[torch.Tensor | int] = []
        reduced: list[tuple[int, torch.Tensor | None]] = []
        is_single = (messages.numel > 0) + len(messages.straight) == 1
        numbers = [(index, part) for index in messages.members for part in range(len(self._cuts[index]))]
        number = {each: each[0] if is_single else at for at, each in enumerate(numbers)}
        if messages.numel:
            source = messages.full if messages.is_full else next(memory)
            before = before if messages.is_full else messages.pieces(source, with_kept=True)
            inputs, outputs = [source], [number[messages.members[0], 0]]
            if not messages.is_shard:
                outputs = [output := next(memory)]
                parts = zip(messages.members, messages.sections(output), strict=True)
                reduced = [(number[index, 0], part) for index, part in parts if part.numel()]
        for each in messages.straight:
            place = number[each.transfer, each.part]
            staged = next(memory) if each.casts else None
            inputs.append(each.number if each.full is None else each.full)
            outputs.append(place if staged is None else staged)
            reduced.append((place, staged))
        if messages.is_shard:  # all of it is written in place, and divided at once
            reduced = [(messages.members[0] if is_single else len(numbers), None)]
        return _Call(messages.members, before, inputs, outputs, None, reduced, is_single)


@dataclass(eq=False, slots=True)
class _PendingCollectives:
    """Collectives on their way."""

    wait: Wait
    started: list[_Started]
    lease: Lease

    def finish(self) -> None:
        WAITS.current = self.wait
        WAITS.count += 1
        try:
            for works, _, _, _ in self.started:
                for work in works:
                    if work is not None:
                        work.wait()
        except RuntimeError as error:
            if not comes_from_backend(error):
                raise
            raise lost(self.wait, "another rank", error) from error
        finally:
            WAITS.current = None
        for _, call, places, divisor in self.started:
            if call.after is not None:
                call.after()
            moved = [(places[number], part) for number, part in call.reduced if part is not None]
            for place, part in moved:
                if part.itemsize >= place.itemsize:  # divided in the dtype that has more bits
                    divide_(part, divisor)
            if moved:
                foreach_copy([place for place, _ in moved], [part for _, part in moved])
            for number, staged in call.reduced:
                if staged is None or staged.itemsize < places[number].itemsize:
                    divide_(places[number], divisor)
        if self.lease is not NO_LEASE:
            SHARED.give_back(self.lease)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: not every backend moves and adds them as they are."""
    return tensor.view(tensor.dtype.to_real()) if tensor.is_complex() else tensor


def _one_at_a_time(collective: Collective, output: torch.Tensor, source: torch.Tensor) -> None:
    """Start a collective on a device, and let its stream wait: not every backend tells several that run apart."""
    if (work := collective(output, source)) is not None:
        work.wait()


class _SumInPlace(dist.Work):
    """A reduce-scatter of gloo, which is an all-reduce of a copy of the ``source``, without the copy."""

    def __init__(self, group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor) -> None:
        super().__init__()
        self._output, self._part = output, source.view(group.size(), *output.shape)[group.rank()]
        self._work = group.allreduce([source])

    def wait(self, *_: object) -> bool:
        self._work.wait()
        self._output.copy_(self._part)
        del self._work, self._part  # the memory of the source, before the next result takes some
        return True
