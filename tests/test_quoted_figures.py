"""Each ratio that README quotes is that of the results from which the tables of the documentation are made."""

from __future__ import annotations

import re
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


BOTH = "torch FSDP2", "DDP"
#: What README says, with a group for each figure, and the figures.
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


def text() -> str:
    return " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_ratio_is_that_of_the_results(claim: str) -> None:
    found = re.search(claim, text())
    assert found is not None
    assert found.groups() == CLAIMS[claim]()


def test_a_realistic_step_is_as_fast_as_one_of_ddp() -> None:
    assert abs(wall(REALISTIC, "fullshard", "DDP") - 1) < 0.02


def test_no_other_ratio_of_times_is_quoted() -> None:
    """The one of a GPU is from a run of its own, which :mod:`tests.test_benchmarks_gpu` compares with its page."""
    rest = re.sub("|".join(CLAIMS), "", text())
    quoted = re.findall(r"[\d.]+ times (?:faster|as long)[^.|]*", rest)
    assert [each for each in quoted if "FSDP2's at 7 B parameters" not in each] == []
