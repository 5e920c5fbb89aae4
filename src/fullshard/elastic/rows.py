"""Which process plays which logical rank: rows of processes, each of which plays whole logical replicas.

A logical rank is a place in a grid of replicas by shards, whose size never changes. A *row* has one process for each
shard, and runs the micro-batches of one or more logical replicas, one replica after another. A process that is in no
row stands by: it has a shard and steps with the others, but computes no gradients. Plain functions of integers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

Row = tuple[int, ...]  # a process for each shard


def arrange(rows: Sequence[Row], shard_of: Mapping[int, int], shards: int, replicas: int) -> tuple[Row, ...]:
    """The rows of the processes in ``shard_of``, which maps each to its shard. Complete rows stay, and come
    first. The other processes form more rows, at most one for each replica. They form none if a shard is missing."""
    kept = [row for row in rows if all(process in shard_of for process in row)]
    placed = {process for row in kept for process in row}
    free: list[list[int]] = [[] for _ in range(shards)]
    for process, shard in shard_of.items():
        if process not in placed:
            free[shard].append(process)
    return (*kept, *zip(*free, strict=False))[:replicas]


def replicas_of(row: int, rows: int, replicas: int) -> range:
    """The logical replicas that one of ``rows`` plays, as even as possible."""
    return range(row * replicas // rows, (row + 1) * replicas // rows)


def missing_shards(shard_of: Mapping[int, int], shards: int) -> list[int]:
    """The shards that no process has."""
    return sorted({*range(shards)}.difference(shard_of.values()))


def shard_for(shard_of: Mapping[int, int], shards: int) -> int:
    """The shard that the fewest processes have: a new process gets it."""
    had = [*shard_of.values()]
    return min(range(shards), key=had.count)


def spare(
    rows: Sequence[Row], shard_of: Mapping[int, int], coming: Collection[int], replicas: int, shards: int
) -> list[int]:
    """The processes in ``shard_of`` that would do more with a different shard: they stand by, and a shard that a
    further row lacks has at least two processes less than theirs. ``coming`` are the shards of new processes."""
    had = [*shard_of.values(), *coming]
    fewest = min(map(had.count, range(shards)))
    placed = {process for row in rows for process in row}
    found = [each for each, shard in shard_of.items() if each not in placed and had.count(shard) > fewest + 1]
    return found if fewest < replicas else []
