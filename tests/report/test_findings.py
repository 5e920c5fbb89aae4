"""What traces show, of ranks whose times are given."""

from __future__ import annotations

import pytest

from fullshard.report.findings import findings, waited
from fullshard.report.rank_trace import RankTrace
from tests.report.cases import MS, by_hand


def test_waits_are_for_the_last_rank_and_then_for_the_bytes() -> None:
    found = {(wait.rank, wait.by): wait.length for wait in waited([by_hand(0), by_hand(1, computes=60)])}
    assert found == {(0, 1): 40 * MS, (0, None): 10 * MS, (1, None): 10 * MS}


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_slow_rank_is_named_with_what_it_computes_there(slow: int) -> None:
    ranks = [by_hand(rank, computes=60 if rank == slow else 20) for rank in range(3)]
    first = findings(ranks)[0]
    assert (first.kind, first.rank, first.group) == ("slow rank", slow, "b")
    assert first.share == pytest.approx(0.4)
    assert f"Rank {slow} is slow" in first.text
    assert "forward of 'b' takes 60 ms there, and 20 ms on the others" in first.text


def test_no_rank_is_slow_where_all_are_alike() -> None:
    kinds = {finding.kind for finding in findings([by_hand(0), by_hand(1)])}
    assert "slow rank" not in kinds
    assert "late gathers" in kinds


def test_ranks_that_wait_for_each_other_in_turns_are_told_of() -> None:
    ranks = []
    for rank in (0, 1):
        slow, fast = by_hand(rank, computes=60), by_hand(rank)
        spans = [mine if mine.step == rank else other for mine, other in zip(slow.spans, fast.spans, strict=True)]
        slow.spans = [span._replace(end=span.end - 10 * MS) if span.what == "gather" else span for span in spans]
        ranks.append(slow)
    first = findings(ranks)[0]
    assert (first.kind, first.share) == ("balance", pytest.approx(0.2))
    assert "No rank stands out" in first.text
    assert "20 ms of a step of 100 ms" in first.text


def test_a_trace_without_a_whole_step_says_so() -> None:
    (finding,) = findings([RankTrace(0, "host", "cpu", "memory")])
    assert "No step" in finding.text


def test_a_rank_for_which_the_others_hardly_wait_is_not_slow() -> None:
    ranks = [by_hand(rank, computes=22 if rank == 1 else 20) for rank in range(3)]  # ms of 100
    assert "slow rank" not in {finding.kind for finding in findings(ranks)}
    ranks[1] = by_hand(1, computes=24)
    assert "slow rank" in {finding.kind for finding in findings(ranks)}


def test_what_costs_nothing_comes_last() -> None:
    found = findings([by_hand(0), by_hand(1, computes=60)])
    assert [finding.kind for finding in found][-1] == "prefetch"
    assert found[-1].share == 0
    assert [finding.share for finding in found] == sorted((finding.share for finding in found), reverse=True)


def test_what_an_eighth_of_the_bytes_between_hosts_would_give_is_told() -> None:
    """Two ranks of a host that exchange for 45 of 100 ms with others, and wait 15 of them for bytes."""
    ranks = [by_hand(rank) for rank in range(2)]
    assert "between hosts" not in {finding.kind for finding in findings(ranks)}
    for rank in ranks:
        gathers = [span for span in rank.spans if span.lane == "gather"]
        rank.spans = [span._replace(nbytes=9_000_000 * (span.lane == "gather")) for span in rank.spans]
        rank.spans += [span._replace(lane="network", start=span.end - 45 * MS) for span in gathers]
        rank.spans = [each._replace(end=each.start + 15 * MS) if each.lane == "wait" else each for each in rank.spans]
    (found,) = [finding for finding in findings(ranks) if finding.kind == "between hosts"]
    assert "in a step from the others, in 45 ms (0.40 GB/s), and its ranks wait 15 ms for bytes" in found.text
    assert "a step would take about 85 ms instead of 100 ms" in found.text
    assert found.share == pytest.approx(0.15)
    for rank in ranks:  # of less than a seventh of the time on the network nothing is left: some of a longer wait is
        rank.spans = [each._replace(end=each.start + 45 * MS) if each.lane == "wait" else each for each in rank.spans]
    (found,) = [finding for finding in findings(ranks) if finding.kind == "between hosts"]
    assert found.share == pytest.approx(45 * 7 / 8 / 100)
