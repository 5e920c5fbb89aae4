"""What can be computed from the trace of one rank: steps, tracks, shares of the time, and the file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fullshard.report.rank_trace import RankTrace, Shares, Span, Work, as_data, from_data, own_work, shares, tracks
from tests.report.cases import MS, by_hand


def span(lane: Any, what: str, start: int, end: int, group: str = "", step: int = 0) -> Span:
    return Span(lane, what, group, "forward", step, start, end)


def trace_of(*spans: Span) -> RankTrace:
    return RankTrace(0, "host", "cpu", "memory", spans=[*spans])


def test_a_step_goes_from_the_end_of_the_one_before_to_its_last_optimizer() -> None:
    trace = trace_of(
        span("pass", "forward", 10, 20),
        span("pass", "optimizer", 30, 40),
        span("pass", "forward", 60, 70, step=1),
        span("pass", "optimizer", 75, 80, step=1),
        span("pass", "optimizer", 80, 85, step=1),
        span("pass", "forward", 90, 95, step=2),  # which did not end
    )
    assert trace.steps() == {0: (10, 40), 1: (40, 85)}
    assert trace_of().steps() == {}


def test_an_optimizer_in_the_backward_ends_with_it() -> None:
    trace = trace_of(span("pass", "backward", 10, 50), span("pass", "optimizer", 20, 30))
    assert trace.steps() == {0: (10, 50)}


def test_spans_of_a_lane_are_found_in_one_step_or_in_all() -> None:
    spans = span("gather", "gather", 0, 1), span("gather", "gather", 2, 3, step=1), span("wait", "gather", 0, 1)
    trace = trace_of(*spans)
    assert list(trace.of("gather")) == [*spans[:2]]
    assert list(trace.of("gather", 1)) == [spans[1]]
    assert (spans[1].length, spans[1].number, spans[1].nbytes) == (1, 0, 0)


def test_all_times_of_a_shifted_trace_are_earlier_and_nothing_else_differs() -> None:
    trace = by_hand(1)
    earlier = trace.shifted(5)
    assert [(each.start, each.end) for each in earlier.spans] == [(s.start - 5, s.end - 5) for s in trace.spans]
    assert earlier.memory == [(when - 5, nbytes) for when, nbytes in trace.memory]
    assert earlier.shifted(-5) == trace


def test_spans_of_a_track_are_apart_or_one_in_the_other() -> None:
    outer, inner, crossing, later = (
        span("computation", name, *times)
        for name, times in {"a": (0, 10), "b": (2, 8), "c": (5, 15), "d": (10, 12)}.items()
    )
    assert tracks([later, crossing, inner, outer]) == [(0, outer), (0, inner), (1, crossing), (0, later)]


def test_each_part_of_a_step_is_counted_once() -> None:
    trace = trace_of(
        span("pass", "forward", 0, 60),
        span("wait", "gather", 10, 30),
        span("wait", "gather", 20, 35),  # of another thread: 25 together
        span("host", "gather", 30, 40),  # 5 of them are in a wait
        span("pass", "optimizer", 80, 100),
        span("wait", "a norm", 85, 90),
    )
    assert shares(trace) == Shares(step=100, computing=30, copying=5, waiting=30, optimizer=15, outside=20)
    assert shares(trace_of()) == Shares(0, 0, 0, 0, 0, 0)


def test_shares_are_those_of_an_average_step() -> None:
    found = shares(by_hand(0, computes=20, steps=3))
    assert found == Shares(100 * MS, 30 * MS, 0, 50 * MS, 10 * MS, 10 * MS)


def test_the_work_of_a_unit_is_without_units_in_it_and_waits() -> None:
    trace = trace_of(
        span("pass", "forward", 0, 50),
        span("computation", "forward", 0, 40, "outer"),
        span("computation", "forward", 10, 30, "outer.inner"),
        span("wait", "gather", 25, 35),
        span("pass", "optimizer", 60, 70),
    )
    found = {(each.what, each.group): each.length for each in own_work(trace)}
    assert found["forward", "outer"] == 15
    assert found["forward", "outer.inner"] == 15
    assert found["optimizer", ""] == 10
    assert all(isinstance(each, Work) for each in own_work(trace))


def test_the_data_has_all_of_a_trace_and_begins_at_zero() -> None:
    traces = [by_hand(rank).shifted(-7 * MS) for rank in range(2)]
    found = from_data(json.loads(json.dumps(as_data(traces))))
    assert found == [each.shifted(7 * MS) for each in traces]
    assert min(each.start for each in found[0].spans) == 0


@pytest.mark.parametrize("content", [[], {}, {"version": 99, "ranks": []}], ids=str)
def test_data_of_another_version_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match="is not a trace of version 1, which this release of fullshard reads"):
        from_data(content)


@pytest.mark.parametrize("ranks", [None, 5, [3], [{"spans": []}], [{"spans": [[1]], "memory": []}]], ids=str)
def test_damaged_data_is_refused(ranks: Any) -> None:
    data = {**as_data([by_hand(0)]), **({} if ranks is None else {"ranks": ranks})}
    if ranks is None:
        del data["ranks"]
    with pytest.raises(ValueError, match=r"its data is damaged: (KeyError|TypeError)"):
        from_data(data)
