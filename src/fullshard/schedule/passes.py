"""Passes of ranks that share memory: when the ranks of a host may read what the others write.

A *pass* is an outermost forward or a backward. In a pass every rank reads what all ranks wrote before it, and no rank
writes. Between passes every rank may write its own shards, and no rank reads those of others. So these ranks wait for
each other at the beginning and at the end of a pass.
"""

from __future__ import annotations

from collections.abc import Iterable

from fullshard.comm.local_ranks import PassBarrier
from fullshard.group.param_group import ParamGroup
from fullshard.group.step import Kind


class Passes:
    """The passes of one tree of modules.

    Attributes:
        groups: the groups whose ranks share memory, in the pass that runs.
    """

    def __init__(self) -> None:
        self.groups: list[ParamGroup] = []
        self._barriers: list[PassBarrier] = []

    def begin(self, kind: Kind, groups: Iterable[ParamGroup], steps: int) -> None:
        """Publish this rank's shards, and wait until all ranks have done so after the same ``steps`` of optimizers."""
        barriers: dict[int, PassBarrier] = {}  # one for all groups that the same ranks share
        self.groups = [*groups]
        for group in self.groups:
            assert group.shard.shared is not None
            group.shard.shared.publish(group.full.count_writes, whatever=kind == "forward")
            barriers.setdefault(id(group.transport), group.shard.shared.memory.barrier)
        self._barriers = list(barriers.values())
        for barrier in self._barriers:
            barrier.enter(f"the beginning of a {kind}", 1 if kind == "backward" else 0, steps)
        for group in self.groups:
            if not group.full.state.is_unsharded:
                group.full.let_read(True)

    def end(self, doing: str = "") -> None:
        """Wait until all ranks have ended the pass, and so have read what they need. If an error cut the pass short,
        ``doing`` is empty, and this rank does not wait."""
        groups, self.groups = self.groups, []
        for group in groups:
            if not group.full.state.is_unsharded:
                group.full.let_read(False)
        for barrier in self._barriers:
            barrier.leave(doing) if doing else barrier.give_up()
