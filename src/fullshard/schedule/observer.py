"""The events of a step, and the observers that are told of them.

Order tests, profiles, reports and checks are observers. Without observers there are no events, and no cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Action = Literal["gather", "reuse", "unshard", "reshard", "rest", "reduce"]
Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class Event:
    """One thing that happened to one group.

    Args:
        action: ``gather`` (communication started), ``unshard`` (what was gathered is there and the modules show it),
            ``reuse`` (the values were still there and the modules show them), ``reshard``, ``rest`` (resharded to a
            smaller mesh), ``reduce`` (the reduction of its gradients started).
        group: fully qualified name of the group's module, ``""`` for the root.
        during: the pass.
        step: counts forwards of the root.
    """

    action: Action
    group: str
    during: Pass
    step: int


class Observer(Protocol):
    """Is called on the rank itself, in the order in which things happen there."""

    def __call__(self, event: Event) -> None: ...
