"""Slots: a few pieces of memory that take turns in holding the buffers of many groups.

A :class:`SlotPool` owns the memory; a :class:`SlotBuffer` is one group's full buffer, which has memory only while it
is in use. Its tensors are made once and keep their storage for good: taking a slot moves the slot's memory into that
storage and giving it back moves it out, so that what autograd saved is right again wherever the values lie next time.

::

    pool          slot 1 [########]     slot 2 [########]
    block 0       holds slot 1                                in use
    block 1                             holds slot 2          gathered ahead
    block 2       (the address of a slot it had, and no memory of its own)

Nothing is allocated, freed or faulted in once every slot exists. A buffer that was given back keeps its slot, and its
values, until somebody else needs it: taking it again then costs nothing. A buffer that keeps its memory shares it with
no other, and its values stay at one address, as graphs of a device need. Where storages cannot exchange their memory
(torch before 2.12), a slot is only a size: its taker frees the memory of its last holder and allocates anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from fullshard.device import PASSED, Mark, mark_now
from fullshard.torch_private import CAN_SWAP_MEMORY, alias_storage, storage_id, swap_memory

Allocate = Callable[[int, torch.device], torch.Tensor]


class Slot:
    """A piece of memory and the buffer that has it, in use or no longer."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.storage = memory.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.holder: SlotBuffer | None = None
        self.released: Mark = PASSED


class SlotPool:
    """Memory for buffers that take turns.

    Args:
        device: where the memory lies.
        allocate: makes 1-D uint8 tensors of a number of bytes.
    """

    def __init__(self, device: torch.device, allocate: Allocate) -> None:
        self.device = device
        self._allocate = allocate
        #: Slots that any buffer may take, the longest unused first.
        self.free: list[Slot] = []
        self.buffers: weakref.WeakSet[SlotBuffer] = weakref.WeakSet()
        #: Size of an ordinary slot: the largest buffer that takes turns. Larger ones have slots of their own size.
        self.ordinary = 0

    def take(self, buffer: SlotBuffer) -> Slot:
        """A slot for ``buffer``, which takes it from its last holder; one without a holder is preferred."""
        nbytes, largest = buffer.nbytes, buffer.nbytes
        if buffer.takes_turns:
            largest = max(2 * nbytes, self.ordinary)
        chosen = None
        for slot in self.free:
            if nbytes <= slot.nbytes <= largest and (chosen is None or slot.holder is None):
                chosen = slot
                if slot.holder is None:
                    break
        if chosen is not None:
            self.free.remove(chosen)
            return chosen
        size = self.ordinary if buffer.takes_turns and nbytes <= self.ordinary else nbytes
        with torch.inference_mode(False):
            made = Slot(self._allocate(size, self.device if CAN_SWAP_MEMORY else torch.device("meta")))
        made.released = mark_now(self.device)  # what had this memory before may still be read in the current lane
        return made

    @property
    def slots_in_use(self) -> int:
        return sum(buffer.in_use for buffer in self.buffers if buffer.pool is self)

    @property
    def nbytes_free(self) -> int:
        """Bytes that are kept for the next step."""
        return sum(slot.nbytes for slot in self.free)

    def drop(self) -> int:
        """Give every slot that is not in use back to the system; returns their bytes."""
        dropped = self.nbytes_free
        for slot in self.free:
            if slot.holder is not None:
                slot.holder.lose()
        self.free.clear()
        for buffer in self.buffers:
            buffer.forget_address()
        return dropped


