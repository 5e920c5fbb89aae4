"""Explores what processes that agree may do: every order of messages, ends, losses, suspicions and gradients.

Runs the same :class:`Agreement` as the library. A world is what all processes are in and what is under way between
them. Processes and messages are kept once and known by their numbers, and so is what an event does to a process: a
world is a few small integers, and most events cost a look-up.

The invariants stand in :meth:`Explorer._check` and :meth:`Explorer._check_quiet`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from fullshard.elastic.agreement import Agreement, Membership, Stage
from fullshard.elastic.rows import arrange, missing_shards


class ViolationError(AssertionError):
    """An invariant does not hold; the message has the events that lead there."""


class Limits(NamedTuple):
    """How much may happen in a world."""

    steps: int = 2
    deaths: int = 1
    suspicions: int = 0
    ballots: int = 0  # proposals made again because nothing was decided for long
    choices: int = 0  # of the replicas that take part in a step; 0: all do, and nobody chooses
    asks: int = 0  # whether a process is new, by default the last, and asks to join: 1 one member, 2 all of them


class World(NamedTuple):
    """All processes, and what is under way."""

    processes: tuple[int, ...]
    channels: tuple[tuple[int, ...], ...]  # messages under way, by sender * processes + receiver
    dead: frozenset[int]
    left: Limits  # what may still happen
    installed: tuple[Membership | None, ...]  # the membership of each number in which anybody acted first
    counted: int = 0  # steps that count somewhere
    computed: int = -1  # the last step of which anybody had all gradients
    stepped: frozenset[tuple[int, Any]] = frozenset()  # steps that anybody has made, and with which replicas


Event = tuple[Any, ...]  # a process, what happens to it, and arguments
ASK = "asks to join"


class Watched(Agreement):
    """An agreement that notes what it changes."""

    def __setattr__(self, name: str, value: Any) -> None:
        notes = self.__dict__.setdefault("notes", [])
        if name in ("membership", "state"):
            notes.append((name, value))
        elif name == "step" and "step" in self.__dict__:
            replicas = self.__dict__.get("complete_with")
            notes.append((name, self.step, value, self._is_complete, self.membership.number, replicas))
        super().__setattr__(name, value)


def frozen(value: Any) -> Any:
    """A value that can be compared and hashed, and stands for the attribute of a process."""
    if isinstance(value, dict):
        return tuple((key, frozen(each)) for key, each in value.items())
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, list):
        return tuple(map(frozen, value))
    if isinstance(value, tuple):
        return (type(value).__name__, *map(frozen, value))
    return frozen(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, Stage) else value


#: Attributes whose order means nothing: equal worlds are found equal.
UNORDERED = ("_said", "_told")


def identity(process: Watched) -> Any:
    state = {name: value for name, value in vars(process).items() if name not in ("notes", "outbox", "row_from")}
    for name in UNORDERED:
        state[name] = dict(sorted(state[name].items()))
    if process._proposal is not None:
        proposal = copy.copy(process._proposal)
        proposal.promises = dict(sorted(proposal.promises.items()))
        proposal.accepts = dict(sorted(proposal.accepts.items()))
        state["_proposal"] = proposal
    return frozen(state)


def copied(process: Watched) -> Watched:
    new = object.__new__(Watched)
    for name, value in vars(process).items():
        mutable = isinstance(value, (dict, set, list)) or name == "_proposal"
        vars(new)[name] = copy.deepcopy(value) if mutable else value
    vars(new)["notes"] = []
    return new


class Explorer:
    """Explores the worlds of some processes."""

    def __init__(
        self, shard_of: dict[int, int], shards: int, replicas: int, limits: Limits, new: int | None = None
    ) -> None:
        self.size, self.limits = len(shard_of), limits
        self.shard_of, self.shards, self.replicas = shard_of, shards, replicas
        self.new = (self.size - 1 if new is None else new) if limits.asks else None
        self._objects: list[Any] = []  # processes and messages, by their numbers
        self._numbers: dict[Any, int] = {}
        self._effects: dict[tuple[int, Any], tuple[int, list[tuple[int, int]], list[Any]]] = {}
        self._origin: dict[World, tuple[World, Event] | None] = {}

    def start(self) -> World:
        members = {process: shard for process, shard in self.shard_of.items() if process != self.new}
        rows = arrange((), members, self.shards, self.replicas)
        first = Membership(0, 0, tuple(members.items()), rows)
        agreements = [
            Watched(each, self.shards, self.replicas, first if each in members else None) for each in self.shard_of
        ]
        numbers = tuple(self._number(identity(each), each) for each in agreements)
        return World(numbers, ((),) * self.size**2, frozenset(), self.limits, (first,))

    # -- exploration ---------------------------------------------------------------------------------------------------

    def explore(self, most: int = 10**9) -> int:
        """Visits every world, the nearest first, or ``most`` of them. Returns how many."""
        start = self.start()
        self._origin = {start: None}
        queue = [start]
        for world in queue:
            for event, after in self._successors(world):
                if after not in self._origin:
                    self._origin[after] = world, event
                    queue.append(after)
            if len(queue) >= most:
                break
        return len(queue)

    def walk(self, walks: int, seed: int = 0) -> int:
        """Goes through worlds at random, to the end of each walk. Returns the number of events."""
        draw, events = random.Random(seed), 0
        for _ in range(walks):
            world = self.start()
            self._origin = {world: None}
            while following := list(self._successors(world)):
                rare = [each for each in following if each[0][1] in ("dies", "suspects", "again", "trusts")]
                often = [each for each in following if each not in rare]
                event, after = draw.choice(rare if rare and (not often or draw.random() < 0.15) else often)
                self._origin.setdefault(after, (world, event))
                world, events = after, events + 1
        return events

    def trace(self, world: World) -> list[Event]:
        """The events that lead to a world."""
        events = []
        while (origin := self._origin.get(world)) is not None:
            world = origin[0]
            events.append(origin[1])
        return events[::-1]

    def _fail(self, rule: str, world: World, event: Event) -> None:
        lines = []
        for each in [*self.trace(world), event]:
            words = [
                self._objects[each[3]] if each[1] == "receives" and k == 3 else word for k, word in enumerate(each)
            ]
            lines.append(" ".join(map(str, words)))
        raise ViolationError("\n".join([rule, *lines]))

    # -- events --------------------------------------------------------------------------------------------------------

    def _successors(self, world: World) -> Iterator[tuple[Event, World]]:
        events = list(self._events(world))
        if not any(world.channels) and all(each[1] not in ("loses",) for each in events):
            self._check_quiet(world)
        for event in events:
            yield event, self.after(world, event)
            if event[1] in ("dies", "asks") or not world.left.deaths:
                continue
            sent = len(self._effect(world.processes[event[0]], event[1:])[1])
            for several in range(sent):
                yield (*event, f"and dies after {several} messages"), self.after(world, event, several)

    def _events(self, world: World, limited: bool = True) -> Iterator[Event]:
        left, size = world.left, self.size
        for me in (each for each in range(size) if each not in world.dead):
            process: Watched = self._objects[world.processes[me]]
            for other in range(size):
                if channel := world.channels[other * size + me]:
                    yield me, "receives", other, channel[0]
                elif other in world.dead and other not in process.lost:
                    yield me, "loses", other
            is_new = me == self.new and process.membership.number < 0
            able = process.state is not Stage.OUT or (is_new and world.computed >= process.step)
            may_run = process.step < left.steps or not limited
            is_first = process.state is Stage.RUNNING and next(iter(process.members)) == me
            if is_first and may_run and process.step not in process.chosen:
                yield from ((me, "chooses", (choice,)) for choice in range(left.choices))
            able = able and (not left.choices or process.step in process.chosen)
            if able and not process._is_complete and may_run:
                yield me, "completes"
            has_all = process._is_complete or left.choices  # a new process is told no choice, only the mean
            if is_new and has_all and process.__dict__.get("heard", 0) > process.step:
                yield me, "follows", process.step + 1
            if process.is_frozen and (left.ballots or not limited):
                yield me, "again"
            if not limited:
                continue
            if left.deaths:
                yield me, "dies"
            if is_new and left.asks:
                yield me, "asks"
            if process.state is not Stage.OUT:
                for other in process.members:
                    if other in process.suspected and other not in world.dead:
                        yield me, "trusts", other
                    elif left.suspicions and other not in {me, *process.lost, *process.suspected}:
                        yield me, "suspects", other

    def after(self, world: World, event: Event, several: int | None = None) -> World:
        """The world after an event; the process dies in it once it has sent ``several`` messages."""
        me, what, *_ = event
        left, size, channels = world.left, self.size, list(world.channels)
        if what == "asks":
            members = sorted({*range(size)} - world.dead - {me})
            for each in members if left.asks > 1 else members[:1]:
                channels[me * size + each] += (self._number(ASK, ASK),)
            return world._replace(channels=tuple(channels), left=left._replace(asks=0))
        if what == "suspects":
            left = left._replace(suspicions=left.suspicions - 1)
        if what == "again":
            left = left._replace(ballots=max(0, left.ballots - 1))
        number, sent, notes = world.processes[me], [], []
        if what != "dies":
            number, sent, notes = self._effect(number, event[1:])
        if what == "receives":
            channels[event[2] * size + me] = channels[event[2] * size + me][1:]
        for receiver, message in sent[:several]:
            if receiver not in world.dead:
                channels[me * size + receiver] += (message,)
        dead = world.dead
        if what == "dies" or several is not None:
            dead, left = dead | {me}, left._replace(deaths=left.deaths - 1)
            for other in range(size):
                channels[other * size + me] = ()
        processes = (*world.processes[:me], number, *world.processes[me + 1 :])
        new = world._replace(processes=processes, channels=tuple(channels), dead=dead, left=left)
        if what == "completes":
            new = new._replace(computed=max(world.computed, self._objects[world.processes[me]].step))
        return self._check(world, event, notes, new) if notes else new

    def _effect(self, number: int, what: Event) -> tuple[int, list[tuple[int, int]], list[Any]]:
        """What an event does to a process: the process after it, what it sends, and what it notes."""
        if (known := self._effects.get((number, what))) is not None:
            return known
        process = copied(self._objects[number])
        match what:
            case ("receives", sender, message) if self._objects[message] is ASK:
                if sender not in process.members and sender not in process.lost:
                    process.candidates[sender] = self.shard_of[sender]
                    process.consider()
            case ("receives", sender, message) if isinstance(self._objects[message], int):
                process.__dict__["heard"] = max(self._objects[message], process.__dict__.get("heard", 0))
            case ("receives", sender, message):
                process.receive(sender, self._objects[message])
            case ("loses", other):
                process.lose(other)
            case ("suspects" | "trusts" as word, other):
                process.suspect(other, word == "suspects")
            case ("chooses", replicas):
                process.choose(replicas)
            case ("completes",):
                process.__dict__["complete_with"] = process.chosen.get(process.step)
                process.complete()
            case ("follows", step):
                process.follow(step)
            case ("again",):
                process.consider(again=True)
        sent = [(receiver, self._number(frozen(message), message)) for receiver, message in process.outbox]
        for step in (note[2] for note in process.__dict__["notes"] if note[0] == "step" and note[1] != note[2]):
            if self.new is not None and self.new not in (process.me, *process.lost):  # it gets gradients after a step
                sent.append((self.new, self._number(("stepped", step), step)))
        notes, process.__dict__["notes"], process.outbox = process.__dict__["notes"], [], []
        self._effects[number, what] = known = self._number(identity(process), process), sent, notes
        return known

    def _number(self, key: Any, value: Any) -> int:
        if (number := self._numbers.setdefault(key, len(self._objects))) == len(self._objects):
            self._objects.append(value)
        return number

    # -- invariants ----------------------------------------------------------------------------------------------------

    def _check(self, world: World, event: Event, notes: list[Any], new: World) -> World:
        """Checks what a process changed, and notes it in the world."""

        def demand(holds: bool, rule: str) -> None:
            if not holds:
                self._fail(rule, world, event)

        installed, counted, stepped = world.installed, world.counted, world.stepped
        for place, (name, *values) in enumerate(notes):
            if name == "membership" and notes[place + 1] == ("state", Stage.RUNNING):
                (value,) = values
                if value.number < len(installed):
                    demand(value == installed[value.number], "memberships with the same number are equal")
                    continue
                demand(value.number == len(installed), "memberships follow one another")
                demand(value.step >= counted, "no step that counted is repeated")
                for each in value.shard_of:
                    member: Watched = self._objects[world.processes[each]]
                    ready = member.step == value.step or (member.step == value.step - 1 and member._is_complete)
                    is_new = each in value.joined and member.step == value.step - 1
                    others = [other for other in value.shard_of if other not in value.joined]
                    ready |= is_new and any(value.shard_of[other] == value.shard_of[each] for other in others)
                    demand(ready, "every member is at its step, or has all gradients of the step before")
                self._check_rows(value, demand)
                old = installed[-1].shard_of.keys() if installed[-1] else {*()}
                stay, go = old & value.shard_of.keys(), old - value.shard_of.keys()
                demand(2 * len(stay) > len(old) or go <= world.dead, "a minority goes on only if all others have ended")
                installed = (*installed, value)
            elif name == "step" and values[0] != values[1]:
                old_step, step, was_complete, number, replicas = values
                demand(step == old_step + 1, "a process advances by one step")
                is_new = bool(installed[-1]) and event[0] in installed[-1].joined and installed[-1].step == step
                is_new |= number < 0 and bool(world.left.choices)  # it was told the mean
                demand(was_complete or is_new, "a process that advances had all gradients of the step, or is new")
                later = [each for each in installed[number + 1 :] if each is not None] if number >= 0 else []
                demand(all(each.step >= step for each in later), "no step that counts is repeated already")
                counted = max(counted, step)
                if not is_new:
                    stepped |= {(old_step, replicas)}
                    demand(sum(of == old_step for of, _ in stepped) == 1, "all step with the same replicas")
        return new._replace(installed=installed, counted=counted, stepped=stepped)

    def _check_rows(self, value: Membership, demand: Any) -> None:
        of = value.shard_of
        placed = [process for row in value.rows for process in row]
        demand(len(placed) == len({*placed}), "no process is in two rows")
        demand(len(value.rows) <= self.replicas, "there are no more rows than replicas")
        demand(bool(value.rows) != bool(missing_shards(of, self.shards)), "there is a row if all shards are")
        right = all([of.get(process) for process in row] == [*range(self.shards)] for row in value.rows)
        demand(right, "a row has one member for each shard")

    def _check_quiet(self, world: World) -> None:
        """If nothing is under way, and the living and unsuspected are a quorum and have all shards, they go on."""
        quiet, counted = world, world.counted
        for _ in range(16):
            for event in list(self._events(world, limited=False)):
                if event[1] != "again" and event in [*self._events(world, limited=False)]:
                    world = self.after(world, event)
            if world.counted > counted:
                return
            if not any(world.channels):
                for event in [each for each in self._events(world, limited=False) if each[1] == "again"]:
                    world = self.after(world, event)
        living = [self._objects[world.processes[each]] for each in range(self.size) if each not in world.dead]
        last = max((each.membership for each in living if each.state is not Stage.OUT), default=None)
        if last is None:
            return
        suspected = {other for each in living if each.state is not Stage.OUT for other in each.suspected}
        able = {each.me for each in living if each.state is not Stage.OUT} & last.shard_of.keys() - suspected
        enough = 2 * len(able) > len(last.shards) or last.shard_of.keys() - able <= world.dead
        has_shards = not missing_shards({each: last.shard_of[each] for each in able}, self.shards)
        if able and enough and has_shards:
            ends = [vars(each) for each in living]
            self._fail("nothing is stuck", quiet, (-1, "is stuck", *ends))
