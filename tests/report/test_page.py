"""What the pictures of a page show."""

from __future__ import annotations

from fullshard.report import page
from fullshard.report.findings import waited
from fullshard.report.rank_trace import RankTrace, Span
from tests.report.cases import MS, by_hand


def test_of_a_rank_the_step_of_middle_length_is_drawn() -> None:
    rank = RankTrace(0, "host", "cpu", "memory")
    begin = 0
    for step, length in enumerate((50, 30, 20, 40, 10)):
        for what, start, end in (("forward", 0, length - 5), ("optimizer", length - 5, length)):
            rank.spans.append(Span("pass", what, "", what, step, (begin + start) * MS, (begin + end) * MS))
        begin += length
    assert page._usual_step(rank) == 1


def test_bars_have_their_names_where_there_is_room() -> None:
    rank = by_hand(0, steps=2)
    rank.spans.append(Span("computation", "forward", "blocks.12", "forward", 1, 181 * MS, 184 * MS))
    above, _ = page.draw_step(rank, 1).axes
    names = {(text.get_text(), *text.get_position()) for text in above.texts}
    # The lanes from above: passes, computation, gathers. In the middle of each bar, in ms of the step.
    assert {("forward", 40, 0), ("b", 10, 1), ("a", 75, 1), ("b", 45, 2)} <= names
    assert ("12", 82.5, 1) in names  # the end of a name that is too long
    assert not any(text == "blocks.12" for text, *_ in names)


def test_the_table_of_waits_says_who_waits_for_whom_and_how_long() -> None:
    ranks = [by_hand(0), by_hand(1, computes=60)]
    (axes,) = page.draw_waits(ranks, waited(ranks)).axes
    assert axes.get_title() == "for ... (ms of a step)"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["rank 0", "rank 1", "the bytes"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0 waits", "rank 1 waits"]
    said = {(text.get_text(), *text.get_position()) for text in axes.texts}
    assert said == {("40", 1, 0), ("10", 2, 0), ("10", 2, 1)}
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert all(left < column < right and top < row < bottom for _, column, row in said)
