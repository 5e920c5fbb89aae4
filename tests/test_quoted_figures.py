"""Each figure that README and the page of elastic jobs quote is that of the results behind the tables."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.figures import ratio
from benchmarks.report import read

ROOT = Path(__file__).parent.parent
RESULTS = read(ROOT / "docs/explanation/measurements.json")
COMMUNICATION, COMPUTE, REALISTIC = "communication W=2", "compute W=2", "realistic W=2"


def wall(work: str, name: str, other: str) -> float:
    return ratio(RESULTS[work]["contenders"], "wall", name, other)[0]


def faster(work: str, *others: str) -> tuple[str, ...]:
    return tuple(
        f"{1 / round(wall(work, 'fullshard', other), 2):.{2 if work == REALISTIC else 1}f}" for other in others
    )


BOTH, JOBS = ("torch FSDP2", "DDP"), RESULTS["elastic"]
#: What a page says, with a group for each figure, and the figures.
CLAIMS: dict[str, Callable[[], tuple[Any, ...]]] = {
    r"\| mostly moves parameters \| ([\d.]+) times faster \| ([\d.]+) times faster \|": lambda: faster(
        COMMUNICATION, *BOTH
    ),
    r"\| mostly computes \| ([\d.]+) times faster \| ([\d.]+) times faster \|": lambda: faster(COMPUTE, *BOTH),
    r"\(2,048 tokens a rank\) \| ([\d.]+) times faster \| equally fast \|": lambda: faster(REALISTIC, BOTH[0]),
    r"Over sockets, a step that mostly moves parameters takes ([\d.]+) times as long as DDP's": lambda: (
        f"{wall(COMMUNICATION, 'fullshard, p2p', 'DDP'):.2f}",
    ),
}
CLAIMS_OF_JOBS: dict[str, Callable[[], tuple[Any, ...]]] = {
    r"a step took ([\d.]+) to ([\d.]+) times as long as an HSDP step": lambda: (
        f"{min(JOBS['steady']):.2f}",
        f"{max(JOBS['steady']):.2f}",
    ),
    r"loaded (\d+) MiB, a step took ([\d.]+) times as long as usual": lambda: (
        f"{JOBS['joining MiB']:.0f}",
        f"{statistics.median(JOBS['joining']):.2f}",
    ),
    r"After each of (\d+) kills, the next step ended at most ([\d.]+) s later than usual": lambda: (
        f"{len(JOBS['recoveries'])}",
        f"{max(JOBS['recoveries']):.2f}",
    ),
}


def text(page: str = "README.md") -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("claim", [*CLAIMS, *CLAIMS_OF_JOBS])
def test_a_figure_is_that_of_the_results(claim: str) -> None:
    found = re.search(claim, text("README.md" if claim in CLAIMS else "docs/how-to/survive.md"))
    assert found is not None
    assert found.groups() == (CLAIMS | CLAIMS_OF_JOBS)[claim]()


def test_a_realistic_step_is_as_fast_as_one_of_ddp() -> None:
    assert abs(wall(REALISTIC, "fullshard", "DDP") - 1) < 0.02


def test_no_other_ratio_of_times_is_quoted() -> None:
    """The one of a GPU is from a run of its own, which :mod:`tests.test_benchmarks_gpu` compares with its page."""
    rest = re.sub("|".join(CLAIMS), "", text())
    quoted = re.findall(r"[\d.]+ times (?:faster|as long)[^.|]*", rest)
    assert [each for each in quoted if "FSDP2's at 7 B parameters" not in each] == []
