"""What ranks tell each other while they save and load, and how an error of one becomes an error of all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard import checkpoint
from fullshard.checkpoint.blocks import CheckpointError, CorruptCheckpointError
from fullshard.checkpoint.ranks import PeerFailure, Ranks
from fullshard.comm.waits import PeerFailureError
from tests.harness import World, ranks


def fails(error: Exception | None, result: Any = None) -> Any:
    if error is not None:
        raise error
    return result


def test_without_a_process_group_it_is_this_process_alone() -> None:
    alone = Ranks(None)
    assert (alone.rank, alone.size, alone.first) == (0, 1, True)
    assert alone.gather(5) == alone.gather_to_first(5) == [5]
    assert alone.broadcast("x") == "x"
    assert (alone.any(True), alone.any(False)) == (True, False)
    assert alone.attempt(lambda: (1, "last")) == ((1, "last"), ["last"])
    assert alone.attempt(lambda: 7) == (7, [None])
    with pytest.raises(CheckpointError, match=r"^ValueError: bad$"):
        alone.attempt(lambda: fails(ValueError("bad")))


@ranks(3)
def test_objects_come_in_the_order_of_ranks(world: World) -> None:
    everyone = Ranks(None)
    assert (everyone.rank, everyone.size, everyone.first) == (world.rank, 3, world.rank == 0)
    assert everyone.gather({"r": world.rank}) == [{"r": 0}, {"r": 1}, {"r": 2}]
    assert everyone.gather_to_first("x" * world.rank) == (["", "x", "xx"] if world.rank == 0 else [])
    assert everyone.broadcast(world.rank) == 0
    assert everyone.broadcast(world.rank, source=2) == 2
    assert everyone.any(world.rank == 1)
    assert not everyone.any(False)


@ranks(2)
def test_a_process_that_was_forked_from_a_rank_is_refused(world: World, tmp_path: Path) -> None:
    if not (child := os.fork()):
        try:
            checkpoint.load(tmp_path, torch.nn.Linear(2, 2))
        except CheckpointError as error:
            os._exit(7 if "was forked from a rank" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert Ranks(None).gather(world.rank) == [0, 1]


@ranks(3)
def test_ranks_of_a_part_are_counted_from_its_first(world: World) -> None:
    group = dist.new_group([1, 2])
    if world.rank == 0:
        return
    some = Ranks(group)
    assert (some.rank, some.size) == (world.rank - 1, 2)
    assert some.gather(world.rank) == [1, 2]
    assert some.broadcast(world.rank, source=1) == 2


@ranks(2)
def test_a_save_in_the_background_has_a_group_of_its_own(world: World) -> None:
    beside, another = Ranks(None), Ranks(None)
    beside.communicate_in_background()
    another.communicate_in_background()
    assert beside.group is another.group is not dist.group.WORLD
    assert Ranks(None).group is dist.group.WORLD
    assert beside.gather(world.rank) == [0, 1]


@ranks(2)
def test_a_save_in_the_background_has_another_group_than_what_training_asks_with_nccl(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        config = lambda group: "cuda:nccl" if group is dist.group.WORLD else "cpu:gloo"  # noqa: E731
        patch.setattr(dist, "get_backend_config", config)
        beside, before = Ranks(None), Ranks(None)
        beside.communicate_in_background()
        assert len({beside.group, before.group, dist.group.WORLD}) == 3
        assert Ranks(None).group is before.group


@ranks(2)
def test_an_error_of_one_rank_is_raised_on_all_and_says_whose_it_is(world: World) -> None:
    everyone = Ranks(None)
    assert everyone.attempt(lambda: (world.rank, f"last of {world.rank}")) == (
        (world.rank, f"last of {world.rank}"),
        ["last of 0", "last of 1"],
    )
    with pytest.raises(CheckpointError, match=r"^rank 1: ValueError: bad$") as raised:
        everyone.attempt(lambda: fails(ValueError("bad") if world.rank else None))
    assert type(raised.value) is CheckpointError
    assert isinstance(raised.value.__cause__, ValueError) is (world.rank == 1)


@ranks(2)
@pytest.mark.parametrize("both", [False, True])
def test_only_what_is_corrupt_for_all_that_failed_is_corrupt(world: World, both: bool) -> None:
    everyone = Ranks(None)
    mine = CorruptCheckpointError("bits") if world.rank == 0 else ValueError("bad") if both else None
    says = "rank 0: bits; rank 1: ValueError: bad" if both else "rank 0: bits$"
    with pytest.raises(CheckpointError, match=says) as raised:
        everyone.attempt(lambda: fails(mine))
    assert (type(raised.value) is CorruptCheckpointError) is not both


def test_a_lost_rank_is_told_as_what_it_is() -> None:
    lost = Ranks(None).lost(RuntimeError("connection closed"))
    assert isinstance(lost, PeerFailure)
    assert isinstance(lost, (CheckpointError, PeerFailureError))
    assert "rank 0 lost its connection to another rank" in str(lost)
    assert "(connection closed)" in str(lost)
