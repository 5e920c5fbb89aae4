"""Ranks to which faults are done train right, or end in time with an error that says whose fault it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest

from tests.faults.program import FAULTS, Case, random_case
from tests.faults.run import RankResult, judge, run

#: Programs side by side: most of them wait most of the time.
AT_ONCE = 6
ONE = Case(0, 2, "shm", "fully_shard", (48, 48, 48), 1, "none", rank=1, step=1, block=1, in_backward=False)


def check(cases: list[Case]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = pool.map(run, cases)
        wrong = [f"{case}: {found}" for case, each in zip(cases, results, strict=True) if (found := judge(case, each))]
    assert not wrong, "\n".join(wrong)


def test_a_fault_of_each_kind() -> None:
    """On the transport that ranks of one host take, and between hosts; the tests below have the other kinds."""
    kinds = [fault for fault in FAULTS if fault not in ("none", "between", "leave", "more")]
    check([replace(ONE, fault=fault, transport=("shm", "p2p")[at % 2]) for at, fault in enumerate(kinds)])


@pytest.mark.slow
def test_a_rank_that_ends_before_its_first_forward_is_named() -> None:
    check([replace(ONE, fault="early", step=0)])


@pytest.mark.slow
def test_a_rank_that_ends_between_local_steps_is_named() -> None:
    check([replace(ONE, fault="between", transport="p2p", front_end="local")])


def test_a_rank_that_comes_after_another_was_killed_is_told_by_what_it_sends() -> None:
    """It never waits: its first call of the backend fails."""
    killed = replace(ONE, fault="between", transport="p2p")
    on_device = replace(killed, transport="collective", on_device=True)
    check([replace(killed, wire=True), on_device])


def test_ranks_of_which_gloo_ends_one_are_told_where_they_parted() -> None:
    """Its collectives end a process that is sent more than it expects."""
    case = replace(ONE, transport="collective", fault="leave", block=0, widths=(12, 48), front_end="original")
    found = run(case)
    assert judge(case, found) == ""
    assert any("EnforceNotMet" in rank.said for rank in found)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])
@pytest.mark.parametrize("front_end", ["fully_shard", "original", "flat"])
def test_faults_of_each_kind(transport: str, front_end: str) -> None:
    check(
        [
            replace(ONE, fault=fault, world=world, transport=transport, front_end=front_end, in_backward=in_backward)
            for fault, world, in_backward in product(FAULTS, (2, 3), (False, True))
            if not in_backward or fault in ("delay", "raise", "kill", "stop")
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["p2p", "collective"])
def test_faults_of_each_kind_with_encoded_messages(transport: str) -> None:
    check([replace(ONE, fault=fault, transport=transport, wire=True) for fault in FAULTS])


@pytest.mark.slow
def test_random_faults(pytestconfig: pytest.Config) -> None:
    first = pytestconfig.getoption("--first-seed")
    check([random_case(seed) for seed in range(first, first + pytestconfig.getoption("--programs"))])


def test_what_is_wrong_is_seen() -> None:
    """A check that finds nothing in anything would be worth nothing."""
    fine = run(ONE)
    assert judge(ONE, fine) == ""
    other = replace(fine[0], losses=[*fine[0].losses[:-1], fine[0].losses[-1] + 0.01])
    assert "rank 0: loss 3 is" in judge(ONE, [other, fine[1]])
    killed = replace(ONE, fault="kill")
    ended = RankResult("killed", fine[1].losses[:1], "", 3.0, 3.0)
    assert "rank 0 came to its end" in judge(killed, [fine[0], ended])
    hung = RankResult("hung", fine[0].losses[:1], "", 40.0, 40.0)
    assert "rank 0 hung" in judge(killed, [hung, ended])
    vague = RankResult("raised", fine[0].losses[:1], "RuntimeError: connection closed by peer", 4.0, 4.0)
    assert "rank 0 is not clear" in judge(killed, [vague, ended])
    says = (
        "PeerFailureError: rank 0 lost its connection to rank 1 in an all-gather of 'blocks.1', in the forward "
        "of step 2 (forward 2). "
        "Rank 1 (process 5) was killed or has crashed"
    )
    assert judge(killed, [RankResult("raised", fine[0].losses[:1], says, 4.0, 4.0), ended]) == ""
    assert "rank 0 was told 6.0 s late" in judge(killed, [RankResult("raised", [], says, 9.0, 9.0), ended])
    assert "is not clear" in judge(
        killed, [RankResult("raised", [], says.replace("step 2", "step 4"), 4.0, 4.0), ended]
    )
    swapped = replace(ONE, fault="swap")
    differ = "RuntimeError: rank 0 has the gather of 'a' where rank 1 has the gather of 'b'"
    later = [RankResult("raised", fine[rank].losses[:2], differ, 4.0, 4.0) for rank in range(2)]
    assert "rank 0 was told after 2 micro-batches" in judge(swapped, later)
