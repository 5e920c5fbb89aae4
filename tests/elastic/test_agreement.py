"""The agreement of an elastic job: no order of messages, ends and losses breaks an invariant of the explorer.

The mutations show that the explorer finds what is wrong: each takes one rule of the protocol away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from fullshard.elastic import agreement
from fullshard.elastic.agreement import (
    Accepted,
    Agreement,
    Chosen,
    Complete,
    Decided,
    Membership,
    Prepare,
    Promise,
    Stage,
)
from tests.elastic.explorer import Explorer
from tests.elastic.invariants import ViolationError
from tests.elastic.world import Limits

#: The shard of each process, the number of shards, and that of replicas.
COPIES = {0: 0, 1: 0, 2: 0}, 1, 3
THREE = {0: 0, 1: 1, 2: 0}, 2, 2
FOUR = {0: 0, 1: 1, 2: 0, 3: 1}, 2, 2
PAIR = {0: 0, 1: 0}, 1, 2
COPIES_AND_NEW = {0: 0, 1: 0, 2: 0, 3: 0}, 1, 3
LOST = {0: 0, 1: 1, 2: 1}, 2, 1  # the last process is new

Case = tuple[tuple[dict[int, int], int, int], Limits]

#: Small enough that every world is visited.
WHOLE: list[Case] = [
    (THREE, Limits(steps=2, deaths=1)),
    (THREE, Limits(steps=1, deaths=1, ballots=1)),
    (THREE, Limits(steps=0, deaths=0, suspicions=1)),
    (THREE, Limits(steps=1, deaths=0, asks=2)),
    (THREE, Limits(steps=1, deaths=1, asks=1)),
    (COPIES, Limits(steps=1, deaths=2)),
    (COPIES, Limits(steps=0, deaths=2, suspicions=1)),
    (PAIR, Limits(steps=1, deaths=1, suspicions=1, ballots=1)),
    (PAIR, Limits(steps=1, deaths=1, suspicions=1, ballots=1, hangs=True)),
    (THREE, Limits(steps=1, deaths=1, choices=2)),
    (PAIR, Limits(steps=2, deaths=1, suspicions=1, ballots=1, choices=2)),
    (LOST, Limits(steps=1, deaths=1, asks=1, copies=True)),
    (THREE, Limits(steps=2, deaths=1, copies=True)),
    (COPIES, Limits(steps=1, deaths=2, resets=1)),
]
#: More may happen than can be visited: the nearest worlds, and random walks to the end.
PARTLY: list[Case] = [
    (COPIES, Limits(steps=2, deaths=2, suspicions=1, ballots=2, asks=2)),
    (THREE, Limits(steps=2, deaths=1, suspicions=2, ballots=2, asks=1)),
    (FOUR, Limits(steps=2, deaths=2, suspicions=1, ballots=2)),
    (FOUR, Limits(steps=2, deaths=2, suspicions=1, ballots=2, asks=2)),
    (FOUR, Limits(steps=2, deaths=2, suspicions=1, ballots=2, choices=2, asks=2)),
    (FOUR, Limits(steps=2, deaths=1, suspicions=2, ballots=2, asks=1, hangs=True)),
    (LOST, Limits(steps=3, deaths=2, ballots=1, asks=1, copies=True)),
    (FOUR, Limits(steps=3, deaths=1, suspicions=1, ballots=2, asks=1, copies=True)),
    (COPIES_AND_NEW, Limits(steps=1, deaths=2, suspicions=1, ballots=1, asks=2, resets=3)),
]


@pytest.mark.parametrize(("job", "limits"), WHOLE)
def test_every_order_of_events_keeps_the_invariants(job: Any, limits: Limits) -> None:
    assert Explorer(*job, limits).explore() > 500


@pytest.mark.parametrize(("job", "limits"), PARTLY)
def test_random_orders_of_events_keep_the_invariants(job: Any, limits: Limits) -> None:
    assert Explorer(*job, limits).walk(400) > 2_000


@pytest.mark.slow
@pytest.mark.parametrize(("job", "limits"), PARTLY)
def test_many_orders_of_events_keep_the_invariants(job: Any, limits: Limits) -> None:
    explorer = Explorer(*job, limits)
    assert explorer.explore(800_000) >= 800_000
    assert explorer.walk(5_000, seed=1) > 20_000


LOSE = Agreement.lose


def messages_that_are_lost_are_taken_for_read(self: Agreement, process: int, **_: bool) -> None:
    LOSE(self, process)


def a_majority_is_no_reason_to_doubt(self: Agreement, process: int, is_read: bool = True, **trusted: bool) -> None:
    LOSE(self, process, is_read or any(trusted.values()))


def agreed_by(self: Agreement, voters: Mapping[int, Iterable[int]]) -> list[int]:
    return [process for process in self.members if process in voters]


def half_is_a_quorum(self: Agreement, voters: Mapping[int, Iterable[int]]) -> bool:
    return 2 * len(agreed_by(self, voters)) >= len(self.members)


def only_majorities_decide(self: Agreement, voters: Mapping[int, Iterable[int]]) -> bool:
    return 2 * len(agreed_by(self, voters)) > len(self.members)


def step_counts_though_one_is_not_complete(self: Agreement, process: int, step: int) -> None:
    said = self._said.setdefault(step, set())
    said.add(process)
    if self.state is Stage.COMPLETE and len(said) >= len(self.members) - 1:
        self.step, self.state, self._is_complete = self.step + 1, Stage.RUNNING, False


def promise_forgets_what_was_accepted(self: Agreement, sender: int, message: Prepare, accepted: Any) -> None:
    mine = Promise(message.number, message.ballot, None, self.step, self._is_complete, self._read)
    self._answer(sender, mine)


def promise_forgets_gradients(self: Agreement, sender: int, message: Prepare, accepted: Any) -> None:
    self._answer(sender, Promise(message.number, message.ballot, accepted, self.step, False, self._read))


def frozen_says_complete(self: Agreement) -> None:
    self._is_complete = True
    if self.state is not Stage.OUT:
        self._send(self.members, Complete(self.membership.number, self.step))
    if self.state is Stage.RUNNING:
        self.state = Stage.COMPLETE
        self._note_complete(self.me, self.step)


def goes_back_though_a_member_has_no_copy(latest: int, shard_of: Any, lost: Any, copies: Any) -> Any:
    """:func:`fullshard.elastic.copies.find_way_back` without its condition for the members' own states."""
    for step in sorted({step for each in copies.values() for step, _ in each if step <= latest}, reverse=True):
        holders = {shard: process for shard in lost for process in shard_of if (step, shard) in copies[process]}
        if len(holders) == len(lost):
            return step, tuple(holders.items())
    return None


