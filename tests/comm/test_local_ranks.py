"""Ranks of one host: who they are, what they share, and how they wait for one that is slow, wrong, or gone."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from fullshard.buffer.shared_memory import Counters, Segment
from fullshard.comm.local_ranks import LocalRanks, PassBarrier, find_local_ranks
from fullshard.comm.waits import WAITS, waiting
from tests.harness import RankPool, World, ranks

#: Where a rank is that trains nothing, also if an earlier test in its process did.
NO_PASS = "(before its first forward|outside of training)"


def local_ranks(process_group: Any = None) -> LocalRanks:
    found = find_local_ranks(process_group or dist.group.WORLD)
    assert isinstance(found, LocalRanks), found
    return found


class Shared(NamedTuple):
    """What all ranks are to map, twice."""

    segment: Segment
    view: Segment


def reserved(nbytes: int = 4096) -> Shared:
    return Shared(Segment.reserve(nbytes), Segment.reserve(nbytes))


def shared(among: LocalRanks, nbytes: int = 4096) -> Shared:
    found = reserved(nbytes)
    assert among.map_together(*found)
    return found


@ranks(2, 4)
def test_every_rank_maps_the_same_memory_twice(world: World) -> None:
    found = shared(local_ranks(), 8 * world.size)
    mine = found.segment.tensor(8 * world.rank, 1, torch.int64)
    mine.fill_(world.rank + 1)
    dist.barrier()
    assert found.view.tensor(0, world.size, torch.int64).tolist() == list(range(1, world.size + 1))
    found.view.tensor(0, world.size, torch.int64).fill_(-1)
    dist.barrier()
    assert found.segment.tensor(0, world.size, torch.int64).tolist() == list(range(1, world.size + 1))


@ranks(2)
def test_sharing_leaves_no_file_open(world: World) -> None:
    among = local_ranks()
    before = len(os.listdir("/proc/self/fd"))
    kept = [shared(among) for _ in range(30)]
    assert len(os.listdir("/proc/self/fd")) == before
    del kept


@ranks(3)
@pytest.mark.parametrize("what", ["os.memfd_create", "os.open", "fullshard.buffer.shared_memory.Pages"])
@pytest.mark.parametrize("unlucky", [0, 2])
def test_if_one_rank_cannot_nobody_shares(world: World, what: str, unlucky: int) -> None:
    among, found = local_ranks(), reserved()
    found.segment.pages.own = [(8 * world.rank, 8)]
    mine = found.segment.tensor(8 * world.rank, 1, torch.int64).fill_(world.rank)

    def refuse(*args: Any) -> Any:
        raise OSError(24, "Too many open files")

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == unlucky:
            patch.setattr(what, refuse)
        is_mapped = among.map_together(*found)
    assert is_mapped == (what == "os.memfd_create" and unlucky == 2), "only rank 0 makes a segment"
    assert mine.tolist() == [world.rank]
    if not is_mapped:
        assert among.map_together(*found), "and the next time they do"
    dist.barrier()
    for each in found:
        assert each.tensor(0, world.size, torch.int64).tolist() == list(range(world.size))


@ranks(2)
def test_nothing_to_share_and_different_sizes(world: World) -> None:
    among = local_ranks()
    assert not among.map_together(None)
    expected = "rank 1 needs 0 bytes of shared memory where rank 0 needs 4096: build the same model"
    with pytest.raises(ValueError, match=expected):
        among.map_together(*([None] if world.rank else reserved()))


@ranks(3)
def test_a_gate_keeps_writers_and_readers_apart(world: World) -> None:
    """Each round, every rank writes its own number, all read all numbers, and a different one is slow each time."""
    among = local_ranks()
    found = shared(among)
    gate = PassBarrier(among, found.segment)
    numbers = found.segment.tensor(1024, world.size, torch.int64)
    for number in range(1, 31):
        if number % (world.size + 3) == world.rank:
            time.sleep(0.01)
        numbers[world.rank] = number
        gate.enter("writing")
        if number % (world.size + 2) == world.rank:
            time.sleep(0.01)
        assert numbers.tolist() == [number] * world.size
        gate.leave("reading")


@ranks(2)
@pytest.mark.parametrize("times", [1, 3])
def test_a_rank_that_gave_up_lets_others_leave_and_meets_them_at_the_next_pass(world: World, times: int) -> None:
    among = local_ranks()
    gate = PassBarrier(among, shared(among).segment)
    assert not gate.give_up(), "it was not entered"
    for _ in range(times):
        gate.enter("a pass")
        if world.rank == 0:
            assert gate.give_up()
            assert not gate.give_up()
        gate.leave("a pass")
        gate.leave("a pass that was left")
    if world.rank == 1:
        time.sleep(0.2)
    begin = time.monotonic()
    gate.enter("the next")
    if world.rank == 0:
        assert time.monotonic() - begin > 0.1
    gate.leave("the next")


@ranks(2)
def test_a_rank_that_gave_up_may_have_stepped_since(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And begun the next pass before a slow rank has compared what all said at this one."""
    among = local_ranks()
    gate, wait = PassBarrier(among, shared(among).segment), among.wait

    def wait_long(*args: Any) -> None:
        wait(*args)
        time.sleep(0.2)

    if world.rank == 0:
        monkeypatch.setattr(among, "wait", wait_long)
    gate.enter("a pass", steps=4)
    gate.give_up()
    gate.enter("the next", steps=0)


