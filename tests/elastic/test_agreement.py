"""What processes agree on (:mod:`fullshard.elastic.agreement`), in random orders of messages and deaths.

Invariants, checked whenever a process has changed:

- memberships of one number are the same on all processes that act in them;
- no process makes a step twice, leaves one out, or makes one whose gradients it does not have;
- a step that counted for anybody, dead or alive, is repeated by nobody;
- once nothing is under way, and the processes that are left are enough, every one of them makes further steps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import pytest

from fullshard.elastic.agreement import TABLE, Agreement, Decided, Membership, Message, Promise, State
from fullshard.elastic.rows import arrange, missing_shards

SHARDS, REPLICAS = 2, 2


class World:
    """Processes, messages between each pair in order, and what has happened so far."""

    def __init__(self, seed: int, size: int = SHARDS * REPLICAS) -> None:
        self.chosen = random.Random(seed)
        shard_of = {process: process % SHARDS for process in range(size)}
        first = Membership(0, 0, tuple(shard_of.items()), arrange((), shard_of, SHARDS, REPLICAS))
        self.alive = {process: Agreement(process, SHARDS, REPLICAS, first) for process in range(size)}
        self.under_way: dict[tuple[int, int], deque[Message | None]] = {}  # ``None``: the sender has ended
        self.memberships = {0: first}
        self.steps = dict.fromkeys(self.alive, 0)
        self.counted = 0  # the first step that has counted for nobody

    def send(self, process: int, most: int = 1 << 30) -> None:
        """Puts what a process wants to send on its way; ``most`` messages, if it dies meanwhile."""
        agreement = self.alive[process]
        for receiver, message in agreement.outbox[:most]:
            self.under_way.setdefault((process, receiver), deque()).append(message)
        agreement.outbox.clear()

    def check(self, process: int) -> None:
        agreement = self.alive[process]
        membership = agreement.membership
        if agreement.state is not State.OUT:
            if membership.number not in self.memberships:
                assert membership.step >= self.counted
            assert self.memberships.setdefault(membership.number, membership) == membership
            assert agreement.step >= membership.step
            assert agreement.step >= self.counted - 1
        assert agreement.step - self.steps[process] in (0, 1)
        self.steps[process] = agreement.step
        self.counted = max(self.counted, agreement.step)

    def kill(self, process: int) -> None:
        self.send(process, self.chosen.randrange(len(self.alive[process].outbox) + 1))
        del self.alive[process]
        for other in self.alive:
            self.under_way.setdefault((process, other), deque()).append(None)

    def act(self) -> bool:
        """One thing that may happen now happens. Returns whether there was one."""
        pairs = [pair for pair, messages in self.under_way.items() if messages and pair[1] in self.alive]
        able = [p for p, each in self.alive.items() if each.state is State.RUNNING and each.step < 3]
        chosen = self.chosen.choice([*pairs, *able]) if pairs or able else None
        if chosen is None:
            return False
        if isinstance(chosen, int):
            process = chosen
            self.alive[process].complete()
        else:
            sender, process = chosen
            message = self.under_way[chosen].popleft()
            if message is None:
                self.alive[process].lose(sender)
            else:
                self.alive[process].receive(sender, message)
        self.check(process)
        if self.chosen.random() < 0.7:  # else later, and perhaps never
            self.send(process)
        return True

    def flush(self) -> bool:
        waiting = [process for process, each in self.alive.items() if each.outbox]
        for process in waiting:
            self.send(process)
        return bool(waiting)


def explore(kills: int, seeds: int, suspicions: int = 0) -> None:
    for seed in range(seeds):
        world = World(10_000 * suspicions + 1000 * kills + seed)
        doubts = {world.chosen.randrange(60) for _ in range(suspicions)}
        at = sorted(world.chosen.randrange(60) for _ in range(kills))
        for number in range(3000):
            while at and number >= at[0] and len(world.alive) > 1:
                at.pop(0)
                world.kill(world.chosen.choice([*world.alive]))
            if number in doubts:
                one, other = world.chosen.sample([*world.alive], 2) if len(world.alive) > 1 else (-1, -1)
                for each in world.alive.values() if one >= 0 else ():
                    if each.me != other and (each.me == one or world.chosen.random() < 0.7):
                        each.suspect(other)
            if not world.act() and not world.flush():
                frozen = [each for each in world.alive.values() if each.is_frozen]
                if not frozen or number > 2500:
                    break
                for each in frozen:
                    each.consider(again=True)
        left = {process: process % SHARDS for process in world.alive}
        if not missing_shards(left, SHARDS) and not suspicions:
            assert [each.step for each in world.alive.values()] == [3] * len(left), (kills, seed)


@pytest.mark.parametrize("kills", [0, 1, 2, 3])
def test_processes_that_are_left_go_on_and_agree(kills: int) -> None:
    explore(kills, 300)
    explore(kills, 300, suspicions=2)


def _any_quorum(self: Agreement, voters: Mapping[int, Any]) -> bool:
    return bool(voters)


def _no_repetition(self: Agreement, promises: Mapping[int, Promise], choose: Any = Agreement._choose) -> Any:
    value = choose(self, promises)
    return value and value._replace(step=self.step + 1)


def _always_repeats(self: Agreement, promises: Mapping[int, Promise], choose: Any = Agreement._choose) -> Any:
    return choose(self, {process: each._replace(is_complete=False) for process, each in promises.items()})


def _tells_nobody(self: Agreement, sender: int, message: Decided, install: Any = Agreement._install) -> None:
    install(self, sender, message)
    if sender != self.me:
        self.outbox = [each for each in self.outbox if not isinstance(each[1], Decided)]


@pytest.mark.parametrize(
    ("method", "mistake"),
    [
        ("_is_quorum", _any_quorum),
        ("_choose", _no_repetition),
        ("_choose", _always_repeats),
        ("_install", _tells_nobody),
    ],
)
def test_a_mistake_in_the_protocol_is_found(method: str, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, answer in TABLE.items():
        if answer is getattr(Agreement, method):
            monkeypatch.setitem(TABLE, key, mistake)
    monkeypatch.setattr(Agreement, method, mistake)
    with pytest.raises(AssertionError):
        for kills in (0, 1, 2, 3):
            explore(kills, 500, suspicions=2)
            explore(kills, 500)


def test_a_process_that_joins_waits_for_the_word_of_all_older_members() -> None:
    shard_of = {0: 0, 1: 0, 2: 0}
    new = Agreement(2, 1, 2)
    value = Membership(1, 0, tuple(shard_of.items()), ((0,), (1,)), (2,))
    new.receive(0, Decided(0, value))
    assert new.state is State.OUT
    new.receive(1, Decided(0, value))
    assert new.state is State.RUNNING
    assert new.membership == value


def test_half_of_the_members_go_on_only_if_the_others_have_certainly_ended() -> None:
    first = Membership(0, 0, ((0, 0), (1, 0)), ((0,), (1,)))
    alone = Agreement(0, 1, 2, first)
    alone.suspect(1)
    assert alone.is_frozen
    alone = Agreement(0, 1, 2, first)
    alone.lose(1)
    assert alone.members == {0: 0}
