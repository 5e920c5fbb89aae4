"""A step of a sharded model without the model: which exchanges it makes in which order, and what memory that takes.

Follows the engine's rules for a step (``docs/architecture.md``) with its own slots, staging and order, whose memory is
on meta; tests compare both. A replay begins where ``free_buffers()`` leaves a model and goes through one forward and
backward in the order of :class:`~fullshard.report.facts.ModelFacts`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import torch

from fullshard.buffer.slots import Lease, SlotBuffer, SlotPool, Staging
from fullshard.device import META
from fullshard.group.gradients import MOST_WAITING
from fullshard.report.facts import ModelFacts, UnitFacts
from fullshard.schedule.order import Order

Action = Literal["gather", "wait", "compute", "reduce", "all-reduce", "settle"]
Pass = Literal["forward", "backward"]
#: What memory consists of: what it is, how many pieces, and bytes of each.
Part = tuple[str, int, int]


class Happening(NamedTuple):
    """One thing that a rank does in a step, in its order.

    Args:
        action: ``gather``, ``reduce`` and ``all-reduce`` start an exchange; ``wait`` waits for a gather and ``settle``
            for a reduction; ``compute`` is the work of the modules of a group.
        group: its position in the model's facts.
        during: the pass.
        sent: bytes that this rank sends.
    """

    action: Action
    group: int
    during: Pass
    sent: int = 0


@dataclass(frozen=True)
class Exchanged:
    """The exchanges of one kind in a step, and the bytes that this rank sends (or reads in shared memory) in them."""

    kind: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Phase:
    """The memory of one rank at one time, without activations, and of what it consists."""

    name: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return _total(self.parts)


def _total(parts: Iterable[Part]) -> int:
    return sum(count * size for _, count, size in parts)


class _Buffers(list[SlotBuffer]):
    """One buffer for each group, by its position, in slots without memory. Each is a size, and whether it takes turns.

    Attributes:
        sizes: of the slots that were made.
    """

    def __init__(self, wanted: Iterable[tuple[int, bool]]) -> None:
        self.sizes: list[int] = []
        pool = SlotPool(META, self._allocate)
        for nbytes, takes_turns in wanted:
            self.append(SlotBuffer(pool, nbytes))
            self[-1].takes_turns = takes_turns
            pool.ordinary = max(pool.ordinary, nbytes * takes_turns)

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self.sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=META)


class Replay:
    """A step of ``facts``.

    Attributes:
        happenings: what the rank does, in its order.
        peaks: what is held at the peak of each pass, above what rests.
        kept: what is kept for the next step.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._facts, self._groups = facts, facts.groups
        self.happenings: list[Happening] = []
        self.peaks: dict[Pass, tuple[Part, ...]] = {}
        self._during: Pass = "forward"
        self._fulls = _Buffers((0 if group.shares else group.whole, group.reshards) for group in self._groups)
        self._gradients = _Buffers((group.gradient, group.reshards) for group in self._groups)
        self._copies = _Buffers((group.staged, True) for group in self._groups)
        self._staging = Staging()
        self._leases: dict[tuple[str, int], Lease] = {}
        self._pieces: dict[int, Lease] = {}
        self._order: Order[int] = Order()
        self._state: dict[int, Literal["gathering", "whole"]] = {}
        self._rested: set[int] = set()
        self._values: set[int] = set()
        self._users: Counter[int] = Counter()
        self._collecting: set[int] = set()
        self._straight: set[int] = set()
        self._reducing: list[int] = []
        self._reduced = 0
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for number, unit in enumerate(facts.units):
            self._children[unit.parent].append(number)
            for at in unit.needed:
                self._order.entered.append(at)
        self._order.begin_forward()  # the order is known, as after a first step
        self._look()
        for number in self._children[-1]:
            self._forward(number)
        self._during = "backward"
        for buffer in self._gradients:
            if buffer.nbytes:  # taken once when the places of gradients are made
                buffer.take()
                buffer.give_back()
        self._look()
        for number in reversed(self._children[-1]):
            self._backward(number)
        self._settle(0)
        for at in list(self._state):
            self._reshard(at)
        self._reduced = 0  # after zero_grad()
        self.kept = self._held()

    def exchanged(self) -> tuple[Exchanged, ...]:
        """What the step exchanges, by kind."""
        kinds: defaultdict[str, list[int]] = defaultdict(list)
        for action, at, during, sent in self.happenings:
            read = self._groups[at].reduction.read if action == "reduce" else 0
            if action == "gather":
                kinds[f"gather in {during}"].append(sent)
            elif action in ("reduce", "all-reduce"):
                kinds["reduce, read in shared memory" if read else action].append(read or sent)
        return tuple(Exchanged(kind, len(found), sum(found)) for kind, found in kinds.items())

    # what is held

    def _held(self, temporary: int = 0) -> tuple[Part, ...]:
        kinds = {
            "gradients": [self._reduced],
            "full buffers": self._fulls.sizes,
            "gradient buffers": self._gradients.sizes,
            "copies of shards": self._copies.sizes,
            "messages": [piece.nbytes for piece in self._pieces.values()],
            "gradients as autograd made them": [self._groups[at].straight_gradients for at in self._straight],
            "post-forward shards": [self._groups[at].rested for at in self._rested],
            "the gradient that autograd makes": [temporary],
        }
        counts = ((kind, Counter(filter(None, sizes))) for kind, sizes in kinds.items())
        return tuple((kind, count, size) for kind, found in counts for size, count in found.items())

    def _look(self, temporary: int = 0) -> None:
        held = self._held(temporary)
        self.peaks[self._during] = max(self.peaks.get(self._during, held), held, key=_total)

    def _lease(self, kind: str, at: int, nbytes: int) -> None:
        if nbytes:
            lease = self._leases[kind, at] = self._staging.lease(nbytes, META)
            self._pieces[lease.index] = lease

    def _return(self, kind: str, at: int) -> None:
        if (lease := self._leases.pop((kind, at), None)) is not None:
            self._staging.give_back(lease)

    # what happens to a group

    def _tell(self, action: Action, at: int, sent: int = 0) -> None:
        self.happenings.append(Happening(action, at, self._during, sent))

    def _gather(self, at: int) -> None:
        group, buffer, rests = self._groups[at], self._fulls[at], at in self._rested
        if at in self._state:
            return
        reuses = self._during == "backward" and buffer.slot is not None and at in self._values
        self._state[at] = "whole" if reuses or group.shares else "gathering"
        if not group.shares:
            buffer.take()
        if self._state[at] == "whole":
            return
        self._values.add(at)
        if group.staged and not rests:
            self._copies[at].take()
        exchange = group.rest_gather if rests else group.gather
        self._lease("gather", at, exchange.staging)
        if group.communicates:
            self._tell("gather", at, exchange.sent)
        self._look()

    def _unshard(self, at: int) -> None:
        self._gather(at)
        if self._state[at] == "gathering":
            if self._groups[at].communicates:
                self._tell("wait", at)
            self._state[at] = "whole"
            self._copies[at].give_back()
            self._return("gather", at)
            self._rested.discard(at)
            self._look()

    def _reshard(self, at: int) -> None:
        if self._state.pop(at, None):
            self._fulls[at].give_back()

    def _gather_ahead(self, following: Iterator[int]) -> None:
        for at in islice(following, self._facts.prefetch):
            if at not in self._state and not self._groups[at].shares:
                self._gather(at)

    def _collect(self, at: int) -> None:
        """The first gradient of a group arrives. Small ones wait, and take the buffer when the backward has ended."""
        group = self._groups[at]
        if not group.gradient or at in self._collecting:
            return
        self._collecting.add(at)
        self._straight.add(at)
        if group.gradient >= MOST_WAITING:
            self._take(at)
        self._look(0 if group.straight_gradients else group.largest_gradient)

    def _take(self, at: int) -> None:
        buffer = self._gradients[at]
        self._settle(0 if buffer.in_use else self._groups[at].gradient_buffers - 1)
        buffer.take()

    def _reduce(self, at: int) -> None:
        group = self._groups[at]
        if at not in self._collecting:
            return
        self._collecting.discard(at)
        if group.gradient < MOST_WAITING:
            self._take(at)
        self._reducing.append(at)
        self._reduced += group.reduced
        self._lease("reduce", at, group.reduction.staging)
        if group.ranks > 1:
            self._tell("reduce", at, group.reduction.sent)
        if group.replicas > 1:
            self._tell("all-reduce", at, group.all_reduce_sent)
        self._look()

    def _settle(self, most: int) -> None:
        """Wait for the oldest reductions, until so many are under way."""
        while len(self._reducing) > most:
            at = self._reducing.pop(0)
            self._tell("settle", at)
            self._gradients[at].give_back()
            self._straight.discard(at)
            self._return("reduce", at)

    # the passes

    def _forward(self, number: int) -> None:
        unit = self._facts.units[number]
        for at in unit.needed:
            self._order.entered.append(at)
            self._unshard(at)
            self._users[at] += 1
        if unit.ahead:
            self._gather_ahead(self._order.next_in_forward())
        for inner in self._children[number]:
            self._forward(inner)
        for at in unit.groups:  # its own work, such as a head, follows that inside it
            self._tell("compute", at)
        for at in unit.needed:
            self._order.finished.append(at)
            self._users[at] -= 1
            group = self._groups[at]
            if not self._users[at] and group.reshards:
                if group.rested:
                    self._rested.add(at)
                    self._values.discard(at)
                self._reshard(at)
                self._look()

    def _backward(self, number: int) -> None:
        """The outermost units begin first, and each ends after those inside it."""
        unit = self._facts.units[number]
        for at in unit.needed:
            self._unshard(at)
            self._users[at] += 1
        if unit.ahead_in_backward == "before":
            self._gather_ahead(self._earlier(unit))
        for at in unit.groups:
            self._tell("compute", at)
            self._collect(at)
        for inner in reversed(self._children[number]):
            self._backward(inner)
        for at in unit.groups:
            self._reduce(at)
        for at in unit.needed:
            self._users[at] -= 1
            if not self._users[at]:
                self._reshard(at)
        if unit.ahead_in_backward == "after":
            self._gather_ahead(self._earlier(unit))

    def _earlier(self, unit: UnitFacts) -> Iterator[int]:
        """The groups whose backward follows that of a unit."""
        ahead: Iterator[int] = iter(())
        for at in reversed(unit.groups):
            ahead = self._order.next_in_backward(at)
        return ahead
