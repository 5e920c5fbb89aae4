"""A job whose rank is killed under torchrun goes on by itself, and is the job that was never interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.faults.restarted import WORLD, batch, model


@pytest.mark.slow
def test_a_killed_rank_under_torchrun_costs_no_step(tmp_path: Path) -> None:
    """Its launcher starts all ranks anew, and they go on from the last whole checkpoint."""
    steps, killed = 6, 3
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", "--max-restarts=1"]
    program = ["-m", "tests.faults.restarted", str(tmp_path), str(steps), str(killed)]
    # Without it the ranks find addresses of the first attempt in the launcher's store.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ended = subprocess.run(
        [sys.executable, *command, *program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in (tmp_path / "losses.txt").read_text().splitlines()]
    assert [(int(step), int(attempt)) for step, _, attempt in lines] == [(at, int(at >= killed)) for at in range(steps)]
    assert [float.fromhex(loss) for _, loss, _ in lines] == pytest.approx(uninterrupted(steps), rel=1e-6)


def uninterrupted(steps: int) -> list[float]:
    """The losses of rank 0 in one process."""
    alone, losses = model(), []
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    for step in range(steps):
        each = [alone(batch(rank, step)).square().mean() for rank in range(WORLD)]
        (sum(each) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(each[0].item())
    return losses
