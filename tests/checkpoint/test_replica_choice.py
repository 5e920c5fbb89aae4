"""Which host gets the copy of which, and which of a replica and a checkpoint of the same step is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard import checkpoint
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.replicas import Hosts
from tests.checkpoint.test_faults import filled
from tests.checkpoint.test_replicas import assert_all, replicas_of
from tests.harness import World, ranks


class Alone(Ranks):
    """One rank of a job whose hosts have some ranks each. No other rank is there."""

    def __init__(self, rank: int, hosts: list[int]) -> None:
        self.rank, self.size = rank, sum(hosts)
        self._places = [host for host, members in enumerate(hosts) for _ in range(members)]

    def attempt(self, call: Callable[[], Any]) -> tuple[Any, list[Any]]:
        return call(), [(place, {}) for place in self._places]


def test_of_many_hosts_each_sends_its_files_half_of_them_away(tmp_path: Path) -> None:
    for hosts, targets in (
        ([1] * 3, [1, 2, 0]),
        ([1] * 4, [2, 3, 0, 1]),
        ([1] * 5, [2, 3, 4, 0, 1]),
        ([1] * 6, [3, 4, 5, 0, 1, 2]),
        ([2, 1], [2, 2, 0]),
        ([2, 1, 2, 1], [3, 4, 5, 0, 1, 2]),
        ([3, 1, 1, 1], [4, 4, 4, 5, 0, 3]),
        ([3], [None] * 3),
    ):
        made = [Hosts(tmp_path, Alone(rank, hosts)) for rank in range(sum(hosts))]
        assert [each.to for each in made] == targets
        for rank, each in enumerate(made):
            assert each.sources == [source for source, to in enumerate(targets) if to == rank]


@ranks(2)
def test_of_equal_steps_what_was_saved_last_is_loaded(world: World, tmp_path: Path) -> None:
    model, replicas = filled(), replicas_of(tmp_path, 2)

    def save(value: int, **options: Any) -> None:
        model.fill(value)
        checkpoint.save(tmp_path, model, step=2, **options)

    def loaded() -> Any:
        model.fill(9)
        return checkpoint.load(tmp_path, model, replicas=replicas)

    save(1)
    save(3, replicas=replicas)
    assert loaded() == {"step": 2}
    assert_all(model, 3)
    save(4)
    assert loaded() == {"step": 2}
    assert_all(model, 4)
    save(5, replicas=replicas)
    assert loaded() == {"step": 2}
    assert_all(model, 5)


@ranks(2)
def test_a_replica_is_stale_once_its_own_step_is_on_the_disk(world: World, tmp_path: Path) -> None:
    """As of a job that saves in-memory replicas often, and every tenth on the disk too."""
    model, replicas = filled(), replicas_of(tmp_path, 2)
    model.fill(1)
    checkpoint.save(tmp_path, model, step=2, replicas=replicas)
    model.fill(2)
    checkpoint.save(tmp_path, model, step=2)
    model.fill(9)
    assert checkpoint.load(tmp_path, model, replicas=replicas) == {"step": 2}
    assert_all(model, 2)
