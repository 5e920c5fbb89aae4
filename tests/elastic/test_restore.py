"""Jobs that lose all processes of a shard, and go back to copies (:mod:`fullshard.elastic.restore`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fullshard.elastic.agreement import Agreement, Membership, Stage
from fullshard.elastic.connections import HANGS
from fullshard.elastic.entry import ElasticError
from fullshard.elastic.messages import Candidate, Followed, ShardState, Spared
from fullshard.elastic.restore import Restoring
from fullshard.platforms import host_id
from tests.elastic.__main__ import complaints, undisturbed
from tests.elastic.jobs import Job, Result, run


def steps_of(result: Result, process: int) -> list[int]:
    return [each["step"] for each in result.said[process] if "step" in each and "ended" not in each]


def test_without_replicas_a_new_process_takes_the_lost_shard() -> None:
    job = Job(2, 1, 8, {1: [(5, "backward 0", "SIGKILL")]}, copy_every=2, is_supervised=True)
    result = run(job)
    assert complaints(job, result) == []
    assert result.statuses == [0, -9, 0]
    assert steps_of(result, 0) == [*range(5), *range(4, 8)]
    assert steps_of(result, 2) == [*range(4, 8)]
    assert "no process is left that has shard 1 of 2. The job goes back to step 4, of which" in result.errors[0]
    assert "else start a new process with the same command" in result.errors[0]


def test_a_process_that_can_be_spared_takes_the_lost_shard(tmp_path: Path) -> None:
    """Nobody starts a new process. What is saved afterwards is right: a new job goes on from there."""
    faults = {1: [(3, "forward 0", "SIGKILL")], 3: [(3, "backward 1", "SIGKILL")]}
    job = Job(2, 2, 7, faults, pause=0.1, copy_every=1, saved=str(tmp_path))
    result = run(job)
    assert complaints(job, result) == []
    assert sorted(each["shard"] for each in result.ends()) == [0, 1]
    assert max(each.name for each in tmp_path.glob("step-*")) == "step-00000006"
    again = run(Job(2, 2, 8, saved=str(tmp_path)))
    assert again.digests(8) == undisturbed(2, 2, 8).digests(8)
    assert min(each["step"] for one in again.said for each in one if "step" in each) == 6


@pytest.mark.slow
def test_members_that_have_the_same_shard_go_back_together() -> None:
    faults = {1: [(3, "step", "SIGKILL")], 3: [(4, "forward 1", "SIGKILL")]}
    job = Job(2, 2, 8, faults, copy_every=1, is_supervised=True)
    result = run(job)
    assert complaints(job, result) == []
    assert [result.statuses[process] for process in range(4)] == [0, -9, 0, -9]
    assert {*steps_of(result, 0)} == {*steps_of(result, 2)} == {*range(8)}


def test_a_step_may_be_gone_back_to_twice() -> None:
    faults = {1: [(3, "begin", "SIGKILL")], 0: [(4, "clip", "SIGKILL")]}
    job = Job(2, 1, 8, faults, copy_every=3, is_supervised=True)
    result = run(job)
    assert complaints(job, result) == []
    assert result.statuses == [-9, -9, 0, 0]
    assert any(later <= step for step, later in pairwise(steps_of(result, 2)))


def test_without_the_copy_of_a_lost_shard_processes_end_with_an_error_that_says_what_is_left() -> None:
    faults = {1: [(4, "begin", "SIGKILL")], 2: [(4, "begin", "SIGKILL")]}
    result = run(Job(3, 1, 6, faults, copy_every=2))
    assert result.statuses == [3, -9, -9]
    (error,) = result.lost()
    assert "no process is left that has shard 1, 2 of 3: load the last checkpoint and start again" in error
    assert "Processes [0] are left, and their copies are not enough to go on: process 0 has step 2 of shard 0" in error


def test_the_first_member_spares_a_process_once_and_when_all_is_settled(
    tmp_path: Path, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes stand by with shard 0, and process 5 alone has shard 1: process 4 holds the copy of that."""
    job, asked = Restoring(1, 0, tmp_path), list[int]()
    shards = ((0, 0), (2, 0), (3, 0), (4, 0), (5, 1))
    membership = Membership(0, 3, shards, ((0, 5),))
    job.rank, job.shards, job.replicas, job.step, job._target = 0, 2, 3, 3, 10
    job._connections.close()  # it would ask once a second
    job._agreement, here = Agreement(0, 2, 3, membership), host_id()
    monkeypatch.setattr(job._connections, "host_of", {2: here, 3: here, 4: "another", 5: here})
    monkeypatch.setattr(job._connections, "send", lambda process, _: asked.append(process))

    def spared() -> list[int]:
        job._spared = -1, -1, -1, 0.0
        asked.clear()
        job._spare_one()
        return asked[:]

    assert spared() == [3], "process 4 holds the copy of the only process of shard 1"
    job._spare_one()
    assert asked == [3], "it has been asked"
    job._coming[6] = 1
    assert spared() == [4], "shard 1 will have two processes, which is one less than a row more needs"
    job._coming[7] = 1
    assert spared() == []
    job._coming.clear()
    for unsettled in ("step", "suspected", "newcomer", "rank"):
        with monkeypatch.context() as patch:
            if unsettled == "step":
                patch.setattr(job, "step", 8)
            elif unsettled == "suspected":
                patch.setattr(job._agreement, "suspected", {3})
            elif unsettled == "newcomer":
                patch.setattr(job, "_newcomer", time.monotonic())
            else:
                patch.setattr(job, "rank", 2)
            assert spared() == [], unsettled
    copies = membership._replace(shards=shards[:4], rows=(), holders=((1, 4),))
    job._agreement = Agreement(0, 2, 3, copies)
    assert spared() == [3], "process 4 has the copy of the lost shard"
    job._agreement = Agreement(0, 2, 3, copies._replace(holders=()))
    assert spared() == [], "the job cannot go on"


