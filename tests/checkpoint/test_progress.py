"""The lines about a long save: how much is written, and which rank is last."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint import blocks, progress
from fullshard.checkpoint.progress import Progress
from fullshard.checkpoint.ranks import Ranks
from tests.checkpoint import stores
from tests.harness import World, ranks
from tests.harness.slow import slow


class Lines(logging.Handler):
    """The lines about progress, while it is entered."""

    def __init__(self, period: float = 0.1, told: Callable[[str], object] = len) -> None:
        super().__init__(logging.INFO)
        self.told = told
        self.lines, self.patch, self.log = list[str](), pytest.MonkeyPatch(), logging.getLogger("fullshard")
        self.patch.setattr(progress, "PERIOD", period)

    def emit(self, record: logging.LogRecord) -> None:
        if " written after " in (text := record.getMessage()):
            self.lines.append(text)
            self.told(text)

    def __enter__(self) -> list[str]:
        self.before = self.log.level
        self.log.setLevel(logging.INFO)
        self.log.addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        self.log.removeHandler(self)
        self.log.setLevel(self.before)
        self.patch.undo()


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


class Sending:
    """A partial checkpoint with bytes in memory."""

    unsent = 0


@ranks(3)
def test_the_first_rank_logs_what_all_have_written_and_the_last(world: World) -> None:
    sending: Any = Sending()
    with Lines() as lines:
        for key in ("first save", "second save"):  # what the first has left is not read by the second
            lines.clear()
            dist.barrier()
            if world.rank == 2:
                dist.barrier()
            with Progress(Ranks(None), sending, 10, key, 4096):
                if world.rank == 0:
                    until(lambda: any("rank 2 has not begun" in line for line in lines))
                if world.rank < 2:
                    dist.barrier()
                blocks.ON_WRITTEN.get()((3072, 4096, 4096)[world.rank])
                sending.unsent = 2048 if world.rank == 1 else 0
                if world.rank == 0:
                    until(lambda: lines and "rank 1" in lines[-1])
                    assert lines[-1].startswith("step 10: 9.0 KiB of 12.0 KiB written after ")
                    assert lines[-1].endswith("s; rank 1 is last with 2.0 KiB of 4.0 KiB")
                dist.barrier()
            assert (lines == []) is (world.rank != 0)
        count = len(lines)
        time.sleep(0.5)
        assert len(lines) == count
    assert blocks.ON_WRITTEN.get()(5) is None


@ranks(2)
@pytest.mark.parametrize("wait", [True, *slow(False)])
def test_a_save_of_ranks_names_the_one_whose_disk_is_slow(world: World, tmp_path: Path, wait: bool) -> None:
    named, before = tmp_path / "named", blocks.BlockWriter.write_tensors
    says = r"step 3: 39.1 KiB of 39.5 KiB written after .*s; rank 1 is last with 0 B of 400 B"
    told = lambda line: named.touch() if re.fullmatch(says, line) else None  # noqa: E731
    with Lines(told=told) as lines, pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(blocks.BlockWriter, "write_tensors", lambda *args: (until(named.exists), before(*args))[1])
        checkpoint.save(tmp_path / "saves", nn.Linear(100, 100), step=3, wait=wait)
        checkpoint.wait_until_finished()
    assert (lines == []) is (world.rank == 1)


@pytest.mark.parametrize("wait", [True, *slow(False)])
def test_a_slow_store_shows_what_it_has_and_not_what_waits_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    puts, shown = list[str](), list[str]()

    def put(kind: str, path: str) -> None:
        if kind == "put" and "distcp" in path:
            puts.append(path)
            if path != puts[0]:  # one object of three is written
                one = lambda: [line for line in lines if float(line.split()[2]) >= 39]  # noqa: E731
                until(one)
                shown.append(one()[0])

    monkeypatch.setattr(stores, "HOOKS", [put])
    monkeypatch.setattr("fullshard.checkpoint.remote.ObjectPartial.largest", 43000.0)
    model = nn.Linear(1000, 30, bias=False)
    with Lines() as lines:
        checkpoint.save(f"faulty://{tmp_path}/run", model, step=7, wait=wait)
        checkpoint.wait_until_finished()
    assert shown
    for line in shown:
        assert re.match(r"step 7: \S+ (K|Ki)?B of 117.2 KiB written after ", line)
        assert "rank" not in line
        assert float(line.split()[2]) < 60


def test_a_short_save_says_nothing_and_asks_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "_exchange", lambda self: pytest.fail("asked"))
    with Lines(period=10.0) as lines:
        checkpoint.save(tmp_path, nn.Linear(2, 2))
    assert lines == []
