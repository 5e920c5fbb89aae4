"""Slots that the ranks of a host share: each writes its part of the values, and all of them read the whole.

A slot is a segment that a rank maps twice: to write, and as its buffers have it, where its own writes go to copies of
the pages (as in :mod:`fullshard.buffer.shared`). Ranks take the slots of a pool in the same order. Two counters order
their use::

    rank 0    writes its part ── filled 3 ──▶ waits for filled 3 of all ── reads ── read 3 ──▶ next holder
    rank 1    writes its part ── filled 3 ──▶ waits for filled 3 of all ── reads ── read 3 ──▶ waits for read 3 of all,
                                                                                               then writes
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch

from fullshard.buffer.shared_memory import LINE, Counters, Segment
from fullshard.buffer.slots import Slot, SlotBuffer, SlotPool
from fullshard.device import Mark

#: Makes a segment of a number of bytes, and a private mapping of it, for all ranks of a host.
ShareMemory = Callable[[int], tuple[Segment, Segment]]


class NothingToShareError(RuntimeError):
    """There is no memory for a slot, on one rank at least."""


class HostSlot(Slot):
    """A slot in a ``segment`` and a private ``view`` of it. This rank is number ``rank`` of ``size`` on its host."""

    def __init__(self, segment: Segment, view: Segment, rank: int, size: int) -> None:
        self._segment, self._view, self._start = segment, view, slot_start(size)
        super().__init__(view.tensor(self._start, view.address.nbytes - self._start, torch.uint8))
        self.filled, self.read = (Counters(segment, n * LINE * size, rank, size) for n in range(2))
        self.inode = segment.address.inode  # the same on all ranks
        self._is_poisoned, self.use = False, 0

    def writable(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor that begins ``start`` bytes into the slot, whose values all ranks see."""
        return self._segment.tensor(self._start + start, numel, dtype)

    def begin_use(self) -> None:
        self.use = self.read.value + 1
        if self._is_poisoned:
            self._view.discard_writes()
        self._view.begin_use()
        self._view.pages.own = ((0, self._view.pages.nbytes),)  # forked processes see what is there now

    def end_use(self, is_poisoned: bool) -> None:
        """Throw this rank's writes away, and tell the others that it reads the slot no more."""
        self._is_poisoned, self._view.pages.own = is_poisoned, ()
        if not is_poisoned:
            self._view.end_use()
        if self.read.value + 1 == self.use:  # else all were told to begin anew in the middle of it
            self.read.set(self.use)


class HostSlotPool(SlotPool):
    """The slots that the ranks of a host share. ``share`` makes their memory, and ``slots`` gets each, by where it
    begins in this process."""

    def __init__(
        self, device: torch.device, share: ShareMemory, slots: MutableMapping[int, HostSlot], rank: int, size: int
    ) -> None:
        super().__init__(device, lambda nbytes, device: torch.empty(0))
        self._share, self._slots, self._rank, self._size = share, slots, rank, size

    def buffer(self, nbytes: int) -> SlotBuffer:
        return HostSlotBuffer(self, nbytes)

    def make(self, buffer: SlotBuffer) -> Slot:
        slot = HostSlot(*self._share(slot_start(self._size) + self.size_for(buffer)), self._rank, self._size)
        self._slots[slot.storage.data_ptr()] = slot
        return slot


class HostSlotBuffer(SlotBuffer):
    """A full buffer in a host slot. No other rank sees what this rank writes to it."""

    _is_poisoned = False

    def take(self) -> Mark:
        ready = super().take()
        if isinstance(self.slot, HostSlot):
            self.slot.begin_use()
        return ready

    def give_back(self, released: Mark | None = None) -> None:
        if self.in_use and isinstance(self.slot, HostSlot):
            self.slot.end_use(self._is_poisoned)
            self._is_poisoned = False
        super().give_back(released)

    def poison(self) -> None:
        super().poison()
        self._is_poisoned = True


def slot_start(size: int) -> int:
    """The bytes before a slot, in which ``size`` ranks have their counters."""
    return 2 * LINE * size
