"""What a rank tells the others of itself, and what it takes for a proof that a wait will not end."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard.comm.local_ranks import host_id
from fullshard.comm.waits import WAITS, PeerFailureError, Position, Wait, waiting
from fullshard.watch import watch
from fullshard.watch.connections import StoreConnection
from fullshard.watch.reports import Report
from fullshard.watch.watch import Watch, call_of_torch, waiting_for_thread
from tests.harness import World, ranks
from tests.harness.faults import Fault


def test_an_error_at_a_prompt_ends_no_rank(watcher: Watch) -> None:
    """As that of ``code.interact()``, which shows what was mistyped, and goes on."""
    watcher.show(NameError("mistyped"))
    assert watcher.shown[0] == "NameError: mistyped"
    assert not watcher._ending.is_set()


def test_an_error_that_ends_the_program_is_told_at_once(watcher: Watch, store: Any, key: str) -> None:
    """Threads of the user may keep the process from its end."""
    watcher.thread.start()
    thread = threading.Thread(target=watcher.show, args=(ValueError("a bad batch"),))  # without a module below it
    thread.start()
    thread.join()
    assert watcher._ending.is_set()
    assert b"ValueError: a bad batch" in store.get(f"{key}0")


def test_a_rank_of_which_nothing_is_known_is_named(watcher: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a rank that sends, and waits for nobody."""
    monkeypatch.setattr(StoreConnection, "has_gone", True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    assert watcher.explain(None).startswith("Rank 1 may have ended (the store")


def test_a_lost_connection_in_a_call_of_the_user_is_explained(watcher: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WAITS, "explain", lambda _: "Rank 1 was killed")
    raw = RuntimeError("[/b/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert [note for explain in watch.explainers if (note := explain(raw))] == ["Rank 1 was killed"]
    watcher.show(raw)
    assert watcher.shown[1] is False  # the first error is another rank's


def test_ranks_to_which_values_still_come_are_not_stuck(watcher: Watch) -> None:
    """A large group takes long on a slow network, and all of its ranks wait meanwhile."""
    watcher._mine = Report(0, os.getpid(), "here", waits="a gather", waits_for=[1], waited=50, quiet=50)
    other = Report(1, os.getpid(), "there", waits="a gather", waits_for=[0], waited=50, quiet=2)
    assert watcher._judge({1: other}, 50) is None
    other.quiet = 50
    assert "All ranks wait for each other" in (watcher._judge({1: other}, 50) or "")


def test_a_rank_whose_connections_are_gone_still_reports(watcher: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers may have ended already."""
    monkeypatch.setattr(watch, "connected_sockets", lambda: iter(()))
    watcher._update_report(Wait("a gather", dist.group.WORLD), 50.0)
    assert (watcher._mine.waits, watcher._mine.quiet) == ("a gather", 50.0)


@pytest.mark.parametrize("has_gone", [True, False])
def test_a_rank_is_said_to_have_crashed_only_where_it_could_have_told_its_end(
    watcher: Watch, monkeypatch: pytest.MonkeyPatch, has_gone: bool
) -> None:
    """The store may have ended with rank 0, whose program was over."""
    monkeypatch.setattr(StoreConnection, "has_gone", has_gone)
    process = subprocess.Popen(["true"])
    process.wait()
    ended = Report(0, process.pid, host_id())
    watcher._mine.waits_for = [0, 2]
    lost, others = watcher._lost([ended]) or "", watcher._others({0: ended})
    assert ("was killed or has crashed" in lost) is not has_gone
    assert ("has ended (the store in which ranks report their end has gone: it has crashed, " in lost) is has_gone
    assert ("Rank 2 has not sharded anything yet" in others) is not has_gone


def test_ranks_of_which_nothing_is_known_are_named_where_the_store_has_gone(
    watcher: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be killed before it told anything, and the store with it: whoever lost it ends after it."""
    monkeypatch.setattr(StoreConnection, "has_gone", True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2])
    process = subprocess.Popen(["true"])
    process.wait()
    monkeypatch.setattr(watcher._reports, "read", lambda _: {2: Report(2, process.pid, host_id())})
    monkeypatch.setattr(watcher, "_rank", 1)
    said = watcher.explain(None)
    assert "Rank 2 (process" in said
    assert "Nothing is known of ranks [0], which may have ended first" in said


def test_the_first_end_is_told_and_not_who_has_told_of_it(watcher: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank that another one's end has ended would repeat what the one before it has said."""
    told = "Rank 3 (process 9 on node2) was killed or has crashed"
    ended = [
        Report(rank, 99, "there", ended=f"PeerFailureError: lost 3. {told}{watch._LOOK}", is_first=False, cause=told)
        for rank in (1, 2)
    ]
    assert watcher._lost(ended) == told
    monkeypatch.setattr(watcher._reports, "read", lambda _: {each.rank: each for each in ended})
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2])
    assert watcher.explain(None) == told + watch._LOOK
    assert watcher._mine.cause == told


def test_ranks_that_keep_others_waiting_are_named_first(watcher: Watch) -> None:
    watcher._hang, watcher._mine.waits, watcher._mine.waits_for = 5, "a gather", [1, 2]
    waiting = Report(1, os.getpid(), host_id(), doing="in a forward", waits="a gather", waits_for=[0, 2])
    slow = Report(2, os.getpid(), host_id(), doing="between the passes")
    said = watcher._judge({1: waiting, 2: slow}, 9) or ""
    assert said.startswith(
        "Nothing arrived in 5 s: the others wait for rank 2. Rank 2 is between the passes, and waits"
    )


def test_a_process_group_that_was_destroyed_is_not_kept(watcher: Watch) -> None:
    """Its threads and connections would stay."""
    known = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert known() is None
    assert not watcher.is_current


@contextmanager
def a_thread_that_waits() -> Iterator[threading.Thread]:
    """A thread beside the one that trains, in the middle of an exchange of its own."""
    begun, told_to_end = threading.Event(), threading.Event()

    def wait() -> None:
        with waiting("a comparison", dist.group.WORLD):
            begun.set()
            told_to_end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    try:
        yield thread
    finally:
        told_to_end.set()
        thread.join()


def test_a_thread_beside_training_does_not_touch_what_training_waits_for() -> None:
    with waiting("a gather", None):
        count = WAITS.count
        with a_thread_that_waits():
            assert WAITS.current == Wait("a gather", None)
        assert (WAITS.current, WAITS.count) == (Wait("a gather", None), count)
    assert WAITS.current is None
    assert not WAITS.beside


def test_a_long_wait_of_a_thread_beside_training_is_told_and_ends_nothing(
    watcher: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    watcher._warn_after = 2.5
    with a_thread_that_waits() as thread:
        watcher._check_wait()
        watcher._beside[thread].since -= 3
        watcher._check_wait()
        watcher._check_wait()
        assert (watcher._mine.waits, WAITS.verdict) == ("", None)
    assert [each.message.partition("; ")[2] for each in caplog.records] == [
        "a background thread has waited 3 s for a comparison. "
    ]


def test_training_waits_for_what_the_thread_waits_for_that_it_joins(watcher: Watch) -> None:
    with a_thread_that_waits() as thread:
        with waiting_for_thread(thread):
            watcher._check_wait()
            assert (watcher._mine.waits, watcher._mine.beside) == ("a comparison", "")
        watcher._check_wait()
        assert watcher._mine.waits == ""


def test_an_error_from_a_lost_rank_is_not_the_first_of_the_job(watcher: Watch) -> None:
    """A save wraps what it raises."""
    error = RuntimeError("the save failed")
    error.__cause__ = PeerFailureError("rank 0 lost rank 1")
    watcher.show(error)
    assert watcher.shown == ("RuntimeError: the save failed", False)


def test_an_error_of_the_user_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """One raised from the loss of a rank, and one that was handled when the rank was lost."""
    printed: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: printed.append("".join(traceback.format_exception(*error))))
    monkeypatch.setattr(watch, "_watch", None)
    watch._follow_errors()

    def lose_rank() -> None:
        try:
            raise RuntimeError("connection closed")
        except RuntimeError as error:
            raise PeerFailureError("lost rank 1") from error

    def raise_from_loss() -> None:
        try:
            lose_rank()
        except PeerFailureError as error:
            raise Fault("the job is over") from error

    def lose_rank_in_handler() -> None:
        try:
            raise Fault("a bad batch")
        except Fault:
            lose_rank()

    for program in (lose_rank, raise_from_loss, lose_rank_in_handler):
        with pytest.raises((PeerFailureError, Fault)) as raised:
            program()
        sys.excepthook(raised.type, raised.value, raised.tb)
    assert printed[0] == "fullshard.PeerFailureError: lost rank 1\n"
    assert "in raise_from_loss" in printed[1]
    assert "in lose_rank_in_handler" in printed[2]
    for said in printed:
        assert "PeerFailureError: lost rank 1" in said
        assert "connection closed" not in said


def test_a_rank_that_is_over_is_no_proof_while_another_one_may_send(watcher: Watch) -> None:
    """It may have sent its part of an exchange that waits for a slow rank."""
    watcher._mine = Report(0, os.getpid(), "here", waits="a gather", waits_for=[1, 2], waited=9, quiet=9)
    over, slow = Report(1, os.getpid(), "there", ended=watch._OVER), Report(2, os.getpid(), "there")
    others = {1: over, 2: slow}
    assert watcher._judge(others, 9) is None
    slow.waits, slow.waits_for, slow.quiet = "a gather", [0, 1], 1
    assert watcher._judge(others, 9) is None
    slow.quiet = 5
    said = watcher._judge(others, 9) or ""
    assert "has ended" in said
    assert "It may have had fewer batches: all ranks must run the same number of steps" in said
    slow.waits, slow.waits_for, over.ended = "", [], "ValueError: a bad batch"
    said = watcher._judge(others, 9) or ""
    assert "a bad batch" in said
    assert "Look there for the first error" in said


@pytest.mark.parametrize("has_gone", [True, False])
def test_of_a_silent_rank_on_another_host_its_host_is_named(
    watcher: Watch, monkeypatch: pytest.MonkeyPatch, has_gone: bool
) -> None:
    """Nobody here can see whether its process has ended, and nothing more comes once the store has gone too."""
    monkeypatch.setattr(StoreConnection, "has_gone", has_gone)
    other = Report(1, 99, "there", host_name="node7", doing="in the forward of step 3")
    monkeypatch.setattr(watcher._reports, "read", lambda _: {1: other})
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(watch, "_NEWS", 0.2)
    watcher._reports._beats[1] = 0, time.monotonic() - 9
    begin, said = time.monotonic(), watcher.explain(None)
    if has_gone:
        assert time.monotonic() - begin < 0.1  # torchrun ends this process soon
        assert "Rank 1 on node7 may have ended: the store in which ranks report their end has gone" in said
    else:
        assert "Rank 1 on node7 has not reported for 9 s: it may have been killed, or its host or" in said
        assert "It was last seen in the forward of step 3" in said


def test_a_host_that_does_not_answer_ends_a_wait(watcher: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither end of a connection is told that the network between them is cut."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        ends = [":".join(map(str, end)) for end in (here.getpeername(), here.getsockname())]
        other = Report(1, 99, "there", host_name="node7", connections=[ends])
        watcher._mine = Report(0, os.getpid(), "here", host_name="node3", waits="a gather", waits_for=[1])
        watcher._reports._mine = watcher._mine
        monkeypatch.setattr(watch, "unanswered_seconds", lambda _: 59.0)
        assert watcher._judge({1: other}, 70) is None
        monkeypatch.setattr(watch, "unanswered_seconds", lambda _: 61.0)
        said = "node7, the host of rank 1, has not answered node3 for 61 s: it is down, or the network between them is"
        assert watcher._judge({1: other}, 70) == said
        other.host = "here"
        assert watcher._judge({1: other}, 70) is None
        other.host, other.connections = "there", [["192.0.2.7:99", ends[1]]]  # the connection is the user's
        assert watcher._judge({1: other}, 70) is None


def test_a_rank_tells_its_connections_before_anything_is_wrong(watcher: Watch) -> None:
    """If it is killed, and a process that it forked lives on, nobody else closes them."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        watcher._check_wait()
        assert any(each[0].endswith(f":{here.getsockname()[1]}") for each in watcher._mine.connections)


def test_a_verdict_is_over_with_the_wait_that_it_was_about(watcher: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may catch the error, and wait for long while another rank writes what it has."""
    monkeypatch.setattr(os, "_exit", lambda _: pytest.fail("the process was ended"))
    with waiting("a gather", dist.group.WORLD):
        watcher._check_wait()
        watcher._seen.since -= 3
        monkeypatch.setattr(watcher, "_judge", lambda *_: "a proof")
        watcher._check_wait()
        assert (WAITS.verdict, watcher._mine.verdict) == ("a proof", "a proof")
    monkeypatch.setattr(watcher, "_judge", lambda *_: None)
    with waiting("an emergency save", dist.group.WORLD):
        assert WAITS.verdict is None
        watcher._check_wait()
        watcher._judged -= 60
        watcher._seen.since -= 50
        watcher._check_wait()
        assert (WAITS.verdict, watcher._mine.verdict) == (None, "")


def test_a_verdict_that_comes_too_late_is_not_about_the_next_wait(
    watcher: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To judge takes as long as the store takes to answer."""

    def judge(*_: object) -> str:
        WAITS.change(Wait("the next gather", dist.group.WORLD))
        return "a proof"

    with waiting("a gather", dist.group.WORLD):
        watcher._check_wait()
        watcher._seen.since -= 3
        monkeypatch.setattr(watcher, "_judge", judge)
        watcher._check_wait()
        assert WAITS.verdict is None


def test_a_verdict_of_another_rank_is_about_waits_that_began_before_it(watcher: Watch) -> None:
    told = Report(1, os.getpid(), "there", verdict="a proof", judged=0.5)
    assert watcher._judge({1: told}, 3) == "a proof"
    told.judged = 2.5  # when it was written, up to a second ago
    assert watcher._judge({1: told}, 3) is None


def test_ranks_that_parted_are_told_once(watcher: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they did in that pass proves nothing of what they wait for after the error."""
    passes = {"0 0 7": {"0": "a forward", "1": "the gather of 'a'"}}
    other = Report(1, os.getpid(), "there", passes={"0 0 7": {"0": "a forward", "1": "the gather of 'b'"}})
    monkeypatch.setattr(WAITS, "position", lambda: Position(passes=passes))
    monkeypatch.setattr(watcher, "_others_of", lambda _: [1])
    monkeypatch.setattr(watcher._reports, "read", lambda _: {1: other})
    seen = []
    for what in ("a gather", "an emergency save"):
        with waiting(what, dist.group.WORLD):
            watcher._check_wait()
            watcher._seen.since -= 3
            watcher._judged -= 60
            watcher._check_wait()
            seen.append(WAITS.verdict)
    assert "The ranks do not run the same" in (seen[0] or "")
    assert seen[1] is None


def test_a_new_wait_is_told_soon_where_the_store_is_a_file(watcher: Watch, tmp_path: Path) -> None:
    """A file grows with each report, so that a rank that does not wait makes few."""
    watch = Watch(dist.FileStore(str(tmp_path / "store"), 1))
    watch._check_wait()
    watch._check_wait()
    assert watch._mine.beat == 1
    with waiting("a gather", dist.group.WORLD):
        watch._check_wait()
        beats = []
        for _ in range(60):  # seconds
            watch._seen.since -= 1
            watch._mine.written -= 1
            watch._check_wait()
            beats.append(watch._mine.beat)
    assert (beats[0], beats[1]) == (1, 2)
    assert beats[-1] < 12


@ranks(2)
def test_a_rank_that_calls_torch_alone_is_said_to_be_there(world: World) -> None:
    """Its wait is none of ours. To say that it waits for nobody would send people to look elsewhere."""
    here, seen = threading.current_thread(), set[str]()
    tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])

    def look() -> None:
        while not over.wait(0.02):
            seen.add(call_of_torch(here))

    over, thread = threading.Event(), threading.Thread(target=look)
    thread.start()
    if world.rank == 0:
        time.sleep(0.5)
    tensor.full_tensor()
    over.set()
    thread.join()
    told = {each for each in seen if "DTensor.full_tensor (called in test_watch.py:" in each}
    assert "" in seen if world.rank == 0 else told


def test_a_rank_inside_of_torch_is_not_said_to_wait_for_nobody(watcher: Watch) -> None:
    calls = "torch.distributed.tensor._api.DTensor.full_tensor (called in train.py:7)"
    there = Report(1, os.getpid(), host_id(), doing="between the passes of step 2", inside=calls)
    expected = f"Rank 1 is between the passes of step 2, in {calls}, which may wait for other ranks"
    assert watcher._others({1: there}) == expected
    there.inside = ""
    assert watcher._others({1: there}) == "Rank 1 is between the passes of step 2, and waits for nobody"
