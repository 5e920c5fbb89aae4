"""Helpers of the tests: the mark of tests that run on ranks, small models, and the comparison with unsharded training.

Ranks, worlds and pools are those of `fullshard.testing`. `@ranks(...)` is its mark, with a transport beside it:

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

`tests.harness.models` has small seeded models, and `tests.harness.compare` the comparison of sharded training with
the same training unsharded; both are imported by their own names, because not every test needs them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fullshard import platforms
from fullshard.testing import Outcome, RankPool, World, failure_report
from fullshard.testing import simulated_world as fake_world

Test = TypeVar("Test", bound=Callable[..., None])

#: The simulated accelerators, which a test names in place of a transport: see `tests.simulated`.
SIMULATED = ("checked", "late")
#: The hosts on which ranks pretend to be, by rank, with the transport ``hosts``.
HOSTS = "aabb"
#: Runs a test in the quick lane too with all its cases, world sizes and real transports.
everywhere = pytest.mark.everywhere


def ranks(
    *sizes: int, timeout: float = 60.0, transport: str | None = None, fresh: bool = False
) -> Callable[[Test], Test]:
    """Run a test on the first `size` ranks of the pool, once for each of `sizes`; it takes an argument `world`.

    `timeout` is in seconds, for one size. `transport` is for tests of what depends on how buffers move; without it the
    environment decides, as it does for users. `fresh` is for tests of what is chosen once for a process group: they
    have one that served no other test, and serves none after.
    """

    def mark(test: Test) -> Test:
        if transport is not None:
            test = pytest.mark.transport(transport)(test)
        marked: Test = pytest.mark.ranks(*sizes, timeout=timeout, fresh=fresh)(test)
        return marked

    return mark


@contextmanager
def pretended_hosts(hosts: str) -> Iterator[None]:
    """A context in which rank ``i`` runs on the host that letter ``i`` names, if there is one."""
    at = dist.get_rank() if hosts and dist.is_initialized() else len(hosts)
    with patch.object(platforms, "pretended_host", hosts[at : at + 1]):
        yield


__all__ = ["HOSTS", "SIMULATED", "Outcome", "RankPool", "World", "everywhere", "failure_report", "fake_world"]
__all__ += ["pretended_hosts", "ranks"]
