"""What messages between ranks promise beyond right results: order, memory, precision, and errors that do not spread."""

from __future__ import annotations

import gc
import os
import resource
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.buffer.slots import SHARED
from fullshard.comm import sums
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.transport import Reduction, Transfer
from tests.comm.cases import (
    EQUAL,
    LARGE,
    ODD,
    Case,
    Section,
    assert_gathered,
    assert_reduced,
    fill_fulls,
    fill_shards,
    gather,
    group,
    reduce,
    transfers_of,
)
from tests.harness import RankPool, World, ranks

SIX_MEBIBYTES = (((1024, 1024), 0), ((1024,), 0), ((512, 1024), 1))


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@ranks(2)
@pytest.mark.parametrize("finish_in_order", [True, False])
def test_gathers_with_two_tags_may_start_in_opposite_order(world: World, finish_in_order: bool) -> None:
    transport = PointToPointTransport()
    cases = [Case("even", (Section(torch.float32, LARGE),)), Case("even", (Section(torch.float64, LARGE),))]
    transfers = [transfers_of(case, world.size) for case in cases]
    for case, some in zip(cases, transfers, strict=True):
        fill_shards(case, some, world.rank)
    order = [0, 1] if world.rank == 0 else [1, 0]
    pending = {tag: gather(transport, transfers[tag], group(), tag) for tag in order}
    for tag in order if finish_in_order else reversed(order):
        pending[tag].finish()
    for case, some in zip(cases, transfers, strict=True):
        assert_gathered(case, some, world.rank)


@ranks(2)
def test_a_gather_and_a_reduction_of_one_group_may_start_in_opposite_order(world: World) -> None:
    transport, case = PointToPointTransport(), Case("even", (Section(torch.float32, LARGE),))
    gathered, reduced = transfers_of(case, world.size), transfers_of(case, world.size)
    fill_shards(case, gathered, world.rank)
    fill_fulls(case, reduced, world.rank)
    starts = [
        lambda: gather(transport, gathered, group(), 3),
        lambda: reduce(transport, reduced, group(), 3, Reduction(2)),
    ]
    for pending in [start() for start in (starts if world.rank == 0 else reversed(starts))]:
        pending.finish()
    assert_gathered(case, gathered, world.rank)
    assert_reduced(case, reduced, world.rank, 2)


@ranks(2)
def test_a_route_takes_whatever_staging_is_free(world: World) -> None:
    transport = PointToPointTransport()
    cases = [Case("even", (Section(torch.float32, shapes),)) for shapes in (ODD, EQUAL, ODD[::-1])]
    transfers = [transfers_of(case, world.size) for case in cases]
    routes = [transport.gather_route(some, group(), tag) for tag, some in enumerate(transfers)]
    for chosen in ((0, 1), (1, 2), (2, 0, 1)):
        for number in chosen:
            fill_shards(cases[number], transfers[number], world.rank)
            transfers[number][0].full.fill_(float("nan"))
        pending = [routes[number].start() for number in chosen]
        for one in pending:
            one.finish()
        for number in chosen:
            assert_gathered(cases[number], transfers[number], world.rank)


@ranks(2)
def test_a_users_own_messages_are_not_taken_for_ours(world: World) -> None:
    transport = PointToPointTransport()
    case = Case("even", (Section(torch.float32, ODD),))
    transfers = transfers_of(case, world.size)
    fill_shards(case, transfers, world.rank)
    received = torch.zeros(3)
    theirs = [
        dist.irecv(received, 1 - world.rank, tag=5),
        dist.isend(torch.full((3,), float(world.rank)), 1 - world.rank, tag=5),
    ]
    gather(transport, transfers, group(), tag=5).finish()
    for work in theirs:
        assert work is not None
        work.wait()
    assert_gathered(case, transfers, world.rank)
    assert received.tolist() == [1 - world.rank] * 3


@ranks(2)
def test_repeated_exchanges_take_no_new_memory(world: World) -> None:
    transport = PointToPointTransport()
    case = Case("even", (Section(torch.float32, SIX_MEBIBYTES), Section(torch.bfloat16, SIX_MEBIBYTES)))
    gathered, reduced = transfers_of(case, world.size), transfers_of(case, world.size)

    gathering, reducing = transport.gather_route(gathered, group(), 0), transport.reduce_route(reduced, group(), 1)

    def exchange() -> None:
        pending = gathering.start()
        reducing.start([transfer.shard for transfer in reduced], Reduction(2)).finish()
        pending.finish()

    for _ in range(3):
        exchange()
    kept, before = SHARED.nbytes_free, page_faults()
    for _ in range(10):
        exchange()
    assert SHARED.nbytes_free == kept
    assert page_faults() - before < 100, "18 MiB, copied anew ten times, would be 46,000"


@ranks(2)
def test_two_ranks_receive_what_is_large_where_they_add_it_up(world: World) -> None:
    case = Case("even", (Section(torch.float32, (((1024, 1024), 0), ((1024,), 0))),))
    transfers = transfers_of(case, world.size)
    SHARED.drop()
    fill_fulls(case, transfers, world.rank)
    reduce(PointToPointTransport(), transfers, group(), 1, Reduction(2)).finish()
    assert_reduced(case, transfers, world.rank, 2)
    assert SHARED.nbytes_free < 2**20, "small pieces, sent and received"


