"""Arguments that choose a strategy: groups that stay whole because they are small, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.group.strategy import FULL_SHARD, SHARD_GRAD_OP, ZERO, Placement
from fullshard.schedule.unit import unit_of
from fullshard.stages import check_stage, strategy_of
from tests.fully_shard.cases import Recorder
from tests.harness import World, ranks
from tests.harness.compare import Training, compare, each_block
from tests.harness.models import MLP, random_batch, seeded

NORM, LINEAR = 2 * 4 * 16, 4 * (16 * 16 + 16)


def build(threshold: int, **options: Any) -> Any:
    """Blocks of which each norm is a group of its own, as some programs shard them."""
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(3)))
    for block in model:
        fullshard.fully_shard(block[0], persistence_threshold=threshold, **options)
        fullshard.fully_shard(block, persistence_threshold=threshold, **options)
    return fullshard.fully_shard(model, **options)


@ranks(2, transport="p2p")
@pytest.mark.parametrize(("threshold", "gathers"), [(0, 10), (NORM - 1, 10), (NORM, 8), (LINEAR, 6)])
def test_small_groups_are_gathered_once_in_a_step(world: World, threshold: int, gathers: int) -> None:
    """The last two groups of forward are gathered once anyway: backward finds them in their slots."""
    model = build(threshold, reshard_after_forward=True)
    model.set_prefetch_limit(0)
    x = torch.ones(2, 16, requires_grad=True)
    model(x).sum().backward()
    recorder = Recorder(model, "gather")
    model(x).sum().backward()
    assert len(recorder.take()) == gathers


@ranks(2)
@pytest.mark.parametrize("threshold", [4 * 16, 1 << 30])
def test_training_is_the_same(world: World, threshold: int) -> None:
    shard = each_block(persistence_threshold=threshold)
    compare(world, Training(build=lambda: seeded(MLP), shard=shard, batch=random_batch(4, 6)), with_torch=False)


@ranks(2)
def test_a_small_group_that_ran_alone_before_still_stays_whole(world: World) -> None:
    model = build(NORM)
    model[0][0](torch.ones(2, 16))  # as the root of its own tree
    model(torch.ones(2, 16))
    kept = {}
    for name in ("0.0", "0"):
        (group,) = unit_of(model.get_submodule(name)).groups  # type: ignore[union-attr]
        kept[name] = group.options.strategy.after_forward
    assert kept == {"0.0": Placement.REPLICATED, "0": Placement.SHARDED}


@ranks(2)
def test_a_stage_and_a_choice_name_a_strategy(world: World) -> None:
    (group,) = unit_of(fullshard.fully_shard(nn.Linear(4, 4))).groups  # type: ignore[union-attr]
    found = [
        strategy_of(stage, choice, group.data)[0] for stage, choice in ((3, True), (3, False), (2, False), (1, False))
    ]
    assert found == [FULL_SHARD, SHARD_GRAD_OP, ZERO[2], ZERO[1]]
    assert [check_stage(stage, None) for stage in range(4)] == [0, 1, 2, 3]


@ranks(1)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"persistence_threshold": -1}, "persistence_threshold"),
        ({"persistence_threshold": 1.5}, "persistence_threshold"),
        ({"persistence_threshold": True}, "persistence_threshold"),
        ({"persistence_threshold": 1, "zero_stage": 2}, "no effect with zero_stage=2"),
        ({"persistence_threshold": 1, "reshard_after_forward": False}, "no effect with reshard_after_forward=False"),
    ],
)
def test_a_threshold_that_makes_no_sense_is_refused(world: World, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fullshard.fully_shard(nn.Linear(2, 2), **options)
