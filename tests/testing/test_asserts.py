"""What users assert: that it holds for every library that trains right, and fails for each kind of mistake."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard.testing import (
    RankPool,
    World,
    assert_checkpoint_round_trip,
    assert_same_on_all_ranks,
    assert_trains_like,
)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def tensor_parallel(model: nn.Module, world: World) -> nn.Module:
    return parallelize_module(model, world.mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


LIBRARIES: dict[str, Callable[[nn.Module, World], nn.Module]] = {
    "fully_shard": lambda model, world: fullshard.fully_shard(model),
    "wrapper": lambda model, world: fullshard.FullyShardedDataParallel(model),
    "FSDP2 of torch": lambda model, world: torch_fsdp.fully_shard(model),
    "DDP": lambda model, world: nn.parallel.DistributedDataParallel(model),
    "tensor parallel": tensor_parallel,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_trains_right_is_accepted(world: World, library: str) -> None:
    model = mlp()
    sharded = LIBRARIES[library](copy.deepcopy(model), world)
    data = {"data_rank": 0, "data_size": 1} if library == "tensor parallel" else {}
    assert_trains_like(model, sharded, batch, **data)


@pytest.mark.ranks(2)
def test_what_trains_wrong_is_named(world: World) -> None:
    model = mlp()
    with pytest.raises(AssertionError, match=r"step 0: '0.weight' differs by .* on rank [01], where its largest"):
        assert_trains_like(model, copy.deepcopy(model), batch)  # gradients that nobody reduces
    with pytest.raises(AssertionError, match=r"only one of the models has 3\.bias, 3\.weight"):
        assert_trains_like(mlp(), nn.Sequential(*copy.deepcopy(model), nn.Linear(3, 3)), batch, tolerance=9)
    other = mlp()
    with pytest.raises(AssertionError, match="step 0: the loss differs by"):
        assert_trains_like(mlp(), fullshard.fully_shard(other), batch)


@pytest.mark.ranks(2)
def test_equal_values_are_accepted_and_the_first_difference_is_named(world: World) -> None:
    model = fullshard.fully_shard(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(0, 0)).sum().backward()
    optimizer.step()
    assert_same_on_all_ranks({"model": model, "optimizer": optimizer, "rest": [torch.ones(2), "text", None]})
    with pytest.raises(AssertionError, match=r"value\['b'\] differs: rank 1 has other values than rank 0, by up to 1"):
        assert_same_on_all_ranks({"a": 1, "b": torch.tensor([0, world.rank])})
    with pytest.raises(
        AssertionError, match=r"shapes\[0\] differs: rank 0 has shape \(1,\) .* rank 1 has shape \(2,\)"
    ):
        assert_same_on_all_ranks([torch.ones(1 + world.rank)], "shapes")
    with pytest.raises(AssertionError, match=r"value\[0\] differs: rank 0 has 'here', and rank 1 has nothing"):
        assert_same_on_all_ranks(["here"][world.rank :])
    with pytest.raises(AssertionError, match=r"rank 1 has value\[0\], and rank 0 has not"):
        assert_same_on_all_ranks(["here"][: world.rank])


def build(world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: Any = fullshard.fully_shard(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(0, world.rank)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def forget(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, _ = get_state_dict(model, optimizer)
    dcp.load({"model": model_state}, checkpoint_id=path)


def test_a_checkpoint_goes_round(rank_pool: RankPool, tmp_path: Path) -> None:
    assert_checkpoint_round_trip(rank_pool, build, save, load, tmp_path / "right", sizes=(1, 2))
    with pytest.raises(AssertionError, match=r"1 ranks saved what 1 ranks did not load: .* state\['optimizer'\]"):
        assert_checkpoint_round_trip(rank_pool, build, save, forget, tmp_path / "wrong", sizes=(1,))
    with pytest.raises(AssertionError, match="saving on 1 ranks: rank 0 raised: TypeError"):
        assert_checkpoint_round_trip(rank_pool, build, "save", load, tmp_path / "broken", sizes=(1,))  # type: ignore[arg-type]
