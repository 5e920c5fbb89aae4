"""A job whose state is on a disk is killed at any time, and goes on from its last checkpoint with the same values."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import hashlib
import sys

import torch
import torch.distributed as dist
from fullshard import DiskOffloadPolicy, OffloadPolicy, checkpoint, fully_shard

STEPS = 100
torch.set_num_threads(1)
directory, scratch = sys.argv[1:]
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
policy = DiskOffloadPolicy(scratch) if scratch else OffloadPolicy()
for module in (*model, model):
    fully_shard(module, offload_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = checkpoint.load(directory, model, optimizer)
begin = 0 if state is None else state["step"]
print("begins", begin, flush=True)
for step in range(begin, STEPS):
    torch.manual_seed(100 + step)
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(directory, model, optimizer, step=step + 1, keep_last=2)
    print("saved", flush=True)
values = b"".join(param.full_tensor().detach().clone().numpy().tobytes() for param in model.parameters())
print("ends", hashlib.sha256(values).hexdigest(), flush=True)
"""


def start(directory: Path, scratch: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(directory), scratch]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_job_goes_on_from_its_last_checkpoint(tmp_path: Path, kills: int) -> None:
    expected = start(tmp_path / "expected").communicate(timeout=200)[0].split()[-1]
    rng, killed, begins, scratch = random.Random(kills), 0, [0], tmp_path / "scratch"
    while True:
        job = start(tmp_path / "killed", str(scratch))
        assert job.stdout is not None
        begins.append(int(job.stdout.readline().split()[1]))
        if killed < kills:
            for _ in range(rng.randrange(1, 4)):
                job.stdout.readline()
            time.sleep(rng.uniform(0.0, 0.1))
            job.kill()
        output, errors = job.communicate(timeout=200)
        assert not [*scratch.iterdir()], "the system has removed the file"
        if job.returncode == 0:
            break
        assert job.returncode == -signal.SIGKILL, errors
        killed += 1
    assert killed
    assert begins == sorted(begins)
    assert begins[-1] > 0
    assert output.split()[-1] == expected
