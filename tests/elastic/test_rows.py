"""Rows of processes (:mod:`fullshard.elastic.rows`)."""

from __future__ import annotations

import itertools

import pytest

from fullshard.elastic.rows import arrange, missing_shards, replicas_of, shard_for

FOUR = {0: 0, 1: 1, 2: 0, 3: 1}


def test_whole_rows_stay_and_come_first() -> None:
    rows = arrange((), FOUR, 2, 2)
    assert rows == ((0, 1), (2, 3))
    assert arrange(rows, {1: 1, 2: 0, 3: 1}, 2, 2) == ((2, 3),)
    assert arrange(((2, 3),), {1: 1, 2: 0, 3: 1, 4: 0}, 2, 2) == ((2, 3), (4, 1))


def test_processes_of_broken_rows_form_a_new_one() -> None:
    assert arrange(((0, 1), (2, 3)), {1: 1, 2: 0}, 2, 2) == ((2, 1),)


def test_there_are_no_more_rows_than_replicas_and_none_without_a_shard() -> None:
    assert arrange((), {0: 0, 1: 0, 2: 0}, 1, 2) == ((0,), (1,))
    assert arrange(((0, 1),), {1: 1, 3: 1}, 2, 2) == ()
    assert missing_shards({1: 1, 3: 1}, 2) == [0]


@pytest.mark.parametrize(("rows", "replicas"), [*itertools.product(range(1, 5), range(1, 6))])
def test_each_replica_is_played_once_and_evenly(rows: int, replicas: int) -> None:
    played = [replicas_of(row, rows, replicas) for row in range(rows)]
    assert [*itertools.chain(*played)] == [*range(replicas)]
    assert max(map(len, played)) - min(map(len, played)) <= 1


def test_a_new_process_gets_the_shard_that_the_fewest_have() -> None:
    assert shard_for(FOUR, 2) == 0
    assert shard_for({0: 0, 1: 1, 2: 0}, 2) == 1
