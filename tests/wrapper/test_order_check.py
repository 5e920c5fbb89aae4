"""Ranks that run modules in different orders, where TORCH_DISTRIBUTED_DEBUG asks to look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard.schedule import step_log
from tests.fully_shard.cases import first_of
from tests.harness import World, ranks
from tests.harness.models import seeded


class Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


@contextmanager
def debugging() -> Iterator[None]:
    dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        yield
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def sharded(api: str) -> Any:
    model = seeded(Ordered)
    if api == "fully_shard":
        return fullshard.fully_shard_blocks(model)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = fullshard.FullyShardedDataParallel(block)
    return fullshard.FullyShardedDataParallel(model)


@ranks(2, 3)
@pytest.mark.parametrize("api", ["wrapper", "fully_shard"])
@first_of("transport", "shm", "p2p")
def test_ranks_that_gather_different_modules_are_told(world: World, api: str, transport: str) -> None:
    with pytest.MonkeyPatch.context() as patch, debugging():
        patch.setenv("FULLSHARD_TRANSPORT", transport)
        model = sharded(api)
        model(torch.ones(2, 4)).sum().backward()
        inner = model.module if api == "wrapper" else model
        if world.rank == 1:
            inner.order = [2, 1, 0]
        with pytest.raises(RuntimeError, match=r"gathers the parameters of 'blocks.[02]' and ranks"):
            model(torch.ones(2, 4))


@ranks(2)
@pytest.mark.parametrize("api", ["wrapper", "fully_shard"])
def test_equal_orders_pass_and_nothing_is_compared_unless_asked_for(world: World, api: str) -> None:
    def compares(*args: Any) -> None:
        raise AssertionError("a gather was compared")

    model = sharded(api)
    inner = model.module if api == "wrapper" else model
    with debugging():
        for order in ([0, 1, 2], [2, 1, 0], [1]):
            inner.order = order
            model(torch.ones(2, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_log, "verify_next", compares)
        sharded(api)(torch.ones(2, 4)).sum().backward()
        with debugging(), pytest.raises(AssertionError, match="was compared"):
            sharded(api)(torch.ones(2, 4))
