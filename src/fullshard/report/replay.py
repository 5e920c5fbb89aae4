"""A step of a sharded model without the model: which exchanges it makes in which order, and what memory that takes.

Follows the engine's rules for prefetch, slots and reductions on sizes alone (``docs/architecture.md`` has the rules;
tests compare both). A replay begins where ``free_buffers()`` leaves a model and goes through one forward and backward
in the order of :class:`~fullshard.report.facts.ModelFacts`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from fullshard.report.facts import ModelFacts, UnitFacts

Action = Literal["gather", "wait", "compute", "reduce", "all-reduce", "settle"]
Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class Happening:
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
class Phase:
    """The memory of one rank at one time, without activations.

    Args:
        name: of the phase.
        nbytes: in all.
        parts: what it consists of: what, how many, and bytes of each.
    """

    name: str
    nbytes: int
    parts: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Exchanged:
    """The exchanges of one kind in a step, and the bytes that this rank sends (or reads in shared memory) in them."""

    kind: str
    count: int
    nbytes: int


@dataclass
class _Slot:
    nbytes: int
    holder: int = -1


@dataclass
class _Pool:
    """The slots of one kind of buffers, each known by the position of its group."""

    ordinary: int = 0
    slots: list[_Slot] = field(default_factory=list)
    free: list[_Slot] = field(default_factory=list)
    held: dict[int, _Slot] = field(default_factory=dict)  # also from the last use

    def take(self, owner: int, nbytes: int, takes_turns: bool) -> None:
        slot = self.held.get(owner)
        if slot is None:
            for each in self.free:
                has_room = takes_turns and nbytes < each.nbytes <= max(2 * nbytes, self.ordinary)
                if (each.nbytes == nbytes or has_room) and (slot is None or each.holder < 0):
                    slot = each
                    if each.holder < 0:
                        break
        if slot is None:
            slot = _Slot(self.ordinary if takes_turns and nbytes <= self.ordinary else nbytes)
            self.slots.append(slot)
        else:
            self.free.remove(slot)
        self.held.pop(slot.holder, None)
        slot.holder = owner
        self.held[owner] = slot

    def give_back(self, owner: int) -> None:
        self.free.append(self.held[owner])


class _Staging:
    """The buffers in which exchanges work."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._free: dict[bool, list[int]] = {True: [], False: []}
        self._leases: dict[tuple[str, int], tuple[bool, int]] = {}

    def lease(self, kind: str, owner: int, nbytes: int) -> None:
        if not nbytes:
            return
        small = nbytes <= 2**20  # as :class:`~fullshard.buffer.slots.Staging` keeps them apart
        if self._free[small]:
            at = min(self._free[small])
            self._free[small].remove(at)
        else:
            at = len(self.sizes)
            self.sizes.append(0)
        self.sizes[at] = max(self.sizes[at], nbytes)
        self._leases[kind, owner] = small, at

    def give_back(self, kind: str, owner: int) -> None:
        if (kind, owner) in self._leases:
            small, at = self._leases.pop((kind, owner))
            self._free[small].append(at)


@dataclass(frozen=True)
class Held:
    """Memory of one rank at a time, by what holds it: how many pieces of how many bytes."""

    pieces: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]

    @property
    def nbytes(self) -> int:
        return sum(count * size for _, pieces in self.pieces for size, count in pieces)


