"""What processes of an elastic job tell each other beside what :mod:`fullshard.elastic.agreement` sends."""

from __future__ import annotations

from typing import NamedTuple

from fullshard.elastic.gradients import Replica
from fullshard.elastic.packed import Packed
from fullshard.elastic.rows import Row
from fullshard.elastic.state import PackedState


class RunOrder(NamedTuple):
    """The first process of a row tells the others to run one of several replicas, or no more in a step."""

    row: Row
    step: int
    replica: int  # -1: none, because the step counts
    replicas: int


class RunMore(NamedTuple):
    """The first process of a row tells the others whether the row runs another micro-batch of a round."""

    row: Row
    step: int
    number: int
    is_wanted: bool


class Has(NamedTuple):
    """The replicas whose gradients a process has. Sent when a membership begins, and at the end of a row's round."""

    number: int
    step: int
    replicas: tuple[Replica, ...]


class RowValue(NamedTuple):
    """What the backend of one process of a row tells those of the others, when they connect."""

    row: Row
    key: str
    value: bytes


class Square(NamedTuple):
    """The sum of the squares of the gradients of a shard."""

    number: int  # of the membership in which it was sent
    step: int
    shard: int
    total: float


class Leaving(NamedTuple):
    """The sender ends, because its program does, not by an error."""

    is_done: bool  # whether it has made all steps that it was to make
    step: int  # how many steps it has made


class Welcome(NamedTuple):
    """What a new process is told: its number, its shard, and where the members are."""

    number: int
    shard: int
    size: int
    replicas: int
    seed: int
    addresses: dict[int, tuple[str, int]]
    sources: tuple[int, ...]  # the members, those that have its shard first, and of these those without a row


class Spared(NamedTuple):
    """The first member asks the receiver, which stands by, to leave and to come back for a different shard."""


class Fetch(NamedTuple):
    """A new process needs the state of its shard, and the gradients of the steps that follow."""

    process: int
    shard: int


class ShardState(NamedTuple):
    """The state of a shard before a step."""

    step: int
    data: PackedState
    back: int  # as in the membership of the sender
    is_lost: bool = False  # no member has the shard: this is a copy, and no gradients follow


class Followed(NamedTuple):
    """The mean gradients of a shard in a step that counts, and the squares by which they were clipped."""

    step: int
    data: Packed
    present: tuple[bool, ...]
    squares: tuple[Square, ...]
    back: int  # as in the sender's membership


class Candidate(NamedTuple):
    """The sender has made all steps that count, as far as it knows, and asks to be a member."""

    shard: int
    back: int  # as in the membership of the process that has sent its state
    follows: bool  # that process, which sends it the gradients of each step
    reached: frozenset[int]  # processes with which it is connected
    step: int  # that it makes next
