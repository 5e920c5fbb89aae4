"""The passes of a step: which one runs, and when the ranks of a host may read the memory that they share.

A *pass* is an outermost forward or a backward. In a pass every rank reads what all ranks wrote before it, and no rank
writes. Between passes every rank may write its own shards, and no rank reads those of others. Owns the transitions of
:class:`~fullshard.group.step.Pass`, at which ranks that share memory wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from fullshard.comm.local_ranks import PassBarrier
from fullshard.group.param_group import ParamGroup
from fullshard.group.step import Kind, Pass, Step


class Passes:
    """The passes of one tree of modules, whose groups share ``step``."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._barriers: list[PassBarrier] = []
        self._groups: list[ParamGroup] = []  # the groups whose ranks share memory

    def begin(self, kind: Kind, groups: Iterable[ParamGroup]) -> None:
        """Begin a pass. If no other pass runs, publish this rank's shards, and wait until all ranks have done so."""
        step, is_outermost = self._step, self._step.now is Pass.NONE
        step.begin_pass(kind)
        if not is_outermost:
            return
        if step.log.listeners:
            step.log("begin", kind)
        barriers: dict[int, PassBarrier] = {}  # one for all groups that the same ranks share
        self._groups = []
        for group in groups:
            if (shared := group.shard.shared) is not None and not group.shard.is_unmapped:
                shared.publish(group.full.count_writes, whatever=kind == "forward")
                barriers.setdefault(id(group.transport), shared.memory.barrier)
                self._groups.append(group)
        self._barriers = list(barriers.values())
        for barrier in self._barriers:
            barrier.enter(f"the beginning of a {kind}", 1 if kind == "backward" else 0, step.steps_before)
        for group in self._groups:
            if not group.full.state.is_unsharded:
                group.full.let_read(True)

    def leave(self, kind: Kind) -> None:
        """If no pass runs now, wait until all ranks have ended the last one, and so have read what they need."""
        if self._step.now is Pass.NONE:
            self._stop_reading()
            for barrier in self._barriers:
                barrier.leave(f"the end of a {kind}")
        if self._step.log.listeners:
            self._step.log("end", kind)

    def cancel(self) -> None:
        """End a pass that an error cut short, without waiting for other ranks."""
        self._step.now = Pass.NONE
        self._stop_reading()
        for barrier in self._barriers:
            barrier.give_up()

    def _stop_reading(self) -> None:
        for group in self._groups:
            if not group.full.state.is_unsharded:
                group.full.let_read(False)