INSTALL = Agreement._install


def decision_is_not_forwarded(self: Agreement, sender: int, message: Decided) -> None:
    known = len(self.outbox)
    INSTALL(self, sender, message)
    if sender != self.me:
        self.outbox[known:] = [each for each in self.outbox[known:] if each[1] != message]


def stays_complete_under_a_new_membership(self: Agreement, sender: int, message: Decided) -> None:
    step, chosen, is_complete = self.step, dict(self.chosen), self._is_complete
    INSTALL(self, sender, message)
    if is_complete and self.step == step and self.state is Stage.RUNNING:
        self.chosen = chosen
        self.complete()


MUTATIONS: dict[Callable[..., Any], tuple[str, Case]] = {
    half_is_a_quorum: ("_is_quorum", (PAIR, Limits(1, 0, 1))),
    only_majorities_decide: ("_is_quorum", (PAIR, Limits(1, 1))),
    step_counts_though_one_is_not_complete: ("_note_complete", (THREE, Limits(1, 1))),
    promise_forgets_what_was_accepted: ("_promise", (COPIES, Limits(0, 0, 2))),
    promise_forgets_gradients: ("_promise", (THREE, Limits(2, 1))),
    frozen_says_complete: ("complete", (THREE, Limits(1, 0, 1))),
    decision_is_not_forwarded: ("_install", (COPIES, Limits(1, 0, asks=2))),
    stays_complete_under_a_new_membership: ("_install", (THREE, Limits(1, 1, choices=2))),
    messages_that_are_lost_are_taken_for_read: ("lose", (COPIES_AND_NEW, Limits(0, 2, asks=1, resets=1))),
    a_majority_is_no_reason_to_doubt: ("lose", (COPIES_AND_NEW, Limits(0, 2, asks=1, resets=1))),
    goes_back_though_a_member_has_no_copy: ("find_way_back", (THREE, Limits(2, 1, asks=1, copies=True))),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.__name__)
