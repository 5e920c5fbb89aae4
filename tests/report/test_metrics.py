"""Figures that are written after each step."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import checkpoint
from fullshard.checkpoint.blocks import BlockWriter
from fullshard.comm.waits import WAITS, Waits
from fullshard.schedule.unit import unit_of
from tests.fully_shard.cases import inputs
from tests.harness import HOSTS, World, pretended_hosts, ranks
from tests.report.cases import WAYS_TO_STEP, each_value, sharded, trained, trained_by


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_each_rank_appends_a_line_for_each_step(world: World, transport: str, tmp_path: Path) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model, file = sharded(), tmp_path / "metrics.jsonl"
    train = trained(model)
    train(0)
    if world.rank == 1:
        model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(0.1))
    before = set(vars(model._fullshard_unit.schedule))
    with fullshard.log_metrics(model, file):
        for seed in range(3):
            train(seed)
    train(3)
    assert set(vars(model._fullshard_unit.schedule)) == before
    dist.barrier()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((line["rank"], line["step"]) for line in lines) == [
        (rank, step) for rank in (0, 1) for step in range(3)
    ]
    of_all = sum(group.full.buffer.nbytes for group in model._fullshard_unit.schedule.groups)
    gathers = 1 if transport == "p2p" else 0  # in forward; in backward what is left in a slot is used again
    for line in lines:
        assert line["seconds"] >= 0.1
        assert 0 <= line["waited_seconds"] <= line["seconds"]
        assert line["waited_seconds"] >= 0.09 or line["rank"] == 1
        assert (1 + gathers) * of_all // 2 <= line["received_bytes"] <= (1 + 2 * gathers) * of_all // 2
        assert 0 < line["memory_bytes"] <= line["peak_memory_bytes"]


def received(file: Path, stage: int) -> float:
    """Of a step, in bytes of all parameters."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    for layer in (*model, model):
        fullshard.fully_shard(layer, zero_stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fullshard.log_metrics(model, file):
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
    return float(json.loads(file.read_text())["received_bytes"]) / (3 * 4 * 256 * 256)


@ranks(4)
@pytest.mark.parametrize("stage", [0, 2])
def test_bytes_that_other_ranks_of_the_host_receive_are_not_counted(world: World, stage: int, tmp_path: Path) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = "hosts"
    with pretended_hosts(HOSTS):
        assert received(tmp_path / str(world.rank), stage) == 1 / 4 + 1 / 4, "of its one peer"


@ranks(2)
@pytest.mark.parametrize("transport", ["p2p", "collective"])
def test_sums_over_replicas_are_received_too(world: World, transport: str, tmp_path: Path) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    assert received(tmp_path / str(world.rank), stage=0) == 1


@ranks(2)
def test_a_writer_is_given_scalars(world: World) -> None:
    class Writer:
        def __init__(self) -> None:
            self.given: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.given.append((tag, value, step))

    model, writer = sharded(), Writer()
    train = trained(model)
    metrics = fullshard.log_metrics(model, writer)
    train(0)
    train(1)
    metrics.stop()
    names = ["seconds", "waited_seconds", "received_bytes", "memory_bytes", "peak_memory_bytes"]
    assert [(tag, step) for tag, _, step in writer.given] == [
        (f"fullshard/{n}", step) for step in (0, 1) for n in names
    ]


@ranks(2)
def test_saves_are_in_the_line_of_the_step_in_which_they_end(world: World, tmp_path: Path) -> None:
    model, file, saves = sharded(), tmp_path / f"{world.rank}.jsonl", tmp_path / "saves"
    train, go_on, before = trained(model), threading.Event(), BlockWriter.close
    train(0)
    with pytest.MonkeyPatch.context() as patch, fullshard.log_metrics(model, file):
        patch.setattr(BlockWriter, "close", lambda self: (go_on.wait(60), before(self))[1])
        checkpoint.save(saves, model, step=1, wait=False, memory_budget_bytes=2**30)
        checkpoint.save(saves, nn.Sequential(model), step=2, wait=False, memory_budget_bytes=2**30)
        train(0)
        time.sleep(0.1)
        go_on.set()
        checkpoint.wait_until_finished()
        train(1)
        train(2)
        checkpoint.save(saves, nn.Linear(2, 2), step=3)  # another model
        checkpoint.save(saves, model, step=4)
    checkpoint.save(saves, model, step=5)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    names = {"save_seconds", "save_bytes", "save_bytes_per_second", "save_blocked_seconds"}
    assert [names & line.keys() for line in lines] == [set(), names, set(), names]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    two, one = lines[1], lines[3]
    assert one.keys() == names | {"step", "rank"}
    assert one["save_bytes"] == (saves / "step-00000004" / f"__{world.rank}_0.distcp").stat().st_size
    assert one["save_blocked_seconds"] == one["save_seconds"] > 0
    files = [saves / f"step-0000000{step}" / f"__{world.rank}_0.distcp" for step in (1, 2)]
    assert two["save_bytes"] == sum(each.stat().st_size for each in files)
    assert 0 < two["save_blocked_seconds"] < two["save_seconds"] - 0.2
    assert two["save_bytes_per_second"] == two["save_bytes"] / two["save_seconds"]


@ranks(2)
@pytest.mark.parametrize(("way", "front_end"), each_value(WAYS_TO_STEP, ["fully_shard", "wrapper"]))
def test_a_step_of_training_is_a_line_whatever_optimizers_it_has(
    world: World, way: str, front_end: str, tmp_path: Path
) -> None:
    model, file = sharded(front_end), tmp_path / str(world.rank)
    train = trained_by(model, way)
    train(0)
    with fullshard.log_metrics(model, file):
        for seed in range(3):
            train(seed)
            model(inputs()) if seed == 1 else None  # an evaluation
        late = 3 if way != "some" else 2  # where nobody steps on some parameters, a step ends with the next forward
        assert len(file.read_text().splitlines()) == late
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["waited_seconds"] <= line["seconds"] for line in lines)


