"""Twins of a sharded model's units and groups, which train as these do and have no memory: all of it is on meta.

Owns the twins, and what stands for the rest of the world: a transport that moves nothing and has the bytes of the
original's routes, the streams of a device that is not there, and a disk that keeps nothing. A :class:`Listener` is told
what starts and what is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.buffer.plan import BufferPlan
from fullshard.buffer.sections import full_bytes
from fullshard.buffer.slots import NO_LEASE, Lease, OwnBuffer, Staging
from fullshard.comm.all_reduce import sum_route
from fullshard.comm.hosts import HostsTransport, halves_of_sum, peers_of
from fullshard.comm.local_ranks import LocalRanks
from fullshard.comm.transport import PLAIN_SUM, Reduction, Request, Route, Transfer, Transport
from fullshard.device import META, PLANNED, Pending, Streams, is_host
from fullshard.disk.file import DiskWork
from fullshard.disk.tensor import DiskTensor
from fullshard.group.context import GroupContext
from fullshard.group.full_buffer import FullBuffer, WholeBuffer
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import ShardedParameter
from fullshard.group.shard import ShardBuffer
from fullshard.policies import MixedPrecisionPolicy
from fullshard.schedule.unit import Unit
from fullshard.torch_private import make_dtensor, set_local

Action = Literal[
    "gather",
    "reduce",
    "all-reduce",
    "gather over replicas",
    "reduce over replicas",
    "wait",
    "compute",
    "wait-reduce",
]


class Event(NamedTuple):
    """One action of a rank in a step.

    Args:
        action: ``gather``, ``reduce``, ``all-reduce``, and a gather and a reduction over replicas start an exchange.
            ``wait`` waits for a gather, ``wait-reduce`` for a reduction. ``compute`` is the work of a group's modules.
        group: the position of the group in the model's facts.
        sent: bytes that this rank sends.
        ranks: the number of ranks that exchange; of hosts, where their ranks share memory.
        read: bytes that it reads of what other ranks of its host have written, where these share memory.
        during: the pass.
        by_host: bytes that all ranks of its host send to other hosts, where these share memory.
    """

    action: Action
    group: int
    sent: int = 0
    ranks: int = 1
    read: int = 0
    during: Literal["forward", "backward"] = "forward"
    by_host: int = 0


class Listener(Protocol):
    """Is told what the twins' transport does, and has the memory in which it does that."""

    staging: Staging
    groups: list[ParamGroup]  # the twins
    allocations: int  # counts what is allocated

    def started(self, exchange: Event, kept: Sequence[torch.Tensor] = ()) -> None: ...
    def leased(self, lease: Lease) -> None: ...
    def waited(self, exchange: Event) -> None: ...


