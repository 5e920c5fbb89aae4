"""When the reductions of a step are complete: at the end of its last backward, or when the user says so.

If the user says so, a backward waits for no reduction, and does not reduce a unit whose backward it did not see end.
Owns the choice and the order of calls. It leaves the work to the schedule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from fullshard.torch_private import running_backward


class Finalization:
    """The end of the steps of one tree of modules, whose root has a ``name``, for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.by_hand = False  # as the user chose
        self.reset()

    def reset(self) -> None:
        """Forget the step: it has ended, or an error cut it short."""
        self._began_by_hand: bool | None = None  # the choice for this step, once a backward has begun
        self._forward: Callable[[], object] = lambda: None  # returns the mark while a backward may follow
        self.is_awaited = False  # whether reductions that were finalized have yet to be waited for

    @property
    def is_by_hand(self) -> bool:
        """Whether the step that has begun, or the next, is finalized by hand."""
        return self.by_hand if self._began_by_hand is None else self._began_by_hand

    def choose(self, by_hand: bool) -> None:
        """Finalize by hand, or not; raise RuntimeError in a backward, or after one that was not finalized."""
        if by_hand != self.by_hand and running_backward() >= 0:
            raise RuntimeError("set_manual_backward_finalization cannot change mode during a backward")
        if self._began_by_hand not in (None, by_hand):
            raise RuntimeError(
                "set_manual_backward_finalization cannot change mode after a backward has started: end the step "
                "first, with finalize_backward() or a last backward, or call reset_iter_state()"
            )
        self.by_hand = by_hand

    def begin_forward(self) -> None:
        """Raise RuntimeError if an outermost forward begins while an earlier reduction was not waited for."""
        if self.is_awaited:
            raise RuntimeError(
                f"the gradient reduction of {self._name} must be waited on before the next forward: call "
                f"wait() on the handle that finalize_backward(async_op=True) returned"
            )

    def end_forward(self, mark: object | None) -> None:
        """End an outermost forward; ``mark`` lives as long as autograd's graph of it, ``None`` if it has none."""
        if mark is not None:
            self._forward = weakref.ref(mark)

    def begin_backward(self) -> None:
        self._began_by_hand = self.is_by_hand
        self._forward = lambda: None

    def check_by_hand(self, backward_runs: bool) -> None:
        """Raise RuntimeError if the step is not to be finalized by hand, or not yet."""
        if self.is_awaited:
            raise RuntimeError("the gradient reduction that was started must be waited on before another is")
        if not self.is_by_hand:
            raise RuntimeError(
                "finalize_backward requires manual finalization: call set_manual_backward_finalization(True) on the "
                "root before the forward"
            )
        if backward_runs:
            raise RuntimeError("finalize_backward must be called after backward, which has not completed")
        if self._forward() is not None:
            raise RuntimeError(
                f"finalize_backward was called between a forward of {self._name} and its backward: call it after "
                f"the backward or, if there is to be none, let go of what the forward returned"
            )
