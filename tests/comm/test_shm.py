"""The transport of ranks that share memory: slots that others read, and the order of reductions."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.buffer.shared_memory import Segment
from fullshard.comm.hosts import shared_transport
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.shm import ShmTransport
from fullshard.comm.transport import Reduction, StillRead, Transfer
from fullshard.comm.waits import PeerFailureError
from fullshard.watch import watch
from tests.comm.cases import ODD, Case, Section, complete, reduce, transfers_of
from tests.harness import World, ranks
from tests.harness.held import mappings, open_files

CASE = Case("even", (Section(torch.float32, (((8, 3), 0), ((5,), 0))),))
OTHER = Case("even", (Section(torch.float32, ODD),))


def make() -> ShmTransport:
    made = shared_transport(dist.group.WORLD, PointToPointTransport())
    assert isinstance(made, ShmTransport), made
    return made


def start(transport: ShmTransport, transfers: list[Transfer], tag: int = 1) -> Any:
    return reduce(transport, transfers, dist.group.WORLD, tag, Reduction())


@ranks(2)
def test_a_reduction_reads_in_place_and_sends_nothing(world: World) -> None:
    transport = make()
    transfers = transfers_of(CASE, world.size, transport=transport)
    transfers[0].full.fill_(world.rank + 1)

    def refuse(*args: Any) -> Any:
        raise AssertionError("messages were exchanged")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PointToPointTransport, "_route", refuse)
        pending = start(transport, transfers)
        pending.finish()
        pending.wait()
    assert transfers[0].shard[:12].tolist() == [3.0] * 12
    assert (transfers[0].full == world.rank + 1).all(), "what was handed over is not overwritten"


@ranks(3)
def test_a_slot_may_be_written_once_the_slowest_rank_has_read_it(world: World) -> None:
    transport = make()
    transfers = transfers_of(CASE, world.size, transport=transport)
    for number in range(1, 16):
        transfers[0].full.fill_(number * 10.0**world.rank)
        pending = start(transport, transfers)
        assert isinstance(pending, StillRead)
        if number % 4 == world.rank:
            time.sleep(0.02)
        pending.finish()
        assert (transfers[0].shard[:6] == number * 111.0).all()
        pending.wait()


@ranks(2)
def test_many_reductions_under_way_are_read_in_order_by_a_rank_that_is_far_behind(world: World) -> None:
    transport = make()
    shards = []
    slots = [transfers_of(CASE, world.size, transport=transport)[0] for _ in range(4)]
    reads: list[StillRead] = []
    for number in range(150):
        slot = slots[number % 4]
        if number >= 4:
            reads[number - 4].finish()
            reads[number - 4].wait()
        slot.full.fill_(float(number))
        if world.rank == 1 and number in (70, 140):
            time.sleep(0.1)
        shards.append(torch.empty_like(slot.shard))
        reads.append(start(transport, [Transfer(slot.plan, slot.full, shards[-1])], tag=number % 3))
    for one in reads:
        one.finish()
    assert [shard[0].item() for shard in shards] == [2.0 * number for number in range(150)]


@ranks(2)
def test_ranks_that_reduce_different_groups_are_told_the_tags(world: World) -> None:
    transport = make()
    pending = start(transport, transfers_of(CASE, world.size, transport=transport), tag=3 + 4 * world.rank)
    here, there = 3 + 4 * world.rank, 7 - 4 * world.rank
    with pytest.raises(
        RuntimeError, match=rf"rank {1 - world.rank} reduces .*tag {there} where rank . reduces .*tag {here}"
    ):
        pending.finish()
    dist.barrier()
    transport.reset()
    dist.barrier()
    transfers = transfers_of(CASE, world.size, transport=transport)
    transfers[0].full.fill_(1)
    start(transport, transfers).finish()
    assert transfers[0].shard[0] == world.size, "after a reset on all ranks they agree again"


@ranks(2)
def test_ranks_that_reduce_different_parameters_of_a_group_are_told(world: World) -> None:
    transport = make()
    (whole,) = transfers_of(OTHER, world.size, transport=transport)
    plan = whole.plan.select([0, 3] if world.rank else [0, 5])
    pending = start(transport, [Transfer(plan, whole.full, torch.empty(plan.shard_numel))])
    with pytest.raises(
        RuntimeError, match=r"different parameters of the group with tag 1.*set_reduce_scatter_unused_params"
    ):
        pending.finish()
    dist.barrier()


@ranks(2)
def test_a_rank_is_lost_whose_memory_ended_with_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_NEWS", 0.1)  # there are none
    transport = make()
    pending = start(transport, transfers_of(CASE, world.size, transport=transport))

    def gone(address: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory", "/proc/1/fd/3")

    monkeypatch.setattr(Segment, "open", gone)
    says = rf"rank {world.rank} lost its connection to rank {1 - world.rank} in a reduction of"
    with pytest.raises(PeerFailureError, match=says):
        pending.finish()
    dist.barrier()


@ranks(2)
def test_a_reduction_that_was_reset_raises_and_writes_nothing(world: World) -> None:
    transport = make()
    (transfer,) = transfers_of(CASE, world.size, transport=transport)
    pending = start(transport, [transfer])
    for _ in range(2):
        transport.reset()
    with pytest.raises(
        RuntimeError, match=r"a reduction of the group with tag 1 was lost when reset_iter_state\(\) was called"
    ):
        pending.finish()
    assert transfer.shard.isnan().all()
    pending.wait()
    dist.barrier()


@ranks(2, fresh=True)
def test_a_slot_that_was_freed_is_still_found_by_a_slow_rank(world: World) -> None:
    transport = make()
    transfers = transfers_of(CASE, world.size, transport=transport)
    before = mappings()
    transfers[0].full.fill_(world.rank + 1)
    shard, plan = transfers[0].shard, transfers[0].plan
    pending = start(transport, transfers)
    if world.rank == 1:
        time.sleep(0.2)
    pending.finish()
    if world.rank == 0:
        del pending, transfers
        assert mappings() == before, "its own is gone, that of the other rank was opened"
    assert (shard[:12] == 3).all()
    assert plan.world_size == world.size
    dist.barrier()


@ranks(2, fresh=True)
def test_nothing_is_left_of_slots_that_come_and_go(world: World) -> None:
    transport = make()
    files = []
    for _ in range(6):
        transfers = transfers_of(CASE, world.size, transport=transport)
        pending = start(transport, transfers)
        pending.finish()
        pending.wait()
        del pending, transfers
        dist.barrier()
        gc.collect()
        files.append((open_files(), mappings()))
    assert files[0] == files[-1]
    transport.close_peers_buffers()
    dist.barrier()
    assert mappings() == files[0][1] - 1, "the last slot of the other rank"
    transfers = transfers_of(CASE, world.size, transport=transport)
    transfers[0].full.fill_(1)
    start(transport, transfers).finish()
    assert transfers[0].shard[0] == world.size
    dist.barrier()


@ranks(2)
def test_others_let_go_of_a_slot_at_their_next_reduction(world: World) -> None:
    transport = make()
    first, second = (transfers_of(CASE, world.size, transport=transport) for _ in range(2))
    routes = [transport.reduce_route(transfers, dist.group.WORLD, 1) for transfers in (first, second)]
    for route, transfers in zip(routes, (first, second), strict=True):
        complete(route.start([transfers[0].shard], Reduction()))
    before = mappings()
    del transfers, first, route, routes[0]
    gc.collect()
    dist.barrier()
    complete(routes[0].start([second[0].shard], Reduction()))
    assert mappings() == before - 2, "this rank's and that of the other"
    dist.barrier()


@ranks(2)
def test_full_buffers_that_are_not_shared_travel_as_messages(world: World) -> None:
    transport = make()
    transfers = transfers_of(CASE, world.size)
    transfers[0].full.fill_(1)
    pending = start(transport, transfers)
    assert not isinstance(pending, StillRead)
    pending.finish()
    assert transfers[0].shard[0] == world.size


@ranks(2)
def test_too_little_memory_for_a_slot_says_what_to_do(world: World) -> None:
    transport = make()

    def refuse(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.posix_fallocate", refuse)
        with pytest.raises(
            RuntimeError, match=r"no 4096 bytes of shared memory for gradients .*FULLSHARD_TRANSPORT=p2p"
        ):
            transport.allocate(4096, torch.device("cpu"))
        patch.setattr("fullshard.buffer.shared_memory.Segment.reserve", refuse)
        with pytest.raises(RuntimeError, match=r"no address space for 2 x 4224 bytes .*ulimit -v"):
            transport.reserve_shared(4096)


@ranks(2)
def test_it_goes_with_its_process_group(world: World) -> None:
    before = mappings(), open_files()
    pair = dist.new_group()
    transport = shared_transport(pair, PointToPointTransport())
    assert isinstance(transport, ShmTransport)
    assert shared_transport(pair, PointToPointTransport()) is transport
    memory = transport.allocate(4096, torch.device("cpu"))
    memory.fill_(1)
    assert mappings() > before[0]
    dist.barrier()
    dist.destroy_process_group(pair)
    del pair, transport, memory
    assert mappings() == before[0]
