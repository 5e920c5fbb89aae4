"""Ranks that do not run the same groups, parameters, micro-batches or steps are told so before they use the result."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard.comm import process_group
from fullshard.comm.waits import WAITS
from fullshard.device import Lane
from fullshard.group.step import Step
from fullshard.schedule.step_log import StepLog, _Comparison
from tests.fully_shard.cases import environment, inputs
from tests.fully_shard.test_communication import CountingReduceScatter
from tests.harness import World, ranks
from tests.harness.models import seeded


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.experts[index](x)
        return x


def model() -> Any:
    routed = seeded(Routed)
    for expert in routed.experts:
        fullshard.fully_shard(expert, reshard_after_forward=True)
    return fullshard.fully_shard(routed)


SWAPPED = {0: [0, 1], 1: [1, 0]}


EACH_TRANSPORT = pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.ones(4, 6))


@ranks(2)
@EACH_TRANSPORT
@pytest.mark.parametrize(
    ("other", "has"),
    [
        (nn.Linear(4, 6, bias=False), r"'weight' of shape \(6, 4\), torch.float32"),
        (nn.Linear(6, 4, bias=False, dtype=torch.float64), r"'weight' of shape \(4, 6\), torch.float64"),
        (Renamed(), r"'other' of shape \(4, 6\), torch.float32"),
    ],
    ids=["shape", "dtype", "name"],
)
def test_ranks_that_shard_other_parameters_are_told(world: World, transport: str, other: nn.Module, has: str) -> None:
    says = rf"rank 0 has 'weight' of shape \(4, 6\), torch.float32.* where rank 1 has {has}"
    with environment(FULLSHARD_TRANSPORT=transport), pytest.raises(ValueError, match=says):
        fullshard.fully_shard(other if world.rank == 1 else nn.Linear(6, 4, bias=False))


@ranks(2, transport="collective")
@pytest.mark.parametrize("order", [{0: [0], 1: [1]}, SWAPPED], ids=["another", "swapped"])
def test_ranks_that_run_other_groups_are_told_before_the_step(world: World, order: dict[int, list[int]]) -> None:
    routed = model()
    loss = routed(inputs(world.rank), order[world.rank]).square().mean()
    with pytest.raises(RuntimeError, match=r"rank 0 has the gather of 'experts.0' where rank 1 has .* 'experts.1'"):
        loss.backward()


@ranks(2, transport="collective")
def test_only_calls_in_another_order_than_before_are_announced(world: World) -> None:
    """To the other ranks, by a store, which takes time."""
    routed, counts = model(), []
    for order in ([0, 1], [0, 1], [0, 1], [1, 0]):
        with mock.patch.object(WAITS, "announce") as announce:
            routed(inputs(world.rank), order).square().mean().backward()
        counts.append(announce.call_count)
    assert counts[0] > counts[1]  # which gathers ahead
    assert counts[2] == 0
    assert counts[3] > 0


@ranks(2, transport="collective")
def test_they_are_told_before_a_result_without_gradients_is_used(world: World) -> None:
    routed = model()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"gather of 'experts.1'"):
        routed(inputs(), [world.rank])


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(4, 6)) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return x @ self.weights[which].t()


@ranks(2, 3)
@pytest.mark.parametrize("transport", ["p2p", "collective"])
def test_ranks_that_reduce_other_parameters_are_told(world: World, transport: str) -> None:
    """Where gradients lie in shared memory too, ranks tell each other with each reduction."""
    with environment(FULLSHARD_TRANSPORT=transport):
        halves = fullshard.fully_shard(Halves())
        with pytest.raises(RuntimeError, match=r"reduction of \['weights.0'\] .* set_reduce_scatter_unused_params"):
            halves(inputs(), world.rank % 2).sum().backward()


@ranks(2, transport="shm")
def test_ranks_that_reduce_other_parameters_by_a_collective_of_their_own_are_told(world: World) -> None:
    """Parameters lie in shared memory, and gradients travel by what the user gave."""
    halves = fullshard.fully_shard(Halves())
    halves.set_custom_reduce_scatter(CountingReduceScatter())
    with pytest.raises(RuntimeError, match=r"reduction of \['weights.0'\] .* set_reduce_scatter_unused_params"):
        halves(inputs(), world.rank).sum().backward()


@ranks(2, transport="collective")
def test_ranks_may_reduce_other_parameters_as_zeros(world: World) -> None:
    halves = fullshard.fully_shard(Halves())
    halves.set_reduce_scatter_unused_params(True)
    halves(inputs(), world.rank).sum().backward()
    expected = inputs().sum(0).expand(4, 6) / 2
    for parameter in halves.parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected)


#: What is said of a micro-batch that was left out, by whether ranks share memory.
SAYS = {
    False: "rank 0 has a forward after 0 optimizer steps where rank 1 has a forward after 1",
    True: "left out a micro-batch or a step",
}


def left_out(world: World, transport_says: str, routed: Any = None) -> None:
    """Rank 1 takes one micro-batch, where rank 0 takes two."""
    routed = routed or model()
    optimizer = torch.optim.SGD(routed.parameters(), lr=0.1)

    def train() -> None:
        for step in range(2):
            for _ in range(1 if world.rank == 1 and step == 0 else 2):
                routed(inputs(), [0, 1]).sum().backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match=transport_says):
        train()


@ranks(2)
@EACH_TRANSPORT
def test_a_micro_batch_left_out_is_found(world: World, transport: str) -> None:
    with environment(FULLSHARD_TRANSPORT=transport):
        left_out(world, SAYS[transport == "shm"])


@ranks(2)
@EACH_TRANSPORT
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
def test_a_micro_batch_left_out_is_found_in_the_wrapper(world: World, transport: str, original: bool) -> None:
    with environment(FULLSHARD_TRANSPORT=transport):
        routed = fullshard.FullyShardedDataParallel(seeded(Routed), use_orig_params=original)
    left_out(world, SAYS[transport == "shm"], routed)


@pytest.mark.slow
@ranks(3, transport="p2p", fresh=True)
def test_ranks_that_wait_for_messages_of_other_groups_are_told_where_they_parted(world: World) -> None:
    """The timeout of their process group is half a minute or more away."""
    routed, begin = model(), time.monotonic()
    says = r"rank [01] has the gather of 'experts.0' where rank 2 has the gather of 'experts.1'"
    with pytest.raises(fullshard.PeerFailureError, match=says):
        routed(inputs(world.rank), [int(world.rank == 2)]).sum().backward()
    assert time.monotonic() - begin < 10


@ranks(3, transport="p2p", fresh=True)
def test_a_rank_at_the_end_of_a_forward_has_parted_from_one_that_gathers_more(world: World) -> None:
    """It has communicated about the same as the others, as far as it did."""
    routed = model()
    says = r"rank [01] has the gather of 'experts.1' where rank 2 has the end of the forward, both after .* 'experts.0'"
    with pytest.raises(fullshard.PeerFailureError, match=says), torch.no_grad():
        routed(inputs(world.rank), [0] if world.rank == 2 else [0, 1])


def test_a_pass_is_told_as_long_as_its_comparison_runs() -> None:
    """A rank that looks for the difference waits for the others, which may wait for its part of a sum meanwhile."""
    log = StepLog(torch.device("cpu"), Step())

    class Differs(_Comparison):
        def is_there(self) -> bool:
            return True

        def check(self) -> None:
            told.update(log.passes(None, 0))
            raise RuntimeError("the ranks did not run the same")

    told: dict[str, dict[str, str]] = {}
    process_group: Any = SimpleNamespace(group_name="all")
    log._under_way.append(Differs("backward", 3, 7, process_group, []))
    with pytest.raises(RuntimeError, match="did not run the same"):
        log.check()
    assert told == {"all 0 7": {"0": "a backward after 3 optimizer steps", "1": "the end of the backward"}}
    assert log.passes(None, 0) == {}


@ranks(2)
def test_ranks_that_notice_a_difference_at_different_times_need_no_collective(world: World) -> None:
    """On a device nobody waits for a comparison: one rank may be in the next pass when another raises."""
    comparison = _Comparison("forward", 3 + world.rank, 7, dist.group.WORLD, [])  # type: ignore[arg-type]
    comparison.start(torch.device("cpu"), Lane(torch.device("cpu")))
    assert comparison.is_there()
    here, there = "rank 0 has a forward after 3 optimizer steps", "rank 1 has a forward after 4 optimizer steps"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "_PATIENCE", 0.1)
        if world.rank == 1:
            dist.barrier()  # of the next pass, which the first must not take for an answer
        with pytest.raises(RuntimeError, match=here if world.rank else "some ranks have not reported") as error:
            comparison.check()
        assert (there in str(error.value)) == bool(world.rank)
        if world.rank == 0:
            dist.barrier()


@ranks(2, transport="p2p")
@pytest.mark.parametrize("wrapped", [False, True])
def test_ranks_of_one_mind_go_on(world: World, wrapped: bool) -> None:
    """Evaluation, accumulation, and several models in turn are the same on all ranks."""
    one, other = (fullshard.FullyShardedDataParallel(seeded(Routed)) if wrapped else model() for _ in range(2))
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for step in range(3):
        with torch.no_grad():
            other(inputs(step), [1])
        for order in ([0], [1, 0]):
            (one(inputs(step), order) + other(inputs(step), order)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@ranks(4)
@pytest.mark.parametrize(
    "transport", ["shm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("p2p", "collective"))]
)
def test_replicas_that_take_other_micro_batches_are_told(world: World, transport: str) -> None:
    """Both ranks of a replica leave one out: only the all-reduce between replicas is wrong."""
    with environment(FULLSHARD_TRANSPORT=transport):
        routed = fullshard.fully_shard(seeded(Routed), mesh=world.mesh(2, 2, names=("replicate", "shard")))
    optimizer = torch.optim.SGD(routed.parameters(), lr=0.1)

    def train() -> None:
        for step in range(2):
            for _ in range(1 if world.rank >= 2 and step == 0 else 2):
                routed(inputs(), [0, 1]).sum().backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match=r"rank . has a backward after 0 optimizer steps"):
        train()
