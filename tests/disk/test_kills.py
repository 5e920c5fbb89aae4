"""A job whose state is on a disk is killed at any time, and goes on from its last checkpoint with the same values."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import DiskOffloadPolicy, OffloadPolicy, checkpoint, fully_shard


def job(directory: Path, scratch: Path | None, steps: int, tells: Connection) -> None:
    """Tells where it begins, of each save, and what its parameters are in the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    policy = OffloadPolicy() if scratch is None else DiskOffloadPolicy(scratch)
    for module in (*model, model):
        fully_shard(module, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = checkpoint.load(directory, model, optimizer)
    begin = 0 if state is None else state["step"]
    tells.send(begin)
    for step in range(begin, steps):
        torch.manual_seed(100 + step)
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(directory, model, optimizer, step=step + 1, keep_last=2)
        tells.send("saved")
    values = b"".join(param.full_tensor().detach().clone().numpy().tobytes() for param in model.parameters())
    tells.send(hashlib.sha256(values).hexdigest())


def start(directory: Path, steps: int, scratch: Path | None = None) -> tuple[ForkProcess, Connection]:
    context = multiprocessing.get_context("fork")
    told, tells = context.Pipe(duplex=False)
    process = context.Process(target=job, args=(directory, scratch, steps, tells))
    process.start()
    tells.close()
    return process, told


def rest(told: Connection) -> list[str]:
    """What a job tells until it ends."""
    found = []
    while True:
        try:
            found.append(told.recv())
        except EOFError:
            return found


@pytest.mark.parametrize(("kills", "steps"), [(1, 12), pytest.param(20, 100, marks=pytest.mark.slow)])
def test_a_killed_job_goes_on_from_its_last_checkpoint(tmp_path: Path, kills: int, steps: int) -> None:
    expected = rest(start(tmp_path / "expected", steps)[1])[-1]
    rng, killed, begins, scratch = random.Random(kills), 0, [0], tmp_path / "scratch"
    while True:
        process, told = start(tmp_path / "killed", steps, scratch)
        begins.append(told.recv())
        if killed < kills:
            for _ in range(rng.randrange(1, 4)):
                told.recv()
            time.sleep(rng.uniform(0.0, 0.1))
            process.kill()
        output = rest(told)
        process.join()
        assert not [*scratch.iterdir()], "the system has removed the file"
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        killed += 1
    assert killed
    assert begins == sorted(begins)
    assert begins[-1] > 0
    assert output[-1] == expected