@ranks(1)
def test_steps_have_the_numbers_that_the_user_gives(world: World, tmp_path: Path) -> None:
    model, file = sharded(), tmp_path / "file"
    train = trained(model)
    with fullshard.log_metrics(model, file, first_step=1200) as metrics:
        train(0)
        train(1)
        metrics.step += 5  # steps that a gradient scaler left out
        train(2)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1200, 1201, 1207]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is the kernel's count, on Linux")
def test_the_peak_of_a_process_is_not_that_of_its_parent() -> None:
    held = bytearray(b"1") * (1 << 30)
    show = 'import torch; from fullshard.report.watching import Memory; print(Memory(torch.device("cpu")).peak())'
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < len(held)


@ranks(1)
def test_what_takes_no_figures_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="sharded or wrapped, got Linear"):
        fullshard.log_metrics(nn.Linear(2, 2), "file")
    with pytest.raises(TypeError, match="a path or an object with add_scalar, got int"):
        fullshard.log_metrics(sharded(), 3)  # type: ignore[arg-type]


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_figures_go_on_when_a_trace_that_began_before_them_ends(world: World, transport: str, tmp_path: Path) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model = sharded()
    train = trained(model)
    train(0)
    schedule = unit_of(model).schedule  # type: ignore[union-attr]
    looked_at = [schedule, *schedule.groups, schedule.comm.lanes.gather, schedule.comm.lanes.reduce]
    looked_at += [group.transport.local_ranks for group in schedule.groups if transport == "shm"]
    before = [set(vars(each)) for each in looked_at]
    trace = fullshard.profile(model, steps=1)
    with fullshard.log_metrics(model, tmp_path / f"{world.rank}"):
        for seed in range(3):
            comes = tmp_path / f"rank 0 begins step {seed}"
            if world.rank == 0:
                comes.touch()
            while not comes.exists():
                time.sleep(0.01)
            time.sleep(0.1 * world.rank)
            train(seed)
            assert not trace.is_running
    assert [set(vars(each)) for each in looked_at] == before
    assert type(WAITS) is Waits
    lines = [json.loads(line) for line in (tmp_path / f"{world.rank}").read_text().splitlines()]
    received = {line["received_bytes"] for line in lines}
    assert len(lines) == 3
    assert min(received) > 0
    assert len(received) == 1
    assert max(line["waited_seconds"] for line in lines) > 0.04 or world.rank == 1


@ranks(1)
def test_a_model_that_is_deleted_is_not_kept_by_its_figures(world: World, tmp_path: Path) -> None:
    model = sharded()
    fullshard.log_metrics(model, tmp_path / "file")
    trained(model)(0)
    group = weakref.ref(unit_of(model).schedule.groups[0])  # type: ignore[union-attr]
    del model
    gc.collect()
    assert group() is None
    assert len((tmp_path / "file").read_text().splitlines()) == 1
