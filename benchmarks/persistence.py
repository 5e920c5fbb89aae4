"""Groups below a bound that stay whole between forward and backward, beside groups that are freed.

    python -m benchmarks.persistence

Blocks whose norms are groups of their own, on two ranks over sockets: a step with ``persistence_threshold`` gathers the
norms once, and without it twice. Both run in turns.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ranks import run_ranks
from fullshard import explain, fully_shard
from fullshard.text import bytes_text, table

_BLOCKS, _ROUNDS, _WARM_UP = 24, 30, 3


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.linear(self.norm(x))
        return found


def _sharded(width: int, threshold: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [_Block(width) for _ in range(_BLOCKS)]
    for block in blocks:
        fully_shard(block.norm, persistence_threshold=threshold)
        fully_shard(block, persistence_threshold=threshold)
    return fully_shard(nn.Sequential(*blocks))


def measure(width: int, thresholds: list[int]) -> list[tuple[float, int]]:
    """The seconds of a step with each threshold, and the bytes that are kept between steps."""
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    torch.set_num_threads(1)
    models = [_sharded(width, threshold) for threshold in thresholds]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    seconds: list[list[float]] = [[] for _ in models]
    batch = torch.randn(32, width)
    for number in range(_WARM_UP + _ROUNDS):
        for model, optimizer, found in zip(models, optimizers, seconds, strict=True):
            dist.barrier()
            began = time.perf_counter()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if number >= _WARM_UP:
                found.append(time.perf_counter() - began)
    kept = [explain(model).memory[3].nbytes for model in models]
    return list(zip(map(median, seconds), kept, strict=True))


def main() -> None:
    rows: list[list[Any]] = []
    for width in (64, 512):
        thresholds = [0, 4 * 2 * width, 1 << 30]
        found = run_ranks(measure, 2, width, thresholds)[0]
        for (seconds, kept), what in zip(found, ("none", "the norms", "all groups"), strict=True):
            ratio = f"{seconds / found[0][0]:.2f}"
            rows.append([str(width), what, f"{1e3 * seconds:.1f}", ratio, bytes_text(kept)])
    print(table(["width", "stay whole", "ms a step", "x none", "memory between steps"], rows))


if __name__ == "__main__":
    main()
