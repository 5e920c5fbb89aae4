"""A full buffer in memory that the ranks of a host share.

It is always there and holds what the ranks have as their shards, so that nothing has to be gathered. This rank reads it
through a mapping of its own in which writes are not shared: what is written to unsharded parameters concerns nobody
else, and is thrown away when they are resharded.

Between the passes in which all ranks may read, it changes under the eyes of whoever looks. So parameters that are
looked at by hand lie in a copy, :meth:`SharedBuffer.be_private`: every page is written to as it is, and so this rank's
own. The values stay at their address.
"""

from __future__ import annotations

import mmap

import torch

from fullshard.buffer.slots import SlotPool
from fullshard.comm.transport import SharedMemory
from fullshard.device import PASSED, Mark
from fullshard.torch_private import storage_id

#: Writes through ``.data`` leave no trace but pages. They are looked for after each of the first uses of a buffer, as a
#: forward that makes them does so in every step, and once in so many uses later.
_FIRST_USES, _USES = 8, 64


class SharedBuffer:
    """What a :class:`~fullshard.buffer.slots.SlotBuffer` is to groups whose ranks have memory of their own.

    Args:
        shared: the memory.
        nbytes: its size.
    """

    takes_turns = False
    keeps_values = False

    def __init__(self, shared: SharedMemory, nbytes: int) -> None:
        self.nbytes = nbytes
        self._view = shared.view
        self.memory = self._view.tensor(shared.start, nbytes, torch.uint8)
        self._is_private = False
        self._uses = 0
        self._is_written = False
        self.in_use = False

    @property
    def storage_id(self) -> int:
        """Which storage every view of the buffer has."""
        return storage_id(self.memory)

    def take(self) -> Mark:
        self.in_use = True
        return PASSED

    def give_back(self, released: Mark) -> None:
        self.in_use = False
        if self._is_private:
            self.be_shared()
            return
        self._uses += 1
        if self._is_written or self._uses <= _FIRST_USES or self._uses % _USES == 0:
            self._look_for_writes()

    def discard_writes(self) -> None:
        """Let the views see again what the ranks share."""
        self._view.discard_writes()

    def _look_for_writes(self) -> None:
        if not self._view.was_written():
            return
        self.discard_writes()
        if not self._is_written and self._uses > _FIRST_USES:
            self._is_written = True
            raise RuntimeError(
                f"unsharded parameters were written through .data since their use number {self._uses - _USES}, and "
                f"what was written stayed until now: the steps since then may be wrong on this rank. From now on such "
                f"writes are thrown away after each use; go back to an earlier checkpoint, or write to the sharded "
                f"parameters between steps"
            )
        self._is_written = True

    def be_private(self) -> None:
        """Let the views see a copy of what the ranks share now."""
        self.be_shared()
        self._is_private = True
        with torch.no_grad():
            for page in (self.memory[:: mmap.PAGESIZE], self.memory[-1:]):
                page.add_(0)

    def be_shared(self) -> None:
        """Let the views see what the ranks share."""
        if self._is_private:
            self.discard_writes()
            self._is_private = False

    def move(self, pool: SlotPool) -> None:
        """Nothing: it takes no slots."""

    def keep_memory(self, keep: bool) -> None:
        """Nothing: it has memory of its own, at one address."""

    def poison(self) -> None:
        """Nothing: others read it."""
