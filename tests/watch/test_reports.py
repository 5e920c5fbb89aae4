"""Which reports of other ranks are believed: none of an earlier process group or attempt, whatever the clocks say."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest

from fullshard.comm.local_ranks import host_id
from fullshard.watch import reports, watch
from fullshard.watch.connections import StoreConnection
from fullshard.watch.reports import Report, Reports
from fullshard.watch.watch import Watch
from tests.harness.held import watched_processes


def test_a_report_about_an_earlier_process_group_is_not_read(watcher: Watch, store: Any, key: str) -> None:
    """A program may destroy its process group and make another one, over the same store."""
    connection = StoreConnection(store, 0)
    Reports(connection, Report(1, 99, "there", ended=watch._LEFT), key, 1.0).write()
    assert 1 in watcher._reports.read([1])
    later = Watch(store, watcher)
    assert 1 not in later._reports.read([1])
    Reports(connection, Report(1, 99, "there", number=2), key, 1.0).write()
    assert 1 in later._reports.read([1])


def test_a_report_from_before_a_restart_is_not_read(
    watcher: Watch, store: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts all ranks anew over the store in which the failed attempt left how it ended."""
    ended = Report(1, 99, host_id(), ended="ValueError: a bad batch")
    Reports(StoreConnection(store, 0), ended, key, 1.0).write()
    assert 1 in watcher._reports.read([1])
    monkeypatch.setattr(reports, "_BEGUN", time.monotonic() + 1)
    assert 1 not in Watch(store)._reports.read([1])


def test_the_clocks_of_other_hosts_do_not_count(
    watcher: Watch, store: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was set wrong made the ranks of its host invisible to others, or those of an attempt before visible."""
    theirs = Reports(StoreConnection(store, 0), Report(1, 99, "another host"), key, 1.0)
    for clock in ("time", "monotonic"):
        monkeypatch.setattr(reports.time, clock, lambda: 0.0)
    theirs.write()
    monkeypatch.undo()
    assert 1 in watcher._reports.read([1])
    watcher._check_wait()
    later = Watch(store)._reports  # of an attempt that finds the reports of this one
    assert 1 not in later.read([1])
    assert 1 not in later.read([1])
    theirs.write()
    assert 1 in later.read([1])


def test_a_report_of_another_version_is_read_as_far_as_it_is_known(watcher: Watch, store: Any, key: str) -> None:
    store.set(f"{key}1", '{"rank": 1, "process": 99, "host": "there", "ended": "an error", "news": 1}')
    assert watcher._reports.read([1])[1].ended == "an error"
    for unknown in ('{"rank": 2}', "[2]", "no JSON"):
        store.set(f"{key}2", unknown)
        assert 2 not in watcher._reports.read([2])


def test_a_process_is_held_open_once_until_the_end(watcher: Watch) -> None:
    before = watched_processes()
    with subprocess.Popen(["sleep", "60"]) as process:
        report = Report(1, process.pid, host_id())
        assert not any(watcher._reports.has_ended(report) for _ in range(2))
        assert watched_processes() == before + 1
        process.kill()
    assert watcher._reports.has_ended(report)
    watcher._reports.close()
    assert watched_processes() == before


def test_the_age_of_a_killed_rank_s_last_report_is_told(watcher: Watch) -> None:
    """The rank may have trained many steps since then, or have been stopped for long."""
    process = subprocess.Popen(["true"])
    process.wait()
    report = Report(1, process.pid, host_id(), written=time.monotonic() - 90, doing="in the forward of step 2")
    assert (watcher._lost([report]) or "").endswith("its last report, 90 s ago, was: in the forward of step 2")


def test_a_rank_of_another_host_has_ended_if_one_beside_it_has_seen_that(
    watcher: Watch, store: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the ranks of a host see its processes; the store has nothing from one that was killed."""
    process = subprocess.Popen(["true"])
    process.wait()
    killed, beside = Report(1, process.pid, "there", host_name="node2"), Report(2, 99, "there")
    for report in (killed, beside):
        Reports(StoreConnection(store, 0), report, key, 1.0).write()
    monkeypatch.setattr(watcher._reports._mine, "host", "there")
    watcher._reports.read([1, 2])
    assert watcher._reports.look_beside()
    assert 1 in watcher._mine.gone
    monkeypatch.undo()
    assert not watcher._reports.has_ended(killed)
    beside.gone = [1]
    Reports(StoreConnection(store, 0), beside, key, 1.0).write()
    watcher._reports.read([1, 2])
    assert f"Rank 1 (process {process.pid} on node2) was killed or has crashed" in (watcher._lost([killed]) or "")


def test_hosts_that_were_lost_together_are_named_together(watcher: Watch) -> None:
    """This one may be the host that was cut off: the last probes of the others differ by seconds."""
    ends = {"b": ["b:1", "a:1"], "c": ["c:1", "a:2"]}
    lost = [Report(rank, 99, host, connections=[ends[host]], host_name=host) for rank, host in ((1, "b"), (2, "c"))]
    lost.append(Report(3, 99, "c", host_name="c"))
    seconds = {("a:1", "b:1"): 60.0, ("a:2", "c:1"): 57.0}
    said = watcher._reports.unreachable(lost, seconds)
    assert "b, the host of rank 1, has not answered" in said
    assert "c, the host of ranks 2, 3, has not answered" in said
    assert watcher._reports.unreachable(lost, {**seconds, ("a:1", "b:1"): 59.0}) == ""
    assert "c, the host" not in watcher._reports.unreachable(lost, {**seconds, ("a:2", "c:1"): 30.0})


def test_a_store_that_does_not_answer_makes_no_rank_silent(watcher: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreConnection, "is_silent", True)
    here, there = Report(1, 1, host_id()), Report(2, 99, "there", host_name="node2", doing="in a forward")
    watcher._reports.known.update({1: here, 2: there})
    watcher._reports._beats.update({rank: (0, time.monotonic() - 30) for rank in (1, 2)})
    said = watcher._others({1: here, 2: there})
    assert "Rank 2 on node2 has not reported: the store does not answer. It was last seen in a forward" in said
    assert said.endswith("still runs")
    watcher._hang, watcher._mine.waits_for = 5, [1, 2]
    assert "and the store, at rank 0, does not answer: look there first" in (
        watcher._judge({1: here, 2: there}, 9) or ""
    )
