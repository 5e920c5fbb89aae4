"""What a function finds on its rank, and what it leaves there."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from fullshard.testing import RankPool, World, simulated_world
from fullshard.testing.rank import current_world
from tests.harness import ranks


@ranks(2)
def test_a_rank_finds_what_torchrun_tells(world: World) -> None:
    assert current_world() == world
    told = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")}
    assert told == {
        "RANK": str(world.rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(world.rank),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
    }


def test_there_is_no_world_outside_of_a_rank() -> None:
    with pytest.raises(RuntimeError, match="no test runs on this process as a rank"):
        current_world()


def leave_groups(world: World) -> None:
    dist.new_group([0, 1], group_desc="mine")
    world.mesh(2, 1, names=("outer", "inner"))
    dist.destroy_process_group(dist.new_group([0]) if world.rank == 0 else dist.new_group([1]))


def replace_the_default_group(world: World) -> None:
    dist.destroy_process_group()
    with simulated_world(2):
        pass
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False
    )
    prefixed = dist.PrefixStore("mine", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=prefixed, rank=world.rank, world_size=2)


def count_groups(world: World) -> int:
    return len(dist.distributed_c10d._world.pg_map)


def test_groups_left_behind_are_named_and_destroyed(rank_pool: RankPool) -> None:
    for function, left in (
        (leave_groups, ("the group 'mine' of the ranks [0, 1]",)),
        (replace_the_default_group, ("a default group that it made itself, of 2 ranks",)),
        (count_groups, ()),
    ):
        outcomes = rank_pool.run(function, 2)
        assert [outcome.kind for outcome in outcomes] == ["returned"] * 2, outcomes[0].report
        assert [outcome.left for outcome in outcomes] == [left] * 2
    assert [outcome.value for outcome in outcomes] == [1, 1]


def draw(world: World) -> float:
    return torch.rand(()).item()


def test_the_seed_decides_what_is_drawn(rank_pool: RankPool) -> None:
    drawn = [[outcome.value for outcome in rank_pool.run(draw, 2, seed=seed)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] == drawn[0][1]
