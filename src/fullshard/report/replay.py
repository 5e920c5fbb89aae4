"""A predicted step of a sharded model: which exchanges it makes in which order, and how much memory they need.

Works on facts alone, without the model. It follows the engine's rules for a step
(``docs/explanation/architecture.md``) and uses the engine's own slots, staging and order, with memory on meta. Tests
compare a replay with a real step. A replay begins in the state in which ``free_buffers()`` leaves a model. It runs one
forward and one backward in the order of :class:`~fullshard.report.facts.ModelFacts`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fullshard.buffer import slots
from fullshard.buffer.slots import Lease, SlotBuffer, SlotPool, Staging
from fullshard.device import META
from fullshard.group.gradients import MOST_WAITING
from fullshard.report.activations import Moment
from fullshard.report.facts import GroupFacts, ModelFacts, UnitFacts
from fullshard.report.offloaded_facts import ON_CPU, ON_DISK
from fullshard.schedule.order import Order

Action = Literal[
    "gather", "wait", "compute", "reduce", "all-reduce", "wait-reduce", "gather over replicas", "reduce over replicas"
]
Pass = Literal["forward", "backward"]
#: The kinds of memory that come and go in a step. The other kinds stay for the next one.
_PASSING = (
    "gradients",
    "gradients on their way to a disk",
    "gradients as autograd made them",
    "post-forward shards",
    "the gradient that autograd makes",
)
#: A part of the memory: its kind, the number of pieces, and the bytes of each piece.
Part = tuple[str, int, int]
#: On a GPU: what cuBLAS works in, for the threads of forward and backward. On older cards than Hopper it takes less.
WORKSPACES: Part = ("workspaces of cuBLAS", 2, 32 * 2**20)


class Event(NamedTuple):
    """One action of a rank in a step.

    Args:
        action: ``gather``, ``reduce``, ``all-reduce``, and a gather and a reduction over replicas start an exchange.
            ``wait`` waits for a gather,
            ``wait-reduce`` for a reduction. ``compute`` is the work of a group's modules.
        group: the position of the group in the model's facts.
        during: the pass.
        sent: bytes that this rank sends.
        ranks: the number of ranks that exchange.
    """

    action: Action
    group: int
    during: Pass
    sent: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class ExchangeTotal:
    """All exchanges of one kind in a step: their number, and the bytes that this rank sends (or reads from shared
    memory) in all of them together."""

    kind: str
    count: int
    nbytes: int


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


class _Buffers(list[SlotBuffer]):
    """One buffer for each group, in the order of the groups. The slots have no memory.

    ``needs`` has one pair for each group: the size of its buffer, and whether that buffer shares its slot in turns with
    the buffers of other groups.

    Attributes:
        pool: the slots that were made. With ``gives_back``, large ones are those of a device.
    """

    def __init__(self, needs: Iterable[tuple[int, bool]], gives_back: bool) -> None:
        pool = self.pool = SlotPool(META, lambda nbytes, device: torch.empty(nbytes, dtype=torch.uint8, device=META))
        pool.gives_back = gives_back
        for nbytes, takes_turns in needs:
            self.append(SlotBuffer(pool, nbytes))
            self[-1].takes_turns = takes_turns
            pool.ordinary = max(pool.ordinary, nbytes * takes_turns)

    @property
    def sizes(self) -> list[int]:
        """The sizes of the slots that there are."""
        held = (buffer.slot for buffer in self if buffer.slot is not None)
        return [slot.nbytes for slot in dict.fromkeys([*held, *self.pool.free])]


class Replay:
    """A predicted step of the model that ``facts`` describes.

    Args:
        open_ended: positions of groups whose backward ends with that of the model, see
            :class:`~fullshard.report.activations.Activations`.

    Attributes:
        events: the actions of the rank, in order.
        peaks: the memory at the peak of each pass, beyond the memory at rest.
        kept: the memory that is kept for the next step.
        beside: the most bytes on the device that come and go at each moment, beside what is kept.
        at: the memory at the peak of each moment, beyond the memory at rest.
    """

    def __init__(self, facts: ModelFacts, open_ended: Collection[int] = ()) -> None:
        self._facts, self._groups, self._open_ended = facts, facts.groups, open_ended
        self.events: list[Event] = []
        self.peaks: dict[Pass, tuple[Part, ...]] = {}
        self.beside: dict[Moment, int] = {}
        self.at: dict[Moment, tuple[Part, ...]] = {}
        self._at = self._ended = -1  # the group whose modules run, and the one whose modules ended last in this pass
        self._during: Pass = "forward"
        in_place = [group.shares or group.is_full for group in self._groups]
        wholes = (0 if here else group.whole for here, group in zip(in_place, self._groups, strict=True))
        turns = (group.reshards for group in self._groups)
        gives = self._gives_back = not self._groups[0].is_host
        self._fulls = _Buffers(zip(wholes, turns, strict=True), gives)
        self._gradients = _Buffers(((group.gradient, group.reshards) for group in self._groups), gives)
        self._copies = _Buffers(((group.staged, True) for group in self._groups), gives)
        self._replica_gradients = _Buffers(((group.replica_gradients, True) for group in self._groups), gives)
        self._replica_shards: set[int] = set()
        self._staging = Staging()
        self._leases: dict[tuple[str, int], Lease] = {}
        self._pieces: dict[int, Lease] = {}
        self._order: Order[int] = Order()
        self._state: dict[int, Literal["gathering", "whole"]] = {}
        self._post_forward: set[int] = set()
        self._values: set[int] = set()
        self._users: Counter[int] = Counter()
        self._unreduced: set[int] = set()
        self._zero_copy: set[int] = set()
        self._reducing: list[int] = []
        self._summing: list[int] = []  # over replicas
        self._reduced = Counter[str]()  # bytes of reduced gradients, by kind
        self._behind = 0  # bytes of those that may still be written to a disk
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for number, unit in enumerate(facts.units):
            self._children[unit.parent].append(number)
            for at in unit.needed:
                self._order.entered.append(at)
        self._order.begin_forward()  # the order is known, as after a first step
        self._note_peak()
        for number in self._children[-1]:
            self._forward(number)
        self._during, self._ended = "backward", -1
        for buffer in self._gradients:
            if buffer.nbytes:  # the engine takes each gradient buffer once when it lays out the gradients
                buffer.take()
                buffer.give_back()
        self._note_peak()
        self._left: list[int] = []  # the units whose backward ends with that of the model
        for number in reversed(self._children[-1]):
            self._backward(number)
        self._give_back_memory()  # the gradients of these come next
        for number in sorted(self._left, reverse=True):
            self._end_backward(facts.units[number])
        self._wait_for_oldest_reductions(0)
        for at in list(self._state):
            self._reshard(at)
        self._reduced.clear()  # after zero_grad()
        self._behind = 0
        self._give_back_memory()
        self.kept = self._parts()

    def exchanged(self) -> tuple[ExchangeTotal, ...]:
        """What the step exchanges, by kind."""
        kinds: defaultdict[str, list[int]] = defaultdict(list)
        for action, at, during, sent, _ in self.events:
            read = self._groups[at].reduction.read if action == "reduce" else 0
            if action == "gather":
                kinds[f"gather in {during}"].append(sent)
            elif action not in ("wait", "compute", "wait-reduce"):
                kinds["reduce, read in shared memory" if read else action].append(read or sent)
        return tuple(ExchangeTotal(kind, len(found), sum(found)) for kind, found in kinds.items())

    def memory_at(self, moment: Moment) -> tuple[Part, ...]:
        """The memory at the peak of a moment, or of those alike if no such moment was replayed."""
        during, at, _ = moment
        if moment in self.at:
            return self.at[moment]
        alike = (parts for (when, group, _), parts in self.at.items() if (when, group) == (during, at))
        return max(alike, key=_total, default=self.peaks[during])

    # memory

    def _parts(self, temporary: int = 0) -> tuple[Part, ...]:
        kinds = {
            **{kind: [nbytes] for kind, nbytes in self._reduced.items()},
            "full buffers": self._fulls.sizes,
            "gradient buffers": self._gradients.sizes,
            "copies of shards": self._copies.sizes,
            "shards of replicas": [self._groups[at].replica_shard for at in self._replica_shards],
            "gradients of replicas": self._replica_gradients.sizes,
            "gradients on their way to a disk": [self._behind],
            "messages": [piece.nbytes for piece in self._pieces.values()],
            "gradients as autograd made them": [self._groups[at].zero_copy_gradients for at in self._zero_copy],
            "post-forward shards": [self._groups[at].rested for at in self._post_forward],
            "the gradient that autograd makes": [temporary],
        }
        counts = ((kind, Counter(filter(None, sizes))) for kind, sizes in kinds.items())
        return tuple((kind, count, size) for kind, found in counts for size, count in found.items())

    def _note_peak(self, temporary: int = 0) -> None:
        parts = self._parts(temporary)
        self.peaks[self._during] = max(self.peaks.get(self._during, parts), parts, key=_total)
        passing = _total(part for part in parts if part[0] in _PASSING or (self._gives_back and part[2] >= slots.LARGE))
        moment = self._during, self._at, self._ended
        self.at[moment] = max(self.at.get(moment, parts), parts, key=_total)
        self.beside[moment] = max(self.beside.get(moment, 0), passing)

    def _give_back_memory(self) -> None:
        """A device gives large memory that is not in use to its allocator when a forward or a step has ended."""
        if self._gives_back:
            for buffers in (self._fulls, self._gradients, self._copies, self._replica_gradients):
                buffers.pool.drop(slots.LARGE)
            self._staging.drop(slots.LARGE)
            self._replica_shards -= {at for at in self._replica_shards if self._groups[at].replica_shard >= slots.LARGE}

    def _run(self, at: int, ended: int) -> None:
        """The modules of a group run next, after those of another one."""
        self._at, self._ended = at, ended
        self._note_peak()

    def _lease_staging(self, kind: str, at: int, nbytes: int) -> None:
        if nbytes:
            lease = self._leases[kind, at] = self._staging.lease(nbytes, META)
            self._pieces[lease.index] = lease

    def _return_staging(self, kind: str, at: int) -> None:
        if (lease := self._leases.pop((kind, at), None)) is not None:
            lease.give_back()

    # what happens to a group

    def _record(self, action: Action, at: int, sent: int = 0, ranks: int = 1) -> None:
        self.events.append(Event(action, at, self._during, sent, ranks))

    def _gather(self, at: int) -> None:
        group, buffer, from_post_forward = self._groups[at], self._fulls[at], at in self._post_forward
        if at in self._state:
            return
        self._state[at] = "whole" if self._reuses(at) or group.shares else "gathering"
        if not (group.shares or group.is_full):
            buffer.take()
        if self._state[at] == "whole":
            return
        self._values.add(at)
        if group.shards_replicas and not from_post_forward:
            self._start_replica(at)
            self._return_staging("gather over replicas", at)
        elif group.staged and not from_post_forward:
            self._stage(at)
        exchange = group.rest_gather if from_post_forward else group.gather
        self._lease_staging("gather", at, exchange.staging)
        if group.communicates:
            self._record("gather", at, exchange.sent, group.post_forward or 1 if from_post_forward else group.ranks)
        self._note_peak()

    def _reuses(self, at: int) -> bool:
        """Whether backward finds the values of forward in the buffer."""
        return self._during == "backward" and self._fulls[at].slot is not None and at in self._values

    def _reads_ahead(self, at: int) -> bool:
        group = self._groups[at]
        return group.is_host and bool(group.offloaded.shard) and group.offloaded.place == ON_DISK

    def _stage(self, at: int) -> None:
        if not self._copies[at].in_use:  # what was read ahead from a disk
            self._copies[at].take()

    def _start_replica(self, at: int) -> None:
        group = self._groups[at]
        if at in self._replica_shards:
            return
        self._replica_shards.add(at)
        if group.staged:
            self._copies[at].take()
        self._lease_staging("gather over replicas", at, group.replica_gather.staging)
        if group.replicas > 1:
            self._record("gather over replicas", at, group.replica_gather.sent, group.replicas)
        self._note_peak()

    def _unshard(self, at: int) -> None:
        self._gather(at)
        if self._state[at] == "gathering":
            if self._groups[at].communicates:
                self._record("wait", at)
            self._state[at] = "whole"
            self._copies[at].give_back()
            self._return_staging("gather", at)
            self._post_forward.discard(at)
            self._note_peak()

    def _reshard(self, at: int) -> None:
        if self._state.pop(at, None):
            self._fulls[at].give_back()

    def _gather_ahead(self, following: Iterator[int]) -> None:
        most, room = self._facts.prefetch, self._facts.prefetch_bytes
        for number, at in enumerate(following):
            room = room if room is None else room - self._groups[at].whole
            if number == most or (room is not None and room < 0):
                self._start_early(at)
                return
            if at not in self._state and not self._groups[at].shares:
                self._gather(at)

    def _start_early(self, at: int) -> None:
        """The gather after those that are gathered ahead begins with what comes before it."""
        group = self._groups[at]
        if group.is_host and group.shards_replicas:
            self._start_replica(at)
        elif self._reads_ahead(at) and at not in self._state and not self._reuses(at):
            self._stage(at)
            self._note_peak()

    def _accept_gradient(self, at: int) -> None:
        """Accept the first gradient of a group. Small gradients wait, and are copied into the buffer when the unit's
        backward ends."""
        group = self._groups[at]
        if not group.reduced or at in self._unreduced:  # a buffer for gradients that are all zero-copy has no bytes
            return
        self._unreduced.add(at)
        self._zero_copy.add(at)
        if group.gradient >= MOST_WAITING:
            self._take_gradient_buffer(at)
        self._note_peak(0 if group.zero_copy_gradients else group.largest_gradient)

    def _take_gradient_buffer(self, at: int) -> None:
        buffer = self._gradients[at]
        buffers = self._groups[at].gradient_buffers
        self._wait_for_oldest_reductions(0 if buffer.in_use else buffers - 1, buffers)
        buffer.take()

    def _reduce(self, at: int) -> None:
        group = self._groups[at]
        if at not in self._unreduced:
            return
        self._unreduced.discard(at)
        if group.gradient < MOST_WAITING:
            self._take_gradient_buffer(at)
        self._reducing.append(at)
        if group.ranks == 1:  # the gradients that autograd made become those of the parameters
            self._zero_copy.discard(at)
        if group.shards_replicas:
            self._replica_gradients[at].take()
        else:
            self._keep_reduced(group)
        self._lease_staging("reduce", at, group.reduction.staging)
        if group.ranks > 1 or group.reduction.read:
            self._record("reduce", at, group.reduction.sent, group.ranks)
        if group.all_reduce_sent:
            self._record("all-reduce", at, group.all_reduce_sent, group.replicas)
        self._note_peak()

    def _keep_reduced(self, group: GroupFacts) -> None:
        """A group has reduced gradients. Those that belong on a disk are in memory until they are written."""
        self._reduced.update(group.offloaded.split("gradients", group.reduced, group.offloaded.reduced))
        if group.offloaded.place == ON_DISK:
            self._behind = min(self._behind, group.offloaded.behind) + group.offloaded.reduced

    def _wait_for_oldest_reductions(self, at_most: int, sums: int = 0) -> None:
        """Wait for the oldest reductions until no more than ``at_most`` are under way, and ``sums`` over replicas."""
        while len(self._reducing) > at_most:
            at = self._reducing.pop(0)
            self._record("wait-reduce", at)
            self._gradients[at].give_back()
            self._zero_copy.discard(at)
            self._return_staging("reduce", at)
            if (group := self._groups[at]).shards_replicas:
                self._keep_reduced(group)
                self._lease_staging("reduce over replicas", at, group.replica_reduction.staging)
                if group.replicas > 1:
                    self._record("reduce over replicas", at, group.replica_reduction.sent, group.replicas)
                self._note_peak()
                self._summing.append(at)
        while len(self._summing) > sums:
            at = self._summing.pop(0)
            if self._groups[at].replicas > 1:
                self._record("wait-reduce", at)
            self._return_staging("reduce over replicas", at)
            self._replica_gradients[at].give_back()

    # the passes

    def _forward(self, number: int) -> None:
        unit, around = self._facts.units[number], self._at
        self._run(unit.groups[0], self._ended)
        for at in unit.needed:
            self._order.entered.append(at)
            self._unshard(at)
            self._users[at] += 1
        if unit.ahead:
            self._gather_ahead(self._order.next_in_forward())
        for inner in self._children[number]:
            self._forward(inner)
        for at in unit.groups:  # the unit's own work, such as a head, comes after the units inside it
            self._record("compute", at)
        for at in unit.needed:
            self._order.finished.append(at)
            self._users[at] -= 1
            group = self._groups[at]
            if not self._users[at] and group.reshards:
                if group.rested:
                    self._post_forward.add(at)
                    self._values.discard(at)
                self._reshard(at)
                self._note_peak()
        if number == self._children[-1][-1]:
            self._give_back_memory()
        self._run(around, unit.groups[0])

    def _backward(self, number: int) -> None:
        """Run the backward of a unit. Outer units begin first, and a unit ends after the units inside it."""
        unit, around = self._facts.units[number], self._at
        self._run(unit.groups[0], self._ended)
        for at in unit.needed:
            self._unshard(at)
            self._users[at] += 1
        if unit.ahead_in_backward == "before":
            self._gather_ahead(self._groups_before(unit))
        for at in unit.groups:
            self._record("compute", at)
            self._accept_gradient(at)
        for inner in reversed(self._children[number]):
            self._backward(inner)
        if self._open_ended and unit.groups[0] in self._open_ended:
            self._left.append(number)
        else:
            self._end_backward(unit)
            if unit.ahead_in_backward == "after":
                self._gather_ahead(self._groups_before(unit))
        self._run(around, unit.groups[0])

    def _end_backward(self, unit: UnitFacts) -> None:
        for at in unit.groups:
            self._reduce(at)
        for at in unit.needed:
            self._users[at] -= 1
            if not self._users[at]:
                self._reshard(at)

    def _groups_before(self, unit: UnitFacts) -> Iterator[int]:
        """The groups that come before a unit in forward, and so after it in backward, the next one first."""
        ahead: Iterator[int] = iter(())
        for at in reversed(unit.groups):
            ahead = self._order.next_in_backward(at)
        return ahead
