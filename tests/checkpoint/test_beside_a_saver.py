"""Loads and readers beside a job that saves and removes older checkpoints in the same directory."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard import checkpoint
from fullshard.checkpoint.local import LocalStorage
from fullshard.cli import main
from tests.checkpoint.test_faults import Filled, assert_holds, filled
from tests.harness import World, ranks

#: Saves again and again until its input ends, and keeps one checkpoint.
SAVER = """
import itertools, sys, threading, torch
from fullshard import checkpoint
torch.set_num_threads(1)
model, end = torch.nn.Linear(8, 8), threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
for step in itertools.count():
    with torch.no_grad():
        model.weight.fill_(step), model.bias.fill_(step)
    checkpoint.save(sys.argv[1], model, step=step * 2 + int(sys.argv[2]), keep_last=1)
    if step == 0:
        print("saved", flush=True)
    if end.is_set():
        break
"""

#: Saves step 2 once, in place of what is there.
SAVE_ONCE = """
import sys
from fullshard import checkpoint
from tests.checkpoint.test_faults import Filled
model = Filled()
model.fill(2)
checkpoint.save(sys.argv[1], model, step=2, keep_last=1)
"""


@contextmanager
def savers(folder: Path, count: int = 1) -> Iterator[list[subprocess.Popen[str]]]:
    """Other processes that save to a folder while the body runs."""
    pipe = subprocess.PIPE
    others = [
        subprocess.Popen([sys.executable, "-c", SAVER, str(folder), str(number)], stdin=pipe, stdout=pipe, text=True)
        for number in range(count)
    ]
    try:
        for each in others:
            assert each.stdout is not None
            assert each.stdout.readline() == "saved\n"
        yield others
    finally:
        for each in others:
            each.communicate(timeout=60)


def test_beside_a_saver_nothing_is_missed_and_nothing_whole_is_called_broken(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    model, end = torch.nn.Linear(8, 8), time.monotonic() + 3
    with savers(tmp_path):
        while time.monotonic() < end:
            assert checkpoint.load(tmp_path, model) is not None
            assert len(set(model.weight.flatten().tolist())) == 1
            found = checkpoint.latest(tmp_path)
            assert found is not None
            with found:
                assert list(found.verify()) == []
            for command in ("list", "verify", "show"):
                assert main(["checkpoint", command, str(tmp_path)]) == 0, capsys.readouterr()
    assert not recwarn.list


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
    model = filled()
    if first is not None:
        checkpoint.save(tmp_path, model, step=first)

    def saves() -> None:
        other = subprocess.run([sys.executable, "-c", SAVE_ONCE, str(tmp_path)], check=False)
        assert other.returncode == 0

    with listed_too_early(saves), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.load(tmp_path, model) == {"step": 2}


def test_what_is_read_is_removed_by_the_save_after(tmp_path: Path) -> None:
    fill_and_save(tmp_path, 1)
    read = checkpoint.latest(tmp_path)
    assert read is not None
    fill_and_save(tmp_path, 2, keep_last=1)
    assert_holds(read, 1)
    read.close()
    fill_and_save(tmp_path, 3, keep_last=1)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000003"]


def test_what_nobody_holds_any_more_is_not_kept(tmp_path: Path) -> None:
    fill_and_save(tmp_path, 1)
    assert checkpoint.latest(tmp_path) is not None
    fill_and_save(tmp_path, 2, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_two_savers_that_keep_one_checkpoint_both_save(tmp_path: Path) -> None:
    with savers(tmp_path, 2) as others:
        time.sleep(3)
    assert [each.returncode for each in others] == [0, 0]


def test_of_one_step_the_save_that_was_made_last_is_kept(tmp_path: Path) -> None:
    model = Filled()
    for number in (1, 2, 3):
        model.fill(number)
        checkpoint.save(tmp_path, model, step=7, keep_last=1)
        newest = checkpoint.latest(tmp_path)
        assert newest is not None
        with newest:
            assert_holds(newest, number)