class SilentTransport(Transport):
    """Takes the place of ``original`` for twins whose tags are their positions. It moves nothing."""

    def __init__(self, original: Transport, device: torch.device, listener: Listener) -> None:
        self.original, self.listener, self._computes_on = original, listener, device
        self._known: dict[object, tuple[int, int, int, int]] = {}  # of exchanges between hosts that are alike
        self.adds_up_first: list[SilentPending] = []  # reductions that hosts have not exchanged yet
        for name in (
            "name",
            "gradient_buffers",
            "takes_messages",
            "adds_in_fp32",
            "compares_reductions",
            "is_custom",
            "shares_all",
        ):
            setattr(self, name, getattr(original, name))
        self.registers_memory = original.registers_memory
        if original.private is not original:
            self._private = SilentTransport(original.private, device, listener)

    def launches_together(self, process_group: Any, device: torch.device) -> bool:
        return self.original.launches_together(process_group, self._computes_on)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self.listener.allocations += 1
        return super().allocate(nbytes, META)

    def _route(self, request: Request) -> Route:
        what: Action = request.direction
        over, data = request.process_group, self.listener.groups[request.tag].data
        if what == "reduce" and self.compares_reductions and self.original.shares_all:
            read = (over.size() - 1) * owned_bytes(request.transfers, [over.rank()])  # in the others' gradients
            return SilentRoute(self, Event(what, request.tag, ranks=over.size(), read=read))
        if data.shards_replicas and over is data.replicate_group:
            what = "gather over replicas" if what == "gather" else "reduce over replicas"
        return SilentRoute(self, *self._exchange(what, request))

    def _exchange(self, what: Action, request: Request) -> tuple[Event, tuple[int, ...]]:
        """What this rank sends and reads, and the staging of its messages."""
        original, transfers, over = self.original, request.transfers, request.process_group
        if not isinstance(original, HostsTransport):
            route = original.between(request)
            return Event(what, request.tag, route.sent, over.size()), (route.staging,)
        alike = tuple((nameless(plan), full.dtype, shard.dtype) for plan, full, shard in transfers)
        key = request.direction, request.wire and request.wire[:2], alike
        if key not in self._known:
            self._known[key] = self._between_hosts(original, request)
        sent, by_host, read, staging = self._known[key]
        return Event(what, request.tag, sent, original.peers.most + 1, read, by_host=by_host), (staging,)

    @staticmethod
    def _between_hosts(original: HostsTransport, request: Request) -> tuple[int, int, int, int]:
        """The bytes that this rank sends, that all ranks of its host send, and that it reads in their memory; those of
        the staging of its messages."""
        transfers, over = request.transfers, request.process_group
        local, sources = original.local_ranks, original.peers.sources
        routes = [
            original.private._route(request._replace(**_seen_by(member, request, local))) for member in local.members
        ]
        read = owned_bytes(transfers, [over.rank(), *sources])
        if request.direction == "gather":  # the rest of it
            read = sum(param.numel * full.itemsize for plan, full, _ in transfers for param in plan.params) - read
        else:
            read *= local.size - 1
        mine = routes[local.rank]
        return mine.sent, sum(each.sent for each in routes), read, mine.staging

    def sum_route(self, transfers: Sequence[Transfer], process_group: Any, tag: int) -> Route:
        size = process_group.size()
        if not self.compares_reductions:
            sent = sum_route(self.original.private, transfers, process_group, tag, self._computes_on).sent
            return SilentRoute(self, Event("all-reduce", tag, sent, size), is_sum=True)
        if isinstance(self.original, HostsTransport):
            halves = halves_of_sum(Request("reduce", transfers, process_group, tag))
            (one, staging), (other, more) = (self._exchange("reduce", each) for each in halves)
            both = {name: getattr(one, name) + getattr(other, name) for name in ("sent", "read", "by_host")}
            return SilentRoute(self, one._replace(**both, ranks=2 * one.ranks - 1), (*staging, *more), is_sum=True)
        nbytes = sum(plan.shard_numel * full.itemsize for plan, full, _ in transfers)
        return SilentRoute(self, Event("reduce", tag, read=2 * nbytes * (size - 1) // size), is_sum=True)


def nameless(plan: BufferPlan) -> BufferPlan:
    """A plan that is equal to those of groups whose parameters differ in their names only."""
    params = tuple(replace(param, name="") for param in plan.params)
    cuts = [replace(cut, param=param) for cut, param in zip(plan.cuts, params, strict=True)]
    return replace(plan, params=params, cuts=tuple(cuts))


def owned_bytes(transfers: Sequence[Transfer], ranks: Sequence[int]) -> int:
    """The bytes of full buffers that belong to some ranks."""
    return sum(plan.owned_numel(rank) * full.itemsize for plan, full, _ in transfers for rank in ranks)


def _seen_by(member: int, request: Request, local: LocalRanks) -> dict[str, Any]:
    """What is different in a request of another rank of the process group."""
    return {"process_group": _Member(request.process_group, member), "peers": peers_of(local.hosts, member)}


@dataclass(eq=False)
class _Member:
    """A process group as one of its ranks sees it, for the routes that this rank has."""

    over: dist.ProcessGroup
    number: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.over.size()

    def _get_backend(self, device: torch.device) -> Any:
        """For the timeout of its waits."""
        return self.over._get_backend(device)


@dataclass
class SilentRoute:
    """A route that sends nothing. It takes the memory that the original takes beside the buffers."""

    transport: SilentTransport
    exchange: Event
    stagings: tuple[int, ...] = ()  # one after the other
    is_sum: bool = False  # whether what starts bring beside buffers are its results, too

    def __post_init__(self) -> None:
        self.sent, self.staging = self.exchange.sent, sum(self.stagings)

    def start(
        self, shards: Sequence[torch.Tensor] = (), reduction: Reduction = PLAIN_SUM, *zero_copy: torch.Tensor
    ) -> Pending:
        listener, exchange = self.transport.listener, self.exchange
        if exchange.action == "all-reduce":
            sent = 2 * sum(values.nbytes for values in zero_copy) * (exchange.ranks - 1) // exchange.ranks
            exchange = exchange._replace(sent=exchange.sent + sent)
        started = SilentPending(exchange, listener, self.stagings, () if self.is_sum else zero_copy)
        if exchange.action == "reduce" and isinstance(self.transport.original, HostsTransport):
            waiting = self.transport.adds_up_first
            while waiting:  # hosts exchange a sum when the next reduction starts, or when it is waited for
                waiting.pop().exchange()
            waiting.append(started)
        else:
            started.exchange()
        listener.started(exchange, started.kept)
        return started


class SilentPending:
    """An exchange that was started. It keeps zero-copy gradients until it is completed."""

    def __init__(self, event: Event, listener: Listener, stagings: Sequence[int], kept: Sequence[torch.Tensor]) -> None:
        self._event, self._listener, self._stagings, self.kept = event, listener, [*stagings], kept
        self._lease = NO_LEASE

    def exchange(self) -> None:
        """Start to exchange messages: take the staging of the first, or of the next ones."""
        if self._lease is not NO_LEASE:
            self._lease.give_back()
        nbytes = self._stagings.pop(0) if self._stagings else 0
        self._lease = self._listener.staging.lease(nbytes, META) if nbytes else NO_LEASE
        self._listener.leased(self._lease)

    def finish(self) -> None:
        self._listener.waited(self._event)
        while self._stagings or self._lease is not NO_LEASE:
            self.exchange()
        self.kept = ()


@dataclass(eq=False)
class SilentStream:
    """A stream of a device that is not there. It knows the exchanges that were started in it."""

    streams: SilentStreams
    stream_id: int
    exchanges: list[Event] = field(default_factory=list)

    def wait_event(self, event: SilentEvent) -> None:
        if self.stream_id == 0:
            self.streams.waited(event)

    def wait_stream(self, other: SilentStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> SilentEvent:
        return SilentEvent(self, len(self.exchanges))

    def __enter__(self) -> None:
        self.streams.entered.append(self)

    def __exit__(self, *_: object) -> None:
        self.streams.entered.pop()


class SilentEvent(NamedTuple):
    """A point in a stream, and the number of exchanges before it."""

    stream: SilentStream
    before: int

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        """Does nothing: what is copied to the host is there."""


class SilentStreams(Streams):
    """The streams of a device that is not there. The first one computes; ``listener`` is told what it waits for."""

    def __init__(self, listener: Callable[[Event], None]) -> None:
        self._listener, self._waited = listener, dict[SilentStream, int]()
        self.entered = [SilentStream(self, 0)]

    def make(self, device: torch.device) -> Any:
        self._waited[made := SilentStream(self, len(self._waited) + 1)] = 0
        return made

    def current(self, device: torch.device) -> Any:
        return self.entered[-1]

    def waited(self, event: SilentEvent) -> None:
        before = self._waited.get(event.stream, 0)
        for exchange in event.stream.exchanges[before : event.before]:
            self._listener(exchange)
        self._waited[event.stream] = max(before, event.before)

    def keep(self, tensor: torch.Tensor) -> None:
        """Does nothing: nothing is written to memory that is freed."""

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype, pin: bool = True) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=META)


@dataclass
class SilentDisk:
    """A disk that keeps nothing; also a region of it."""

    numel: int = 0
    dtype: torch.dtype = torch.uint8
    writes = 0

    def allocate(self, numel: int, dtype: torch.dtype, what: str) -> SilentDisk:
        return SilentDisk(numel, dtype)

    def read(self, target: torch.Tensor, start: int = 0) -> DiskWork:
        return DiskWork()


class _SharedInPlace(WholeBuffer):
    """A full buffer in memory that ranks share. No rank writes to it."""

    def __init__(self, group: GroupContext, shard: ShardBuffer) -> None:
        FullBuffer.__init__(self, group, shard)
        nbytes = full_bytes(group.sections, group.compute_dtypes)
        self.buffer = OwnBuffer(torch.empty(nbytes, dtype=torch.uint8, device=META))


class Twins:
    """The twins of ``units`` and of their groups, the position of each of which is its tag.

    Attributes:
        units, groups: the twins, in the order of the originals.
        around: the unit around each, the innermost one.
    """

    def __init__(self, units: Sequence[Unit], listener: Listener) -> None:
        self._listener, self._memo = listener, dict[int, Any]()
        self.transports: dict[tuple[Transport, torch.device], SilentTransport] = {}
        self.groups = listener.groups
        for group in (group for unit in units for group in unit.groups):
            self.groups.append(self._group(group, len(self.groups)))
        self.units = [self._unit(unit) for unit in units]
        for unit, twin in zip(units, self.units, strict=True):
            for name in ("groups", "borrowed", "forward_prefetch", "backward_prefetch"):
                setattr(twin, name, [self._memo[id(each)] for each in getattr(unit, name) if id(each) in self._memo])
        modules = {unit: {inner for module in unit.modules for inner in module.modules()} for unit in units}
        self.around: dict[Unit, Unit] = {}
        for unit, twin in zip(units, self.units, strict=True):
            outer = [each for each in units if each is not unit and unit.modules[0] in modules[each]]
            if outer:
                self.around[twin] = around = self._memo[id(min(outer, key=lambda each: len(modules[each])))]
                for number, module in enumerate(twin.modules):
                    around.modules[0].add_module(f"{len(self.around)}.{number}".replace(".", "_"), module)

    def outside(self, unit: Unit) -> Iterator[Unit]:
        """The units around a unit, from the inside out."""
        while (around := self.around.get(unit)) is not None:
            yield (unit := around)

    def _module(self, module: nn.Module) -> nn.Module:
        return self._memo.setdefault(id(module), nn.Module())

    def _unit(self, unit: Unit) -> Unit:
        device = META if is_host(unit.device) else PLANNED
        twin = self._memo[id(unit)] = Unit([*map(self._module, unit.modules)], device, MixedPrecisionPolicy(), False)
        for name in ("auto_reshard", "chose_to_keep", "prefetches_forward", "prefetches_backward"):
            setattr(twin, name, getattr(unit, name))
        for module in twin.modules:
            module.__dict__["_fullshard_unit"] = twin
        return twin

    def _group(self, group: ParamGroup, position: int) -> ParamGroup:
        options = replace(group.options, strategy=group.options.strategy.switched(gradients=True))
        if options.all_reduce is not None:
            options.all_reduce = partial(self._all_reduce, position)
        if options.all_reduce_hook is not None:
            options.all_reduce_hook, options.all_reduce_hook_stream = (lambda _: None), None
        params = [self._parameter(param) for param in group.params]
        modules, device = [*map(self._module, group.modules)], META if is_host(group.device) else PLANNED
        transport = self._transport(group.transport, group.device)
        kind: type[ParamGroup] = _twin_classes.setdefault(type(group), type("Twin", (_Twin, type(group)), {}))
        twin = self._memo[id(group)] = kind(params, modules, group.data, device, options, transport, position)
        twin.reduce_transport = self._transport(group.reduce_transport, group.device)
        twin.reduce_process_group, twin.name = group.reduce_process_group, group.name
        return twin

    def _transport(self, transport: Transport, device: torch.device) -> SilentTransport:
        key = transport, device
        if key not in self.transports:
            self.transports[key] = SilentTransport(transport, device, self._listener)
        return self.transports[key]

    def _parameter(self, param: ShardedParameter) -> ShardedParameter:
        for module in (*(at.module for at in param.locations), getattr(param, "flat_module", None)):
            if module is not None:
                self._module(module)
        before, values = param.sharded, param.values
        if id(before) not in self._memo:
            form = before if not isinstance(before, DTensor) else values
            local = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=META)
            made = make_dtensor(local, param.spec) if isinstance(before, DTensor) else local
            twin = self._memo[id(before)] = nn.Parameter(made, requires_grad=before.requires_grad)
            if isinstance(before, DTensor):
                set_local(twin, local)  # type: ignore[arg-type]
            twin.__dict__.update(before.__dict__ if made is local else {})
        twin_param = param.copy(self._memo)
        twin_param.kept_apart, twin_param.extends = [], False
        return twin_param

    def _all_reduce(self, position: int, output: torch.Tensor) -> None:
        data = self.groups[position].data
        sent = 2 * output.nbytes * (data.replicate_size - 1) // data.replicate_size
        exchange = Event("all-reduce", position, sent, data.replicate_size)
        self._listener.started(exchange)
        self._listener.waited(exchange)


class _Twin(ParamGroup):
    """A group on meta whose values count as if they were there, on a disk and in shared memory too."""

    def _build(self) -> None:
        disk: Any = SilentDisk()
        if self.offloaded.disk is not None:
            self.offloaded.disk, self.here.copies = disk, False  # reduced gradients stay
        super()._build()
        shard = self.shard
        shard.has_meta = False
        if shard.is_unmapped:
            shard.is_unmapped, self.full = False, _SharedInPlace(self, shard)
            self.gradients.attach(self.full, self.module_params)
        if self.offloaded.disk is not None and self.offloaded.parameters:
            chunks = ((index, shard.chunks[index]) for index in self.offloaded.parameters)
            shard.stored = {index: DiskTensor.like(disk, chunk, "") for index, chunk in chunks}
            shard.needs_staging = True
            self.full.use_pool()  # and read from there


_twin_classes: dict[type, type[ParamGroup]] = {}
