"""What the doctor's observer writes of its process, and that a program with it goes on as without."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fullshard
from fullshard import finite
from fullshard.report import rank_observer
from fullshard.report.rank_observer import FOLDER, RankObserver, start
from fullshard.schedule import hooks
from fullshard.schedule.schedule import first_checks
from tests.fully_shard.cases import inputs
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded
from tests.report.cases import trained


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{os.getpid()}.jsonl").read_text().splitlines()]


def checks(lines: list[dict[str, Any]], name: str) -> list[str]:
    return [each["check"]["result"] for each in lines if each["kind"] == "check" and each["check"]["name"] == name]


def sharded_blocks() -> Any:
    model = seeded(MLP)
    for block in model.blocks:
        fullshard.fully_shard(block)
    return fullshard.fully_shard(model)


@ranks(2)
def test_a_job_that_trains_is_reported_from_its_begin_to_its_end(world: World, tmp_path: Path) -> None:
    listeners, checks_before = len(hooks._listeners), [*first_checks]
    observer = RankObserver(tmp_path, steps=2)
    observer.begin()
    try:
        train = trained(sharded_blocks())
        for seed in range(4):
            train(seed)
    finally:
        observer.report_end()
    lines = lines_of(tmp_path)
    kinds = [each["kind"] for each in lines]
    assert (kinds[0], kinds[-2:]) == ("begin", ["done", "end"])
    assert {each["rank"] for each in lines[1:]} >= {str(world.rank)}
    (trace,) = [each for each in lines if each["kind"] == "trace"]
    assert {span[4] for span in trace["ranks"][0]["spans"]} == {0, 1}
    assert checks(lines, "initial values") == ["ok"]
    assert checks(lines, "finite values") == ["ok"]
    positions = [each["text"] for each in lines if each["kind"] == "position"]
    assert positions[0] == "while its first module is sharded"
    assert len(positions) > 1
    assert len(hooks._listeners) == listeners
    assert first_checks == checks_before


@ranks(2)
@pytest.mark.parametrize(("value", "result"), [("nan", "error"), ("inf", "warning")])
def test_the_first_value_that_is_not_finite_is_reported_and_training_goes_on(
    world: World, tmp_path: Path, value: str, result: str
) -> None:
    expect_finite, observer = finite._expect_finite, RankObserver(tmp_path, steps=2)
    observer.begin()
    try:
        model = sharded_blocks()
        for seed in range(2):
            (model(inputs(seed)) + torch.tensor(float(value))).sum()
            model.blocks[0](torch.full((2, 6), float(value)))
    finally:
        observer.report_end()
    assert checks(lines_of(tmp_path), "finite values")[:1] in ([result], ["error"])
    assert finite._expect_finite is expect_finite


@ranks(2)
def test_an_error_that_ends_the_program_is_reported_with_its_position(world: World, tmp_path: Path) -> None:
    observer = RankObserver(tmp_path, steps=1)
    observer.begin()
    observer.report_end(ValueError("a bad batch"))
    observer = RankObserver(tmp_path, steps=1)
    observer.report_end(fullshard.PeerFailureError("rank 1 is lost"))
    first, second = (each for each in lines_of(tmp_path) if each["kind"] == "error")
    assert (first["text"], first["is_first"]) == ("ValueError: a bad batch", True)
    assert (second["text"], second["is_first"]) == ("PeerFailureError: rank 1 is lost", False)


def test_nothing_starts_where_the_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "gone"))
    before = sys.excepthook
    assert start() is None
    assert sys.excepthook is before


def test_an_observed_process_tells_its_last_error_and_then_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, at_exit = list[Any](), list[Any]()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(rank_observer.STEPS, "3")
    monkeypatch.setattr(sys, "excepthook", lambda *error: printed.append(error))
    monkeypatch.setattr(rank_observer.atexit, "register", at_exit.append)
    enabled = faulthandler.is_enabled()
    observer = start()
    assert observer is not None
    try:
        assert observer._steps == 3
        error = ValueError("a bad batch")
        sys.excepthook(ValueError, error, None)
        for each in at_exit:
            each()
    finally:
        observer.stop()
        if not enabled:
            faulthandler.disable()
    assert printed == [(ValueError, error, None)]
    assert [each["kind"] for each in lines_of(tmp_path)] == ["begin", "error"]
