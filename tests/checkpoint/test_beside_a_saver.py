"""Loads and readers beside a job that saves and removes older checkpoints in the same directory."""

from __future__ import annotations

import multiprocessing
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fullshard import checkpoint
from fullshard.checkpoint.local import LocalStorage
from fullshard.cli import main
from tests.checkpoint import stores  # noqa: F401  (makes faulty:// known)
from tests.checkpoint.test_faults import Filled, assert_holds, filled
from tests.harness import World, ranks

SAVES = 20


def save_often(folder: Path, first: int) -> None:
    """Every second step, and keeps one checkpoint."""
    for step in range(first, first + 2 * SAVES, 2):
        fill_and_save(folder, step, keep_last=1)


def test_beside_a_saver_nothing_is_missed_and_nothing_whole_is_called_broken(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    model, context = Filled(), multiprocessing.get_context("fork")
    fill_and_save(tmp_path, 0)
    saver = context.Process(target=save_often, args=(tmp_path, 1))
    saver.start()
    while saver.is_alive():
        assert checkpoint.load(tmp_path, model) is not None
        assert len({value for param in model.parameters() for value in param.flatten().tolist()}) == 1
        found = checkpoint.latest(tmp_path)
        assert found is not None
        with found:
            assert list(found.verify()) == []
        for command in ("list", "verify", "show"):
            assert main(["checkpoint", command, str(tmp_path)]) == 0, capsys.readouterr()
    saver.join()
    assert saver.exitcode == 0
    assert not [each for each in recwarn if "fork" not in str(each.message)]


@contextmanager
def listed_too_early(saves: Callable[[], Any]) -> Iterator[None]:
    """What the next listing says is old when it is used: ``saves`` is called after it."""
    list_now, done = LocalStorage.list, list[int]()

    def early(storage: LocalStorage) -> list[Path]:
        found = list_now(storage)
        if not done:
            done.append(1)
            saves()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "list", early)
        yield


def fill_and_save(folder: Path, step: int, **options: Any) -> None:
    model = Filled()
    model.fill(step)
    checkpoint.save(folder, model, step=step, **options)


@ranks(2)
@pytest.mark.parametrize("first", [None, 1], ids=["nothing yet", "removed"])
def test_a_listing_that_is_old_when_it_is_used_is_made_again(world: World, tmp_path: Path, first: int | None) -> None:
    model, saves = filled(), tmp_path / "saves"
    checkpoint.save(tmp_path / "next", model, step=2)
    if first is not None:
        checkpoint.save(saves, model, step=first)
    dist.barrier()

    def take_its_place() -> None:
        saves.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # the other rank was first
            (tmp_path / "next" / "step-00000002").rename(saves / "step-00000002")
            shutil.rmtree(saves / "step-00000001", ignore_errors=True)

    with listed_too_early(take_its_place), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.load(saves, model) == {"step": 2}


@pytest.mark.parametrize("place", ["{}/saves", "faulty://{}/saves"])
def test_what_is_read_is_removed_by_the_save_after(tmp_path: Path, place: str) -> None:
    folder: Any = place.format(tmp_path)
    fill_and_save(folder, 1)
    read = checkpoint.latest(folder)
    assert read is not None
    fill_and_save(folder, 2, keep_last=1)
    assert_holds(read, 1)
    read.close()
    fill_and_save(folder, 3, keep_last=1)
    assert [path.name for path in checkpoint.list_checkpoints(folder)] == ["step-00000003"]


def test_what_nobody_holds_any_more_is_not_kept(tmp_path: Path) -> None:
    fill_and_save(tmp_path, 1)
    assert checkpoint.latest(tmp_path) is not None
    fill_and_save(tmp_path, 2, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_two_savers_that_keep_one_checkpoint_both_save(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=save_often, args=(tmp_path, first)) for first in (0, 1)]
    for each in others:
        each.start()
    for each in others:
        each.join()
    assert [each.exitcode for each in others] == [0, 0]


def test_of_one_step_the_save_that_was_made_last_is_kept(tmp_path: Path) -> None:
    model = Filled()
    for number in (1, 2, 3):
        model.fill(number)
        checkpoint.save(tmp_path, model, step=7, keep_last=1)
        newest = checkpoint.latest(tmp_path)
        assert newest is not None
        with newest:
            assert_holds(newest, number)
