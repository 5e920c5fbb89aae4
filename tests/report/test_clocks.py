"""Traces of hosts whose clocks differ have the times of one clock."""

from __future__ import annotations

import socket
import time

import pytest
import torch.distributed as dist

import fullshard
from fullshard.comm.waits import WAITS
from fullshard.report import profile
from tests.harness import World, ranks
from tests.report.cases import sharded, trained

SECOND = 1_000_000_000


@ranks(2)
@pytest.mark.parametrize("ahead", [5 * SECOND, -5 * SECOND])
def test_times_of_another_host_are_those_of_the_first(world: World, ahead: int) -> None:
    clock = time.monotonic_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "host_id", lambda: f"{socket.gethostname()} {world.rank}")
        for owner, name in ((time, "monotonic_ns"), (WAITS, "clock")):
            patch.setattr(owner, name, lambda: clock() + ahead * world.rank)
        model = sharded()
        train = trained(model)
        begun = clock()  # of the clock of the machine, which is rank 0's
        dist.barrier()
        trace = fullshard.profile(model, steps=1)
        train(0)
        trace.gather()
        ended = clock()
    if world.rank == 0:
        assert [rank.clock_error > 0 for rank in trace.ranks] == [False, True]
        for rank in trace.ranks:
            error = rank.clock_error
            assert error < SECOND
            assert all(begun - error <= span.start <= span.end <= ended + error for span in rank.spans)
            assert all(begun - error <= when <= ended + error for when, _ in rank.memory)