@ranks(3)
def test_staging_is_bounded_and_can_be_given_back(world: World) -> None:
    limit = 2**20
    transport = PointToPointTransport(staging=limit)
    case = Case("even", (Section(torch.float32, SIX_MEBIBYTES),))
    transfers = transfers_of(case, world.size)
    SHARED.drop()
    fill_shards(case, transfers, world.rank)
    gather(transport, transfers, group(), 0).finish()
    assert_gathered(case, transfers, world.rank)
    assert 0 < SHARED.nbytes_free <= 2 * limit, "what is received, and as much packed"
    SHARED.drop()  # small and large exchanges have buffers of their own
    fill_fulls(case, transfers, world.rank)
    reduce(transport, transfers, group(), 1, Reduction(3)).finish()
    assert_reduced(case, transfers, world.rank, 3)
    assert SHARED.nbytes_free <= 2 * limit
    assert SHARED.drop() > 0
    assert SHARED.nbytes_free == 0
    fill_shards(case, transfers, world.rank)
    gather(transport, transfers, group(), 0).finish()
    assert_gathered(case, transfers, world.rank)


@ranks(4)
@pytest.mark.parametrize("shapes", [ODD, LARGE], ids=["odd", "large"])
def test_terms_are_added_in_the_order_of_ranks(world: World, shapes: tuple[tuple[tuple[int, ...], int], ...]) -> None:
    case = Case("flat", (Section(torch.float32, shapes),))
    (transfer,) = transfers_of(case, world.size)
    fill_fulls(case, [transfer], world.rank)
    reduce(PointToPointTransport(), [transfer], group(), 1, Reduction()).finish()
    totals = [torch.zeros_like(value) for value in case.values(0)[0]]
    for rank in range(world.size):
        for total, value in zip(totals, case.values(rank)[0], strict=True):
            total += value
    for i, offset in enumerate(transfer.plan.full_offsets):
        first, last = transfer.plan.cuts[i].chunk(world.rank)
        start = offset + first - world.rank * transfer.plan.shard_numel
        assert torch.equal(transfer.shard[start : start + last - first], totals[i].flatten()[first:last])


@ranks(2)
def test_integers_are_not_reduced(world: World) -> None:
    (transfer,) = transfers_of(Case("even", (Section(torch.float32, ODD),)), world.size)
    integers = Transfer(transfer.plan, transfer.full.to(torch.int32), transfer.shard)
    with pytest.raises(TypeError, match=r"got torch\.int32: .*FULLSHARD_TRANSPORT=collective"):
        reduce(PointToPointTransport(), [integers], group(), 1, Reduction())


@ranks(3)
@pytest.mark.parametrize("staging", [1, 2**24], ids=["many-rounds", "one-round"])
def test_an_error_after_arrival_leaves_the_group_usable(world: World, staging: int) -> None:
    transport = PointToPointTransport(staging)
    case = Case("even", (Section(torch.float32, LARGE),))
    transfers = transfers_of(case, world.size)
    fill_fulls(case, transfers, world.rank)

    def fail(tensor: torch.Tensor, divisor: float) -> None:
        raise MemoryError("on rank 1 only")

    pending = reduce(transport, transfers, group(), 1, Reduction(3))
    if world.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sums, "divide_", fail)
            with pytest.raises(MemoryError, match="on rank 1 only"):
                pending.finish()
    else:
        pending.finish()
        assert_reduced(case, transfers, world.rank, 3)
    reduce(transport, transfers, group(), 1, Reduction(3)).finish()
    assert_reduced(case, transfers, world.rank, 3)


@ranks(2, fresh=True)
@pytest.mark.parametrize("shapes", [ODD, LARGE], ids=["packed", "large"])
def test_an_exchange_that_nobody_waits_for_holds_nothing_up(world: World, shapes: tuple[Any, ...]) -> None:
    """As where an error ends a backward. gloo reads no more from a rank whose message has nowhere to go."""
    transport, case = PointToPointTransport(), Case("even", (Section(torch.float32, shapes),))
    if world.rank == 0:
        reduce(transport, transfers_of(case, world.size), group(), 1, Reduction(2))
        gc.collect()
    dist.barrier()
    if world.rank == 1:
        abandoned = reduce(transport, transfers_of(case, world.size), group(), 1, Reduction(2))
    dist.barrier()
    transfers = transfers_of(case, world.size)
    fill_fulls(case, transfers, world.rank)
    reduce(transport, transfers, group(), 2, Reduction(2)).finish()
    assert_reduced(case, transfers, world.rank, 2)
    if world.rank == 1:
        del abandoned


def lose_the_last_rank(world: World) -> str:
    transport = PointToPointTransport()
    transfers = transfers_of(Case("even", (Section(torch.float32, LARGE),)), world.size)
    gather(transport, transfers, group(), 8).finish()
    if world.rank == world.size - 1:
        os._exit(1)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        gather(transport, transfers, group(), 8).finish()
    assert time.monotonic() - started < 5
    return str(raised.value)


@pytest.mark.slow
def test_a_lost_rank_is_named(rank_pool: RankPool) -> None:
    outcomes = rank_pool.run(lose_the_last_rank, 2, timeout=30)
    assert [outcome.kind for outcome in outcomes] == ["returned", "died"], outcomes
    assert outcomes[0].value.startswith(
        "rank 0 lost its connection to rank 1 in a point-to-point all-gather of the group with tag 8, "
    )
