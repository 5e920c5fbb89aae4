"""Memory for bytes on their way: kept, grown when a larger exchange comes, and used again.

A :class:`Staging` owns a few buffers, as many as exchanges are under way at once. Memory that is freed and taken again
at each exchange would be faulted in again by the kernel, at nine times the cost of copying it, so buffers stay until
:meth:`Staging.drop`; transports decide what is written to them and when.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from fullshard.device import CPU


class Lease:
    """A buffer that belongs to one exchange until it goes back to its ``place``: ``memory`` and what follows it there.

    Views that were made of a buffer stay right in later leases of it, also when it has grown in between, and may be
    kept under its ``index`` among those of the Staging, which is ``-1`` for memory that comes once.
    """

    def __init__(self, memory: torch.Tensor, index: int = -1, place: object = None) -> None:
        self.storage = memory.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.index = index
        self.place = place
        self.device = memory.device
        self._start = memory.storage_offset() * memory.itemsize

    def view(self, dtype: torch.dtype, start: int, shape: Sequence[int]) -> torch.Tensor:
        """A contiguous tensor in the buffer that begins ``start`` bytes into it."""
        empty = torch.empty(0, dtype=dtype, device=self.device)
        flat = empty.set_(self.storage, (self._start + start) // dtype.itemsize, (math.prod(shape),), (1,))
        return flat.view(tuple(shape))


#: Bytes of a small buffer.
_SMALL = 2**20


class Staging:
    """Buffers that exchanges take in turn."""

    def __init__(self) -> None:
        self._free: defaultdict[object, list[tuple[int, Lease]]] = defaultdict(list)
        self._made = 0

    def lease(self, nbytes: int, device: torch.device) -> Lease:
        """A buffer of at least ``nbytes``, contents undefined.

        On a device with streams it may be used, and must be given back, on the current stream only.
        """
        # Small ones are kept apart, or each buffer would grow as it serves a large exchange beside a small one.
        stream = 0 if device == CPU else torch.accelerator.current_stream(device).stream_id
        place = (device, stream, nbytes <= _SMALL)
        free = self._free[place]
        if free:
            # The first one, so that an exchange gets in every step the buffer for which it has views.
            _, lease = heapq.heappop(free)
        else:
            with torch.inference_mode(False):
                lease = Lease(torch.empty(0, dtype=torch.uint8, device=device), self._made, place)
            self._made += 1
        if lease.nbytes < nbytes:
            lease.storage.resize_(0)  # or what is in it would be copied
            lease.storage.resize_(nbytes)
            lease.nbytes = nbytes
        return lease

    def give_back(self, lease: Lease) -> None:
        heapq.heappush(self._free[lease.place], (lease.index, lease))

    @property
    def nbytes_free(self) -> int:
        """Bytes that are kept for the next exchange."""
        return sum(lease.nbytes for free in self._free.values() for _, lease in free)

    def drop(self) -> int:
        """Give the memory of every buffer that is not in use back to the system; returns its bytes."""
        dropped = self.nbytes_free
        for free in self._free.values():
            for _, lease in free:
                lease.storage.resize_(0)
                lease.nbytes = 0
        return dropped


#: The buffers of this process, which all transports share. ``SHARED.drop()`` gives their memory back.
SHARED = Staging()
#: Stands for the lease of an exchange that needs no memory. It is not given back.
NO_LEASE = Lease(torch.empty(0, dtype=torch.uint8, device="cpu"))
