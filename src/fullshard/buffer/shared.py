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

from fullshard.buffer.shared_memory import Segment, page_faults
from fullshard.buffer.slots import SlotPool
from fullshard.device import PASSED, Mark
from fullshard.torch_private import storage_id

#: Uses of a buffer between two looks at its pages though none was written in a use: a leaf that was kept may be written
#: outside of any.
_USES = 64


class SharedBuffer:
    """What a :class:`~fullshard.buffer.slots.SlotBuffer` is to groups whose ranks have memory of their own.

    Args:
        view: memory that all ranks map, as this one reads it.
        start: where in it the buffer begins, in bytes.
        nbytes: the size of the buffer.
    """

    takes_turns = False
    keeps_values = False
    _faults_seen = 0  # by any buffer, the last time that one was given back

    def __init__(self, view: Segment, start: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._view = view
        self.memory = view.tensor(start, nbytes, torch.uint8)
        self._everything = ((0, self._view.address.nbytes),)
        self._is_private = False
        self._uses = 0
        self._faults = 0
        self.in_use = False

    @property
    def storage_id(self) -> int:
        """Which storage every view of the buffer has."""
        return storage_id(self.memory)

    def take(self) -> Mark:
        if not self.in_use:
            self.in_use = True
            self._faults = SharedBuffer._faults_seen
            self._tell_children()
        return PASSED

    def give_back(self, released: Mark) -> None:
        """Nobody uses it any longer: what was written through ``.data`` is thrown away.

        That leaves no version, but pages, and each such page is a fault. As a rule a use has none.
        """
        self.in_use = False
        self._tell_children()
        if self._is_private:
            self.be_shared()
            return
        self._uses += 1
        SharedBuffer._faults_seen = faults = page_faults()
        if (faults != self._faults or self._uses % _USES == 0) and self._view.was_written():
            self.discard_writes()

    def discard_writes(self) -> None:
        """Let the views see again what the ranks share."""
        self._view.discard_writes()

    def be_private(self) -> None:
        """Let the views see a copy of what the ranks share now."""
        self.be_shared()
        self._is_private = True
        self._tell_children()
        with torch.no_grad():
            for page in (self.memory[:: mmap.PAGESIZE], self.memory[-1:]):
                page.add_(0)

    def be_shared(self) -> None:
        """Let the views see what the ranks share."""
        if self._is_private:
            self.discard_writes()
            self._is_private = False
            self._tell_children()

    def _tell_children(self) -> None:
        """Processes that are forked see what is looked at now; a private copy they see in any case."""
        self._view.pages.own = self._everything if self.in_use and not self._is_private else ()

    def move(self, pool: SlotPool) -> None:
        """Nothing: it takes no slots."""

    def keep_memory(self, keep: bool) -> None:
        """Nothing: it has memory of its own, at one address."""

    def poison(self) -> None:
        """Nothing: others read it."""