def test_a_process_leaves_its_shard_only_while_nobody_needs_it(
    tmp_path: Path, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Restoring(1, 0, tmp_path)
    membership = Membership(0, 3, ((1, 1), (0, 0), (2, 0)), ((2, 1),))
    job.shards, job._agreement = 2, Agreement(0, 2, 2, membership)
    assert not job._is_spare()
    job._receive(1, Spared())
    assert job._is_spare()
    alone, holding = membership._replace(shards=((0, 0),)), membership._replace(holders=((1, 0),))
    for name, value in (
        ("lost", {2}),
        ("state", Stage.FROZEN),
        ("membership", alone),
        ("membership", holding),
        ("membership", membership._replace(rows=((0, 1),))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(job._agreement, name, value)
            assert not job._is_spare(), name
    for name in ("_followers", "_fetching", "_wanted"):
        with monkeypatch.context() as patch:
            patch.setattr(job, name, {4: 0})
            assert not job._is_spare(), name
    job._agreement.membership = membership._replace(number=1)
    job._after_agreement()
    assert not job._is_spare(), "it was asked under the membership before"
    job._connections.close()


def test_a_process_enters_no_row_before_its_step(
    tmp_path: Path, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other process may yet need something of this one in the step before."""
    job, entered = Restoring(1, 0, tmp_path), list[tuple[int, ...]]()
    monkeypatch.setattr(job, "_enter_row", entered.append)
    job._row, job._agreement = (0, 9), Agreement(0, 2, 2, Membership(0, 4, ((0, 0), (1, 1)), ((0, 1),)))
    job.follow_membership(3)
    assert (job._row, entered) == ((), [])
    job.follow_membership(4)
    assert (job._row, entered) == ((0, 1), [(0, 1)])
    job._connections.close()


def test_processes_that_live_and_cannot_connect_say_so(
    tmp_path: Path, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Restoring(1, 0, tmp_path)
    monkeypatch.setattr("fullshard.elastic.regroup.PATIENCE", 0.1)
    monkeypatch.setattr(job, "_enter_row", lambda _: (_ for _ in ()).throw(RuntimeError("refused")))
    job._row, job._agreement = (0, 9), Agreement(0, 2, 2, Membership(0, 4, ((0, 0), (1, 1)), ((0, 1),)))
    with pytest.raises(ElasticError, match=r"process 0 could not connect with \(0, 1\): refused"):
        job.follow_membership(4)
    job._connections.close()


def test_a_process_that_has_made_all_steps_goes_back_unless_another_one_has_left_with_all(
    tmp_path: Path, launched: None
) -> None:
    job = Restoring(1, 0, tmp_path)
    agreement, membership = job._agreement, job._agreement.membership
    assert not job._must_go_back()
    agreement.goes_back, agreement.membership = True, membership._replace(rows=())
    assert job._must_go_back()
    job._leaving[1] = True
    assert not job._must_go_back()
    agreement.membership = membership  # others are about to repeat steps: what is here may be overwritten
    assert job._must_go_back()
    job._connections.close()


def test_a_new_process_forgets_the_steps_that_the_members_have_gone_back_over(
    tmp_path: Path, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Restoring(1, 0, tmp_path)
    monkeypatch.setattr(job, "_load", lambda step, data: setattr(job, "step", step))
    job._agreement, job._counted = Agreement(1, 1, 1), 2  # it had followed the members to step 2
    job._followed = {0: Followed(0, b"", (), (), back=1), 2: Followed(2, b"", (), (), back=0)}
    job._states.append(ShardState(0, b"", back=1))
    job._fetch()
    assert job.step == 0
    assert [job._counts(step) for step in range(3)] == [True, False, False]
    job._connections.close()


def test_a_new_process_that_becomes_a_member_while_it_asks_for_a_state_keeps_its_own(
    tmp_path: Path, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that it followed has ended, and the one that it asks waits for it in a row."""
    job = Restoring(1, 0, tmp_path)
    first = job._agreement.membership
    job._agreement, job._sources = Agreement(1, 1, 1), (0,)
    job._followed = {2: Followed(2, b"", (), (), back=0)}

    def becomes_member(condition: Callable[[], Any], _: str) -> None:
        assert not condition()
        job._agreement.membership = first._replace(number=1)
        assert condition()

    monkeypatch.setattr(job, "wait_for", becomes_member)
    monkeypatch.setattr(job, "_load", lambda *_: pytest.fail("it has a state"))
    job._source = 5
    job._fetch()
    assert [*job._followed] == [2]
    assert not job._agreement.lacks_state
    job._receive(0, ShardState(7, b"", back=0))  # it was under way
    job._agreement.lost.add(5)
    job.step, job._first = 1, 2
    with pytest.raises(ElasticError, match="process 5 has ended before process 0 had its state: start again"):
        job._must_fetch()  # it lacks the gradients of step 1
    job._connections.close()


def test_a_job_goes_on_from_a_checkpoint_though_a_process_ended_while_it_was_saved(tmp_path: Path) -> None:
    """Process 1 ends when its row saves step 2. The other row saves step 4, and a new job goes on from there."""
    saved = str(tmp_path)
    first = run(Job(steps=5, faults={1: [(1, "save", "SIGKILL")]}, saved=saved))
    assert first.statuses == [0, -9, 0, 0]
    assert "step 2 was not saved, because a process of its row has ended" in first.errors[0]
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-00000004"]
    second = run(Job(steps=6, saved=saved))
    assert second.digests(6) == undisturbed(2, 2, 6).digests(6)
    assert {each["step"] for one in second.said for each in one if "step" in each} == {4, 5, 6}
    assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-00000004", "step-00000006"]


def test_a_new_process_becomes_no_member_before_every_member_can_tell_it_so(tmp_path: Path, launched: None) -> None:
    """One that came while the network was cut waits until it has a connection, or the members behind the cut end."""
    job = Restoring(1, 0, tmp_path)
    job.shards, job._agreement = 2, Agreement(0, 2, 2, Membership(0, 3, ((0, 0), (1, 1)), ((0, 1),)))
    asks = partial(Candidate, 0, 0, True)
    job._receive(5, asks(frozenset({0}), 3))
    assert not job._agreement.candidates
    job._receive(5, asks(frozenset({0, 1}), 3))
    assert job._agreement.candidates == {5: 0}
    job._receive(6, asks(frozenset({0}), 3))
    assert job._agreement.candidates == {5: 0}
    job._agreement.lost.add(1)
    job._receive(6, asks(frozenset({0}), 3))
    assert job._agreement.candidates == {5: 0}, "both will be members"
    job._receive(6, asks(frozenset({0, 5}), 3))
    assert job._agreement.candidates == {5: 0, 6: 0}
    job._receive(7, asks(frozenset({0, 5, 6}), 1))
    assert job._agreement.candidates == {5: 0, 6: 0}, "it is two steps behind"
    job._connections.close()


def test_a_new_process_that_asks_does_not_hang(tmp_path: Path, launched: None) -> None:
    """It may have loaded its state for longer than a process may compute while others wait."""
    job = Restoring(1, 0, tmp_path)
    job._agreement = Agreement(0, 1, 2, Membership(0, 3, ((0, 0), (1, 0)), ((0,), (1,))))
    job._suspect(5, HANGS)
    job._receive(5, Candidate(0, 0, True, frozenset({0, 1}), 3))
    assert not job._agreement.suspected | job._agreement.hanging
    job._connections.close()


def test_a_state_that_comes_late_is_not_loaded(tmp_path: Path, launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that it came from was asked again, when the new one had made the next step with others' gradients."""
    job, loaded = Restoring(1, 0, tmp_path), list[int]()
    monkeypatch.setattr(job, "_load", lambda step, data: (loaded.append(step), setattr(job, "step", step)))
    job._agreement = Agreement(1, 1, 1)
    for step, back in ((3, 1), (2, 1), (3, 1), (2, 2)):
        job._states.append(ShardState(step, b"", back))  # type: ignore[arg-type]
        job._fetch()
        assert (job._states, job._agreement.lacks_state) == ([], False)
    assert loaded == [3, 3, 2]
    job._agreement.membership = Membership(3, 2, ((1, 0),), ((1,),))
    for step in (2, 4):
        job._states.append(ShardState(step, b"", 2))  # type: ignore[arg-type]
        job._fetch()
    assert loaded == [3, 3, 2, 4], "a member needs what it did not get from the process that it followed"
    job._connections.close()
