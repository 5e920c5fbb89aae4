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

from fullshard.elastic.agreement import Agreement, Decided, Membership, Stage
from fullshard.elastic.copies import Copy, holder_of, outdated
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
    copies: bool = False  # whether each process copies its state when it has all gradients of a step
    hangs: bool = False  # whether those that are suspected hang: they answer, and are to be left out


class World(NamedTuple):
    """All processes, and what is under way."""

    processes: tuple[int, ...]
    channels: tuple[tuple[int, ...], ...]  # messages under way, by sender * processes + receiver
    dead: frozenset[int]
    left: Limits  # what may still happen
    installed: tuple[Membership, ...]  # the membership of each number in which anybody acted first
    counted: int = 0  # steps that count somewhere
    computed: int = -1  # the last step of which anybody had all gradients
    stepped: frozenset[tuple[int, Any]] = frozenset()  # steps that anybody has made, and with which replicas


class Ask(NamedTuple):
    """A new process asks to be a member, with a state of the future since the membership ``back``."""

    back: int


class Stepped(NamedTuple):
    """A new process may get the gradients of the step before."""

    step: int


Event = tuple[Any, ...]  # a process, what happens to it, and arguments
#: Where a process does nothing of a step.
WAITING = Stage.FROZEN, Stage.OUT
#: What an event takes from the limits.
TAKES = {"dies": "deaths", "suspects": "suspicions", "hangs": "suspicions", "again": "ballots"}


class Watched(Agreement):
    """An agreement that notes what it changes. It may be that of a new process, which has a state of the future since
    the membership ``since``, and has ``heard`` of gradients."""

    since = heard = 0

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
        return tuple((key, frozen(each)) for key, each in sorted(value.items(), key=lambda item: item[0]))
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(frozen, value))
    return frozen(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, Stage) else value


