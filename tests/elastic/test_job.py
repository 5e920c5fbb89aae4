"""What a process of a job sees of the others and of itself (:mod:`fullshard.elastic.job`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Client
from typing import Any, cast

import pytest

from fullshard.buffer.shared_memory import Address
from fullshard.comm.waits import waiting
from fullshard.elastic import entry
from fullshard.elastic.agreement import Agreement, Membership, Promise
from fullshard.elastic.connections import Beat, _receive
from fullshard.elastic.entry import ElasticError
from fullshard.elastic.gradients import Kept
from fullshard.elastic.job import Job
from fullshard.elastic.messages import Leaving, Square
from fullshard.platforms import host_id
from fullshard.watch.connections import connected_sockets


@pytest.fixture
def alone(launched: None) -> Iterator[Job]:
    job = Job(1, 0, None)
    yield job
    job._connections.close()


def test_changes_are_counted(alone: Job) -> None:
    assert alone.changes == 0
    with alone._changed:
        alone._agreement.candidates[1] = 0
        alone._agreement.consider()
        alone._agreement.receive(1, Promise(0, (1, 0), None, 0, False, frozenset(), frozenset()))
    assert alone.changes == 1


def test_a_process_computes_or_waits(alone: Job) -> None:
    alone._progress()
    time.sleep(0.05)
    computes, waits = alone._progress()
    assert computes >= 0.05
    assert waits == 0
    with waiting("something", None):
        assert alone._progress() == (0.0, 0.0)
        time.sleep(0.05)
        computes, waits = alone._progress()
        assert waits >= 0.05
        assert computes == 0
    assert alone._progress() == (0.0, 0.0)


def test_a_wait_without_a_majority_is_an_error(alone: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with alone._changed:
        alone.wait_for(lambda: True, "nothing")
        alone._frozen_since = time.monotonic() - entry.PATIENCE - 1
        with pytest.raises(ElasticError, match="no majority of the members answers process 0, which waited 30 s for X"):
            alone.wait_for(lambda: False, "X")


def test_a_process_whose_backend_does_not_end_a_wait_that_was_cut_ends(
    alone: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    with waiting("the gradients", cast(Any, object())):
        alone._cut_row()
        alone._progress()
        alone._cut = alone._cut[0], alone._cut[1] - 11
        alone._cut_row()  # again: it is the same wait
        with pytest.raises(SystemExit, match="1"):
            alone._progress()
    assert (
        "process 0 still waits for the gradients 10 s after its connections to other processes were closed"
        in caplog.text
    )
    with waiting("the next ones", cast(Any, object())):
        alone._progress()


def test_steps_that_a_process_made_and_left_are_compared_with_those_that_are_to_be_made(alone: Job) -> None:
    """A process may leave between two calls of steps()."""
    alone._target = 10
    for is_done, step, expected in ((True, 5, False), (False, 10, False), (True, 10, True)):
        alone._receive(1, Leaving(is_done, step))
        assert alone._agreement.is_done is expected


def test_waits_that_begin_after_a_row_was_broken_are_cut_too(alone: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[int] = []
    monkeypatch.setattr(alone, "_cut_row", lambda: cuts.append(1))
    alone._row = (0,)
    alone._progress()
    assert not cuts
    alone._row = (0, 1)
    alone._progress()
    alone._progress()
    assert cuts == [1, 1]


def test_the_connections_of_the_job_outlive_a_row(alone: Job) -> None:
    before = {ends for _, ends in connected_sockets()}
    with Client(alone._connections.address, authkey=alone._connections.key) as new:
        new.send((1, ("127.0.0.1", 1), "host"))
        new.recv()
        assert not alone._connections.connect({1: ("127.0.0.1", 1)}, 10)
        alone._row_connections = {ends for _, ends in connected_sockets()} - before  # it came while the row was formed
        alone._cut_row()
        alone._connections.send(1, "the last message")
        while isinstance(said := _receive(new, lambda: None), Beat):
            pass
    assert said == "the last message"


def test_others_may_connect_while_a_process_asks_to_be_a_member(alone: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    alone._agreement, addresses = Agreement(0, 1, 1), alone._connections.addresses
    addresses[1] = addresses[2] = "127.0.0.1", 1
    monkeypatch.setattr(alone._connections, "send", lambda to, _: addresses.setdefault(to + 10, addresses[1]))
    alone._ask_to_be_member()
    assert [*addresses] == [1, 2, 11, 12]


def test_a_new_process_asks_again_to_be_a_member(alone: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members forget who asks when they decide on something else, and the step that it follows may not end."""
    alone._agreement, asked = Agreement(0, 1, 1), list[int]()
    monkeypatch.setattr(alone, "_ask_to_be_member", lambda: asked.append(1))
    with alone._changed:
        alone.wait_for(lambda: len(asked) == 2, "the gradients of a step")
        alone._agreement.lacks_state = True
        began = time.monotonic()
        alone.wait_for(lambda: time.monotonic() > began + 0.7, "a state")
    assert len(asked) == 2


def test_news_on_which_a_process_cannot_act_end_it(alone: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no memory is left")

    monkeypatch.setattr(alone, "_receive", fail)
    alone._hear(alone._opened, alone._receive, 1, "a message")
    with (
        alone._changed,
        pytest.raises(ElasticError, match="process 0 could not act on news of another one: no memory is left"),
    ):
        alone.wait_for(lambda: False, "X")


class Told:
    """The gradients that a process has of a step."""

    def __init__(self) -> None:
        self.copied: list[bool] = []

    def tell_again(self, step: int, in_own_memory: bool) -> list[Kept]:
        self.copied.append(in_own_memory)
        return [Kept(step, 0, (), host_id(), Address(1, 2, 3, 4))]

    def replicas_of(self, step: int) -> list[int]:
        return [0]

    def has_all(self, *_: Any) -> bool:
        return False


def test_members_are_told_again_what_others_may_have_lost(alone: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody was lost, new members are told where the gradients are, and nothing is copied."""
    kept, told, square = Told(), list[tuple[int, Any]](), Square(0, 3, 0, 1.0)
    monkeypatch.setattr(alone, "_kept", kept)
    monkeypatch.setattr(alone._connections, "send", lambda process, message: told.append((process, message)))
    monkeypatch.setattr(alone._connections, "host_of", dict.fromkeys(range(5), host_id()))
    assert alone._members_before == {0}
    alone._members_before, alone._squares = {0, 1, 2}, {(3, 0): square}
    for number, members, joined in ((1, (0, 1), ()), (2, (0, 1, 3), (3,)), (3, (0, 3, 4), (4,))):
        told.clear()
        alone._agreement.membership = Membership(number, 4, tuple((each, 0) for each in members), ((0,),), joined)
        alone._after_agreement()
        assert kept.copied.pop() is (number != 2)
        others = {*(joined if number == 2 else members)} - {0}
        assert {process for process, message in told if isinstance(message, Kept)} == others
        assert {process for process, message in told if message == square} >= {*members[1:]}


def test_the_first_member_shows_how_the_job_changes(alone: Job, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fullshard"):
        alone._tell_change("one")
        alone._agreement.lost.add(0)  # another one is the first
        alone._tell_change("two")
    assert [(each.levelname, each.message) for each in caplog.records] == [("WARNING", "one"), ("INFO", "two")]
