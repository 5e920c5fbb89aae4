"""Copies of the states of shards in the memory of other processes: a job goes back to them if a shard is lost.

Owns which process holds a copy, and to which step a membership can go back. Plain functions of integers.

Every so many steps each process packs the state of its shard, keeps it, and sends it to its *holder*, a process that
has a different shard. A step can be gone back to if every member has kept its own state of it, and for each shard that
no member has, a member holds a copy::

             member 0 (shard 0)                      member 1 (shard 1), which ends in step 7
    step 4   its own state, a copy of shard 1        its own state, a copy of shard 0
    step 6   its own state                           its own state, on its way to member 0
                │
                ▼
    member 0 goes back to step 4, and sends the copy of shard 1 to a new process
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from fullshard.elastic.state import PackedState


class Copy(NamedTuple):
    """The state of a shard before a step; a message to the process that holds it."""

    number: int  # of the membership in which it was sent
    step: int
    shard: int
    data: PackedState


def holder_of(process: int, shard_of: Mapping[int, int], host_of: Mapping[int, str]) -> int | None:
    """The member that holds the copy of a member: the next one that has a different shard, if possible on a different
    host. ``None`` if all have the same shard."""
    ring = [*shard_of]
    at = ring.index(process)
    others = [each for each in ring[at + 1 :] + ring[:at] if shard_of[each] != shard_of[process]]
    return min(others, key=lambda each: host_of.get(each) == host_of.get(process), default=None)


def find_way_back(
    latest: int, shard_of: Mapping[int, int], lost: Collection[int], copies: Mapping[int, Collection[tuple[int, int]]]
) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """The last step to which members can go back without the ``lost`` shards, and for each of these the process that
    has its copy. All can begin at the step ``latest`` as they are; ``copies`` are the steps and shards of the copies
    that each has."""
    for step in sorted({step for each in copies.values() for step, _ in each if step <= latest}, reverse=True):
        holders = {shard: process for shard in lost for process in shard_of if (step, shard) in copies[process]}
        has_own = step == latest or all((step, shard) in copies[each] for each, shard in shard_of.items())
        if has_own and len(holders) == len(lost):
            return step, tuple(holders.items())
    return None


def outdated(copies: Collection[tuple[int, int]], step: int, every: int) -> list[tuple[int, int]]:
    """The copies that a process may drop when it has copied its state before ``step``, because all copies of the time
    before have reached their holders. With a copy in each step, only the copies before those are certain to have."""
    return [key for key in copies if key[0] < step - max(every, 2)]
