"""Explores what processes that agree may do: every order of messages, ends, losses, suspicions and gradients.

Runs the same :class:`Agreement` as the library. A world is what all processes are in and what is under way between
them. Processes and messages are kept once and known by their numbers, and so is what an event does to a process: a
world is a few small integers, and most events cost a look-up.

The invariants stand in :mod:`tests.elastic.invariants`, and what must happen in :meth:`Explorer._check_quiet`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from fullshard.elastic.agreement import Membership, Stage
from fullshard.elastic.copies import Copy, holder_of, outdated
from fullshard.elastic.rows import arrange, missing_shards
from tests.elastic.invariants import Invariants, ViolationError
from tests.elastic.world import TAKES, Ask, Event, Limits, Stepped, Watched, World


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


class Explorer(Invariants):
    """Explores the worlds of some processes."""

    def __init__(
        self, shard_of: dict[int, int], shards: int, replicas: int, limits: Limits, new: int | None = None
    ) -> None:
        self.size, self.limits = len(shard_of), limits
        super().__init__(shards, replicas)
        self.shard_of = shard_of
        self.new = (self.size - 1 if new is None else new) if limits.asks else -1
        self._numbers: dict[Any, int] = {}  # of processes and messages
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

    def fail(self, rule: str, world: World, *last: Event) -> None:
        events = [*last]
        while (origin := self._origin.get(world)) is not None:
            world = origin[0]
            events.insert(0, origin[1])
        told = [(*each[:3], self.objects[each[3]], *each[4:]) if each[1] == "receives" else each for each in events]
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

    def _events(self, world: World, limited: bool = True) -> Iterator[Event]:
        left, size, living = world.left, self.size, self.living(world)
        for process in living:
            me, is_out = process.me, process.state is Stage.OUT
            for other in range(size):
                if channel := world.channels[other * size + me]:
                    yield me, "receives", other, channel[0]
                    if left.resets and other in world.dead:
                        yield me, "is reset by", other, me not in self.objects[world.processes[other]].doubted
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
        elif what == "is reset by":
            channels[event[2] * size + me] = ()
        elif what == "completes":
            computed = max(computed, self.objects[number].step)
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
        return self.check(world, event, notes, new) if notes else new

    def _effect(self, number: int, what: Event) -> tuple[int, list[tuple[int, int]], list[Any]]:
        """What an event does to a process: the process after it, what it sends, and what it notes."""
        if (known := self._effects.get((number, what))) is not None:
            return known
        process = copied(self.objects[number])
        match what:
            case ("receives", sender, message):
                self._receive(process, sender, self.objects[message])
            case ("loses", other):
                process.lose(other)
            case ("is reset by", other, has_trusted):
                process.lose(other, is_read=False, has_trusted=has_trusted)
            case ("suspects" | "hangs" | "trusts" as word, other):
                process.doubted |= {other}
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
                    process.followers.add(sender)  # see Stepped
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
        if (number := self._numbers.setdefault(key, len(self.objects))) == len(self.objects):
            self.objects.append(value)
        return number

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
        living = [each for each in self.living(world) if each.state is not Stage.OUT]
        if not living:
            return
        last = max(each.membership for each in living).shard_of
        able = {each.me for each in living} & last.keys() - {other for each in living for other in each.suspected}
        gone, unread = last.keys() - able, {other for each in living for other in each.unread}
        enough = 2 * len(able) > len(last) or (gone <= world.dead and (len(able) == len(gone) or not gone & unread))
        if able and enough and not missing_shards({each: last[each] for each in able}, self.shards):
            self.fail("nothing is stuck", quiet, (-1, "is stuck", *map(vars, living)))
