"""Which step a load takes, what it does to values of another dtype, and what it warns of on another number of ranks."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fullshard import checkpoint
from fullshard.checkpoint import CheckpointError
from tests.checkpoint.cases import assert_same, whole
from tests.checkpoint.stores import faults
from tests.checkpoint.test_faults import filled, flip
from tests.checkpoint.test_pretrained import write
from tests.checkpoint.test_replicas import assert_all, replicas_of
from tests.checkpoint.test_save import apis, run, sharded
from tests.harness import RankPool, World, ranks
from tests.harness.models import MLP, seeded

each_storage = pytest.mark.parametrize("scheme", ["", "faulty://"], ids=["local", "store"])


def save(world: World, folder: Path, states: list[list[int]]) -> None:
    checkpoint.save(folder, filled(), step=1, state={"alike": [1], **({"own": states[world.rank]} if states else {})})


def load(world: World, folder: Path) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = checkpoint.load(folder, filled())
    return found, [str(each.message) for each in warned]


def test_only_state_that_differed_between_ranks_is_warned_of(rank_pool: RankPool, tmp_path: Path) -> None:
    cases: list[list[list[int]]] = [[], [[3], [3]], [[3], [4]]]
    for number, states in enumerate(cases):
        folder, own = tmp_path / str(number), {"own": states[0]} if states else {}
        run(rank_pool, save, 2, folder, states)
        assert run(rank_pool, load, 2, folder)[0] == ({"step": 1, "alike": [1], **own}, [])
        found, (*warned,) = run(rank_pool, load, 1, folder)[0]
        assert found == {"step": 1, "alike": [1], **own}
        assert len(warned) == (states == [[3], [4]])
        assert all("was saved by 2 ranks and is loaded by 1. The states ['own'] differ" in each for each in warned)


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


def save_steps(directory: Any, *steps: int, **options: Any) -> Any:
    """Saves; the values of the n-th are n. Returns the model."""
    model = filled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a lower step than the one before
        for number, step in enumerate(steps, 1):
            model.fill(number)
            checkpoint.save(directory, model, step=step, **options)
    return model


@each_storage
@ranks(2)
def test_a_load_takes_the_newest_save_of_its_step(world: World, tmp_path: Path, scheme: str) -> None:
    directory = f"{scheme}{tmp_path}/run"
    model = save_steps(directory, 5, 5, 10, 15)
    for step, number in ((5, 2), (10, 3), (15, 4), (None, 4)):
        model.fill(9)
        assert checkpoint.load(directory, model, step=step) == {"step": 15 if step is None else step}
        assert_all(model, number)
    assert checkpoint.load(f"{directory}/step-00000005", model, step=5) == {"step": 5}
    assert_all(model, 1)


@each_storage
@ranks(2)
def test_a_step_that_is_not_there_is_an_error_that_names_the_others(world: World, tmp_path: Path, scheme: str) -> None:
    directory = f"{scheme}{tmp_path}/run"
    with pytest.raises(CheckpointError, match=r"step 5 cannot be loaded from .*/run: there are no steps"):
        checkpoint.load(directory, filled(), step=5)
    model = save_steps(directory, 5, 5, 10)
    for step in (0, 7):
        with pytest.raises(CheckpointError, match=rf"step {step} cannot be .*/run: there are only the steps \[5, 10\]"):
            checkpoint.load(directory, model, step=step)
    with pytest.raises(CheckpointError, match=r"there are only the steps \[10\]"):
        checkpoint.load(f"{directory}/step-00000010", model, step=5)
    assert_all(model, 3)


@each_storage
@ranks(2)
def test_a_step_that_is_not_whole_is_an_error_that_says_why(world: World, tmp_path: Path, scheme: str) -> None:
    model = save_steps(f"{scheme}{tmp_path}/run", 5, 10, 15)
    if world.rank == 0:
        (file,) = (tmp_path / "run" / "step-00000010").glob("__0_0*.distcp")
        flip(file, -9)
    reason = r"step 10 cannot be loaded .*__0_0.*distcp.* not what was written"
    with pytest.warns(UserWarning, match="10 is skipped"), pytest.raises(CheckpointError, match=reason):
        checkpoint.load(f"{scheme}{tmp_path}/run", model, step=10)
    assert checkpoint.load(f"{scheme}{tmp_path}/run", model, step=5) == {"step": 5}
    assert_all(model, 1)


@ranks(2)
def test_a_broken_save_of_a_step_and_one_of_another_step_under_its_name_are_passed_over(
    world: World, tmp_path: Path
) -> None:
    model = save_steps(tmp_path, 5, 5, 10)
    if world.rank == 0:
        flip(tmp_path / "step-00000005.1" / "__0_0.distcp", -9)
        (tmp_path / "step-00000010").rename(tmp_path / "step-00000007")
    dist.barrier()
    with pytest.warns(UserWarning, match=r"step-00000005.1 is skipped"):
        assert checkpoint.load(tmp_path, model, step=5) == {"step": 5}
    assert_all(model, 1)
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(CheckpointError, match="holds step 10, not 7"):
        checkpoint.load(tmp_path, model, step=7)


@ranks(2)
def test_an_older_replica_of_the_step_is_loaded_and_one_of_another_is_not(world: World, tmp_path: Path) -> None:
    replicas = replicas_of(tmp_path, 2)
    model = save_steps(tmp_path / "run", 5)
    save_steps(tmp_path / "run", 7, replicas=replicas)
    model = save_steps(tmp_path / "run", 10, 20)
    assert checkpoint.load(tmp_path / "run", model, step=7, replicas=replicas) == {"step": 7}
    assert checkpoint.load(tmp_path / "run", model, step=10, replicas=replicas) == {"step": 10}
    with pytest.raises(CheckpointError, match=r"there are only the steps \[5, 7, 10, 20\]"):
        checkpoint.load(tmp_path / "run", model, step=8, replicas=replicas)
    checkpoint.save(tmp_path / "other", model, step=1)
    reason = r"step 7 cannot be loaded .* it belongs to a different training run"
    with pytest.warns(UserWarning, match="07 is skipped"), pytest.raises(CheckpointError, match=reason):
        checkpoint.load(tmp_path / "other", model, step=7, replicas=replicas)


class Pair(nn.Module):
    """Two layers and two buffers, which may be tied."""

    def __init__(self, tied: bool, at: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3)])
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.register_buffer("one", torch.zeros(2))
        self.register_buffer("two", self.one if tied else torch.zeros(2))
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.second.weight)
        if tied:
            self.second.weight = self.first.weight
        for tensor in (self.second.weight.data, self.two):
            tensor[-1:] += at


@ranks(2)
@apis
@pytest.mark.parametrize("kind", ["one.safetensors", "checkpoint"])
def test_a_tie_that_the_checkpoint_does_not_have_is_refused(world: World, tmp_path: Path, api: str, kind: str) -> None:
    def load(values: Pair, into: Any, **options: Any) -> list[torch.Tensor]:
        nonlocal number
        number += 1
        folder = tmp_path / str(number)
        if kind == "checkpoint":
            checkpoint.save(folder, values, step=1)
            checkpoint.load(folder, into, **options)
        else:
            files = {name: each.clone() for name, each in values.state_dict().items()}
            checkpoint.load_pretrained(into, write(tmp_path / f"{number}-{world.rank}", kind, files), **options)
        found = get_model_state_dict(into)
        return [whole(found[name]) for name in ("first.weight", "second.weight")]

    number, tied = 0, sharded(api, lambda: Pair(True))
    with pytest.raises(CheckpointError, match=r"'model.first.weight', 'model.one', .* are tied .*, and differ in"):
        load(Pair(False, 1.0), tied)
    with pytest.warns(UserWarning, match="the model has the values of one") if world.rank else nullcontext():
        load(Pair(False, 1.0), tied, strict=False)
    for values, into in (
        (Pair(False), tied),
        (Pair(True, 2.0), sharded(api, lambda: Pair(False))),
        (Pair(True, 2.0), tied),
    ):
        assert [torch.equal(each, values.second.weight) for each in load(values, into)] == [True, True]


def test_no_step_but_a_number_is_taken(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"step is 1.5; expected an integer"):
        checkpoint.load(tmp_path, nn.Linear(2, 2), step=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step is -1; expected a number of 0 or more"):
        checkpoint.load(tmp_path, nn.Linear(2, 2), step=-1)


@ranks(2)
def test_a_store_that_fails_now_and_then_gives_the_step(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fullshard.checkpoint.store.PAUSES", (0.001,) * 5)
    with faults(fail=0.1, late=0.2):
        model = save_steps(f"faulty://{tmp_path}/run", 5, 10)
        assert checkpoint.load(f"faulty://{tmp_path}/run", model, step=5) == {"step": 5}
    assert_all(model, 1)
