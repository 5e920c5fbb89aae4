"""The strategy of a group is data: a row of placements that the group executes."""

from __future__ import annotations

import os

import pytest

from fullshard.group.strategy import FULL_SHARD, SHARD_GRAD_OP, ZERO_1, Placement, Strategy
from tests.fully_shard.cases import Recorder, first_of, groups_of, inputs, twins
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded

#: Parameters stay whole until an optimizer has written to their shards, which is what ZeRO-1 has of them.
WHOLE = Strategy(after_forward=Placement.REPLICATED, after_backward=Placement.REPLICATED)


def test_a_column_is_switched_and_switched_back() -> None:
    assert FULL_SHARD.switched(after_forward=False) == SHARD_GRAD_OP
    assert SHARD_GRAD_OP.switched(after_forward=True) == FULL_SHARD
    without = FULL_SHARD.switched(gradients=False, gradients_of_replicas=False)
    assert (without.gradients, without.gradients_of_replicas) == (Placement.PARTIAL, Placement.PARTIAL)
    assert not without.reduces
    assert not without.all_reduces


@ranks(2)
@first_of("transport", "p2p", "collective")
def test_a_row_says_how_often_parameters_are_gathered(world: World, transport: str) -> None:
    """The first group of a chain: the values of the last ones may still be in a slot."""
    os.environ["FULLSHARD_TRANSPORT"] = transport
    for strategy, gathers in ((FULL_SHARD, 2), (SHARD_GRAD_OP, 1), (WHOLE, 1)):
        pair = twins(world, lambda: seeded(MLP))
        for group in groups_of(pair.sharded):
            group.options.strategy = strategy
        pair.step()
        recorder = Recorder(pair.sharded, "gather")
        for _ in range(3):
            pair.step()
            assert recorder.take().count("gather 0") == gathers, strategy


@ranks(2)
@pytest.mark.parametrize("strategy", [WHOLE, ZERO_1])
def test_parameters_that_stay_whole_are_gathered_once_for_all_micro_batches(world: World, strategy: Strategy) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    pair = twins(world, lambda: seeded(MLP))
    for group in groups_of(pair.sharded):
        group.options.strategy = strategy
    params = dict(pair.sharded.named_parameters())
    pair.step()
    recorder = Recorder(pair.sharded, "gather", "reduce")
    for micro in range(3):
        pair.sharded.set_requires_gradient_sync(micro == 2)
        pair.sharded(inputs(10 * micro + world.rank)).square().mean().backward()
        for rank in range(world.size):
            (pair.whole(inputs(10 * micro + rank)).square().mean() / world.size).backward()
    events = recorder.take()
    assert [events.count(f"{action} 0") for action in ("gather", "reduce")] == [1, 1]
    found = {name: param.grad for name, param in params.items()}
    pair.check({name: param.grad for name, param in pair.whole.named_parameters()}, found, "gradient")
