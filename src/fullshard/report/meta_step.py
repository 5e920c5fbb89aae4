"""A step of a sharded model on meta: which exchanges it makes in which order, and how much memory they need.

The engine's own units, schedule and groups run it, as :mod:`fullshard.report.twins`, which train and have no memory. So
they decide what is gathered, reused, prefetched, reduced and given back. Tests compare it with a real step.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard import device
from fullshard.buffer import slots
from fullshard.buffer.sections import shard_bytes
from fullshard.buffer.slots import Lease, Staging
from fullshard.comm.waits import WAITS
from fullshard.device import META
from fullshard.group.gradient_buffer import MessageViews
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import local_tensor
from fullshard.report.activations import Moment, Pass
from fullshard.report.facts import ON_CPU, ON_DISK, ModelFacts, sharers_of
from fullshard.report.twins import Action, Event, SilentStreams, Twins
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.step_log import StepLog
from fullshard.schedule.unit import Unit
from fullshard.torch_private import storage_id

#: How the names of those exchanges end that read memory, and send nothing.
READ = ", read in shared memory"
#: The full buffers that the ranks of a host share. A rank has its share of them.
SHARED_BUFFERS = "share of the host's full buffers"
#: What slots of pools are for, by the first word of their kind.
_SLOTS = {
    "parameters": "full buffers",
    "gradients": "gradient buffers",
    "staging": "copies of shards",
    "replica": "shards of replicas",
    "sums": "gradients of replicas",
}
#: The kinds of memory that come and go in a step. The other kinds stay for the next one.
_PASSING = (
    "gradients",
    "gradients on their way to a disk",
    "gradients as autograd made them",
    "post-forward shards",
    "the gradient that autograd makes",
)
_ORDER = (_PASSING[0], SHARED_BUFFERS, *_SLOTS.values(), _PASSING[1], "messages", *_PASSING[2:])
#: A part of the memory: its kind, the number of pieces, and the bytes of each piece.
Part = tuple[str, int, int]
#: On a GPU: what cuBLAS works in, for the threads of forward and backward. On older cards than Hopper it takes less.
WORKSPACES: Part = ("workspaces of cuBLAS", 2, 32 * 2**20)


@dataclass(frozen=True)
class ExchangeTotal:
    """All exchanges of one kind in a step: their number, and the bytes that this rank sends (or reads from shared
    memory) in all of them together, and that all ranks of its host send to other hosts, where these share memory."""

    kind: str
    count: int
    nbytes: int
    by_host: int = 0


@dataclass(frozen=True)
class Phase:
    """The memory of one rank at one time, and its parts. Parts on a disk are listed, but are not memory."""

    name: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return _total(part for part in self.parts if not part[0].endswith(ON_DISK))

    @property
    def on_device(self) -> int:
        """The bytes of the parts that are not offloaded."""
        return _total(part for part in self.parts if not part[0].endswith((ON_CPU, ON_DISK)))


def _total(parts: Iterable[Part]) -> int:
    return sum(count * size for _, count, size in parts)


@dataclass
class PredictedStep:
    """What a rank does in a step, and the memory that it needs.

    Attributes:
        events: the actions of the rank, in order.
        peaks: the memory at the peak of each pass, beyond shards, optimizer state and what no group has.
        kept: the memory that is kept for the next step.
        beside: the most bytes on the device that come and go at each moment, beside what is kept.
        at: the same at the peak of each moment.
    """

    events: list[Event] = field(default_factory=list)
    peaks: dict[Pass, tuple[Part, ...]] = field(default_factory=dict)
    kept: tuple[Part, ...] = ()
    beside: dict[Moment, int] = field(default_factory=dict)
    at: dict[Moment, tuple[Part, ...]] = field(default_factory=dict)

    def exchanged(self) -> tuple[ExchangeTotal, ...]:
        """What the step exchanges, by kind."""
        kinds: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for event in self.events:
            if event.action not in ("wait", "compute", "wait-reduce"):
                kind = f"gather in {event.during}" if event.action == "gather" else event.action
                if event.sent or event.by_host or not event.read:
                    kinds[kind].append((event.sent, event.by_host))
                if event.read:
                    kinds[f"{kind}{READ}"].append((event.read, 0))
        return tuple(
            ExchangeTotal(kind, len(found), *map(sum, zip(*found, strict=True))) for kind, found in kinds.items()
        )

    def memory_at(self, moment: Moment) -> tuple[Part, ...]:
        """The memory at the peak of a moment, or of those alike if no such moment was predicted."""
        during, at, _ = moment
        if moment in self.at:
            return self.at[moment]
        alike = (parts for (when, group, _), parts in self.at.items() if (when, group) == (during, at))
        return max(alike, key=_total, default=self.peaks[during])


class _Node(torch.autograd.Function):
    """The identity. In backward it calls ``told``, which returns a gradient for each leaf."""

    @staticmethod
    def forward(ctx: Any, told: Callable[[], Sequence[torch.Tensor]], x: torch.Tensor, *leaves: torch.Tensor) -> Any:
        ctx.told = told
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, grad, *ctx.told()


_node: Callable[..., Any] = _Node.apply


class _TwinLog(StepLog):
    """The log of twins: no other rank logs the same."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule.device, schedule.step)
        self._compares_each = False


