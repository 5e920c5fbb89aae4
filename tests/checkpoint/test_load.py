"""What a load on another number of ranks warns of."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from fullshard import checkpoint
from tests.checkpoint.test_faults import filled
from tests.checkpoint.test_save import run
from tests.harness import RankPool, World


def save(world: World, folder: Path, states: list[list[int]]) -> None:
    checkpoint.save(folder, filled(), step=1, state={"alike": [1], **({"own": states[world.rank]} if states else {})})


def load(world: World, folder: Path) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = checkpoint.load(folder, filled())
    return found, [str(each.message) for each in warned]


@pytest.mark.parametrize("states", [[], [[3], [3]], [[3], [4]]], ids=["none", "alike", "differing"])
def test_only_state_that_differed_between_ranks_is_warned_of(
    rank_pool: RankPool, tmp_path: Path, states: list[list[int]]
) -> None:
    run(rank_pool, save, 2, tmp_path, states)
    own = {"own": states[0]} if states else {}
    assert run(rank_pool, load, 2, tmp_path)[0] == ({"step": 1, "alike": [1], **own}, [])
    found, (*warned,) = run(rank_pool, load, 1, tmp_path)[0]
    assert found == {"step": 1, "alike": [1], **own}
    assert len(warned) == (states == [[3], [4]])
    assert all("was saved by 2 ranks and is loaded by 1: of ['own']" in each for each in warned)
