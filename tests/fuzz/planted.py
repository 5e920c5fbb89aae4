"""Defects that are planted into the library on purpose, to show that programs find them.

Each is a change of one decision of the engine, of the kind that a mistaken line would make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fullshard import Ragged
from fullshard.buffer.shared import SharedBuffer
from fullshard.comm.transport import Reduction
from fullshard.device import PASSED, Done
from fullshard.group import reduction as reduction_module
from fullshard.group.full_buffer import GatheredBuffer, State
from fullshard.group.gradients import Gradients
from fullshard.group.param_group import ParamGroup
from fullshard.group.reduction import SecondHop
from fullshard.group.shard import SharedChunks
from fullshard.group.source import ReplicaShard

Plant = Callable[[pytest.MonkeyPatch], None]


def _forgotten_wait(patch: pytest.MonkeyPatch) -> None:
    """A group is shown before its gather has ended."""
    wait = ParamGroup.wait_for_unshard

    def show_at_once(self: Any) -> None:
        self._late, self.full._complete = self.full._complete, PASSED.wait
        wait(self)

    patch.setattr(ParamGroup, "wait_for_unshard", show_at_once)


def _stale_slot(patch: pytest.MonkeyPatch) -> None:
    """Values that are still in a slot are used again, whatever was written since."""
    gather = GatheredBuffer.gather

    def reuse(self: Any) -> Any:
        if self.buffer.slot is None:
            return gather(self)
        self.change_state(State.GATHERING)
        self.buffer.take()

    patch.setattr(GatheredBuffer, "gather", reuse)


def _forgotten_divisor(patch: pytest.MonkeyPatch) -> None:
    """Gradients are summed and not averaged."""
    patch.setattr(reduction_module, "Reduction", lambda divisor, sum_only: Reduction(1.0, sum_only))


def _unpublished_chunks(patch: pytest.MonkeyPatch) -> None:
    """In shared memory, what a rank has written to its chunks is not shown to the others."""
    patch.setattr(SharedChunks, "publish", lambda self, version, whatever: None)


def _dropped_gradient(patch: pytest.MonkeyPatch) -> None:
    """Gradients that should be added to others are dropped."""
    patch.setattr(reduction_module, "foreach_add", lambda sums, more: None)


def _forgotten_replicas(patch: pytest.MonkeyPatch) -> None:
    """Gradients are not summed over replicas."""
    patch.setattr(SecondHop, "start", lambda self, values: (values, Done()))


def _early_reshard(patch: pytest.MonkeyPatch) -> None:
    """A group is resharded when one of its units has ended, whoever else still reads it."""
    patch.setattr(ParamGroup, "users", property(lambda self: set(), lambda self, users: None), raising=False)


def _gradients_of_the_unused(patch: pytest.MonkeyPatch) -> None:
    """Parameters that were not used get gradients of zeros."""
    lay_out = Gradients._lay_out

    def reduce_all(self: Any) -> None:
        self._group.options.reduce_unused = True
        lay_out(self)

    patch.setattr(Gradients, "_lay_out", reduce_all)


def _lost_partial_sums(patch: pytest.MonkeyPatch) -> None:
    """What was accumulated before the last micro-batch is forgotten."""

    def forget(self: Any) -> None:
        self._arrived.clear()
        original(self)

    original = Gradients.copy_waiting
    patch.setattr(Gradients, "copy_waiting", forget)


def _lasting_writes(patch: pytest.MonkeyPatch) -> None:
    """Writes to unsharded parameters are not looked for."""
    patch.setattr(SharedBuffer, "discard_writes", lambda self: None)


def _cut_blocks(patch: pytest.MonkeyPatch) -> None:
    """Ragged parameters are cut between any rows."""
    patch.setattr(Ragged, "block_rows", lambda self, shape, name: 1)


def _old_replica_shard(patch: pytest.MonkeyPatch) -> None:
    """What was gathered over the replicas is used again, whatever an optimizer has written since."""
    patch.setattr(ReplicaShard, "has", lambda self, values: self._values is not None)


PLANTS: dict[str, Plant] = {
    "forgotten wait": _forgotten_wait,
    "stale slot": _stale_slot,
    "forgotten divisor": _forgotten_divisor,
    "unpublished chunks": _unpublished_chunks,
    "dropped gradient": _dropped_gradient,
    "forgotten replicas": _forgotten_replicas,
    "early reshard": _early_reshard,
    "gradients of the unused": _gradients_of_the_unused,
    "lost partial sums": _lost_partial_sums,
    "lasting writes": _lasting_writes,
    "cut blocks": _cut_blocks,
    "old replica shard": _old_replica_shard,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Have a defect inside the block; none for the empty name."""
    with pytest.MonkeyPatch.context() as patch:
        if name:
            PLANTS[name](patch)
        yield
