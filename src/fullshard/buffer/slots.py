"""Memory that is kept and takes turns: slots for the buffers of many groups, and staging for bytes on their way.

A :class:`SlotPool` owns the memory; a :class:`SlotBuffer` is one group's full buffer, which has memory only while it
is in use. Its tensors are made once and keep their storage for good: taking a slot moves the slot's memory into that
storage and giving it back moves it out, so that what autograd saved is right again wherever the values lie next time.

A buffer that was given back keeps its slot, and its values, until somebody else needs it: taking it again then costs
nothing. Where storages cannot exchange their memory, a slot is only a size: its taker frees the memory of its last
holder, and allocates anew. On the CPU each keeps its address, and only the pages move.

A :class:`Staging` owns the memory that transports work in: a piece for each exchange that is under way. Pieces stay and
grow: to fault memory in again at each exchange would cost nine times as much as to copy it.
"""

from __future__ import annotations

import heapq
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain

import torch

from fullshard.buffer.shared_memory import Segment
from fullshard.device import CPU, HOSTS, META, PASSED, Mark, current_stream, is_host, mark_end, mark_now, mark_released
from fullshard.torch_private import CAN_SWAP_MEMORY, alias_storage, storage_id, swap_memory

Allocate = Callable[[int, torch.device], torch.Tensor]