class MetaStep:
    """Steps of the twins of ``units``, all that a model has. ``facts`` are the model's."""

    def __init__(self, units: Sequence[Unit], facts: ModelFacts) -> None:
        self.groups: list[ParamGroup] = []
        self.staging = Staging()
        self._ran: dict[object, PredictedStep] = {}
        self._notes = False  # whether what happens is noted
        self.twins = twins = Twins(units, self)
        self._facts = self._as_built = facts
        self._schedules, self._streams = (
            list[Schedule](),
            None if facts.groups[0].is_host else SilentStreams(self._waited),
        )
        self._pieces = dict[int, Lease]()  # of the staging, by their index
        self._reduced, self._behind = Counter[str](), 0  # bytes of reduced gradients, by kind; on their way to a disk
        #: Bytes of gradients by what identifies them, and the group of those that are not copied; the last one.
        self._made, self._newest = dict[int, tuple[int, ParamGroup | None]](), (0, 0)
        self._receives: ParamGroup | None = None  # the group of the last gradient
        #: The most bytes so far, by pass and by moment, and of what: outside of slots, and slots.
        self._most: dict[Any, tuple[int, list[tuple[str, int]], list[tuple[str, int]]]] = {}
        self.allocations, self._known = 0, -1  # of slots, and how many of them are known
        self._slots, self._in_slots = list[tuple[str, int]](), 0
        meshes = {group: group.options.post_forward_mesh for group in self.groups}
        #: The bytes of groups that are sharded over a smaller mesh between forward and backward.
        self._post_forward = {
            group: shard_bytes([each.over(mesh.shard_size) for each in group.sections], group.compute_dtypes)
            for group, mesh in meshes.items()
            if mesh is not None
        }
        self._is_host = facts.groups[0].is_host
        shared = {id(each): sharers_of(each.original) for each in twins.transports.values()}
        self._sharers = {key: sharers for key, sharers in shared.items() if sharers > 1}  # by the id of the transport
        self._position = {group: at for at, group in enumerate(self.groups)}
        first: dict[Unit, float] = {}  # when forward runs the units
        for number, unit in enumerate(facts.units):
            twin = next(each for each in twins.units if self.groups[unit[0]] in each.groups)
            for each in (twin, *twins.outside(twin)):
                first.setdefault(each, number)
        last = -1.0  # those without parameters of their own run after the ones before them
        for twin in twins.units:
            last = first.setdefault(twin, last + 0.5)
        self._inside: defaultdict[Unit | None, list[Unit]] = defaultdict(list)
        for twin in sorted(first, key=lambda each: first[each]):
            self._inside[twins.around.get(twin)].append(twin)

    def run(self, facts: ModelFacts, open_ended: Collection[int] = ()) -> PredictedStep:
        """Run a step. It begins in the state in which ``free_buffers()`` leaves a model whose order is known.

        Args:
            facts: those of the model; or others, for groups that reshard or not, and other limits of prefetch.
            open_ended: positions of groups whose backward ends with that of the model, see
                :class:`~fullshard.report.activations.Activations`.
        """
        kinds = tuple((group.reshards, group.offloaded) for group in facts.groups)
        key = kinds, facts.prefetch, facts.prefetch_bytes, tuple(open_ended)
        if key not in self._ran:
            self._facts, self._open_ended, self.found = facts, open_ended, PredictedStep()
            self._run_step()
            self._ran[key] = self.found
        return self._ran[key]

    def _run_step(self) -> None:
        with self._apart():
            if not self._schedules:
                self._start()
                self._train()
                for views in (group.gradients.buffer.views for group in self.groups):
                    for rows in views._rows if isinstance(views, MessageViews) else ():
                        rows.fill = _is_full  # type: ignore[method-assign, assignment]  # torch works out its shapes in Python
            self._set()
            self._notes = True
            self._train()
            self.found.kept = _parts([*self._held(), *self._held_in_slots()])
            for key, (_, held, in_slots) in self._most.items():
                where: dict[Any, tuple[Part, ...]] = self.found.at if isinstance(key, tuple) else self.found.peaks
                where[key] = _parts([*held, *in_slots])
            self._notes = False

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """A context in which twins run: on streams of their own, and what they wait for is no rank's."""
        before = device._streams, WAITS.position
        device._streams = self._streams or before[0]
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            device._streams, WAITS.position = before

    def _start(self) -> None:
        """Make the schedules, with memory of their own."""
        for root in filter(self._inside[None].__contains__, self.twins.units):
            is_list, root.is_list = root.is_list, False
            schedule = root.start()
            root.is_list = is_list
            self._schedules.append(schedule)
            schedule.comm.staging, schedule.step.forwards = self.staging, 1  # checks come before the first
            schedule.log = schedule.step.log = _TwinLog(schedule)
            schedule.log.listeners.append(self._logged)
        self._strategies = [group.options.strategy for group in self.groups]

    def _set(self) -> None:
        """Set what the facts say, and free all buffers."""
        every = zip(self.groups, self._strategies, self._facts.groups, self._as_built.groups, strict=True)
        for group, strategy, wanted, built in every:
            if wanted.reshards is not built.reshards:
                strategy = strategy.switched(after_forward=wanted.reshards)
            group.options.strategy = strategy
        for schedule in self._schedules:
            schedule.prefetch_limit, schedule.prefetch_bytes = self._facts.prefetch, self._facts.prefetch_bytes
            for (kind, _), pool in schedule.comm.pools.items():
                pool.drop()
                pool.ordinary = 0 if kind in ("parameters", "gradients") else pool.ordinary
            schedule.size_slots()
        self.staging.drop()
        self._pieces.clear()
        self._most.clear()
        self._known = -1

    # the step

    def _train(self) -> None:
        self._during: Pass = "forward"
        self._at = self._ended = -1  # the group whose modules run, and the one whose modules ended last in this pass
        self._note()
        x = torch.empty((), device=META, requires_grad=True)
        for unit in self._inside[None]:
            x = self._forward(unit, x)
        torch.autograd.backward([_node(self._begin_backward, x)], [torch.empty((), device=META)])
        for group in self.groups:
            for param in group.params:
                param.sharded.grad = None
        self._reduced.clear()
        self._behind, self._newest, self._receives = 0, (0, 0), None

    def _forward(self, unit: Unit, x: torch.Tensor) -> torch.Tensor:
        """Run the forward of a unit whose modules run those inside it, and then compute with its own parameters."""
        at, around, before = self._position[unit.groups[0]] if unit.groups else -1, self._at, x
        self._run(at, self._ended)
        is_open = at in self._open_ended
        x = x.detach() if is_open else _node(partial(self._run, around, at), x)
        for module in unit.modules:
            (x,), _ = unit.pre_forward(module, (x,), {})
            if module is unit.modules[0]:
                for inner in self._inside[unit]:
                    x = self._forward(inner, x)
                for group in unit.groups:
                    for index, leaf in enumerate(param.unsharded for param in group.params):
                        if leaf is not None and leaf.requires_grad:
                            x = _node(partial(self._gradient, group, index, leaf), x, leaf)
                x = _node(partial(self._compute, unit), x)
                self._compute(unit)
            x = unit.post_forward(module, (), x)
        self._run(around, at)
        return _node(partial(self._run, at), before + x if is_open else x)

    def _begin_backward(self) -> Sequence[torch.Tensor]:
        self._during, self._ended = "backward", -1
        return self._run(-1)

    def _run(self, at: int, ended: int = -1) -> Sequence[torch.Tensor]:
        """The modules of a group run next, after those of another one."""
        self._note()  # what came of the last gradient
        self._at, self._ended = at, self._ended if ended < 0 else ended
        self._newest, self._receives = (0, 0), None
        self._note()
        return ()

    def _compute(self, unit: Unit) -> Sequence[torch.Tensor]:
        for group in unit.groups:
            self._record(Event("compute", self._position[group]))
        self._note()
        return ()

    def _gradient(self, group: ParamGroup, index: int, leaf: torch.Tensor) -> Sequence[torch.Tensor]:
        """What autograd makes for a parameter."""
        if self._newest[0] not in self._made:
            self._note()  # with the one before it, which was copied
        like = torch.empty_like(leaf) if isinstance(leaf, DTensor) else None
        grad = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META) if like is None else like
        values, views = local_tensor(grad), group.gradients.buffer.views
        stays = index in views.kept and values.dtype == views.dtypes[index]
        self._newest, self._receives = self._count(values, group if stays else None), group
        self._note()
        return (grad,)

    def _count(self, grad: torch.Tensor, stays: ParamGroup | None = None) -> tuple[int, int]:
        """Count the memory of a gradient while it is there, and know of which group it is if that does not copy it.
        Returns what identifies it, and its bytes."""
        storage = grad.untyped_storage()
        key, nbytes = storage_id(grad), storage.nbytes()
        if key not in self._made:
            self._made[key] = nbytes, stays
            weakref.finalize(storage, self._made.pop, key, None).atexit = False
        return key, nbytes

    # what the engine tells

    def _logged(self, action: str, group: ParamGroup, moves: bool) -> None:
        if action == "reduce":
            if group.keeps_whole:  # what is not copied becomes the gradients of the parameters
                for key in [key for key, (_, stays) in self._made.items() if stays is group]:
                    del self._made[key]
                    self._newest = (0, 0) if key == self._newest[0] else self._newest
            if not (group.data.shards_replicas and group.data.replicate_size > 1):
                self._keep_reduced(self._position[group])
            self._note()

    def leased(self, lease: Lease) -> None:
        if lease.index >= 0:
            self._pieces[lease.index] = lease
            self._note()

    def started(self, exchange: Event, kept: Sequence[torch.Tensor] = ()) -> None:
        for grad in kept:
            self._count(grad)
        if self._streams is not None:
            self._streams.entered[-1].exchanges.append(exchange)
        if exchange.action == "reduce over replicas":
            self._keep_reduced(exchange.group)
        self._record(exchange)
        self._note()

    def waited(self, exchange: Event) -> None:
        if self._streams is None:
            self._waited(exchange)

    def _waited(self, exchange: Event) -> None:
        if exchange.action != "gather over replicas":  # the gather that follows waits for it
            action: Action = "wait" if exchange.action == "gather" else "wait-reduce"
            self._record(Event(action, exchange.group, read=0 if exchange.sent or exchange.by_host else exchange.read))

    def _record(self, event: Event) -> None:
        if self._notes:
            self.found.events.append(event._replace(during=self._during))

    def _keep_reduced(self, at: int) -> None:
        """A group has reduced gradients. Those that belong on a disk are in memory until they are written."""
        group = self._facts.groups[at]
        self._reduced.update(group.offloaded.split("gradients", group.reduced, group.offloaded.reduced))
        if group.offloaded.place == ON_DISK:
            self._behind = min(self._behind, group.offloaded.behind) + group.offloaded.reduced

    # memory

    def _note(self) -> None:
        """Note the memory, if it is the most of the pass or of the moment."""
        if not self._notes:
            return
        if self.allocations != self._known or not self._is_host:  # where a device gives memory back
            self._known, self._slots = self.allocations, self._held_in_slots()
            self._in_slots = sum(nbytes for _, nbytes in self._slots)
        held, moment = self._held(), (self._during, self._at, self._ended)
        total, passing = self._in_slots, 0
        for kind, nbytes in held:
            total += nbytes
            if kind in _PASSING or (nbytes >= slots.LARGE and not self._is_host):
                passing += nbytes
        if not self._is_host:
            passing += sum(nbytes for _, nbytes in self._slots if nbytes >= slots.LARGE)
        for key in (self._during, moment):
            if total > self._most.get(key, (-1,))[0]:
                self._most[key] = total, held, self._slots
        self.found.beside[moment] = max(self.found.beside.get(moment, 0), passing)

    def _held(self) -> list[tuple[str, int]]:
        """The kind and the size of each piece of memory that is in no slot."""
        if self._receives is not None:  # gradients that travel in another dtype
            for grad in self._receives.gradients.buffer.views.zero_copy.values():
                self._count(grad, self._receives)
        made = sum(nbytes for nbytes, _ in self._made.values())
        gone = self._newest[1] if self._newest[0] not in self._made else 0
        held = [*self._reduced.items(), *(("messages", piece.nbytes) for piece in self._pieces.values())]
        held += [("gradients as autograd made them", made), ("the gradient that autograd makes", gone)]
        held += [("gradients on their way to a disk", self._behind)]
        for group, nbytes in self._post_forward.items():
            held += [("post-forward shards", nbytes)] if group.full._post_forward is not None else []
        return held

    def _held_in_slots(self) -> list[tuple[str, int]]:
        held = []
        for schedule in self._schedules:
            for (kind, transport), pool in schedule.comm.pools.items():
                taken = (buffer.slot for buffer in pool.buffers if buffer.slot is not None and buffer.pool is pool)
                name, sharers = _SLOTS[kind.partition(" ")[0]], 1
                if kind == "parameters" and transport in self._sharers:
                    name, sharers = SHARED_BUFFERS, self._sharers[transport]
                held += [(name, -(-slot.nbytes // sharers)) for slot in {*pool.free, *taken}]
        return held


def _parts(held: Iterable[tuple[str, int]]) -> tuple[Part, ...]:
    found = Counter(each for each in held if each[1])
    order = {kind: _ORDER.index(kind.removesuffix(ON_CPU).removesuffix(ON_DISK)) for kind, _ in found}
    sizes = sorted(found, key=lambda each: (order[each[0]], *each))
    return tuple((kind, found[kind, nbytes], nbytes) for kind, nbytes in sizes)


def _is_full(_: object) -> bool:
    return True