class SlotBuffer:
    """Memory of ``nbytes`` that is there between :meth:`take` and :meth:`give_back`.

    ``memory`` is a 1-D uint8 tensor; it may be viewed only once a slot was taken, and then for good.
    """

    def __init__(self, pool: SlotPool, nbytes: int) -> None:
        self.pool = pool
        self.nbytes = nbytes
        #: Whether slots of the ordinary size fit; a buffer that stays in use across others has one of its own size.
        self.takes_turns = True
        #: Whether it keeps the slot that it once took, and so its address, while it is not in use.
        self.keeps_memory = False
        self._slot: Slot | None = None
        self._size = 0  # bytes at its address, its own or stale
        self._stale: SlotPool | None = None  # where its address lies while it has no slot
        self.in_use = False
        with torch.inference_mode(False):
            self._own = torch.empty(0, dtype=torch.uint8, device=pool.device)
        self._storage = self._own.untyped_storage()
        #: Identifies the storage that all views of the buffer have.
        self.storage_id = storage_id(self._own)
        self._memory: torch.Tensor | None = None
        pool.buffers.add(self)

    @property
    def memory(self) -> torch.Tensor:
        if self._memory is None:
            with torch.inference_mode(False), torch.no_grad():
                empty = torch.empty(0, dtype=torch.uint8, device=self.pool.device)
                self._memory = empty.set_(self._storage, 0, (self.nbytes,), (1,))
        return self._memory

    @property
    def keeps_values(self) -> bool:
        """Whether what was written while it was last in use is still there."""
        return self._slot is not None and not self.in_use

    def keep_memory(self, keep: bool) -> None:
        """Let no other have the memory, which then stays at its address, or let all take turns."""
        if keep != self.keeps_memory:
            self.keeps_memory = keep
            if self._slot is not None and not self.in_use:
                change = self.pool.free.remove if keep else self.pool.free.append
                change(self._slot)

    def take(self) -> Mark:
        """Get memory. The caller waits for the returned mark before it writes to it.

        Raises:
            RuntimeError: the buffer is in use.
        """
        if self.in_use:
            raise RuntimeError("a buffer that is in use was taken again: it has one owner at a time")
        if self._slot is not None:
            self.in_use = True
            if not self.keeps_memory:
                self.pool.free.remove(self._slot)
            return self._slot.released
        slot = self._slot = self.pool.take(self)
        self.in_use = True
        holder = slot.holder
        if not CAN_SWAP_MEMORY:
            slot.released.wait()  # before its memory is the allocator's
            if holder is not None:
                holder.lose()
            self._storage.resize_(slot.nbytes)
            slot.released = mark_now(self.pool.device)
        elif holder is not None and self._stale is self.pool is holder.pool and self._size == slot.nbytes:
            swap_memory(self._storage, holder._storage)  # the one gets the memory, the other a stale address
            holder._slot = None
        else:
            if holder is not None:
                holder.lose()
            if self._size not in (0, slot.nbytes):  # an address in a slot of another size
                self._empty()
            swap_memory(self._storage, slot.storage)
        self._stale, self._size = self.pool, slot.nbytes
        slot.holder = self
        return slot.released

    def give_back(self, released: Mark) -> None:
        """Let others have the memory once ``released`` has passed. Does nothing if it is not in use."""
        if self.in_use:
            self.in_use = False
            assert self._slot is not None
            self._slot.released = released
            if not self.keeps_memory:
                self.pool.free.append(self._slot)

    def lose(self) -> None:
        """Give up the slot to another buffer. A stale read finds the old address, or torch refuses it."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        slot.holder = None
        if not CAN_SWAP_MEMORY:
            self._storage.resize_(0)
            return
        slot.storage = alias_storage(self._storage)
        swap_memory(self._storage, slot.storage)

    def move(self, pool: SlotPool) -> None:
        """Take slots from another pool from now on; one that is in use stays until it is given back."""
        if not self.in_use and pool is not self.pool:
            if self._slot is not None and not self.keeps_memory:
                self.lose()
            self.pool = pool
            pool.buffers.add(self)

    def forget_address(self) -> None:
        """Let the storage be empty where it has no memory of its own: the address it still has is about to go."""
        if self._slot is None and CAN_SWAP_MEMORY:
            self._empty()

    def _empty(self) -> None:
        swap_memory(self._storage, torch.UntypedStorage(0, device=self.pool.device))
        self._size = 0

    def poison(self) -> None:
        """Fill with NaN (as fp32 and most other formats read it), so that a read at the wrong time shows."""
        self.memory.fill_(0xFF)
