"""Whole runs, as their processes tell them: what each has run in which step, and how the job has changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.elastic.jobs import Fault, Job, Result, run


def ends_in(step: int) -> list[Fault]:
    """A process ends late in a step: the others have run what they had to before."""
    return [(step, "forward 1", "0.5"), (step, "backward 1", "SIGKILL")]


JOBS = {
    "two processes of different rows end": Job(faults={1: ends_in(2), 2: ends_in(3)}, steps=5),
    "two of three replicas end": Job(1, 3, faults={0: ends_in(1), 1: ends_in(2)}, steps=4),
}


def trace_of(result: Result) -> str:
    """What each process has run, as ``rank.micro-batch`` by the step, what it has logged, and how it ended."""
    lines = []
    for process, (said, status) in enumerate(zip(result.said, result.statuses, strict=True)):
        ran: dict[int, list[str]] = {}
        for step, rank, number in (each["ran"] for each in said if "ran" in each):
            ran.setdefault(step, []).append(f"{rank}.{number}")
        lines.append(f"process {process} ended with {status}")
        lines += [f"    step {step}: {' '.join(each)}" for step, each in ran.items()]
        logged = [
            each for each in result.errors[process].splitlines() if re.match("fullshard: (process|member|step)", each)
        ]
        lines += ["    " + re.sub(r"\d+\.\d+ s", "… s", each.removeprefix("fullshard: ")) for each in logged]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", JOBS)
def test_a_run_goes_as_it_went(name: str) -> None:
    golden = Path(__file__).parent / "traces" / f"{name.replace(' ', '_')}.txt"
    found = trace_of(run(JOBS[name]))
    assert found == golden.read_text(encoding="utf-8"), f"if this is right, it belongs into {golden}:\n{found}"