@ranks(3)
def test_the_timeout_of_the_process_group_holds_and_names_who_is_late(world: World) -> None:
    short = dist.new_group(timeout=timedelta(seconds=1))
    among = local_ranks(short)
    counters = Counters(shared(among).segment, 0, world.rank, world.size)
    dist.barrier()
    if world.rank == 0:
        match = rf"rank 0 waited in another wait, {NO_PASS}, for rank 2 \(process \d+\) for 1 s, the timeout"
        with waiting("another wait", short):
            with pytest.raises(RuntimeError, match=match):
                among.wait(counters, 1, "a test")
            assert WAITS.current is not None, "the wait around it goes on"
    elif world.rank == 1:
        counters.set(1)
    dist.barrier()


@ranks(2)
def test_a_long_wait_costs_little(world: World) -> None:
    among = local_ranks()
    counters = Counters(shared(among).segment, 0, world.rank, world.size)
    if world.rank == 1:
        time.sleep(0.8)
        counters.set(1)
        return
    begin = time.thread_time()
    among.wait(counters, 1, "a test")
    assert time.thread_time() - begin < 0.2


@ranks(2)
def test_other_threads_run_while_one_waits(world: World) -> None:
    among = local_ranks()
    counters = Counters(shared(among).segment, 0, world.rank, world.size)
    thread = threading.Thread(target=lambda: (time.sleep(0.05), counters.set(1)))
    thread.start()
    among.wait(counters, 1, "what a thread of the other rank does")
    thread.join()


def lose_ranks_1_and_3(world: World) -> None:
    """Rank 1 ends when it has come to 1, rank 2 comes there late, and rank 3 ends before it comes to 2."""
    among = local_ranks()
    counters = Counters(shared(among).segment, 0, world.rank, world.size)
    if world.rank == 2:
        time.sleep(0.7)
    counters.set(1)
    if world.rank in (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    among.wait(counters, 1, "a wait for those that came")
    counters.set(2)
    among.wait(counters, 2, "a test")


def test_ranks_that_ended_are_missed_as_soon_as_they_are_waited_for(rank_pool: RankPool) -> None:
    outcomes = rank_pool.run(lose_ranks_1_and_3, 4)
    assert [outcome.kind for outcome in outcomes] == ["raised", "died", "raised", "died"]
    for rank in (0, 2):
        assert outcomes[rank].at - outcomes[3].at < 5
        assert re.search(
            rf"rank {rank} waited in a test, {NO_PASS}, "
            r"for rank 1 \(process \d+\), 3 \(process \d+\), "
            r"which has ended\. "
            r".*(Look there for|[Ff]ind) the first error",
            outcomes[rank].summary,
        )
