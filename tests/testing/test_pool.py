"""The pool of ranks itself: what a test sees of its world, and what it is told when ranks fail, die or hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.harness import RankPool, World, failure_report, ranks


@ranks(1, 2, 3, 4)
def test_the_world_has_the_size_of_the_mark(world: World) -> None:
    total = torch.full((3,), world.rank)
    dist.all_reduce(total)
    assert total.tolist() == [sum(range(world.size))] * 3
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)


@ranks(2)
@pytest.mark.parametrize("value", [1, 2])
def test_parameters_and_fixtures_arrive(tmp_path: Path, value: int, world: World) -> None:
    (tmp_path / str(world.rank)).write_text(str(value))
    dist.barrier()
    assert {path.read_text() for path in tmp_path.iterdir()} == {str(value)}


@ranks(4)
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)])
def test_meshes_of_one_test_are_not_those_of_the_last(world: World, shape: tuple[int, int]) -> None:
    mesh = world.mesh(*shape, names=("outer", "inner"))
    tensor = torch.arange(8.0)
    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(0)]):
        shards = distribute_tensor(tensor, mesh, placements)
        twice = shards + shards
        assert isinstance(twice, DTensor)
        assert torch.equal(twice.full_tensor(), 2 * tensor)
        assert twice.device_mesh.get_group("inner").size() == shape[1]


def raise_on_rank_1(world: World) -> None:
    if world.rank == 1:
        assert [1, 2] == [1, 3], "the cause"
    dist.barrier()


def test_the_cause_comes_before_lost_connections(rank_pool: RankPool) -> None:
    outcomes = rank_pool.run(raise_on_rank_1, 3)
    assert [outcome.kind for outcome in outcomes] == ["raised"] * 3
    report = failure_report(outcomes)
    assert report.startswith("rank 1 raised: AssertionError: the cause")
    assert "(3 of 3 ranks failed)" in report
    assert "assert [1, 2] == [1, 3]" in report
    assert "test_pool.py" in report


def die_on_rank_0(world: World) -> None:
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_dead_rank_is_named_and_the_pool_goes_on(rank_pool: RankPool) -> None:
    outcomes = rank_pool.run(die_on_rank_0, 2)
    assert [outcome.kind for outcome in outcomes] == ["died", "raised"]
    assert failure_report(outcomes).startswith("rank 0 died: The process of rank 0 was killed by SIGKILL.")
    assert [outcome.value for outcome in rank_pool.run(add, 2, 3, right=4)] == [7, 8]


def add(world: World, left: int, *, right: int) -> int:
    return left + right + world.rank


def hang_on_rank_1(world: World) -> None:
    if world.rank == 1:
        time.sleep(60)
    dist.barrier()


def test_hanging_ranks_show_where(rank_pool: RankPool) -> None:
    outcomes = rank_pool.run(hang_on_rank_1, 2, timeout=1)
    assert [outcome.kind for outcome in outcomes] == ["hung", "hung"]
    assert "in hang_on_rank_1" in outcomes[1].report
    assert "barrier" in outcomes[0].report


def leave_traces(world: World) -> None:
    os.environ["TRACE_OF_A_TEST"] = "1"
    torch.set_default_dtype(torch.float64)


def look_for_traces(world: World) -> tuple[bool, torch.dtype, float]:
    return "TRACE_OF_A_TEST" in os.environ, torch.get_default_dtype(), torch.rand(()).item()


def test_traces_of_a_test_are_removed(rank_pool: RankPool) -> None:
    first = [outcome.value for outcome in rank_pool.run(look_for_traces, 2)]
    rank_pool.run(leave_traces, 2)
    assert [outcome.value for outcome in rank_pool.run(look_for_traces, 2)] == first
    assert first[0] == first[1] == (False, torch.float32, first[0][2])


def leave_threads(world: World, count: int) -> int:
    for _ in range(count):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def test_ranks_with_many_threads_left_behind_are_replaced(rank_pool: RankPool) -> None:
    """They are mostly those of process groups, which wake often: all that follow would be slow."""
    before = [outcome.value for outcome in rank_pool.run(leave_threads, 2, 1)]
    assert [outcome.value for outcome in rank_pool.run(leave_threads, 2, 100)] == before
    after = [outcome.value for outcome in rank_pool.run(leave_threads, 2, 0)]
    assert not {*after} & {*before}


def test_what_cannot_be_sent_is_named(rank_pool: RankPool) -> None:
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        rank_pool.run(lambda world: None, 2)
