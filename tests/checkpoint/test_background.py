"""Saves beside training, what becomes of their failures, and ranks that are told to end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
from fullshard.checkpoint.local import LocalPartial
from fullshard.checkpoint.ranks import PeerFailure
from tests.checkpoint import stores
from tests.checkpoint.cases import assert_same, optimizer_of, train, with_optimizer
from tests.checkpoint.test_save import APIS, sharded
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded
from tests.harness.slow import slow, some


@ranks(2)
@pytest.mark.parametrize("api", some(APIS, ("fully_shard", "flat")))
def test_training_goes_on_while_what_was_is_written(world: World, tmp_path: Path, api: str) -> None:
    model, optimizer = with_optimizer(sharded(api), "AdamW", 2, world.rank)
    go_on, before = threading.Event(), BlockWriter.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockWriter, "close", lambda self: (go_on.wait(60), before(self))[1])
        assert checkpoint.save(tmp_path, model, optimizer, step=2, wait=False) is None
        losses = train(model, optimizer, range(2, 5), world.rank)
        assert checkpoint.list_checkpoints(tmp_path) == []
        go_on.set()
        assert checkpoint.wait_until_finished() == tmp_path / "step-00000002"
    assert checkpoint.wait_until_finished() is None
    other, fresh = with_optimizer(sharded(api), "AdamW")
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


@pytest.mark.slow
def test_saves_at_the_end_of_a_program_are_written_and_a_failure_is_told_and_is_its_status(tmp_path: Path) -> None:
    program = f"""
import atexit, time
atexit.register(print, "the last one")
import torch
from fullshard import checkpoint
from fullshard.checkpoint.local import LocalPartial
from tests.checkpoint import stores
def fail(self, name): raise OSError(28, "no space")
LocalPartial.open = fail
stores.HOOKS.append(lambda kind, path: time.sleep(0.02))
url, model = "faulty://{tmp_path}/run", torch.nn.Linear(9, 9)
for step in (1, 2):
    checkpoint.save(url, model, step=step, wait=False, memory_budget_bytes=2**20)
checkpoint.save("{tmp_path}/failing", model, step=7, wait=False, memory_budget_bytes=2**20)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert "the save of step 7, in the background, failed" in ended.stderr
    assert (ended.returncode, ended.stdout) == (1, "the last one\n")
    assert len(checkpoint.list_checkpoints(f"faulty://{tmp_path}/run")) == 2


