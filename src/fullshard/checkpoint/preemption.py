"""Preemption: after SIGTERM, all ranks agree on the step after which they save and stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from torch.distributed import ProcessGroup

from fullshard.checkpoint.ranks import Ranks

#: Windows does not deliver SIGTERM: who asks a process to end there sends Ctrl+Break.
_SIGNALS = [signal.SIGTERM, *([signal.SIGBREAK] if hasattr(signal, "SIGBREAK") else [])]


class PreemptionHandler:
    """A context in which SIGTERM does not end the process at once, but asks it to save and stop. On Windows so does
    Ctrl+Break.

    ::

        with checkpoint.PreemptionHandler(grace_period=25) as preempted:
            for step in range(first, steps):
                train(step)
                if preempted():
                    checkpoint.save(directory, model, optimizer, step=step + 1)
                    break

    Args:
        grace_period: how many seconds after SIGTERM the process ends, whatever it does then. A checkpoint that is
            incomplete by then does not become visible, and older checkpoints stay whole.
        process_group: the ranks that train together, if they are not all ranks.

    Ranks: all alike; the answer of a call is the same on all.
    """

    def __init__(self, grace_period: float = 30.0, process_group: ProcessGroup | None = None) -> None:
        self._grace_period, self._group = grace_period, process_group
        self._timer: threading.Timer | None = None
        self._before: dict[int, Any] = {}
        self._signalled_at: float | None = None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until this process ends; ``None`` if it has not received SIGTERM."""
        if self._signalled_at is None:
            return None
        return max(0.0, self._signalled_at + self._grace_period - time.monotonic())

    def __call__(self) -> bool:
        """Whether any rank has received SIGTERM. All ranks must call it, and all get the same answer."""
        return self._ranks.any(self._signalled_at is not None)

    def __enter__(self) -> Self:
        self._ranks = Ranks(self._group)
        self._before = {each: signal.signal(each, self._note_signal) for each in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)
        if self._timer is not None:
            self._timer.cancel()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()
            self._timer = threading.Timer(self._grace_period, self._end)
            self._timer.daemon = True
            self._timer.start()

    def _end(self) -> None:
        sys.stderr.write(f"fullshard: this process ends {self._grace_period:g} s after SIGTERM, before it could save\n")
        sys.stderr.flush()
        os._exit(128 + signal.SIGTERM)
