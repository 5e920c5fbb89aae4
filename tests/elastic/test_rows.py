"""Rows of processes: which stay, which are new, and which logical replicas each plays."""

from __future__ import annotations

import itertools

import pytest

from fullshard.elastic.rows import arrange, missing_shards, replicas_of, shard_for, spare


def test_rows_that_are_whole_stay_and_come_first() -> None:
    assert arrange([(0, 1), (2, 3), (4, 5)], {0: 0, 2: 0, 3: 1, 4: 0, 5: 1}, 2, 3) == ((2, 3), (4, 5))


def test_processes_of_broken_rows_form_a_new_one() -> None:
    assert arrange([(0, 1), (2, 3)], {0: 0, 3: 1}, 2, 2) == ((0, 3),)


def test_there_are_no_more_rows_than_replicas() -> None:
    assert arrange([], {each: each % 2 for each in range(8)}, 2, 3) == ((0, 1), (2, 3), (4, 5))


def test_without_one_of_the_shards_there_is_no_row() -> None:
    assert arrange([(0, 1)], {0: 0, 2: 0}, 2, 2) == ()
    assert missing_shards({0: 0, 2: 0}, 3) == [1, 2]


@pytest.mark.parametrize("left", [each for size in range(7) for each in itertools.combinations(range(6), size)])
def test_a_row_has_one_process_for_each_shard_and_none_is_in_two(left: tuple[int, ...]) -> None:
    shard_of = {process: process % 2 for process in left}
    rows = arrange([(0, 1), (2, 3), (4, 5)], shard_of, 2, 3)
    placed = [process for row in rows for process in row]
    assert len({*placed}) == len(placed)
    assert {*placed} <= {*left}
    assert all([shard_of[process] for process in row] == [0, 1] for row in rows)
    assert len(rows) == min(len([each for each in left if each % 2 == shard]) for shard in (0, 1))


@pytest.mark.parametrize("replicas", range(1, 9))
def test_every_replica_is_played_once_and_as_evenly_as_possible(replicas: int) -> None:
    for rows in range(1, replicas + 1):
        played = [replicas_of(row, rows, replicas) for row in range(rows)]
        assert [each for row in played for each in row] == [*range(replicas)]
        assert max(map(len, played)) - min(map(len, played)) <= 1


def test_a_new_process_gets_the_shard_that_the_fewest_have() -> None:
    assert shard_for({0: 0, 1: 1, 2: 0}, 2) == 1
    assert shard_for({0: 0, 1: 1}, 3) == 2


def test_a_process_is_spared_if_its_shard_has_two_more_than_one_that_a_row_lacks() -> None:
    shard_of = {0: 0, 2: 0, 4: 0, 5: 1}
    assert spare([(4, 5)], shard_of, [], 3, 2) == [0, 2]
    assert spare([(4, 5)], shard_of, [1], 3, 2) == [], "a new process brings the shard"
    assert spare([(4, 5)], shard_of, [0], 3, 2) == [0, 2]
    assert spare([(4, 5)], shard_of, [], 1, 2) == [], "there are no more rows"
    assert spare([], {0: 0, 2: 0}, [], 2, 2) == [0, 2], "the other shard is lost"
    assert spare([], {0: 0}, [], 2, 2) == []
    assert spare([(0, 1, 2)], {0: 0, 1: 1, 2: 2, 3: 0}, [], 2, 3) == []


@pytest.mark.parametrize("left", [each for size in range(3, 9) for each in itertools.combinations(range(9), size)])
def test_spared_processes_come_to_rest_in_as_many_rows_as_can_be(left: tuple[int, ...]) -> None:
    """One after another comes back as a new process with the shard that the fewest have."""
    shard_of, new = {process: process % 3 for process in left}, 9
    rows = arrange([(0, 1, 2), (3, 4, 5), (6, 7, 8)], shard_of, 3, 3)
    while found := spare(rows, shard_of, [], 3, 3):
        del shard_of[found[-1]]
        shard_of[new] = shard_for(shard_of, 3)
        rows, new = arrange(rows, shard_of, 3, 3), new + 1
        assert new < 9 + 4
    assert len(rows) == len(left) // 3
