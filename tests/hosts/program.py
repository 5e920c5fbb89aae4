"""A small training for several hosts: each rank prints its loss in each step."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard import checkpoint, fully_shard_blocks


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.0, help="how long a step takes at least")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--replicas", type=Path)
    options = parser.parse_args()
    sharded = fully_shard_blocks(model())
    optimizer = torch.optim.Adam(sharded.parameters(), lr=0.01)
    rank, first = dist.get_rank(), 0
    if options.checkpoints is not None:
        state = checkpoint.load(options.checkpoints, sharded, optimizer, replicas=options.replicas)
        first = 0 if state is None else state["step"]
    for step in range(first, options.steps):
        loss = sharded(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item():.9g}\n", end="", flush=True)  # one write: ranks share a pipe
        if options.checkpoints is not None:
            checkpoint.save(options.checkpoints, sharded, optimizer, step=step + 1, replicas=options.replicas)
        time.sleep(options.seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
