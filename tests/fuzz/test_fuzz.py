"""Random programs are right; see `tests.fuzz`."""

from __future__ import annotations

import pytest

from tests.fuzz.pool import Fuzzer
from tests.fuzz.programs import generate, read
from tests.harness import RankPool


def test_programs_train_as_unsharded(pytestconfig: pytest.Config, rank_pool: RankPool) -> None:
    count, first = pytestconfig.getoption("--programs"), pytestconfig.getoption("--first-seed")
    results = list(Fuzzer(rank_pool).results(map(generate, range(first, first + count))))
    findings = [result for result in results if result.is_finding or result.kind == "invalid"]
    told = [f"python -m tests.fuzz --seed {result.program.seed}: {result.kind}\n{result.text}" for result in findings]
    assert not findings, "\n\n".join(told)
    assert len(results) == count


def test_the_text_of_a_program_is_the_program() -> None:
    for seed in range(200):
        program = generate(seed)
        assert read(program.text()) == program
