"""Programs find defects that were planted into the library."""

from __future__ import annotations

import itertools

import pytest

from tests.fuzz import pool
from tests.fuzz.planted import PLANTS
from tests.fuzz.pool import Fuzzer
from tests.fuzz.programs import generate
from tests.harness import RankPool

MOST = 240
"""Programs within which each is found; most are within twenty."""


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_defect_is_found(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch, plant: str) -> None:
    monkeypatch.setattr(pool, "PATIENCE", 10.0)
    fuzzer = Fuzzer(rank_pool, plant)
    on_two = (program for program in map(generate, itertools.count(10_000)) if program.world == 2)
    for run in range(MOST):
        if fuzzer.run(next(on_two)).is_finding:
            print(f"{plant}: found by program {run}")
            return
    pytest.fail(f"{MOST} programs did not find the planted defect '{plant}'")
