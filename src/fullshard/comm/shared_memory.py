"""Memory that several processes of a host map, and the numbers by which they tell each other where they are.

A :class:`Segment` has no name in the file system: its owner makes it (``memfd``, with its space reserved, so that no
limit of ``/dev/shm`` holds for it and no later access fails) and others open it through the owner's ``/proc``. The
system takes it back when the last process that maps it ends, however that ends. :class:`Counters` are one number for
each process, which only that process writes. What is in a segment, and who may read it when, is up to others.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import weakref
from pathlib import Path
from typing import NamedTuple

import torch

#: Bytes between the numbers of two processes, so that they do not share a cache line.
_LINE = 64


class Address(NamedTuple):
    """Where another process finds a segment: a file of a process, which file it is, and its size in bytes."""

    pid: int
    fd: int
    inode: int
    nbytes: int


def can_share() -> bool:
    """Whether this system has what segments need. Processors other than x86-64 may reorder what we write."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")


class Segment:
    """A piece of memory; mapped until the last tensor in it is gone.

    Raises:
        OSError: there is not enough memory, or too many files are open, or the owner cannot be looked at.
    """

    def __init__(self, memory: mmap.mmap, address: Address) -> None:
        self.memory = memory
        self.address = address

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """New memory, all zeros, that others may open as long as this process maps it."""
        fd = os.memfd_create("fullshard", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, max(1, nbytes))
            memory = mmap.mmap(fd, max(1, nbytes))
        except BaseException:
            os.close(fd)
            raise
        weakref.finalize(memory, os.close, fd)
        return cls(memory, Address(os.getpid(), fd, os.fstat(fd).st_ino, max(1, nbytes)))

    @classmethod
    def open(cls, address: Address, flags: int = mmap.MAP_SHARED) -> Segment:
        """The memory that a process made."""
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != address.inode:
                raise FileNotFoundError(f"process {address.pid} has another file where its shared memory was")
            return cls(mmap.mmap(fd, address.nbytes, flags), address)
        finally:
            os.close(fd)

    def view(self) -> Segment:
        """The same memory, read as others write it, and never written: who writes to it gets copies of those pages.

        :meth:`was_written` tells of such pages, :meth:`discard_writes` lets go of them.
        """
        return Segment.open(self.address, mmap.MAP_PRIVATE)

    def was_written(self) -> bool:
        """Whether this process has pages of its own in a :meth:`view`. Takes about 10 ns for each KiB.

        ``False`` where the system does not tell.
        """
        pages = -(-self.address.nbytes // mmap.PAGESIZE)
        first = self.tensor(0, 1, torch.uint8).data_ptr() // mmap.PAGESIZE
        try:
            with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
                pagemap.seek(8 * first)
                entries = torch.frombuffer(bytearray(pagemap.read(8 * pages)), dtype=torch.int64)
        except (OSError, ValueError):
            return False
        there = (entries >> 62) != 0  # in memory or swapped out
        of_file = (entries >> 61) & 1 != 0
        return bool((there & ~of_file).any())

    def discard_writes(self) -> None:
        self.memory.madvise(mmap.MADV_DONTNEED)

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor that begins ``start`` bytes into the segment, with a storage of its own and no more in it."""
        with torch.inference_mode(False):
            if numel == 0:
                return torch.empty(0, dtype=dtype, device="cpu")
            return torch.frombuffer(self.memory, dtype=dtype, offset=start, count=numel)

    def numbers(self, start: int, count: int) -> memoryview[int]:
        """``count`` 64-bit integers that begin ``start`` bytes into the segment."""
        return memoryview(self.memory)[start : start + 8 * count].cast("q")


class Counters:
    """A number for each of ``size`` processes, of which this one writes that of ``rank`` and reads the others."""

    def __init__(self, segment: Segment, start: int, rank: int, size: int) -> None:
        step = _LINE // 8
        self._numbers = segment.numbers(start, step * size)
        self._mine = step * rank
        self._others = [step * other for other in range(size) if other != rank]
        self.value = 0

    @staticmethod
    def nbytes(size: int) -> int:
        return _LINE * size

    def set(self, value: int) -> None:
        """Say that this process has come to ``value``: what it wrote before is seen by whoever reads the number."""
        self.value = self._numbers[self._mine] = value

    def reached(self, value: int) -> bool:
        """Whether all the others have come to ``value``."""
        return all(self._numbers[other] >= value for other in self._others)

    def of(self, rank: int) -> int:
        return self._numbers[rank * _LINE // 8]
