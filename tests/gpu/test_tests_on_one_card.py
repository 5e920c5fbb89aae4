"""Tests of several ranks on one card, as users write them: `ranks(2, device="cuda")`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard
from fullshard.testing import World, assert_trains_like

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2, device="cuda")]


def test_a_tensor_becomes_whole(world: World) -> None:
    tensor = torch.arange(8.0, device=world.device)
    shards = distribute_tensor(tensor, world.mesh(), [Shard(0)])
    assert isinstance(shards, DTensor)
    assert shards.to_local().device == world.device
    assert torch.equal(shards.full_tensor(), tensor)


@pytest.mark.parametrize("shard", [fullshard.fully_shard, torch_fsdp.fully_shard])
def test_both_libraries_train_like_one_process(world: World, shard: Callable[[nn.Module], nn.Module]) -> None:
    def batch(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(world.device)

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(world.device)
    assert_trains_like(model, shard(copy.deepcopy(model)), batch)