@ranks(2)
def test_memory_of_the_copy_is_used_again(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    places = set()
    for _ in range(3):
        checkpoint.save(tmp_path, model, wait=False)
        places.add(Background._saves[-1].memory.data_ptr())
    checkpoint.wait_until_finished()
    assert (Background._saves, Background._spare) == ([], [])
    assert len(places) == 1
    for path in checkpoint.list_checkpoints(tmp_path):
        assert list(Checkpoint(path).verify()) == []


@contextlib.contextmanager
def held() -> Iterator[threading.Event]:
    """No save ends before the event is set, or before the context ends."""
    go_on, before = threading.Event(), BlockWriter.close

    def close(self: BlockWriter) -> None:
        assert go_on.wait(60)
        before(self)

    def put(kind: str, path: str) -> None:
        assert kind != "put" or "distcp" not in path or go_on.wait(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockWriter, "close", close)
        patch.setattr(stores, "HOOKS", [put])
        try:
            yield go_on
        finally:
            go_on.set()
            with contextlib.suppress(CheckpointError):
                Background.wait_until_finished()


def filled(value: float) -> torch.nn.Module:
    """A model of 4000 bytes, all of one value."""
    model = torch.nn.Linear(1000, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def values_in(directory: Any) -> dict[int, float]:
    """The value of the tensor in each checkpoint, by step. Each checkpoint is read whole."""
    found = {}
    for path in checkpoint.list_checkpoints(directory):
        with Checkpoint(path) as saved:
            assert list(saved.verify()) == []
            weight = saved.tensor("model.weight")
            assert weight.unique().numel() == 1
            found[saved.manifest.step] = weight.flatten()[0].item()
    return found


@pytest.mark.parametrize("place", ["{}/saves", "faulty://{}/saves"])
def test_saves_hold_the_values_of_their_times_and_one_too_many_for_the_budget_waits(tmp_path: Path, place: str) -> None:
    directory, model = place.format(tmp_path), filled(1)
    saving = threading.Thread(
        target=lambda: checkpoint.save(directory, model, step=3, wait=False, memory_budget_bytes=9000)
    )
    with held() as go_on:
        for step in (1, 2):
            torch.nn.init.constant_(model.weight, step)
            checkpoint.save(directory, model, step=step, wait=False, memory_budget_bytes=9000)
        torch.nn.init.constant_(model.weight, 3)
        saving.start()
        saving.join(0.5)
        assert saving.is_alive()
        assert checkpoint.list_checkpoints(directory) == []
        assert len(Background._saves) == 2
        go_on.set()
        saving.join(60)
        assert str(checkpoint.wait_until_finished()).endswith("step-00000003")
    assert values_in(directory) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert (Background._saves, Background._spare) == ([], [])


def test_memory_of_two_saves_is_used_again_and_that_of_one_stays_without_a_budget(tmp_path: Path) -> None:
    for step in range(6):
        with held() as go_on:
            spare = {each.data_ptr() for each in Background._spare}
            for again in (0, 1):
                checkpoint.save(tmp_path, filled(step), step=2 * step + again, wait=False, memory_budget_bytes="10kB")
            assert spare <= {each.memory.data_ptr() for each in Background._saves}
            go_on.set()
            Background.wait_until_finished()
            assert len(Background._spare) == 2
            checkpoint.save(tmp_path, filled(step), step=2 * step + 1, wait=False)
            Background.wait_until_finished()
            assert len(Background._spare) == 1
    assert values_in(tmp_path).keys() == {*range(12)}


def test_saves_that_have_ended_are_forgotten_but_not_their_errors(tmp_path: Path) -> None:
    def write() -> None:
        raise CheckpointError("no space")

    Background.start(write, 0, torch.empty(0))
    for step in range(1, 6):
        Background.start(lambda: tmp_path, step, Background.memory(100, pin=False, budget=10**6))
        Background._saves[-1].wait()
    assert len(Background._saves) == 2
    assert Background.has_failed()
    with pytest.raises(CheckpointError, match="step 0, in the background, failed: no space"):
        checkpoint.wait_until_finished()


def test_saves_without_a_step_that_are_under_way_get_different_steps(tmp_path: Path) -> None:
    for directory in (tmp_path / "saves", f"faulty://{tmp_path}/store"):
        with held() as go_on:
            for value in (5, 6, 7):
                checkpoint.save(directory, filled(value), wait=False, memory_budget_bytes=2**20)
            go_on.set()
            checkpoint.wait_until_finished()
        assert values_in(directory) == {0: 5.0, 1: 6.0, 2: 7.0}


@ranks(2)
@pytest.mark.parametrize("late", [1, *slow(0)])
def test_ranks_save_twice_and_train_while_one_of_them_is_slow(world: World, tmp_path: Path, late: int) -> None:
    model, optimizer = with_optimizer(sharded("fully_shard"), "AdamW")
    url, expected = f"faulty://{tmp_path}/run", {}
    with held() as go_on:
        if world.rank != late:
            go_on.set()
        for step in (1, 2, 3):
            train(model, optimizer, range(step, step + 1), world.rank)
            expected[step] = {name: value.full_tensor() for name, value in model.state_dict().items()}
            directory = tmp_path / "saves" if step == 2 else url
            checkpoint.save(directory, model, optimizer, step=step, wait=False, memory_budget_bytes=2**30)
        train(model, optimizer, range(4, 6), world.rank)
        assert len(Background._saves) == 3
        assert checkpoint.list_checkpoints(url) == checkpoint.list_checkpoints(tmp_path / "saves") == []
        dist.barrier()
        go_on.set()
        assert str(checkpoint.wait_until_finished()).endswith("step-00000003")
    for step, directory in ((1, url), (2, tmp_path / "saves"), (3, url)):
        other = sharded("fully_shard")
        assert checkpoint.load(directory, other, optimizer_of(other, "AdamW"), step=step) == {"step": step}
        assert_same({name: value.full_tensor() for name, value in other.state_dict().items()}, expected[step])


@ranks(2)
def test_each_rank_waits_for_its_own_budget_and_none_for_ever(world: World, tmp_path: Path) -> None:
    """The ranks hold different numbers of bytes, and each waits at a different save."""
    for step in range(6):
        model = seeded(MLP) if step % 2 else sharded("fully_shard")  # the first rank writes all of the former
        budget = 1 if world.rank else 20000
        checkpoint.save(tmp_path, model, step=step, wait=False, memory_budget_bytes=budget)
        dist.barrier()
    assert checkpoint.wait_until_finished() == tmp_path / "step-00000005"
    assert len(checkpoint.list_checkpoints(tmp_path)) == 6


@ranks(2)
@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("call", ["save in the background", "wait_until_finished", *slow("save", "load")])
def test_the_error_of_one_save_under_way_is_raised_once_on_all_ranks_and_the_others_are_written(
    world: World, tmp_path: Path, failing: int, call: str
) -> None:
    model = sharded("fully_shard")
    budget: dict[str, Any] = {"wait": False, "memory_budget_bytes": 2**30}
    with pytest.MonkeyPatch.context() as patch:
        before = LocalPartial.open

        def opened(self: LocalPartial, name: str) -> BlockWriter:
            if world.rank == 1 and self.path.name.startswith(f".step-0000000{failing}"):
                raise OSError(28, os.strerror(28))
            return before(self, name)

        patch.setattr(LocalPartial, "open", opened)
        for step in (1, 2):
            checkpoint.save(tmp_path, model, step=step, **budget)
        if world.rank == 1:  # the other rank may not know of the failure yet
            Background._saves[-1].wait()
        with pytest.raises(CheckpointError, match=rf"step {failing}, in the background, failed: rank 1: .*No space"):
            {
                "save": lambda: checkpoint.save(tmp_path, model),
                "save in the background": lambda: checkpoint.save(tmp_path, model, step=3, **budget),
                "load": lambda: checkpoint.load(tmp_path, model),
                "wait_until_finished": checkpoint.wait_until_finished,
            }[call]()
    dist.barrier()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == [f"step-0000000{3 - failing}"]
    dist.barrier()
    checkpoint.save(tmp_path, model, step=4, **budget)
    assert checkpoint.wait_until_finished() == tmp_path / "step-00000004"


@ranks(2)
def test_a_rank_without_memory_for_its_copy_is_named_on_all_ranks(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(torch, "empty", lambda *args, **kwargs: fail(None) if args[0] else torch.zeros(0))  # type: ignore[arg-type]
        checkpoint.save(tmp_path, model, step=1, wait=False)
    with pytest.raises(CheckpointError, match="step 1, in the background, failed: rank 1: OSError"):
        checkpoint.wait_until_finished()
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [PeerFailure("a rank is lost"), KeyError("on this rank"), CheckpointError("no space")]
)
def test_a_save_after_one_that_ended_amid_messages_is_not_written_as_it_would_read_them(error: Exception) -> None:
    go_on, written, memory = threading.Event(), [], torch.empty(0)

    def write() -> None:
        go_on.wait(60)
        raise error

    Background.start(write, 1, memory)
    for step in (2, 3):
        Background.start(lambda: written.append(1), step, memory)
    go_on.set()
    with pytest.raises(CheckpointError, match=r"^the save of step 1, in the background, failed: ") as raised:
        Background.wait_until_finished()
    all_ranks_know = type(error) is CheckpointError
    assert len(written) == (2 if all_ranks_know else 0)
    assert ("the save of step 2 failed, and since then ranks cannot" in str(raised.value)) is not all_ranks_know


@ranks(2)
def test_a_replica_after_a_save_on_disk_that_is_under_way_follows_it(world: World, tmp_path: Path) -> None:
    replicas, model = tmp_path / f"host {world.rank}", sharded("fully_shard")
    with held() as go_on:
        for step, place in ((1, None), (2, replicas)):
            checkpoint.save(tmp_path / "saves", model, step=step, wait=False, memory_budget_bytes=2**30, replicas=place)
        go_on.set()
        checkpoint.wait_until_finished()
    assert checkpoint.load(tmp_path / "saves", model, replicas=replicas) == {"step": 2}


@ranks(2)
def test_what_is_on_a_disk_is_written_before_a_save_returns(world: World, tmp_path: Path) -> None:
    """It is not copied: also where an evaluation has left the root whole."""
    model = fullshard.fully_shard(torch.nn.Linear(256, 256), offload_policy=fullshard.DiskOffloadPolicy(tmp_path))
    with torch.no_grad():
        model(torch.ones(1, 256))
    checkpoint.save(tmp_path / "saves", model, wait=False)
    assert checkpoint.wait_until_finished() is None


def test_a_program_that_is_killed_between_two_saves_leaves_the_first(tmp_path: Path) -> None:
    def kill(kind: str, path: str) -> None:
        if kind == "put" and "step-00000002" in path and "distcp" in path:
            os.kill(os.getpid(), signal.SIGKILL)

    def save() -> None:
        stores.HOOKS.append(kill)
        budget: dict[str, Any] = {"wait": False, "memory_budget_bytes": 2**20}
        for step in (1, 2, 3):
            checkpoint.save(f"faulty://{tmp_path}/run", filled(step), step=step, **budget)
        checkpoint.wait_until_finished()

    assert stores.in_a_fork(save) == -signal.SIGKILL
    assert [path.name for path in checkpoint.list_checkpoints(f"faulty://{tmp_path}/run")] == ["step-00000001"]
    checkpoint.save(f"faulty://{tmp_path}/run", filled(4), step=2)
    assert len(checkpoint.list_checkpoints(f"faulty://{tmp_path}/run")) == 2


def test_a_budget_that_is_no_size_is_refused(tmp_path: Path) -> None:
    for budget in ("much", -1, 0):
        with pytest.raises(ValueError, match="expected bytes"):
            checkpoint.save(tmp_path, filled(1), wait=False, memory_budget_bytes=budget)


@ranks(2)
def test_ranks_that_are_told_to_end_save_after_the_same_step(world: World, tmp_path: Path) -> None:
    model, optimizer = with_optimizer(sharded("fully_shard"), "SGD")
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


@pytest.mark.slow
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
