"""Saves beside training, what becomes of their failures, and ranks that are told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fullshard
from fullshard import checkpoint
from fullshard.checkpoint import Checkpoint, CheckpointError
from fullshard.checkpoint.background import Background
from fullshard.checkpoint.blocks import BlockWriter
from tests.checkpoint.cases import assert_same, optimizer_of, train, wrapped
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded


def sharded(api: str) -> Any:
    if api != "fully_shard":
        return wrapped(use_orig_params=api == "fragments")
    model = seeded(MLP)
    fullshard.fully_shard(model)
    return model


@ranks(2)
@pytest.mark.parametrize("api", ["fully_shard", "flat", "fragments"])
def test_training_goes_on_while_what_was_is_written(world: World, tmp_path: Path, api: str) -> None:
    model = sharded(api)
    optimizer = optimizer_of(model, "AdamW")
    train(model, optimizer, range(2), world.rank)
    go_on, before = threading.Event(), BlockWriter.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockWriter, "close", lambda self: (go_on.wait(60), before(self))[1])
        assert checkpoint.save(tmp_path, model, optimizer, step=2, wait=False) is None
        losses = train(model, optimizer, range(2, 5), world.rank)
        assert checkpoint.list_checkpoints(tmp_path) == []
        go_on.set()
        assert checkpoint.wait_until_finished() == tmp_path / "step-00000002"
    assert checkpoint.wait_until_finished() is None
    other = sharded(api)
    fresh = optimizer_of(other, "AdamW")
    assert checkpoint.load(tmp_path, other, fresh) == {"step": 2}
    assert train(other, fresh, range(2, 5), world.rank) == losses


def test_a_save_goes_where_its_relative_path_led_when_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    go_on, before = threading.Event(), BlockWriter.close
    monkeypatch.setattr(BlockWriter, "close", lambda self: (go_on.wait(60), before(self))[1])
    checkpoint.save("saves", torch.nn.Linear(2, 2), step=1, wait=False)
    monkeypatch.chdir("other")
    go_on.set()
    assert checkpoint.wait_until_finished() == tmp_path / "saves" / "step-00000001"
    assert list((tmp_path / "other").iterdir()) == []
    assert checkpoint.load(tmp_path / "saves", torch.nn.Linear(2, 2)) == {"step": 1}


def fail(self: BlockWriter) -> None:
    raise OSError(28, os.strerror(28))


@ranks(2)
@pytest.mark.parametrize("call", ["save", "load", "wait_until_finished"])
def test_a_failure_in_the_background_is_raised_by_the_next_call_on_all_ranks(
    world: World, tmp_path: Path, call: str
) -> None:
    model = sharded("fully_shard")
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(BlockWriter, "close", fail)
        checkpoint.save(tmp_path, model, wait=False)
        with pytest.raises(CheckpointError, match=r"in the background, failed: rank 1: .*No space left on device"):
            {
                "save": lambda: checkpoint.save(tmp_path, model),
                "load": lambda: checkpoint.load(tmp_path, model),
                "wait_until_finished": checkpoint.wait_until_finished,
            }[call]()
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    dist.barrier()
    checkpoint.save(tmp_path, model, wait=False)
    assert checkpoint.save(tmp_path, model) == tmp_path / "step-00000001"


def test_a_failure_before_the_end_of_a_program_is_told(tmp_path: Path) -> None:
    program = f"""
import torch
from fullshard import checkpoint
from fullshard.checkpoint.background import Background
from fullshard.checkpoint.blocks import BlockWriter
def fail(self): raise OSError(28, "no space")
BlockWriter.close = fail
checkpoint.save({str(tmp_path)!r}, torch.nn.Linear(2, 2), wait=False)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert "the last save, in the background, failed" in ended.stderr


@ranks(2)
def test_memory_of_the_copy_is_used_again(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    places = set()
    for _ in range(3):
        checkpoint.save(tmp_path, model, wait=False)
        places.add(Background._arena.data_ptr())
    assert Background._arena.numel() > 0
    checkpoint.wait_until_finished()
    assert Background._arena.numel() == 0
    assert len(places) == 1
    for path in checkpoint.list_checkpoints(tmp_path):
        assert list(Checkpoint(path).verify()) == []


@ranks(2)
def test_ranks_that_are_told_to_end_save_after_the_same_step(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    optimizer = optimizer_of(model, "SGD")
    with checkpoint.PreemptionHandler(grace_period=300) as preempted:
        assert preempted.seconds_left is None
        for step in range(100):
            train(model, optimizer, range(step, step + 1))
            if step == 3 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if preempted():
                checkpoint.save(tmp_path, model, optimizer, step=step + 1)
                break
        assert (preempted.seconds_left is None) == (world.rank == 0)
    other = sharded("fully_shard")
    assert checkpoint.load(tmp_path, other) == {"step": 4}
    assert_same(other.state_dict(), model.state_dict())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_process_that_does_not_come_to_save_ends_in_time(tmp_path: Path) -> None:
    program = """
import os, signal, time
from fullshard import checkpoint
with checkpoint.PreemptionHandler(grace_period=0.5) as preempted:
    print(time.monotonic(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert preempted()
    while True:
        time.sleep(0.01)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    assert "0.5 s after SIGTERM" in ended.stderr
    assert time.monotonic() - float(ended.stdout) < 30  # of which most is this machine's load


def test_a_save_of_tensors_of_any_kind_of_memory(tmp_path: Path) -> None:
    """Values that do not lie in one run are copied one tensor at a time."""
    model = torch.nn.Module()
    model.crossed = torch.nn.Parameter(torch.arange(12.0).view(3, 4).t())
    model.low = torch.nn.Parameter(torch.arange(6, dtype=torch.bfloat16))
    model.register_buffer("flags", torch.tensor([True, False]))
    model.register_buffer("nothing", torch.zeros(0, 3))
    for wait in (True, False):
        checkpoint.save(tmp_path, model, wait=wait)
    checkpoint.wait_until_finished()
    for path in checkpoint.list_checkpoints(tmp_path):
        with Checkpoint(path) as saved:
            for name, value in model.state_dict().items():
                assert saved.tensor(f"model.{name}").equal(value)
