"""The states of a group, and which may follow which.

::

    SHARDED ──unshard──▶ GATHERING ──wait──▶ UNSHARDED ──reshard──▶ SHARDED
                             ▲                    └────rest────▶ RESTING (sharded over a smaller mesh)
                             └──────────unshard────────────────────┘
"""

from __future__ import annotations

from enum import Enum, auto


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
