"""Helpers of the tests: ranks to run on, small models, and the comparison with unsharded training.

A test on several ranks is an ordinary test with a mark. Its body runs once on each of the first `W` ranks of a
pool of processes, which is started by the first such test and kept until the last; during the body the default
process group (gloo) has exactly `W` ranks, so that for the code under test the world *is* `W`:

    import pytest
    import torch.distributed as dist

    from tests.harness import World, ranks

    @ranks(1, 2, 4)                                        # one test for each world size
    @pytest.mark.parametrize("rows", [3, 5])
    def test_sum_of_ranks(world: World, rows: int) -> None:
        total = torch.full((rows,), world.rank)
        dist.all_reduce(total)
        assert total[0] == world.size * (world.size - 1) // 2

There are two lanes. `make test` runs the quick one, which leaves out what proves the tests rather than the library, or
proves it once more: torch's own library in the same cases; worlds of other sizes than 2 (in tests/parity and
tests/comm 2 and 3) where a test has that one; in tests/parity all transports but the first (tests/comm compares their
bytes); and tests with the mark `slow`. What it leaves out has that mark when pytest selects: `-m slow` runs it alone.
Of a test with three parameters or more (the number of ranks is one) it takes so many cases that every two values meet,
and on four ranks so many that each value is met: a mistake that only more values together show is left to the long
lane. `make test-all` runs everything. A test with the mark `@everywhere` has all its cases, worlds and real transports
in both lanes. Parity on simulated accelerators stands in `tests.simulated` for the quick lane, each way to
train once.

What a test may count on, and what it may not:

- the function is found in the ranks by its module and name, and its arguments are pickled: parameters and fixtures
  such as `tmp_path` (the same folder on every rank) arrive, `monkeypatch` and `capsys` do not; use
  `pytest.MonkeyPatch.context()`, `pytest.raises` and `pytest.warns` inside the body;
- the random seed is 0 on every rank; environment variables and torch's default dtype are put back afterwards; what
  else a test changes in its process stays there for the next one, so it has to be undone by the test;
- a rank that raises, dies or hangs (`@ranks(2, timeout=120)`; the default is 60 seconds) fails the test: the cause
  comes first, with the traceback or the stacks of every rank that has something else to say. The ranks of a failed
  test are thrown away, so that the next test starts with fresh ones.

A test about failing ranks wants to look at the failures instead. It takes the fixture `rank_pool`, or its own
processes, and gets one `Outcome` for each rank (`returned`, `raised`, `skipped`, `died` or `hung`):

    def test_peers_notice_a_dead_rank(rank_pool: RankPool) -> None:
        outcomes = rank_pool.run(die_in_backward, 2, timeout=30)     # die_in_backward(world) is a module-level function
        assert [outcome.kind for outcome in outcomes] == ["died", "raised"]

    with RankPool(2) as pool:                              # plain processes of one's own, also outside of pytest
        outcomes = pool.run(function, 2, argument, keyword=3)

`fake_world(1024)` makes the test process believe that it is one rank of many, with collectives that move nothing.

`tests.harness.models` has small seeded models, and `tests.harness.compare` the comparison of sharded training with
the same training unsharded; both are imported by their own names, because not every test needs them.
"""

from tests.harness.fake import fake_world
from tests.harness.pool import RankPool, failure_report
from tests.harness.rank import Outcome, World, everywhere, ranks

__all__ = ["Outcome", "RankPool", "World", "everywhere", "failure_report", "fake_world", "ranks"]
