"""Copies of shards: who holds them, and to which step members can go back (:mod:`fullshard.elastic.copies`)."""

from __future__ import annotations

from fullshard.elastic.copies import find_way_back, holder_of, outdated

FOUR = {0: 0, 1: 1, 2: 0, 3: 1}


def test_the_holder_is_the_next_process_that_has_a_different_shard() -> None:
    assert [holder_of(process, FOUR, {}) for process in FOUR] == [1, 2, 3, 0]
    assert holder_of(3, {0: 0, 1: 0, 3: 0}, {}) is None


def test_a_different_host_is_preferred() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert [holder_of(process, FOUR, hosts) for process in FOUR] == [3, 2, 1, 0]


def test_members_go_back_to_the_last_step_of_which_all_states_are_left() -> None:
    copies = {0: {(2, 0), (4, 0), (6, 0), (2, 1), (4, 1)}, 2: {(2, 0), (4, 0), (6, 0), (6, 1)}}
    assert find_way_back(9, {0: 0, 2: 0}, [1], copies) == (6, ((1, 2),))
    assert find_way_back(5, {0: 0, 2: 0}, [1], copies) == (4, ((1, 0),))
    copies[2].remove((4, 0))
    assert find_way_back(5, {0: 0, 2: 0}, [1], copies) == (2, ((1, 0),))
    assert find_way_back(4, {0: 0, 2: 0}, [1], copies) == (4, ((1, 0),))
    assert find_way_back(9, {0: 0, 2: 0}, [1, 2], copies) is None


def test_the_last_two_copies_are_kept() -> None:
    made = [(step, shard) for step in range(0, 12, 3) for shard in (0, 1)]
    assert outdated(made, 9, 3) == [(0, 0), (0, 1), (3, 0), (3, 1)]
    assert outdated([(0, 0), (1, 0), (2, 0), (3, 0)], 3, 1) == [(0, 0)]
