"""The order in which the units of a wrapped model are gathered and reduced, as the prefetch settings say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fullshard
from fullshard import BackwardPrefetch, ShardingStrategy
from fullshard.schedule.step_log import StepEvent
from tests.harness import World, ranks
from tests.harness.models import MLP, random_batch, seeded
from tests.harness.wrapper import ORIGINAL, wrap_blocks

PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST


def observed(model: Any, *actions: str) -> Callable[[], list[str]]:
    """What the schedule of a model tells from now on: a function that takes what was told since its last call."""
    told: list[StepEvent] = []
    model.check_is_root()  # which makes it
    model._unit.schedule.log.add_observer(told.append)

    def take() -> list[str]:
        seen = [
            f"{each.action} {each.group.replace('blocks.', '') or 'root'}" for each in told if each.action in actions
        ]
        told.clear()
        return seen

    return take


def step(model: Any) -> None:
    model(random_batch(4, 6)(0)[0].requires_grad_()).sum().backward()


@ranks(2, transport="p2p")
@ORIGINAL
@pytest.mark.parametrize("prefetch", [PRE, POST, None])
def test_backward(world: World, prefetch: BackwardPrefetch | None, original: bool) -> None:
    model = wrap_blocks(original=original, backward_prefetch=prefetch)(fullshard, seeded(MLP))
    take = observed(model, "gather", "reuse", "unshard", "reduce", "reshard")
    for _ in range(2):
        output = model(random_batch(4, 6)(0)[0].requires_grad_())
        take()
        output.sum().backward()
        told = [event.replace("reuse", "gather") for event in take()]
        expected = []  # what is still there from forward is used again
        for block in (3, 2, 1, 0):
            own, ahead = [f"reduce {block}", f"reshard {block}"], [f"gather {block - 1}"] if block else []
            expected += {PRE: [*ahead, *own], POST: [*own, *ahead], None: [*own, *ahead]}[prefetch]
        events = [event for event in told if "unshard" not in event]
        assert events == ["gather 3", *expected, "reduce root", "reshard root"]
        for block in (2, 1, 0):  # ahead is before the gradients of a block are computed, or after
            gather, unshard, reduce = (told.index(f"{each} {block}") for each in ("gather", "unshard", "reduce"))
            before = told.index(f"reduce {block + 1}")
            assert gather < before if prefetch is PRE else before < gather
            assert gather < unshard < reduce


@ranks(2, transport="p2p")
@pytest.mark.parametrize("ahead", [False, True])
def test_forward(world: World, ahead: bool) -> None:
    """On the CPU, where nothing else runs ahead, it always gathers the next block before this one computes."""
    model = wrap_blocks(forward_prefetch=ahead)(fullshard, seeded(MLP))
    step(model)  # in which the order is learned
    take = observed(model, "gather", "unshard", "reshard")
    with torch.no_grad():
        model(*random_batch(4, 6)(0))
    expected = ["gather root", "unshard root", "gather 0"]
    for block in range(3):
        expected += [f"unshard {block}", f"gather {block + 1}", f"reshard {block}"]
    assert take() == [*expected, "unshard 3", "reshard 3"]


@ranks(2, transport="p2p")
@pytest.mark.parametrize("strategy", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
def test_what_stays_is_not_gathered_again(world: World, strategy: ShardingStrategy) -> None:
    model = wrap_blocks(strategy=strategy.name)(fullshard, seeded(MLP))
    take = observed(model, "gather", "reduce")
    for _ in range(2):
        output = model(random_batch(4, 6)(0)[0].requires_grad_())
        assert sorted(take()) == sorted(f"gather {block}" for block in (0, 1, 2, 3, "root"))
        output.sum().backward()
        assert take() == [f"reduce {block}" for block in (3, 2, 1, 0, "root")]


@ranks(2, transport="p2p")
def test_quiet_micro_batches_reduce_nothing(world: World) -> None:
    model = wrap_blocks()(fullshard, seeded(MLP))
    take = observed(model, "reduce")
    with model.no_sync():
        step(model)
        assert take() == []
    step(model)
    assert take() == [f"reduce {block}" for block in (3, 2, 1, 0, "root")]
