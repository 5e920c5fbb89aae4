"""One group's two exchanges by themselves: gathering 48 MiB of parameters, and reducing their gradients.

Both are differences, taken in the same way for every contender, in one round, and in CPU time, which counts every
thread of a rank. A gather is a forward without gradients, of parameters that an optimizer has just written, less the
same forward of a plain module. A reduction is a backward of parameters that stayed gathered, less the backward of a
plain module.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.contenders import ALONE, DDP, FSDP1, FSDP2, Contender, ours
from benchmarks.models import Block
from benchmarks.ranks import run_ranks
from benchmarks.traffic import Traffic

_WARM_UP = 3


def measure_group(world_size: int, width: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of a gather and of a reduction, for each contender a number for each round: the mean of the ranks.

    And ``copied``, the bytes that a gather copies within a rank, as a part of the group's.
    """
    by_rank = run_ranks(_measure, world_size, width, rounds)
    merged: dict[str, Any] = {"ranks": world_size, "group_bytes": 4 * (12 * width**2 + 4 * width)}
    merged["copied"] = by_rank[0].pop("copied")
    for what, first in by_rank[0].items():
        merged[what] = {
            name: [sum(values) / world_size for values in zip(*(rank[what][name] for rank in by_rank), strict=True)]
            for name in first
        }
    return merged


def _measure(width: int, rounds: int) -> dict[str, dict[str, Any]]:
    x = torch.ones(1, 1, width)
    sharded = [*ours(), FSDP2, FSDP1, ALONE]
    copying = torch.randn(12 * width**2 + 4 * width)
    target = torch.empty_like(copying)

    models = {contender.name: _build(contender, width, reshard=True) for contender in sharded}
    gathering: dict[str, Callable[[], float]] = {name: _gathering(model, x) for name, model in models.items()}
    reducing: dict[str, Callable[[], float]] = {
        contender.name: _reducing(_build(contender, width, reshard=False), x) for contender in [*sharded, DDP]
    }
    found: dict[str, Any] = {"gather": _take_turns(gathering, rounds), "reduce": _take_turns(reducing, rounds)}
    found["copied"] = {name: _copied(models[name], x) / copying.nbytes for name in gathering if name != ALONE.name}
    found["copy"] = _take_turns({"memcpy": lambda: _cpu(lambda: target.copy_(copying))}, rounds)
    return found


def _build(contender: Contender, width: int, reshard: bool) -> nn.Module:
    torch.manual_seed(0)
    block = Block(width)
    return contender.wrap(nn.Sequential(block), [block], reshard=reshard)  # FSDP1 never frees what its root holds


def _gathering(model: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    def run() -> float:
        with torch.no_grad():
            next(model.parameters()).add_(0)  # or parameters that are still there would not be gathered
            return _cpu(lambda: model(x))

    return run


def _copied(model: nn.Module, x: torch.Tensor) -> float:
    """Bytes that a gather copies within this rank, once it is warm."""
    with torch.no_grad():
        next(model.parameters()).add_(0)
        with Traffic() as traffic:
            model(x)
    return traffic.copied


def _reducing(model: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    def run() -> float:
        loss = model(x).sum()
        seconds = _cpu(loss.backward)
        for param in model.parameters():
            param.grad = None
        return seconds

    return run


def _take_turns(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run each in every round, in shuffled order; what the plain module takes is subtracted from what the rest take."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for number in range(-_WARM_UP, rounds):
        random.Random(number).shuffle(order)
        for name in order:
            dist.barrier()
            taken = runs[name]()
            dist.barrier()
            if number >= 0:
                seconds[name].append(taken)
    plain = seconds.pop(ALONE.name, [0.0] * rounds)
    return {name: [a - b for a, b in zip(values, plain, strict=True)] for name, values in seconds.items()}


def _cpu(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin
