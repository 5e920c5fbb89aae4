"""The training step of a tree of modules: which pass runs, what was counted, and who logs what happens.

The groups of a tree share one :class:`Step`. The schedule makes it and changes it; groups read it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Literal
from weakref import WeakKeyDictionary

from fullshard.device import PASSED, Mark

Kind = Literal["forward", "backward"]  # of a pass
#: What happens to a group, see :class:`~fullshard.schedule.step_log.StepEvent`; or to a pass, or a unit's modules.
Action = Literal["gather", "reuse", "unshard", "reshard", "rest", "reduce", "begin", "end", "forward", "backward"]
NOTHING: frozenset[int] = frozenset()


class Pass(Enum):
    """The pass that runs: an outermost forward, a backward, a backward inside a forward, or none."""

    NONE = False, False, False
    FORWARD = True, False, True
    BACKWARD = False, True, True
    NESTED = True, True, True
    FINALIZING = False, True, False  # what backwards left is being reduced between passes

    def __init__(self, has_forward: bool, has_backward: bool, reads_shared: bool) -> None:
        self.has_forward, self.has_backward = has_forward, has_backward  # whether one has begun that has not ended
        self.reads_shared = reads_shared  # whether ranks read the memory that they share, and none writes to it


#: The pass that runs after another begins or ends.
BEGIN = {
    (Pass.NONE, "forward"): Pass.FORWARD,
    (Pass.NONE, "backward"): Pass.BACKWARD,
    (Pass.FORWARD, "backward"): Pass.NESTED,
}
END = {
    (Pass.FORWARD, "forward"): Pass.NONE,
    (Pass.BACKWARD, "backward"): Pass.NONE,
    (Pass.NESTED, "backward"): Pass.FORWARD,
    (Pass.NESTED, "forward"): Pass.BACKWARD,  # an error ended the backward in it
    (Pass.NONE, "backward"): Pass.NONE,  # reset_iter_state() was called in it
}
#: The pass while what backwards left is being reduced, and after an error ended that or the wait for reductions.
FINALIZE = {Pass.NONE: Pass.FINALIZING, Pass.FORWARD: Pass.NESTED}


class Log:
    """Is told everything that happens in a step, once, where it starts. This base class keeps nothing.

    Attributes:
        listeners: functions of an action, its subject, and a flag: of a group, whether bytes move; of a unit, whether
            its modules begin (or end) to compute. The subject is a pass where one begins or ends. Logging costs
            nothing without listeners.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[Action, Any, bool], object]] = []

    def __call__(
        self, action: Action, group: Any, parameters: frozenset[int] = NOTHING, moves: bool = True
    ) -> AbstractContextManager[object] | None:
        """Log an action on a group, the indices of parameters that it reduces, and whether bytes move (not in memory
        that ranks share). What is returned, if anything, is to be open while the communication starts."""
        return None


class Step:
    """The step of a tree.

    Attributes:
        now: the pass that runs.
        forwards: outermost forwards so far. Values gathered before the last one may be old: shards may have changed.
        optimizer_steps: steps on the parameters of the tree; one, if optimizers take turns between two passes.
        steps_before: how many of these came before the pass that runs, or else before the last one.
        updates: steps of each optimizer on the parameters of the tree, also those in a backward.
        written: marks the end of the optimizers' writes. A gather runs in another lane, and waits for it.
        begin_backward: called when a backward reaches any of the groups.
        log: called with everything that happens to a group.
    """

    def __init__(self, begin_backward: Callable[[], None] = lambda: None) -> None:
        self.now = Pass.NONE
        self.forwards = self.optimizer_steps = self.steps_before = self.updates = 0
        self.written: Mark = PASSED
        self.begin_backward = begin_backward
        self.log = Log()
        #: The step that each optimizer made last. Programs may make an optimizer for each parameter, and drop it then.
        self._stepped = WeakKeyDictionary[object, int]()

    def count_step(self, optimizer: object) -> None:
        """Count a step of an optimizer. Ranks may have different numbers of optimizers, each for some parameters."""
        count = self._stepped[optimizer] = max(self._stepped.get(optimizer, 0), self.steps_before) + 1
        self.optimizer_steps = max(self.optimizer_steps, count)
