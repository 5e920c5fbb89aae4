"""Handles of communication that a user started and waits for later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self


class Handle:
    """Communication that was started, and the work that follows it."""

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Wait for the communication, and complete what depends on it. A second call does nothing."""
        if self._wait is not None:
            self._wait()
            self._wait = None

    def returned_if(self, async_op: bool) -> Self | None:
        """Return the handle with ``async_op``; without it wait, and return ``None``."""
        if async_op:
            return self
        self.wait()
        return None


class UnshardHandle(Handle):
    """A gather that ``unshard(async_op=True)`` started. After ``wait()`` the module shows the unsharded parameters.

    Ranks: each for itself.
    """


class GradientReductionHandle(Handle):
    """Reductions that ``finalize_backward(async_op=True)`` started.

    After ``wait()`` the gradients may be used, and the next forward may run.

    Raises:
        RuntimeError: by ``wait()``, if ``reset_iter_state()`` was called before.

    Ranks: each for itself.
    """