def test_the_explorer_finds_a_rule_that_is_missing(mutation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, (job, limits) = MUTATIONS[mutation]
    for key, answer in agreement.TABLE.items():
        if answer is getattr(Agreement, name, None):
            monkeypatch.setitem(agreement.TABLE, key, mutation)
    monkeypatch.setattr(Agreement if hasattr(Agreement, name) else agreement, name, mutation)
    explorer = Explorer(*job, limits, new=0 if job is COPIES[0] else None)
    with pytest.raises(ViolationError):
        explorer.explore(200_000)


def test_the_first_member_chooses_replicas_once_and_a_new_membership_ends_the_choice() -> None:
    first = Membership(0, 0, ((0, 0), (1, 0)), ((0,), (1,)))
    here, there = Agreement(0, 1, 2, first), Agreement(1, 1, 2, first)
    there.choose(((1,),))
    for choice in (((0,),), ((1,),)):
        here.choose(choice)
    assert there.outbox == []
    assert here.outbox == [(1, Chosen(0, 0, ((0,),)))]
    there.receive(0, Chosen(0, 0, ((0,),)))
    there.complete()
    there.receive(0, Decided(0, Membership(1, 0, first.shards, first.rows)))
    assert (there.state, there.chosen, there.step) == (Stage.RUNNING, {}, 0)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_process_that_answers_is_suspected_no_more_unless_it_hangs(hangs: bool) -> None:
    first = Membership(0, 0, ((0, 0), (1, 0)), ((0,), (1,)))
    here, there = Agreement(0, 1, 2, first), Agreement(1, 1, 2, first)
    here.suspect(1, hangs=hangs)
    for _ in range(4):
        for process, other in ((here, there), (there, here)):
            sent, process.outbox = process.outbox, []
            for _receiver, message in sent:
                other.receive(process.me, message)
    assert not here.outbox + there.outbox
    left = Membership(1, 0, ((0, 0),), ((0,),)) if hangs else Membership(1, 0, first.shards, first.rows)
    assert here.membership == there.membership == left
    assert there.state is (Stage.OUT if hangs else Stage.RUNNING)
    assert bool(here.suspected) == hangs


def test_a_new_process_whose_membership_was_superseded_may_ask_again() -> None:
    new = Agreement(2, 1, 3)
    joined = Membership(1, 0, ((0, 0), (1, 0), (2, 0)), ((0,), (1,), (2,)), (2,))
    new.receive(0, Decided(0, joined))
    new.receive(0, Decided(1, Membership(2, 0, ((0, 0), (1, 0)), ((0,), (1,)))))
    new.receive(1, Decided(0, joined))
    assert new.membership.number == -1
    new.receive(0, Prepare(2, (1, 0)))
    assert new.outbox == [(0, Promise(2, (1, 0), None, 0, False, frozenset()))]


def test_less_than_a_majority_decides_only_when_each_has_read_the_last_message_of_all_others() -> None:
    first = Membership(0, 0, tuple((each, 0) for each in range(5)), tuple((each,) for each in range(5)))
    here, there = Agreement(0, 1, 5, first), Agreement(1, 1, 5, first)
    for lost in (2, 3, 4):
        here.lose(lost)
    (_, prepare), *_ = here.outbox
    there.receive(0, prepare)
    here.outbox.clear()
    for lost in (2, 3, 4):
        assert not here.outbox
        there.lose(lost)
        here.receive(1, there.outbox.pop()[1])
    assert [receiver for receiver, _ in here.outbox] == [1]


@pytest.mark.parametrize("has_promised", [False, True])
@pytest.mark.parametrize("was_trusted", [False, True])
@pytest.mark.parametrize("known", [set(), {1}], ids=["", "1 has ended before"])
def test_fewer_than_half_go_on_if_the_others_cannot_have_decided_without_them(
    has_promised: bool, was_trusted: bool, known: set[int]
) -> None:
    last = Agreement(2, 1, 3, Membership(0, 0, ((0, 0), (1, 0), (2, 0)), ((0,), (1,), (2,))))
    if has_promised:
        last.receive(0, Prepare(0, (1, 0), frozenset(known)))
    for lost in (0, 1):
        last.lose(lost, is_read=False, has_trusted=was_trusted)
    assert last.membership.number == (1 if was_trusted and (known or not has_promised) else 0)


def test_nobody_goes_back_for_a_shard_whose_processes_have_made_all_steps() -> None:
    """Results would change, if replicas train apart, or everyone would wait for a new process."""
    first = Membership(0, 0, ((0, 0), (1, 1)), ((0, 1),))
    for is_done in (False, True):
        last = Agreement(1, 2, 1, first)
        last.copies = {(0, 0): b"", (0, 1): b""}
        last.complete()
        last.is_done = is_done
        last.lose(0)
        assert (last.step, last.goes_back, last.membership.holders) == (
            (1, False, ()) if is_done else (0, True, ((0, 1),))
        )


@pytest.mark.parametrize("is_done", [False, True])
def test_nobody_goes_back_if_a_member_has_made_all_rounds(is_done: bool) -> None:
    """It may end at any time, with the result that the others would change."""
    first = Agreement(0, 2, 2, Membership(0, 3, ((0, 0), (1, 0), (2, 1)), ((0, 2),)))
    first.copies = {(2, 0): b"", (2, 1): b""}
    first.lose(2)
    first.receive(1, Promise(0, (1, 0), None, 3, False, frozenset({2}), frozenset({(2, 0)}), is_done))
    first.receive(1, Accepted(0, (1, 0), frozenset({2})))
    assert (first.membership.number, first.goes_back, first.step) == (1, not is_done, 3 if is_done else 2)


def test_a_member_that_is_too_many_steps_behind_knows_its_row() -> None:
    """It loads a checkpoint, and the others have: it is out, and says so by an error of its own."""
    late = Agreement(1, 1, 2, Membership(0, 0, ((0, 0), (1, 0), (2, 0)), ((0,), (2,))))
    late.receive(0, Decided(0, Membership(1, 5, ((0, 0), (1, 0)), ((0,), (1,)))))
    assert late.state is Stage.OUT
    assert late.row_from == {(0,): 0, (1,): 5}


@pytest.mark.parametrize(("follows", "lacks_state"), [(False, False), (True, False), (True, True)])
def test_a_candidate_that_lacks_a_step_joins_only_if_it_is_sent_the_gradients(follows: bool, lacks_state: bool) -> None:
    alone = Agreement(0, 1, 2, Membership(0, 0, ((0, 0),), ((0,),)))
    alone.complete()
    assert alone.step == 1
    alone.candidates[1] = 0
    if follows:
        alone.followers.add(1)
    alone.consider()
    new = Agreement(1, 1, 2)  # it has made no step
    new.lacks_state = lacks_state  # because the process that sent the gradients has ended
    new.receive(0, Prepare(0, (1, 0)))
    ((_, promise),) = new.outbox
    alone.receive(1, promise)
    assert (alone.membership.number, alone.membership.joined) == (1, (1,) if follows and not lacks_state else ())
