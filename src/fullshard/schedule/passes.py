"""When the ranks of a host may read the parameters that they share.

A *pass* is an outermost forward or a backward. In a pass every rank reads what all of them wrote before it, and nobody
writes; between passes everybody may write its shards (optimizers, checkpoints, averages, plain assignments) and nobody
reads those of others. Owns the beginnings and ends of passes, at which ranks wait for each other; with ranks that have
memory of their own there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fullshard.comm.transport import PassBarrier
from fullshard.group.comm_context import Clock
from fullshard.group.group import Group

Kind = Literal["forward", "backward"]


class Passes:
    """The passes of one tree of modules; ``clock`` tells its groups whether they are in one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kind: Kind | None = None
        #: Steps of optimizers when the last pass began.
        self.steps = 0
        self._barriers: list[PassBarrier] = []
        self._groups: list[Group] = []  # those whose ranks share memory

    def begin(self, kind: Kind, groups: Iterable[Group]) -> None:
        """Make this rank's shards known, and wait until all ranks have. Inside another pass nothing happens."""
        if self._kind is not None:
            return
        barriers: dict[int, PassBarrier] = {}  # one for all groups that the same ranks share
        self._groups = []
        for group in groups:
            if group.memory.shared is not None and not group.memory.is_apart:
                group.full.publish(whatever=kind == "forward")
                barriers.setdefault(id(group.transport), group.memory.shared.memory.barrier)
                self._groups.append(group)
        self._kind, self.steps = kind, self._clock.steps
        self._barriers = list(barriers.values())
        for barrier in self._barriers:
            barrier.enter(f"the beginning of a {kind}", 1 if kind == "backward" else 0, self.steps)
        self._clock.reading = True
        for group in self._groups:
            if not group.is_unsharded:
                group.full.let_read(True)

    def end(self, kind: Kind) -> None:
        """Wait until all ranks have read what they need."""
        if self._kind is not kind:
            return
        self._stop_reading()
        for barrier in self._barriers:
            barrier.leave(f"the end of a {kind}")

    def give_up(self) -> None:
        """End the pass that an error cut short, and wait for nobody."""
        self._stop_reading()
        for barrier in self._barriers:
            barrier.give_up()

    def _stop_reading(self) -> None:
        self._kind, self._clock.reading = None, False
        for group in self._groups:
            if not group.is_unsharded:
                group.full.let_read(False)
