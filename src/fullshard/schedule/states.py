"""The states of a unit, and which may follow which.

A state has what belongs to it, so that nothing of it is left when it ends. Autograd's graph refers to a :class:`Use`
alone: a state would keep the inputs of its forward alive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fullshard.schedule import marks


class Use:
    """One forward, as autograd's graph refers to it."""

    updates = 0  # steps of optimizers before it


class Idle:
    """The state of a unit of which nothing runs, and the base of all states."""

    name = "idle"
    to_run: Collection[nn.Module] = ()  # modules whose forward has not ended
    in_method = False  # whether a method of a module runs, whose forwards are part of it
    is_opaque = False  # whether a forward returned no tensor: nothing tells when its backward begins
    uses: set[Use] | None = None  # those whose backward has begun and not ended
    is_differentiated = False  # whether a backward goes through an earlier one of the unit


@dataclass(eq=False)
class Forward(Idle):
    """A forward runs: of one module after another, if there are several. A backward in it does not change the state."""

    name = "forward"
    use: Use
    to_run: set[nn.Module] = field()
    is_transformed = False  # whether the module that runs is under a transform
    #: The inputs of the first module that are marked, their aliases, and their versions before it.
    marked: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], list[int]] = marks.NONE


class Recomputation(Forward):
    """A forward runs inside of a backward. It may stop before it ends."""

    name = "recomputation"


@dataclass(eq=False)
class Backward(Idle):
    """A backward runs. A forward in it recomputes what the backward needs, and does not change the state."""

    name = "backward"
    uses: set[Use] = field(default_factory=set)


IDLE = Idle()
#: The states that may follow each state; IDLE may follow all of them.
LEGAL = {
    "idle": {"forward", "recomputation", "backward"},
    "forward": set[str](),
    "recomputation": {"backward"},
    "backward": set[str](),
}