def identity(process: Watched) -> Any:
    left_out = ("notes", "outbox", "row_from")
    return frozen({name: value for name, value in vars(process).items() if name not in left_out})


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
        self.new = (self.size - 1 if new is None else new) if limits.asks else -1
        self._objects: list[Any] = []  # processes and messages, by their numbers
        self._numbers: dict[Any, int] = {}
        self._effects: dict[tuple[int, Any], tuple[int, list[tuple[int, int]], list[Any]]] = {}
        self._origin: dict[World, tuple[World, Event] | None] = {}

    def start(self) -> World:
        members = {process: shard for process, shard in self.shard_of.items() if process != self.new}
        first = Membership(0, 0, (*members.items(),), arrange((), members, self.shards, self.replicas))
        own = [Watched(each, self.shards, self.replicas, first if each in members else None) for each in self.shard_of]
        numbers = tuple(self._number(identity(each), each) for each in own)
        return World(numbers, ((),) * self.size**2, frozenset(), self.limits, (first,))

    # -- exploration ---------------------------------------------------------------------------------------------------

    def explore(self, most: int = 10**9) -> int:
        """Visits every world, the nearest first, or ``most`` of them. Returns how many."""
        queue = [self.start()]
        self._origin = {queue[0]: None}
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
                rare = [each for each in following if each[0][1] in (*TAKES, "trusts")]
                often = [each for each in following if each not in rare]
                event, after = draw.choice(rare if rare and (not often or draw.random() < 0.15) else often)
                self._origin.setdefault(after, (world, event))
                world, events = after, events + 1
        return events

    def _fail(self, rule: str, world: World, *last: Event) -> None:
        events = [*last]
        while (origin := self._origin.get(world)) is not None:
            world = origin[0]
            events.insert(0, origin[1])
        told = [(*each[:3], self._objects[each[3]], *each[4:]) if each[1] == "receives" else each for each in events]
        raise ViolationError("\n".join([rule, *(" ".join(map(str, each)) for each in told)]))

    # -- events --------------------------------------------------------------------------------------------------------

    def _successors(self, world: World) -> Iterator[tuple[Event, World]]:
        events = list(self._events(world))
        if not any(world.channels) and all(each[1] != "loses" for each in events):
            self._check_quiet(world)
        for event in events:
            yield event, self.after(world, event)
            if event[1] in ("dies", "asks") or not world.left.deaths:
                continue
            for several in range(len(self._effect(world.processes[event[0]], event[1:])[1])):
                yield (*event, f"and dies after {several} messages"), self.after(world, event, several)

    def _living(self, world: World) -> list[Watched]:
        return [self._objects[world.processes[each]] for each in range(self.size) if each not in world.dead]

    def _events(self, world: World, limited: bool = True) -> Iterator[Event]:
        left, size, living = world.left, self.size, self._living(world)
        for process in living:
            me, is_out = process.me, process.state is Stage.OUT
            for other in range(size):
                if channel := world.channels[other * size + me]:
                    yield me, "receives", other, channel[0]
                elif other in world.dead and other not in process.lost:
                    yield me, "loses", other
            is_new = me == self.new and process.membership.number < 0
            able = world.computed >= process.step if is_new else not is_out and bool(process.membership.rows)
            may_run = process.step < left.steps or not limited
            is_first = process.state is Stage.RUNNING and next(iter(process.members)) == me
            if is_first and may_run and process.step not in process.chosen:
                yield from ((me, "chooses", (choice,)) for choice in range(left.choices))
            able = able and (not left.choices or process.step in process.chosen)
            if able and not process._is_complete and may_run:
                yield me, "completes"
            has_all = process._is_complete or left.choices  # a new process is told no choice, only the mean
            if is_new and has_all and process.heard > process.step:
                yield me, "follows", process.step + 1
            if process.is_frozen and (left.ballots or not limited):
                yield me, "again"
            others = tuple(each.me for each in living if each is not process)
            for step, back in self._states_for(process, living) if is_new else ():
                yield me, "fetches", step, back, *others
            if not limited:
                continue
            if left.deaths:
                yield me, "dies"
            if is_new and left.asks:
                yield me, "asks", *(others if left.asks > 1 else others[:1])
            for other in process.members if not is_out else ():
                if other in process.suspected and other not in world.dead:
                    yield me, "trusts", other
                elif left.suspicions and other not in {me, *process.lost, *process.suspected}:
                    yield me, "hangs" if left.hangs else "suspects", other

    def _states_for(self, new: Watched, living: list[Watched]) -> Iterator[tuple[int, int]]:
        """The states that members send to the new process after they have gone back, and the memberships that did."""
        for member in living:
            membership, shard = member.membership, self.shard_of[new.me]
            owns = member.members.get(member.me) == shard and not member.goes_back
            if membership.back > new.since and (owns or (shard, member.me) in membership.holders):
                yield member.step if owns else membership.step, membership.back

    def after(self, world: World, event: Event, several: int | None = None) -> World:
        """The world after an event; the process dies in it once it has sent ``several`` messages."""
        (me, what, *_), size, channels = event, self.size, list(world.channels)
        left, number, sent, notes, dead, computed = world.left, world.processes[me], [], [], world.dead, world.computed
        for taken in [TAKES[each] for each in (what, "dies" if several is not None else "") if each in TAKES]:
            left = left._replace(**{taken: max(0, getattr(left, taken) - 1)})
        left = left._replace(asks=0) if what == "asks" else left
        if what == "receives":
            channels[event[2] * size + me] = channels[event[2] * size + me][1:]
        elif what == "completes":
            computed = max(computed, self._objects[number].step)
        if what != "dies":
            number, sent, notes = self._effect(number, event[1:])
        for receiver, message in sent[:several]:
            if receiver not in dead:
                channels[me * size + receiver] += (message,)
        if what == "dies" or several is not None:
            dead |= {me}
            channels = [() if place % size == me else each for place, each in enumerate(channels)]
        processes = (*world.processes[:me], number, *world.processes[me + 1 :])
        new = World(processes, tuple(channels), dead, left, world.installed, world.counted, computed)
        return self._check(world, event, notes, new) if notes else new

    def _effect(self, number: int, what: Event) -> tuple[int, list[tuple[int, int]], list[Any]]:
        """What an event does to a process: the process after it, what it sends, and what it notes."""
        if (known := self._effects.get((number, what))) is not None:
            return known
        process = copied(self._objects[number])
        match what:
            case ("receives", sender, message):
                self._receive(process, sender, self._objects[message])
            case ("loses", other):
                process.lose(other)
            case ("suspects" | "hangs" | "trusts" as word, other):
                process.suspect(other, word != "trusts", word == "hangs")
            case ("chooses", replicas):
                process.choose(replicas)
            case ("completes",):
                process.__dict__["complete_with"] = process.chosen.get(process.step)
                self._copy(process)
                process.complete()
            case ("asks", *others):
                process.outbox += [(each, Ask(process.since)) for each in others]
            case ("fetches", step, back, *others):
                process.follow(step)
                process.since, process.heard, process.__dict__["notes"] = back, step, []
                process.outbox += [(each, Ask(back)) for each in others]
            case ("follows", step):
                process.follow(step)
            case ("again",):
                process.consider(again=True)
        notes, process.__dict__["notes"] = process.__dict__["notes"], []
        if self.new not in (-1, process.me, *process.lost):
            stepped = [note[2] for note in notes if note[0] == "step" and note[1] < note[2]]
            process.outbox += [(self.new, Stepped(step)) for step in stepped]  # type: ignore[misc]
        sent = [(receiver, self._number(frozen(message), message)) for receiver, message in process.outbox]
        process.outbox = []
        self._effects[number, what] = known = self._number(identity(process), process), sent, notes
        return known

    def _receive(self, process: Watched, sender: int, message: Any) -> None:
        match message:
            case Stepped(step):
                process.heard = max(step, process.heard)
            case Ask(back):
                if sender not in {*process.members, *process.lost} and back >= process.membership.back:
                    process.candidates[sender] = self.shard_of[sender]
                    process.consider()
            case Copy(number, step, shard, data):
                if number >= process.membership.back:
                    process.copies[step, shard] = data
            case _:
                process.receive(sender, message)

    def _copy(self, process: Watched) -> None:
        """A process loads its copy if it has gone back, and copies its state, which it knows by the future it is of."""
        key, membership = (process.step, self.shard_of[process.me]), process.membership
        if process.goes_back:
            process.__dict__["notes"].append(("loads", key in process.copies))
            process.goes_back = False
        if not self.limits.copies or process.me not in membership.shard_of or key in process.copies:
            return
        process.copies[key] = membership.back
        if (holder := holder_of(process.me, membership.shard_of, {})) is not None:
            copy_: Any = Copy(membership.number, *key, membership.back)  # type: ignore[arg-type]
            process.outbox.append((holder, copy_))
        for old in outdated(process.copies, process.step, 1) if not process.is_frozen else ():
            del process.copies[old]

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

        installed, counted, computed, stepped = world.installed, world.counted, new.computed, world.stepped
        for place, (name, *values) in enumerate(notes):
            if name == "membership" and notes[place + 1] == ("state", Stage.RUNNING):
                (value,) = values
                if value in installed:
                    continue
                is_forgotten = not self._knows(new, installed[value.number :])
                demand(is_forgotten, "memberships with the same number are equal, if any that knows of them is left")
                installed = installed[: value.number]
                demand(value.number == len(installed), "memberships follow one another")
                if value.back == value.number:
                    counted, computed = value.step, value.step - 1
                demand(value.step >= counted, "no step that counted is repeated")
                self._check_states(world._replace(installed=installed), value, demand)
                self._check_rows(value, demand)
                old, members = installed[-1].shard_of.keys(), value.shard_of.keys()
                agreed = {
                    each for each in old if each in members or self._objects[world.processes[each]].state in WAITING
                }
                enough = 2 * len(agreed) > len(old) or old - agreed <= world.dead
                demand(enough, "less than a majority agrees only if all others have ended")
                installed = (*installed, value)
            elif name == "loads":
                demand(values[0], "a process that goes back has its copy")
            elif name == "step" and values[0] < values[1]:
                old_step, step, was_complete, number, replicas = values
                demand(step == old_step + 1, "a process advances by one step")
                is_new = event[0] in installed[-1].joined and installed[-1].step == step
                is_new |= number < 0 and bool(world.left.choices)  # it was told the mean
                demand(was_complete or is_new, "a process that advances had all gradients of the step, or is new")
                later = installed[number + 1 :] if number >= 0 else ()
                backs = [each for each in later if each.number == each.back]
                is_repeated = any(each.step < step and (not backs or event[0] in each.shard_of) for each in later)
                demand(not is_repeated, "no step that counts is repeated already")
                if number >= 0 and not backs:
                    demand(computed >= old_step, "a step that counts was computed")
                    counted = max(counted, step)
                if not is_new and world.left.choices:
                    stepped |= {(old_step, replicas)}
                    demand(sum(of == old_step for of, _ in stepped) == 1, "all step with the same replicas")
        return new._replace(installed=installed, counted=counted, computed=computed, stepped=stepped)

    def _knows(self, world: World, memberships: tuple[Membership, ...]) -> bool:
        """Whether a process that lives knows of one of some memberships, or will read of it."""
        messages = [self._objects[each] for channel in world.channels for each in channel]
        said = [each.value for each in messages if isinstance(each, Decided)]
        known = [each for process in self._living(world) for each in (process.membership, *process._told.values())]
        return any(each in memberships for each in (*said, *known))

    def _check_states(self, world: World, value: Membership, demand: Any) -> None:
        """Checks that members can begin at the step of their membership."""
        of, backs = value.shard_of, [each for each in world.installed if each.number == each.back]
        member_of: dict[int, Watched] = {each: self._objects[world.processes[each]] for each in of}
        goes_back = value.back == value.number
        demand(not (goes_back and value.joined), "no new process, which is not frozen, goes back")
        demand(not goes_back or missing_shards(of, self.shards), "a membership goes back only without a shard")
        for each, member in member_of.items():
            others = [of[other] for other in of if other not in value.joined]
            ready = member.step == value.step or goes_back
            follows = member._is_complete or (each in value.joined and of[each] in others)
            demand(ready or (member.step == value.step - 1 and follows), "every member is at its step, or can make it")
            is_old = any(back.number > member.since and back.step < value.step for back in backs)
            demand(each not in value.joined or not is_old, "a new member has a state of the future that counts")
        own = [(shard, each) for each, shard in of.items()] if goes_back else []
        for shard, each in [*own, *value.holders]:
            made = member_of[each].copies.get((value.step, shard))
            demand(made is not None, "every state of the step to which a membership goes back is there")
            is_old = any(back.number > made and back.step < value.step for back in backs)
            demand(not is_old, "copies are of the future that counts")

    def _check_rows(self, value: Membership, demand: Any) -> None:
        of, missing = value.shard_of, missing_shards(value.shard_of, self.shards)
        placed = [process for row in value.rows for process in row]
        demand(len(placed) == len({*placed}), "no process is in two rows")
        demand(len(value.rows) <= self.replicas, "there are no more rows than replicas")
        demand(bool(value.rows) != bool(missing), "there is a row if all shards are")
        demand(not value.holders or [*dict(value.holders)] == missing, "copies of the missing shards are held")
        right = all([of.get(process) for process in row] == [*range(self.shards)] for row in value.rows)
        demand(right, "a row has one member for each shard")

    def _check_quiet(self, world: World) -> None:
        """If nothing is under way, and the living and unsuspected are a quorum and have all shards, they go on."""
        quiet, counted = world, world.counted
        for _ in range(32):
            for event in list(self._events(world, limited=False)):
                if event[1] != "again" and event in [*self._events(world, limited=False)]:
                    world = self.after(world, event)
            if world.counted > counted:
                return
            if not any(world.channels):
                for event in [each for each in self._events(world, limited=False) if each[1] == "again"]:
                    world = self.after(world, event)
        living = [each for each in self._living(world) if each.state is not Stage.OUT]
        if not living:
            return
        last = max(each.membership for each in living).shard_of
        able = {each.me for each in living} & last.keys() - {other for each in living for other in each.suspected}
        enough = 2 * len(able) > len(last) or last.keys() - able <= world.dead
        if able and enough and not missing_shards({each: last[each] for each in able}, self.shards):
            self._fail("nothing is stuck", quiet, (-1, "is stuck", *map(vars, living)))
