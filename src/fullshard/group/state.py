"""The states of a group, and which may follow which; and what all groups of a tree agree on.

::

    SHARDED ──unshard──▶ GATHERING ──wait──▶ UNSHARDED ──reshard──▶ SHARDED
                             ▲                    └────rest────▶ RESTING (sharded over a smaller mesh)
                             └──────────unshard────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from fullshard.device import PASSED, Mark


class State(Enum):
    """Where the values of a group are."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()
    RESTING = auto()

    __hash__ = object.__hash__  # members are compared by identity; that of Enum is a function of Python


LEGAL = {
    State.SHARDED: {State.GATHERING, State.UNSHARDED},
    State.GATHERING: {State.UNSHARDED},
    State.UNSHARDED: {State.SHARDED, State.RESTING},
    State.RESTING: {State.GATHERING, State.SHARDED},
}


@dataclass
class Clock:
    """What a tree of modules agrees on: values gathered in an earlier epoch may have been written since."""

    epoch: int = 0
    #: Is called when a backward reaches any of its groups.
    begin_backward: Callable[[], None] = lambda: None
    #: The optimizer's writes, for gathers that start before the current lane would have come to them.
    written: Mark = PASSED
    #: Whether ranks that share memory read it now: in a forward or backward.
    reading: bool = False
    #: Steps of optimizers on the groups of the tree.
    steps: int = 0
