"""The file of a trace that other programs open."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from fullshard.report import chrome_trace
from fullshard.report.rank_trace import Span
from tests.report.cases import MS, by_hand


def overlapping() -> list[Span]:
    times = [(0, 100), (10, 40), (20, 30), (35, 60), (50, 120), (100, 130), (130, 130)]
    return [Span("gather", "gather", str(i), "forward", 0, a * MS, b * MS) for i, (a, b) in enumerate(times)]


def test_a_trace_has_the_structure_that_viewers_read() -> None:
    ranks = [by_hand(0), by_hand(1, computes=60)]
    ranks[0].spans += overlapping()
    by_phase = defaultdict(list)
    for event in chrome_trace.events(ranks):
        assert {"ph", "pid", "tid", "ts", "name"} <= event.keys()
        by_phase[event["ph"]].append(event)
    assert set(by_phase) == {"M", "X", "C", "s", "f"}
    assert len(by_phase["X"]) == sum(len(rank.spans) for rank in ranks)
    assert min(event["ts"] for event in by_phase["X"]) == 0
    assert all(event["dur"] >= 0 for event in by_phase["X"])
    named = {(event["pid"], event["tid"]) for event in by_phase["M"] if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in by_phase["X"]} == named
    assert {event["pid"] for event in by_phase["X"]} == {0, 1}
    starts = {event["id"]: event for event in by_phase["s"]}
    ends = {event["id"]: event for event in by_phase["f"]}
    assert starts.keys() == ends.keys()
    assert all(starts[number]["ts"] <= ends[number]["ts"] for number in starts)
    for event in (*starts.values(), *ends.values()):  # an arrow is bound to the span that it lies in
        here = [x for x in by_phase["X"] if (x["pid"], x["tid"]) == (event["pid"], event["tid"])]
        assert any(x["ts"] <= event["ts"] <= x["ts"] + x["dur"] for x in here)


def test_programs_that_read_the_events_may_stop_before_the_data(tmp_path: Path) -> None:
    ranks = [by_hand(0), by_hand(1, computes=60)]
    chrome_trace.write(ranks, tmp_path / "trace.json")
    assert list(json.loads((tmp_path / "trace.json").read_text())) == ["displayTimeUnit", "traceEvents", "fullshard"]
    assert chrome_trace.read(tmp_path / "trace.json") == ranks


def test_memory_stands_where_the_spans_stand_that_began_with_it() -> None:
    rank = by_hand(0, steps=3)
    events = chrome_trace.events([rank])
    passes = [event["ts"] for event in events if (event["ph"], event["name"]) == ("X", "forward")]
    memory = [(event["ts"], event["args"]) for event in events if event["ph"] == "C"]
    assert passes == [0, 100_000, 200_000]  # microseconds
    assert memory == [(when, {"memory": 2**20}) for when in passes]
