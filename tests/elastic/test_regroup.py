"""What cannot go on over another process group, and how models get a shard (:mod:`fullshard.elastic.regroup`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import CPUOffloadPolicy, DiskOffloadPolicy, FullyShardedDataParallel, WirePolicy, fully_shard
from fullshard.checkpoint.layout import layout_of
from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.select import simulated_transport
from fullshard.elastic.regroup import problem_of, use_shard
from fullshard.elastic.state import load_state, pack_state
from fullshard.group.parameter import local_tensor
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import groups_in, schedule_of
from fullshard.torch_private import init_fake_group
from tests.group.test_extension import Bf16Gathered
from tests.harness import World, ranks


@ranks(2)
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, ""),
        ({"zero_stage": 1}, ""),
        ({"zero_stage": 0}, "its parameters are on several ranks"),
        ({"wire_policy": WirePolicy(reduce="int8")}, "its wire_policy encodes messages"),
        ({"offload_policy": DiskOffloadPolicy}, "its parameters are on a disk"),
    ],
)
def test_what_an_elastic_job_cannot_train_is_said(
    world: World, tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    if options.get("offload_policy") is DiskOffloadPolicy:
        options = {"offload_policy": DiskOffloadPolicy(tmp_path)}
    model = fully_shard(nn.Linear(4, 4), **options)
    (group,) = groups_in(model, recurse=True)
    assert problem_of(group).startswith(problem)
    assert bool(problem_of(group)) == bool(problem)


def shown(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule) -> list[Any]:
    """What a rank has of a model and its optimizer, and where it lies in them."""
    params = [*model.parameters()]
    tensors = [optimizer.state[param]["exp_avg"] for param in params] + params
    layouts = [layout_of(param) for group in schedule.groups for param in group.params]
    places = [(each.shape, each.boxes, each.copies[1:]) for each in layouts]
    return [*places, *(getattr(param, "shard_metadata", None) for param in params), *map(local_tensor, tensors)]


@pytest.mark.parametrize("kind", ["sharded", "offloaded", "fragments", "flat"])
def test_a_model_may_get_the_shard_of_another_rank(kind: str) -> None:
    """Three ranks of a simulated world: what rank 0 has after it was given the place of rank 2, or of rank 1, and the
    state of that is what the rank has."""

    def made(rank: int) -> tuple[nn.Module, torch.optim.Optimizer, Schedule]:
        init_fake_group(3, rank)
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 4, bias=False))  # no size is a multiple of 3
        with simulated_transport(lambda _: CollectiveTransport()):
            if kind in ("sharded", "offloaded"):
                policy = {"offload_policy": CPUOffloadPolicy()} if kind == "offloaded" else {}
                fully_shard(model[0], **policy)
                fully_shard(model, **policy)
            else:
                model = FullyShardedDataParallel(model, use_orig_params=kind == "fragments")
        optimizer = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
        schedule = schedule_of(model, "this test")
        dist.destroy_process_group()
        return model, optimizer, schedule

    moving = made(0)
    params = [*moving[0].parameters()]
    for rank in (2, 1):
        other = made(rank)
        use_shard(moving[2], rank)
        assert not any(local_tensor(param).count_nonzero() for param in params if kind != "flat")
        load_state(pack_state(*other[:2], {}), *moving[:2], {})
        assert all(one is same for one, same in zip(moving[0].parameters(), params, strict=True)), "the optimizer's"
        for mine, its in zip(shown(*moving), shown(*other), strict=True):
            assert torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its
        for param in params:  # torch keeps the shapes that an operator has given on a mesh
            assert local_tensor(param.new_zeros(param.shape)).shape == local_tensor(param).shape


def test_a_parameter_that_says_what_is_gathered_keeps_its_class_and_its_padding() -> None:
    def made(rank: int) -> tuple[Schedule, Any]:
        init_fake_group(2, rank)
        model = nn.Linear(7, 5, bias=False)
        model.weight = nn.Parameter(Bf16Gathered(model.weight.detach()))
        with simulated_transport(lambda _: CollectiveTransport()):
            schedule = schedule_of(fully_shard(model), "this test")
        dist.destroy_process_group()
        return schedule, schedule.groups[0].params[0]

    schedule, moving = made(0)
    use_shard(schedule, 1)
    _, other = made(1)
    assert type(moving.values) is type(other.values) is Bf16Gathered
    assert moving.values.shape == other.values.shape == (2, 7)
    padded = [each.values.held.untyped_storage().nbytes() for each in (moving, other)]
    assert padded == [4 * 3 * 7] * 2