class Replay:
    """A step of ``facts``.

    Attributes:
        happenings: what the rank does, in its order.
        forward, backward: what is held at the peak of each pass, above what rests.
        kept: what is kept for the next step.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._groups = facts.groups
        self.happenings: list[Happening] = []
        self._pass: Pass = "forward"
        self._parameters, self._gradients, self._copies, self._staging = _Pool(), _Pool(), _Pool(), _Staging()
        for group in self._groups:
            if group.reshards:
                if not group.shares:
                    self._parameters.ordinary = max(self._parameters.ordinary, group.whole)
                self._gradients.ordinary = max(self._gradients.ordinary, group.gradient)
            self._copies.ordinary = max(self._copies.ordinary, group.staged)
        self._state: dict[int, Literal["gathering", "whole"]] = {}
        self._rested: set[int] = set()
        self._values: set[int] = set()
        self._users: Counter[int] = Counter()
        self._collecting: set[int] = set()
        self._straight: set[int] = set()
        self._reducing: list[int] = []
        self._temporary = 0
        self._children: dict[int, list[int]] = {}
        self.forward = self.backward = Held(())
        self._run()
        self.kept = self._hold(temporary=0)

    # what is held

    def _hold(self, temporary: int) -> Held:
        kinds = {
            "full buffers": [slot.nbytes for slot in self._parameters.slots],
            "gradient buffers": [slot.nbytes for slot in self._gradients.slots],
            "copies of shards": [slot.nbytes for slot in self._copies.slots],
            "messages": self._staging.sizes,
            "gradients as autograd made them": [self._groups[at].straight_gradients for at in self._straight],
            "post-forward shards": [self._groups[at].rested for at in self._rested],
            "the gradient that autograd makes": [temporary] if temporary else [],
        }
        return Held(
            tuple((kind, tuple(Counter(filter(None, sizes)).items())) for kind, sizes in kinds.items() if any(sizes))
        )

    def _look(self) -> None:
        held = self._hold(self._temporary)
        if self._pass == "forward":
            self.forward = max(self.forward, held, key=lambda each: each.nbytes)
        else:
            self.backward = max(self.backward, held, key=lambda each: each.nbytes)

    # what happens

    def _tell(self, action: Action, at: int, sent: int = 0) -> None:
        self.happenings.append(Happening(action, at, self._pass, sent))

    def _gather(self, at: int) -> None:
        group = self._groups[at]
        if at in self._state:
            return
        if group.shares:
            self._state[at] = "whole"
            return
        reuses = self._pass == "backward" and at in self._parameters.held and at in self._values
        self._parameters.take(at, group.whole, group.reshards)
        if reuses:
            self._state[at] = "whole"
            return
        self._values.add(at)
        self._state[at] = "gathering"
        if group.staged and at not in self._rested:
            self._copies.take(at, group.staged, True)
        self._staging.lease("gather", at, group.rest_gather_staging if at in self._rested else group.gather_staging)
        if group.communicates:
            self._tell("gather", at, group.rest_gather_sent if at in self._rested else group.gather_sent)
        self._look()

    def _unshard(self, at: int) -> None:
        self._gather(at)
        if self._state[at] == "gathering":
            if self._groups[at].communicates:
                self._tell("wait", at)
            self._state[at] = "whole"
            if self._groups[at].staged and at not in self._rested:
                self._copies.give_back(at)
            self._staging.give_back("gather", at)
            self._rested.discard(at)
            self._look()

    def _reshard(self, at: int) -> None:
        if self._state.pop(at, None) and not self._groups[at].shares:
            self._parameters.give_back(at)

    def _gather_ahead(self, following: list[int]) -> None:
        for at in following[: self._facts.prefetch]:
            if at not in self._state and not self._groups[at].shares:
                self._gather(at)

    # the passes

    def _run(self) -> None:
        units = self._facts.units
        for number, unit in enumerate(units):
            self._children.setdefault(unit.parent, []).append(number)
        self._entered: list[int] = []
        self._left: list[int] = []
        order = [at for unit in units for at in unit.needed]
        stack: list[UnitFacts] = []
        for number, unit in enumerate(units):
            while stack and (unit.parent < 0 or stack[-1] is not units[unit.parent]):
                self._leave(stack.pop())
            stack.append(unit)
            for at in unit.needed:
                self._entered.append(at)
                self._unshard(at)
                self._users[at] += 1
            if unit.ahead:
                self._gather_ahead(order[len(self._entered) :])
            if number not in self._children:
                self._compute(unit)
        while stack:
            self._leave(stack.pop())
        self._pass = "backward"
        self._look()
        self._go_back()

    def _compute(self, unit: UnitFacts) -> None:
        for at in unit.groups:
            self._tell("compute", at)

    def _leave(self, unit: UnitFacts) -> None:
        if self._facts.units.index(unit) in self._children:  # its own work, such as a head, follows that inside it
            self._compute(unit)
        for at in unit.needed:
            self._users[at] -= 1
            self._left.append(at)
            group = self._groups[at]
            if self._users[at] or not group.reshards:
                continue
            if group.rested and group.post_forward:
                self._rested.add(at)
                self._values.discard(at)
            self._reshard(at)
            self._look()

    def _go_back(self) -> None:
        """Backward: the outermost units begin first, and each ends after those inside it."""
        units = self._facts.units

        def visit(number: int) -> None:
            unit = units[number]
            for at in unit.needed:
                self._unshard(at)
                self._users[at] += 1
            last = self._last_use(unit)
            if unit.ahead_in_backward == "before":
                self._gather_ahead(last)
            for at in unit.groups:
                self._tell("compute", at)
                self._collect(at)
            for inner in reversed(self._children.get(number, [])):
                visit(inner)
            for at in unit.groups:
                self._reduce(at)
            for at in unit.needed:
                self._users[at] -= 1
                if not self._users[at]:
                    self._reshard(at)
            if unit.ahead_in_backward == "after":
                self._gather_ahead(last)

        for number in reversed(self._children.get(-1, [])):
            visit(number)
        self._settle(0)
        for at in list(self._state):
            self._reshard(at)

    def _last_use(self, unit: UnitFacts) -> list[int]:
        """The groups that were left before the last use of a unit, the latest first."""
        if not unit.groups:
            return []
        first = max(at for at, each in enumerate(self._left) if each == unit.groups[0])
        earlier = dict.fromkeys(reversed(self._left[:first]))
        return [at for at in earlier if at not in unit.groups]

    def _collect(self, at: int) -> None:
        """The first gradient of a group arrives."""
        group = self._groups[at]
        if not group.gradient or at in self._collecting:
            return
        self._settle(group.gradient_buffers - 1)
        self._gradients.take(at, group.gradient, group.reshards)
        self._collecting.add(at)
        self._straight.add(at)
        self._temporary = 0 if group.straight_gradients else group.largest_gradient
        self._look()
        self._temporary = 0

    def _reduce(self, at: int) -> None:
        group = self._groups[at]
        if at not in self._collecting:
            return
        self._collecting.discard(at)
        self._reducing.append(at)
        self._staging.lease("reduce", at, group.reduce_staging)
        if group.ranks > 1:
            self._tell("reduce", at, group.reduce_sent)
        if group.replicas > 1:
            self._tell("all-reduce", at, group.all_reduce_sent)
        self._look()

    def _settle(self, most: int) -> None:
        """Wait for the oldest reductions, until so many are under way."""
        while len(self._reducing) > most:
            at = self._reducing.pop(0)
            self._tell("settle", at)
            self._gradients.give_back(at)
            self._straight.discard(at)
            self._staging.give_back("reduce", at)
