"""One rank of a job under torchrun: it saves after each step, and in the first attempt one rank is killed.

`restarted.py DIRECTORY STEPS KILLED` writes the losses of rank 0 to `DIRECTORY/losses.txt`, one line for each step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import checkpoint

WORLD = 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(WORLD * step + rank))


def main(directory: Path, steps: int, killed: int) -> None:
    dist.init_process_group("gloo")
    rank, sharded = dist.get_rank(), model()
    for layer in (sharded[0], sharded[2], sharded):
        fullshard.fully_shard(layer)
    optimizer = torch.optim.Adam(sharded.parameters(), lr=0.01)
    state = checkpoint.load(directory / "checkpoints", sharded, optimizer)
    for step in range(0 if state is None else state["step"], steps):
        loss = sharded(batch(rank, step)).square().mean()
        if step == killed and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with (directory / "losses.txt").open("a") as losses:
                losses.write(f"{step} {loss.item().hex()} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
        checkpoint.save(directory / "checkpoints", sharded, optimizer, step=step + 1, keep_last=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
