"""Tests on several ranks: real processes and real numbers, on a laptop, in milliseconds a test.

pytest finds the plugin by itself. A test on several ranks is an ordinary test with a mark::

    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.ranks(2, 4)                                # one test for each world size
    def test_sum_of_ranks(world):
        total = torch.full((3,), world.rank)
        dist.all_reduce(total)
        assert total[0] == world.size * (world.size - 1) // 2

Its body, its fixtures and its ``setUp`` run on each of the first 2 or 4 ranks of a pool of processes, in a default
process group (gloo) of that size. How to write such tests, step by step: ``docs/how-to/test.md``.
"""

from fullshard.testing.asserts import assert_checkpoint_round_trip, assert_same_on_all_ranks, assert_trains_like
from fullshard.testing.pool import Conditions, RankPool, failure_report
from fullshard.testing.rank import Outcome, World
from fullshard.testing.simulated import simulated_world

__all__ = [
    "Conditions",
    "Outcome",
    "RankPool",
    "World",
    "assert_checkpoint_round_trip",
    "assert_same_on_all_ranks",
    "assert_trains_like",
    "failure_report",
    "simulated_world",
]
