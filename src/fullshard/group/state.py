"""The states of a group, and which may follow which.

::

    SHARDED ──unshard──▶ GATHERING ──wait──▶ UNSHARDED ──reshard──▶ SHARDED
                             ▲                    └────rest────▶ SHARDED_POST_FORWARD (sharded over a smaller mesh)
                             └──────────unshard────────────────────┘
"""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    """Where the values of a group are."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()
    SHARDED_POST_FORWARD = auto()

    __hash__ = object.__hash__  # members are compared by identity; that of Enum is a function of Python


LEGAL = {
    State.SHARDED: {State.GATHERING, State.UNSHARDED},
    State.GATHERING: {State.UNSHARDED},
    State.UNSHARDED: {State.SHARDED, State.SHARDED_POST_FORWARD},
    State.SHARDED_POST_FORWARD: {State.GATHERING, State.SHARDED},
}
