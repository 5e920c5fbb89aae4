"""What holds in every world of :mod:`tests.elastic.explorer`, checked whenever a process changes."""

from __future__ import annotations

from typing import Any

from fullshard.elastic.agreement import Decided, Membership, Stage
from fullshard.elastic.rows import missing_shards
from tests.elastic.world import WAITING, Event, Watched, World


class ViolationError(AssertionError):
    """An invariant does not hold; the message has the events that lead there."""


class Invariants:
    """The base of an explorer of worlds, which have some ``shards`` and ``replicas``."""

    def __init__(self, shards: int, replicas: int) -> None:
        self.shards, self.replicas = shards, replicas
        self.objects: list[Any] = []  # processes and messages, by their numbers

    def living(self, world: World) -> list[Watched]:
        return [self.objects[each] for process, each in enumerate(world.processes) if process not in world.dead]

    def fail(self, rule: str, world: World, *last: Event) -> None:
        raise NotImplementedError

    def check(self, world: World, event: Event, notes: list[Any], new: World) -> World:
        """Checks what a process changed, and notes it in the world."""

        def demand(holds: bool, rule: str) -> None:
            if not holds:
                self.fail(rule, world, event)

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
                    each for each in old if each in members or self.objects[world.processes[each]].state in WAITING
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
        messages = [self.objects[each] for channel in world.channels for each in channel]
        said = [each.value for each in messages if isinstance(each, Decided)]
        known = [each for process in self.living(world) for each in (process.membership, *process._told.values())]
        return any(each in memberships for each in (*said, *known))

    def _check_states(self, world: World, value: Membership, demand: Any) -> None:
        """Checks that members can begin at the step of their membership."""
        of, backs = value.shard_of, [each for each in world.installed if each.number == each.back]
        member_of: dict[int, Watched] = {each: self.objects[world.processes[each]] for each in of}
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
