"""Loss scaling and clipping of a wrapped model, in one training loop, are those of torch's wrapper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchsScaler

import fullshard
from fullshard.optim import ShardedGradScaler
from tests.fully_shard.cases import first_of
from tests.harness import World, ranks


def train(world: World, wrapper: type, scaler_class: type, p: float, orig: bool) -> list[tuple[float, ...]]:
    """Loss, norm and scale of each step; in the second the last rank overflows."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    model = wrapper(model, dist.group.WORLD, use_orig_params=orig, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler: Any = scaler_class("cpu", init_scale=64.0, process_group=dist.group.WORLD)
    log = []
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + world.rank)
        loss = model(torch.randn(4, 3)).square().mean()
        scaler.scale(loss).backward()
        if step == 1 and world.rank == world.size - 1:
            next(q.grad for q in model.parameters() if q.grad is not None and q.grad.numel()).view(-1)[0] = math.inf
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(0.1, p)
        scaler.step(optimizer)
        scaler.update()
        log.append((loss.item(), norm.item(), scaler.get_scale()))
    return log


@ranks(2, 3)
@first_of("p", 2.0, 1.0, math.inf)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "fragments"])
def test_losses_norms_and_scales_are_torchs(world: World, p: float, orig: bool) -> None:
    ours = train(world, fullshard.FullyShardedDataParallel, ShardedGradScaler, p, orig)
    theirs = train(world, torch_fsdp.FullyShardedDataParallel, TorchsScaler, p, orig)
    for mine, torchs in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(torchs, rel=1e-5)
    assert [scale for _, _, scale in ours] == [64.0, 32.0, 32.0]
