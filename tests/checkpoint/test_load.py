"""What a load on another number of ranks warns of, and what it does to values of another dtype."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fullshard import checkpoint
from tests.checkpoint.cases import assert_same, whole
from tests.checkpoint.test_faults import filled
from tests.checkpoint.test_save import apis, run, sharded
from tests.harness import RankPool, World, ranks
from tests.harness.models import MLP, seeded


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


@ranks(2)
@apis
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_are_cast_to_the_dtype_of_the_model(world: World, tmp_path: Path, api: str, dtype: torch.dtype) -> None:
    model = sharded(api)
    checkpoint.save(tmp_path, model, step=1)
    other = sharded(api, lambda: seeded(MLP, 5).to(dtype))
    checkpoint.load(tmp_path, other)
    expected = {name: whole(each).to(dtype) for name, each in get_model_state_dict(model).items()}
    assert_same({name: whole(each) for name, each in get_model_state_dict(other).items()}, expected)
