"""What the charts of a page show."""

from __future__ import annotations

import pytest

from fullshard.report import page
from fullshard.report.findings import waited
from fullshard.report.rank_trace import RankTrace, Span, shares
from tests.report.cases import MS, by_hand


def test_of_a_rank_the_step_of_middle_length_is_drawn() -> None:
    rank = RankTrace(0, "host", "cpu", "memory")
    begin = 0
    for step, length in enumerate((50, 30, 20, 40, 10)):
        for what, start, end in (("forward", 0, length - 5), ("optimizer", length - 5, length)):
            rank.spans.append(Span("pass", what, "", what, step, (begin + start) * MS, (begin + end) * MS))
        begin += length
    assert page._usual_step(rank) == 1


def test_bars_have_their_names_which_are_short_where_there_is_little_room() -> None:
    rank = by_hand(0, steps=2)
    rank.spans.append(Span("computation", "forward", "blocks.12", "forward", 1, 181 * MS, 184 * MS))
    named = {
        (text, at, length)
        for trace in page.draw_step([rank], 1).data
        if trace.text
        for text, at, length in zip(trace.text, trace.base, trace.x, strict=True)
    }
    # Where each bar begins and how long it is, in ms of the step, which begins where the step before ended.
    assert {("forward", 0, 80), ("b", 0, 20), ("a", 70, 10), ("b", 20, 50), ("12", 81, 3)} <= named
    assert not any(text == "blocks.12" for text, *_ in named)


def test_each_rank_has_a_row_for_each_lane_and_all_is_seen() -> None:
    ranks = [by_hand(0), by_hand(1, computes=60)]
    figure = page.draw_step(ranks, 1)
    for axis in (figure.layout.yaxis, figure.layout.yaxis2):
        assert list(axis.ticktext) == ["pass", "computation", "gather", "wait"]
        assert list(axis.range) == [3.5, -0.5]
    assert list(figure.layout.xaxis3.range) == [0, 100]
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [set(trace.y) for trace in bars] == 2 * [{0}, {1}, {2}, {3}]
    assert {title.text for title in figure.layout.annotations} == {"rank 0", "rank 1", "memory, MiB"}


def test_the_memory_of_a_step_is_in_milliseconds_and_mib() -> None:
    rank = by_hand(0, steps=3)
    rank.memory = [((100 + ms) * MS, mib * 2**20) for ms, mib in ((-1, 9), (0, 3), (25, 5), (100, 4), (101, 9))]
    (line,) = (trace for trace in page.draw_step([rank], 1).data if trace.type == "scatter")
    # The first step begins with its forward, each other one with the end of the one before.
    assert list(line.x) == [0, 25, 100]
    assert list(line.y) == [3, 5, 4]


def test_the_parts_of_a_step_are_its_length() -> None:
    ranks = [by_hand(0), by_hand(1, computes=60)]
    figure = page.draw_shares(ranks)
    assert [trace.name for trace in figure.data] == ["computing", "optimizer", "copying", "waiting", "outside"]
    for at, rank in enumerate(ranks):
        assert sum(trace.x[at] for trace in figure.data) == pytest.approx(shares(rank).step / MS)


def test_the_matrix_of_waits_says_who_waits_for_whom_and_how_long() -> None:
    ranks = [by_hand(0), by_hand(1, computes=60)]
    (chart,) = page.draw_waits(ranks, waited(ranks)).data
    assert list(chart.x) == ["for rank 0", "for rank 1", "for the bytes"]
    assert list(chart.y) == ["rank 0 waits", "rank 1 waits"]
    assert [list(row) for row in chart.z] == [[None, 40, 10], [None, None, 10]]
