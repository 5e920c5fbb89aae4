"""A job continues from the in-memory replicas of its hosts when ranks or a host are lost, and never from a wrong one.

A host is a directory here, of which each host has one of its own.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import checkpoint
from fullshard.checkpoint import Checkpoint, CheckpointError, fetch
from fullshard.checkpoint.blocks import BLOCK
from fullshard.checkpoint.fetch import ASK, Replica
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.replicas import Hosts
from tests.checkpoint.cases import flip, small_disk, train, with_optimizer
from tests.checkpoint.test_faults import CALLS, assert_holds, filled, killed_at
from tests.checkpoint.test_save import run, sharded
from tests.harness import RankPool, World, failure_report, ranks
from tests.harness.models import MLP, seeded
from tests.harness.slow import slow

STEP = "step-00000002"


def host_of(rank: int, hosts: int, size: int) -> int:
    return rank * hosts // size


def replicas_of(folder: Path, hosts: int = 1) -> Path:
    """The directory of in-memory replicas of this rank's host."""
    return folder / f"host {host_of(dist.get_rank(), hosts, dist.get_world_size())}"


@contextmanager
def log_of_load() -> Iterator[list[str]]:
    """The lines of the log, of rank 0."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger, level = logging.getLogger("fullshard"), logging.getLogger("fullshard").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def train_and_die(world: World, folder: Path, hosts: int, victim: int | None) -> None:
    """Saves step 1 on the disk, step 2 in memory, writes down what follows, and loses a rank."""
    model, optimizer = with_optimizer(sharded("fully_shard"), "AdamW", 1)
    checkpoint.save(folder, model, optimizer, step=1, state={"note": [world.rank]})
    train(model, optimizer, range(1, 2))
    note = [10 + world.rank]
    path = checkpoint.save(folder, model, optimizer, step=2, replicas=replicas_of(folder, hosts), state={"note": note})
    assert path == replicas_of(folder, hosts) / STEP
    losses = train(model, optimizer, range(2, 4))
    if world.rank == 0:
        (folder / "losses").write_text(json.dumps(losses))
    dist.barrier()
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if victim is not None:
        train(model, optimizer, range(4, 6))


def load_and_go_on(world: World, folder: Path, hosts: int) -> tuple[Any, list[float], list[str], list[str]]:
    model, optimizer = with_optimizer(sharded("fully_shard"), "AdamW")
    with log_of_load() as lines, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = checkpoint.load(folder, model, optimizer, replicas=replicas_of(folder, hosts))
    assert found is not None
    losses = train(model, optimizer, range(found["step"], 4))
    return found, losses, lines, [str(each.message) for each in warned]


def lose_ranks(pool: RankPool, folder: Path, size: int, hosts: int, victim: int | None = None) -> list[float]:
    """The losses after the in-memory replica of step 2."""
    outcomes = pool.run(train_and_die, size, folder, hosts, victim, timeout=30)
    assert victim is None or outcomes[victim].kind == "died", failure_report(outcomes)
    assert [path.name for path in checkpoint.list_checkpoints(folder)] == ["step-00000001"]
    return json.loads((folder / "losses").read_text())


MORE = ((2, 1, None), (3, 2, None), (3, 2, 1), (3, 3, 1))


@pytest.mark.parametrize(
    ("size", "hosts", "lost"),
    [(3, 2, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_a_job_that_lost_a_rank_or_a_host_goes_on_from_memory(
    rank_pool: RankPool, tmp_path: Path, size: int, hosts: int, lost: int | None
) -> None:
    expected = lose_ranks(rank_pool, tmp_path, size, hosts, victim=0 if hosts == 1 else None)
    if lost is not None:
        shutil.rmtree(tmp_path / f"host {lost}")
    for rank, (found, losses, lines, warned) in enumerate(run(rank_pool, load_and_go_on, size, tmp_path, hosts)):
        assert found == {"step": 2, "note": [10 + rank]}
        assert losses == expected
        assert warned == []
        assert len(lines) == (rank == 0)
        assert all("step 2 is loaded from" in line and "it is an in-memory replica" in line for line in lines)


def test_without_one_part_of_it_the_older_checkpoint_of_the_directory_is_loaded(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    lose_ranks(rank_pool, tmp_path, 3, 3)
    for host in (0, 2):  # rank 2 sent its file to host 0
        shutil.rmtree(tmp_path / f"host {host}")
    for rank, (found, _, lines, warned) in enumerate(run(rank_pool, load_and_go_on, 3, tmp_path, 3)):
        assert found == {"step": 1, "note": [rank]}
        assert ["no host has ['__2_0.distcp'] any more" in each for each in warned] == [True]
        assert len(lines) == (rank == 0)
        assert all("step 1 is loaded from" in line and "no host has" in line for line in lines)


@pytest.mark.parametrize("after", [2, *slow(3)])
def test_another_number_of_ranks_reads_it(rank_pool: RankPool, tmp_path: Path, after: int) -> None:
    expected = lose_ranks(rank_pool, tmp_path, 5 - after, 2)
    shutil.rmtree(tmp_path / "host 1")
    for found, losses, _, _ in run(rank_pool, load_and_go_on, after, tmp_path, 2):
        assert found["step"] == 2
        assert losses == pytest.approx(expected, rel=1e-6)


def save_replicas(folder: Path, hosts: int = 1) -> Any:
    """Step 1 on the disk, step 2 in memory."""
    model = filled()
    for step in (1, 2):
        model.fill(step)
        checkpoint.save(folder, model, step=step, replicas=replicas_of(folder, hosts) if step == 2 else None)
    dist.barrier()
    model.fill(7)
    return model


def assert_all(model: Any, number: int) -> None:
    assert all(param.full_tensor().eq(number).all() for param in model.parameters())


@ranks(2)
def test_a_flipped_bit_is_read_from_the_other_host_and_if_that_has_one_too_the_directory_is(
    world: World, tmp_path: Path
) -> None:
    model, path = save_replicas(tmp_path, hosts=2), replicas_of(tmp_path, 2) / STEP
    at = Checkpoint(path).tensors["model.blocks.0.weight"].pieces[0].data
    if world.rank == 0:
        flip(path / "__0_0.distcp", at + 3)
    dist.barrier()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert checkpoint.load(tmp_path, model, replicas=replicas_of(tmp_path, 2)) == {"step": 2}
    assert [("the copy of rank 1 is read" in str(each.message)) for each in warned] == [True] * (world.rank == 0)
    assert_all(model, 2)
    if world.rank == 1:
        flip(path / "__0_0.distcp", at + 4)
    dist.barrier()
    reason = "step-00000002 is skipped, because it is not whole.*wrong checksum.*of rank 1.*wrong checksum"
    with pytest.warns(UserWarning, match=reason):
        assert checkpoint.load(tmp_path, model, replicas=replicas_of(tmp_path, 2)) == {"step": 1}
    assert_all(model, 1)


@ranks(2)
def test_a_host_that_lacks_a_file_asks_for_many_blocks_at_a_time(world: World, tmp_path: Path) -> None:
    replicas, asked = replicas_of(tmp_path, 2), list[tuple[int, int]]()
    models = [seeded(lambda: nn.Linear(1000, 1003)) for _ in range(2)]
    for model in models:
        fullshard.fully_shard(model)
    with torch.no_grad():
        models[0].weight.to_local().copy_(torch.randn(models[0].weight.to_local().shape))
    checkpoint.save(tmp_path, models[0], step=2, replicas=replicas)
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(replicas)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "AHEAD", 3 * BLOCK)
        before = Replica.ask
        patch.setattr(
            Replica,
            "ask",
            lambda self, holder, name, start, block: (
                asked.append((start // BLOCK, len(block))) or before(self, holder, name, start, block)
            ),
        )
        assert checkpoint.load(tmp_path, models[1], replicas=replicas) == {"step": 2}
    for key, value in models[0].state_dict().items():
        assert value.to_local().equal(models[1].state_dict()[key].to_local())
    many = [each for each in asked if each[1] == 3 * BLOCK]
    assert len(many) == 2 * (world.rank == 0)
    assert len(asked) <= 6 * (world.rank == 0)


@ranks(2)
def test_a_stale_replica_is_never_loaded(world: World, tmp_path: Path) -> None:
    model, replicas = save_replicas(tmp_path), replicas_of(tmp_path)
    first, other = world.rank == 0, tmp_path / "other"

    def load(reason: str, directory: Path = tmp_path) -> Any:
        dist.barrier()
        with pytest.warns(UserWarning, match=f"{STEP} is skipped: .*{reason}"):
            return checkpoint.load(directory, model, replicas=replicas)

    checkpoint.save(other, model, step=1)
    assert load("it belongs to a different training run", other) == {"step": 1}
    if first:
        (tmp_path / "step-00000001").rename(tmp_path / "aside")
    assert load("it was saved after step-00000001, which is no longer in") is None
    checkpoint.save(tmp_path, model, step=1)
    assert load("it was saved after step-00000001, which is no longer in") == {"step": 1}
    dist.barrier()
    if first:
        shutil.rmtree(tmp_path / "step-00000001")
        (tmp_path / "aside").rename(tmp_path / "step-00000001")
    dist.barrier()
    assert checkpoint.load(tmp_path, model, replicas=replicas) == {"step": 2}
    checkpoint.save(tmp_path, model, step=1)
    assert load("step-00000001.1 was saved after it") == {"step": 1}
    checkpoint.save(tmp_path, model, step=2)
    with log_of_load() as lines:
        assert checkpoint.load(tmp_path, model, replicas=replicas) == {"step": 2}
    assert all(
        "step 2 is loaded from" in line and "the in-memory replica of step 2 is skipped" in line for line in lines
    )
    dist.barrier()
    if first:
        (tmp_path / "near.json").unlink()
        for path in checkpoint.list_checkpoints(tmp_path):
            shutil.rmtree(path)
    assert load("it belongs to a different training run") is None


@ranks(2)
def test_the_newer_of_both_is_loaded_and_one_replica_is_kept(world: World, tmp_path: Path) -> None:
    model, replicas = filled(), replicas_of(tmp_path, 2)
    assert checkpoint.load(tmp_path, model, replicas=replicas) is None
    for step, on_disk in enumerate([False, False, True, False, False, True]):
        model.fill(step)
        checkpoint.save(tmp_path, model, step=step, replicas=None if on_disk else replicas, wait=step % 2 == 0)
        checkpoint.wait_until_finished()
        assert checkpoint.load(tmp_path, model, replicas=replicas) == {"step": step}
        assert_all(model, step)
        (path,) = checkpoint.list_checkpoints(replicas)
        if not on_disk:
            assert_holds(Checkpoint(path), step)
    dist.barrier()
    checkpoint.forget_replicas(replicas)
    dist.barrier()
    assert not replicas.exists()
    assert checkpoint.load(tmp_path, model, replicas=replicas) == {"step": 5}
    with pytest.raises(ValueError, match="replicas need a step"):
        checkpoint.save(tmp_path, model, replicas=replicas)


@ranks(3)
def test_ranks_of_a_host_have_one_leader(world: World, tmp_path: Path) -> None:
    for hosts, target in ((1, None), (2, (2, 2, 0)[world.rank]), (3, (1, 2, 0)[world.rank])):
        found = Hosts(replicas_of(tmp_path, hosts), Ranks(None))
        assert found.to == target
        assert host_of(found.leader, hosts, 3) == host_of(world.rank, hosts, 3)


def save_to_full_memory(world: World, folder: Path, memory: Path) -> tuple[str, Any]:
    replicas = memory / "job" if world.rank else folder / "host"
    model, small = seeded(lambda: MLP((1000, 1000, 1000))), filled()
    fullshard.fully_shard(model)
    checkpoint.save(folder, model, step=1)
    small.fill(2)
    assert checkpoint.save(folder, small, step=2, replicas=replicas) == replicas / STEP
    with pytest.warns(UserWarning, match="no in-memory replica of step 3 was kept") as warned:
        assert checkpoint.save(folder, model, step=3, replicas=replicas) is None
    assert [path.name for path in replicas.iterdir()] == [STEP]
    checkpoint.save(folder, model, step=4)
    return str(warned[0].message), checkpoint.load(folder, model, replicas=replicas)


def test_full_memory_is_warned_of_and_changes_nothing(rank_pool: RankPool, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    with small_disk(memory):
        for told, found in run(rank_pool, save_to_full_memory, 2, tmp_path, memory):
            assert "rank 1" in told
            assert "No space left on device" in told
            assert found == {"step": 4}


def save_replicas_until_killed(world: World, folder: Path, victim: int, moment: int, wait: bool) -> None:
    model, replicas = save_replicas(folder, hosts=2), replicas_of(folder, 2)
    names = (*CALLS, "torch.distributed.isend", "torch.distributed.irecv", "torch.distributed.broadcast")
    with killed_at(moment if world.rank == victim else -1, names):
        for step in (3, 4):
            model.fill(step)
            checkpoint.save(folder, model, step=step, replicas=replicas, wait=wait)
        checkpoint.wait_until_finished()


def load_what_is_left(world: World, folder: Path) -> int:
    model, replicas = filled(), replicas_of(folder, 2)
    found = checkpoint.load(folder, model, replicas=replicas)
    assert found is not None
    assert_all(model, found["step"])
    checkpoint.save(folder, model, step=9, replicas=replicas)
    assert [path.name for path in replicas.iterdir()] == ["step-00000009"]
    return int(found["step"])


@pytest.mark.slow
@pytest.mark.parametrize("lost", [None, 0])
def test_a_rank_killed_at_any_point_of_a_save_of_replicas_loses_nothing(
    rank_pool: RankPool, tmp_path: Path, lost: int | None
) -> None:
    draw, steps = random.Random(lost), set()
    for number in range(10):
        folder, victim, moment = tmp_path / str(number), draw.randrange(2), draw.randrange(60)
        folder.mkdir()
        outcomes = rank_pool.run(save_replicas_until_killed, 2, folder, victim, moment, number % 3 > 0, timeout=30)
        kinds = [outcome.kind for outcome in outcomes]
        assert kinds[victim] in ("died", "returned"), failure_report(outcomes)
        assert "hung" not in kinds, failure_report(outcomes)
        if lost is not None:
            shutil.rmtree(folder / f"host {lost}")
        found = run(rank_pool, load_what_is_left, 2, folder)
        assert len(set(found)) == 1
        assert found[0] >= 2, f"moment {moment} of rank {victim}"
        steps.add(found[0])
        shutil.rmtree(folder)
    assert len(steps) > 1


@ranks(2)
def test_a_directory_that_cannot_be_made_is_an_error_of_save_and_a_warning_of_load(
    world: World, tmp_path: Path
) -> None:
    model = filled()
    if world.rank == 0:
        (tmp_path / "file").write_text("")
    checkpoint.save(tmp_path, model, step=1)
    with pytest.raises(CheckpointError, match=r"no in-memory replicas can be kept in .*file"):
        checkpoint.save(tmp_path, model, step=2, replicas=tmp_path / "file")
    with pytest.warns(UserWarning, match=r"in-memory replicas are skipped: .*file"):
        assert checkpoint.load(tmp_path, model, replicas=tmp_path / "file") == {"step": 1}


def load_until_killed(world: World, folder: Path) -> None:
    model, replicas = save_replicas(folder, hosts=2), replicas_of(folder, 2)

    def die(copy: Replica) -> None:
        dist.recv(torch.empty(3, dtype=torch.int64), group=copy.ranks.group, tag=ASK)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            shutil.rmtree(replicas)
        else:
            patch.setattr(Replica, "_serve", die)
        dist.barrier()
        checkpoint.load(folder, model, replicas=replicas)


def test_only_this_user_can_read_and_write_replicas(tmp_path: Path) -> None:
    """Anybody may make a directory in /dev/shm before this job does."""
    for kind in ("new", "readable", "writable", "of another user", "link of another user"):
        (tmp_path / kind).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            _check_owner(tmp_path / kind, patch, kind)


def _check_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    replicas, model, status = tmp_path / "replicas", nn.Linear(2, 2), Path.lstat
    if kind != "new":
        replicas.mkdir()
        replicas.chmod({"readable": 0o755, "writable": 0o777}.get(kind, 0o700))
    if kind == "of another user":
        monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if kind == "link of another user":
        other = os.stat_result([*replicas.stat()[:4], os.geteuid() + 1, *replicas.stat()[5:]])
        monkeypatch.setattr(Path, "lstat", lambda path: other if path == replicas else status(path))
    checkpoint.save(tmp_path / "run", model, step=1)
    if kind in ("new", "readable"):
        checkpoint.save(tmp_path / "run", model, step=2, replicas=replicas)
        assert replicas.stat().st_mode & 0o777 == 0o700
        assert checkpoint.load(tmp_path / "run", model, replicas=replicas) == {"step": 2}
        return
    problem = "no in-memory replicas can be kept in .*replicas: (it belongs to the user|other users may write to it)"
    with pytest.raises(CheckpointError, match=problem):
        checkpoint.save(tmp_path / "run", model, step=2, replicas=replicas)
    with pytest.raises(CheckpointError, match=problem):
        checkpoint.forget_replicas(replicas)
    with pytest.warns(UserWarning, match=f"in-memory replicas are skipped: {problem}"):
        assert checkpoint.load(tmp_path / "run", model, replicas=replicas) == {"step": 1}
    assert list(replicas.iterdir()) == []


@pytest.mark.slow
def test_a_rank_lost_while_others_read_what_it_has_is_an_error(rank_pool: RankPool, tmp_path: Path) -> None:
    reads, asked = rank_pool.run(load_until_killed, 2, tmp_path, timeout=30)
    assert asked.kind == "died"
    assert reads.kind == "raised", failure_report([reads, asked])
    assert "rank 0 lost its connection to another rank while it saved or loaded a checkpoint" in failure_report(
        [reads, asked]
    )
