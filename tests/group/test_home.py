"""Which parameters of a group lie in which home."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import CPUOffloadPolicy, DiskOffloadPolicy, OffloadPolicy, fully_shard
from fullshard.group.home import DiskHome
from tests.fully_shard.cases import groups_of
from tests.harness import World, fake_world, ranks


def offloaded(policy: OffloadPolicy, model: nn.Module | None = None) -> Any:
    model = model or nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    (group,) = groups_of(fully_shard(model, offload_policy=policy))
    return group


def test_a_share_is_that_of_the_first_parameters() -> None:
    for share, count in ((True, 8), (0.5, 4), (0.26, 3), (0.001, 1), (False, 0)):
        with fake_world(2):
            group = offloaded(CPUOffloadPolicy(parameters=share))
            assert group.offloaded.parameters == set(range(count)), share
            assert group.offloaded.state == set(range(8))
            assert {index for each in group.sections for index in each.members} == set(range(8))


def test_small_parameters_stay_in_memory(tmp_path: Path) -> None:
    with fake_world(2):
        group = offloaded(DiskOffloadPolicy(tmp_path))
        assert group.offloaded.parameters == {0, 2, 4, 6}
        assert isinstance(group.offloaded, DiskHome)
        assert set(group.shard.stored) == {0, 2, 4, 6}
        assert group.shard.nbytes < 8 * 256 * 4


def test_shards_of_replicas_cannot_be_on_a_disk(tmp_path: Path) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        with pytest.raises(ValueError, match=r"parameter 'weight', which outer_zero_stage=1 shards again"):
            fully_shard(nn.Linear(256, 256), mesh=mesh, outer_zero_stage=1, offload_policy=DiskOffloadPolicy(tmp_path))


@ranks(1)
def test_parameters_on_meta_go_to_the_disk_once_they_have_values(world: World) -> None:
    with torch.device("meta"):
        model: Any = nn.Linear(256, 256)
    with tempfile.TemporaryDirectory() as directory:
        fully_shard(model, offload_policy=DiskOffloadPolicy(directory))
        model.to_empty(device="cpu")
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        assert model(torch.ones(1, 256)).eq(256).all()
        model.reshard()
        (group,) = groups_of(model)
        assert set(group.shard.stored) == {0}
        assert model.weight.to_local().eq(1).all()
