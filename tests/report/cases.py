"""Traces of the tests: of ranks that train, and made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.report.rank_trace import RankTrace, Span
from tests.fully_shard.cases import inputs
from tests.harness import World
from tests.harness.models import MLP, seeded

MS = 1_000_000


def each_value(*values: Sequence[Any]) -> list[Any]:
    """All combinations of values, of which the quick lane takes so many that it meets each value."""
    most = max(map(len, values))
    quick = [tuple(of_one[at % len(of_one)] for of_one in values) for at in range(most)]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in product(*values)]


def trained(model: nn.Module) -> Any:
    """A function that trains ``model`` a step, on other inputs each time and on each rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(seed: int) -> None:
        model(inputs(seed)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


#: How optimizers step in a training: one, two of which each has half of the parameters, one for each parameter in the
#: backward, and one that leaves parameters out.
WAYS_TO_STEP = ["one", "two", "in backward", "some"]


def trained_by(model: nn.Module, way: str) -> Any:
    """A function that trains ``model`` a step of two micro-batches (in backward: of one)."""
    params = list(model.parameters())
    parts = {"one": [params], "two": [params[::2], params[1::2]], "some": [params[1:-1]]}
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts.get(way, [[param] for param in params])]
    for param, optimizer in zip(params, optimizers, strict=False) if way == "in backward" else ():

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)

    def train(seed: int) -> None:
        for batch in range(1 if way == "in backward" else 2):
            model(inputs(seed + batch)).sum().backward()
        for optimizer in optimizers if way != "in backward" else ():
            optimizer.step()
        model.zero_grad()

    return train


def sharded(front_end: str = "fully_shard", **options: Any) -> Any:
    """A small model with a group for each block. ``options`` are those of ``fully_shard``."""
    model = seeded(MLP)
    if front_end == "wrapper":
        return fullshard.FullyShardedDataParallel(model, use_orig_params=True)
    for block in model.blocks:
        fullshard.fully_shard(block, **options)
    return fullshard.fully_shard(model, **options)


def recorded(world: World, model: Any, steps: int = 2) -> Any:
    """Train some steps, of which the last ``steps`` are recorded and gathered."""
    train = trained(model)
    for seed in range(2):
        train(10 * seed + world.rank)
    trace = fullshard.profile(model, steps=steps)
    for seed in range(steps):
        assert trace.is_running
        train(10 * seed + world.rank)
    assert not trace.is_running
    trace.gather()
    return trace


def by_hand(rank: int, *, computes: int = 20, steps: int = 2) -> RankTrace:
    """A rank that computes so many ms in the forward of ``b``, in steps of 100 ms, with one gather of ``b`` that comes
    when the slowest of two ranks (60 ms) has sent it; and 10 ms later because of the bytes."""
    trace = RankTrace(rank, "host", "cpu", "memory", groups={"b": 2**20})
    for step in range(steps):
        at = 100 * step

        def span(lane: Any, what: str, group: str, begin: int, end: int, at: int = at, step: int = step) -> Span:
            return Span(lane, what, group, "forward", step, (at + begin) * MS, (at + end) * MS)

        trace.spans += [
            span("pass", "forward", "", 0, 80),
            span("computation", "forward", "b", 0, computes),
            span("gather", "gather", "b", computes, 70),
            span("wait", "gather", "b", computes, 70),
            span("computation", "forward", "a", 70, 80),
            span("pass", "optimizer", "", 90, 100),
        ]
        trace.memory.append((at * MS, 2**20 * (1 + rank)))
    return trace