class Slot:
    """A piece of memory, and the buffer that uses it or was the last to use it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.storage = memory.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.holder: SlotBuffer | None = None
        self.released: Mark = PASSED


class SlotPool:
    """Memory for buffers that take turns: 1-D uint8 tensors, which ``allocate`` makes. ``stays``: whether it is
    registered with a backend, which costs more than to keep it."""

    def __init__(self, device: torch.device, allocate: Allocate, stays: bool = False) -> None:
        self.device = device
        #: Whether large memory that is not in use goes to the device's allocator before other memory is made, and when
        #: a forward or a step ends.
        self.gives_back = not (stays or is_host(device))
        self.is_host = is_host(device)
        self._allocate = allocate
        #: Slots that any buffer may take: first those without a holder, then those that were unused the longest.
        self.free: list[Slot] = []
        self.buffers: weakref.WeakSet[SlotBuffer] = weakref.WeakSet()
        #: Size of an ordinary slot: the largest buffer that takes turns. Larger ones have slots of their own size.
        self.ordinary = 0

    def buffer(self, nbytes: int) -> SlotBuffer:
        """A new buffer that takes slots of this pool."""
        return SlotBuffer(self, nbytes)

    def size_for(self, buffer: SlotBuffer) -> int:
        """Bytes of a new slot for a buffer."""
        return self.ordinary if buffer.takes_turns and buffer.nbytes <= self.ordinary else buffer.nbytes

    def make(self, buffer: SlotBuffer) -> Slot:
        if self.gives_back:
            self.drop(LARGE)
        size = self.size_for(buffer)
        if not CAN_SWAP_MEMORY and self.device != META:
            return Slot(torch.empty(size, dtype=torch.uint8, device=META))
        with torch.inference_mode(False):
            made = Slot(self._allocate(size, self.device))
        made.released = mark_now(self.device)  # what had this memory before may still be read in the current lane
        return made

    @property
    def nbytes_free(self) -> int:
        """Bytes that are kept for the next step."""
        return sum(slot.nbytes for slot in self.free)

    def forget_marks(self) -> None:
        """Let no slot be waited for: what follows comes after all that was done with them."""
        for slot in (*self.free, *(buffer.slot for buffer in self.buffers if buffer.pool is self)):
            if slot is not None:
                slot.released = PASSED

    def drop(self, least: int = 0) -> int:
        """Give every slot of ``least`` bytes or more that is not in use back to the system; returns their bytes."""
        dropped = [slot for slot in self.free if slot.nbytes >= least]
        for slot in dropped:
            if not self.is_host:
                slot.released.wait()  # the allocator may give it to the current lane at once
            if slot.holder is not None:
                slot.holder.give_up_slot()
        self.free = [slot for slot in self.free if slot.nbytes < least]
        for buffer in self.buffers if dropped or not least else ():
            if buffer.slot is None and CAN_SWAP_MEMORY:  # the address that it still has is about to go
                buffer._empty()
        return sum(slot.nbytes for slot in dropped)


class SlotBuffer:
    """Memory of ``nbytes`` that is there between :meth:`take` and :meth:`give_back`."""

    def __init__(self, pool: SlotPool, nbytes: int) -> None:
        self.pool = pool
        self.nbytes = nbytes
        #: Whether slots of the ordinary size fit; a buffer that stays in use across others has one of its own size.
        self.takes_turns = True
        #: Whether it keeps the slot that it once took, and so its address, while it is not in use.
        self.keeps_memory = False
        #: The slot it has, in use or from its last use: what was written then is still there.
        self.slot: Slot | None = None
        self._size = 0  # bytes at its address, its own or stale
        self._stale: SlotPool | None = None  # where its address lies while it has no slot
        self.in_use = False
        #: Its memory on the CPU where storages exchange none. It stays mapped: a late write ends no process.
        self._segment: Segment | None = None
        with torch.inference_mode(False):
            own = torch.empty(0, dtype=torch.uint8, device=pool.device)
            if not CAN_SWAP_MEMORY and pool.device == CPU and nbytes:
                with suppress(OSError):  # more than the process may have
                    self._segment = Segment.reserve(nbytes)
                    own = self._segment.tensor(0, nbytes, torch.uint8)
        self._storage = own.untyped_storage()
        self.storage_id = storage_id(own)  # identifies the storage that all views of the buffer have
        pool.buffers.add(self)

    @cached_property
    def memory(self) -> torch.Tensor:
        """A 1-D uint8 tensor; it may be viewed only once a slot was taken, and then for good."""
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(0, dtype=torch.uint8, device=self.pool.device)
            return empty.set_(self._storage, 0, (self.nbytes,), (1,))

    def keep_memory(self, keep: bool) -> None:
        """Let no other have the memory, which then stays at its address, or let all take turns."""
        if keep != self.keeps_memory:
            self.keeps_memory = keep
            if self.slot is not None and not self.in_use:
                change = self.pool.free.remove if keep else self.pool.free.append
                change(self.slot)

    def take(self) -> Mark:
        """Get memory, unless it is in use. The caller waits for the returned mark before it writes to it."""
        if self.in_use:
            raise RuntimeError("a buffer that is in use was taken again: it has one owner at a time")
        pool, slot = self.pool, self.slot
        if slot is not None:
            self.in_use = True
            if not self.keeps_memory:
                pool.free.remove(slot)
            return slot.released
        for slot in pool.free:
            has_room = self.takes_turns and self.nbytes < slot.nbytes <= max(2 * self.nbytes, pool.ordinary)
            if slot.nbytes == self.nbytes or has_room:
                pool.free.remove(slot)
                break
        else:
            slot = None  # the pool may free it
            slot = pool.make(self)
        self.slot, self.in_use, holder = slot, True, slot.holder
        if not CAN_SWAP_MEMORY:
            slot.released.wait()  # before the allocator has the memory
            if holder is not None:
                holder.give_up_slot(self)
            if self._segment is None:
                self._storage.resize_(slot.nbytes)
            slot.released = mark_end(pool.device)
        elif holder is not None and self._stale is pool is holder.pool and self._size == slot.nbytes:
            swap_memory(self._storage, holder._storage)  # the one gets the memory, the other a stale address
            holder.slot = None
        else:
            if holder is not None:
                holder.give_up_slot()
            if self._size not in (0, slot.nbytes):  # an address in a slot of another size
                self._empty()
            swap_memory(self._storage, slot.storage)
            self._stale, self._size = pool, slot.nbytes
        slot.holder = self
        return slot.released

    def give_back(self, released: Mark | None = None) -> None:
        """Let others have the memory, if it is in use, once ``released`` or what the current lane holds has passed."""
        if self.in_use:
            self.in_use = False
            assert self.slot is not None
            if released is None:
                released = PASSED if self.pool.is_host else mark_released(self.pool.device)
            self.slot.released = released
            if not self.keeps_memory:
                self.pool.free.append(self.slot)

    def give_up_slot(self, taker: SlotBuffer | None = None) -> None:
        """Give up the slot to another buffer. A stale read finds the old address, or torch refuses it."""
        slot, self.slot = self.slot, None
        assert slot is not None
        slot.holder = None
        if self._segment is not None:
            self._segment.discard_writes(taker._segment if taker else None)
        elif not CAN_SWAP_MEMORY:
            self._storage.resize_(0)
        else:
            slot.storage = alias_storage(self._storage)
            swap_memory(self._storage, slot.storage)

    def change_pool(self, pool: SlotPool) -> None:
        """Take slots from another pool from now on; one that is in use stays until it is given back."""
        if not self.in_use and pool is not self.pool:
            if (slot := self.slot) is not None and not self.keeps_memory:
                self.give_up_slot()
                self.pool.free.remove(slot)
                self.pool.free.insert(0, slot)
            self.pool = pool
            pool.buffers.add(self)

    def _empty(self) -> None:
        swap_memory(self._storage, torch.UntypedStorage(0, device=self.pool.device))
        self._size = 0

    def poison(self) -> None:
        """Fill with NaN (as fp32 and most other formats read it), so that a read at the wrong time shows."""
        self.memory.fill_(0xFF)


class OwnBuffer:
    """A buffer with memory of its own, which is in use like a :class:`SlotBuffer` and takes no turns."""

    takes_turns = False

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.nbytes = memory.numel()
        self.storage_id = storage_id(memory)
        self.in_use = False

    def take(self) -> Mark:
        self.in_use = True
        return PASSED

    def give_back(self, released: Mark | None = None) -> None:
        self.in_use = False

    def keep_memory(self, keep: bool) -> None:
        """Does nothing: its memory stays."""

    def poison(self) -> None:
        """Does nothing: its values stay, and others may read them."""


class Lease:
    """A buffer that belongs to one exchange until it is given back: ``memory`` and what follows it in its storage.

    Views of a buffer stay valid in later leases of it, even if it has grown in between. So a route may keep them by the
    buffer's ``index`` in the Staging. The index is -1 for memory that is leased only once.
    """

    give_back: Callable[[], object]  # makes it free for the next exchange

    def __init__(self, memory: torch.Tensor, index: int = -1) -> None:
        self.storage = memory.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.index = index
        self.device = memory.device
        self._start = memory.storage_offset() * memory.itemsize

    def view(self, dtype: torch.dtype, start: int, shape: Sequence[int]) -> torch.Tensor:
        """A contiguous tensor in the buffer that begins ``start`` bytes into it."""
        empty = torch.empty(0, dtype=dtype, device=self.device)
        flat = empty.set_(self.storage, (self._start + start) // dtype.itemsize, (math.prod(shape),), (1,))
        return flat.view(tuple(shape))


_SMALL = 2**20  # bytes of a small buffer
#: Bytes from which memory of a device is given back whenever a forward or a step ends. Less is kept: to gather the
#: values in it once more would cost more than it is worth.
LARGE = 2**26


class Staging:
    """Buffers that exchanges take in turn."""

    def __init__(self) -> None:
        self.free: defaultdict[object, list[tuple[int, Lease]]] = defaultdict(list)
        self._made = 0
        self.is_in_graph = False  # whether a captured graph knows addresses of what is kept

    def lease(self, nbytes: int, device: torch.device) -> Lease:
        """A buffer of at least ``nbytes``, contents undefined. It is used and given back on the current stream only."""
        # Small ones are kept apart, or each buffer would grow as it serves a large exchange beside a small one.
        kind: object = nbytes <= _SMALL
        if device not in HOSTS:
            kind = device, current_stream(device).stream_id, kind
        free = self.free[kind]
        if free:
            # The first one, so that an exchange gets in every step the buffer for which it has views.
            _, lease = heapq.heappop(free)
        else:
            with torch.inference_mode(False):
                lease = Lease(torch.empty(0, dtype=torch.uint8, device=device), self._made)
            lease.give_back = partial(heapq.heappush, free, (self._made, lease))
            self._made += 1
        if lease.nbytes < nbytes:
            lease.storage.resize_(0)  # or what is in it would be copied
            lease.storage.resize_(nbytes)
            lease.nbytes = nbytes
        return lease

    @property
    def nbytes_free(self) -> int:
        """Bytes that are kept for the next exchange."""
        return sum(lease.nbytes for free in self.free.values() for _, lease in free)

    def drop(self, least: int = 0) -> int:
        """Free the memory of every buffer of ``least`` bytes or more that is not in use; returns its bytes."""
        before = self.nbytes_free
        for _, lease in chain.from_iterable(self.free.values()):
            if lease.nbytes >= least:
                lease.storage.resize_(0)
                lease.nbytes = 0
        return before - self.nbytes_free


#: The buffers of this process, which all transports share. ``SHARED.drop()`` gives their memory back.
SHARED = Staging()
#: Stands for the lease of an exchange that needs no memory. It is not given back.
NO_LEASE = Lease(torch.empty(0, dtype=torch.uint8, device="cpu"))
