"""Memory that several processes of a host map, and the numbers by which they tell each other where they are.

A :class:`Segment` has no name in the file system: its owner makes it (``memfd``, with its space reserved, so that no
limit of ``/dev/shm`` holds for it and no later access fails) and others open it through the owner's ``/proc``. The
system takes it back when the last process that maps it ends, however that ends. :class:`Counters` are one number for
each process, which only that process writes. What is in a segment, and who may read it when, is up to others.

It is mapped without the ``mmap`` objects of Python, each of which keeps a file open (before 3.13 always): a model of
hundreds of groups would have more open files than many systems allow.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import weakref
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

#: Bytes between the numbers of two processes, so that they do not share a cache line.
_LINE = 64
_PAGEMAP = "/proc/self/pagemap"


class Address(NamedTuple):
    """Where another process finds a segment: a file of a process, which file it is, and its size in bytes."""

    pid: int
    fd: int
    inode: int
    nbytes: int


def can_share() -> bool:
    """Whether this system has what segments need. Processors other than x86-64 may reorder what we write.

    Python may have been built for older systems than this one, and writes to a view have to be found (some sandboxes do
    not tell of them).
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    calls = all(hasattr(os, name) for name in ("memfd_create", "pidfd_open"))
    return calls and os.access(_PAGEMAP, os.R_OK)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _map(fd: int, nbytes: int, flags: int) -> ctypes.Array[ctypes.c_char]:
    """A file in memory, for as long as anything refers to it."""
    libc = _libc()
    start = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if start == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * nbytes).from_address(start)
    weakref.finalize(memory, libc.munmap, start, nbytes).atexit = False  # tensors may outlive this module
    return memory


class File:
    """An open file, closed with the last reference to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Segment:
    """A piece of memory; mapped until the last tensor in it is gone.

    Raises:
        OSError: there is not enough memory, or too many files are open, or the owner cannot be looked at.
    """

    def __init__(self, memory: ctypes.Array[ctypes.c_char], address: Address, file: File | None = None) -> None:
        self.memory = memory
        self.address = address
        #: Of the process that made the segment: others may open it as long as this is there.
        self.file = file

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """New memory, all zeros."""
        nbytes = max(1, nbytes)
        file = File(os.memfd_create("fullshard", os.MFD_CLOEXEC))
        os.posix_fallocate(file.fd, 0, nbytes)
        address = Address(os.getpid(), file.fd, os.fstat(file.fd).st_ino, nbytes)
        return cls(_map(file.fd, nbytes, mmap.MAP_SHARED), address, file)

    @classmethod
    def open(cls, address: Address, flags: int = mmap.MAP_SHARED) -> Segment:
        """The memory that a process made.

        With ``MAP_PRIVATE`` it is read as others write it and never written: who writes to it gets copies of those
        pages. :meth:`was_written` tells of such pages, :meth:`discard_writes` lets go of them.
        """
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != address.inode:
                raise FileNotFoundError(f"process {address.pid} has another file where its shared memory was")
            return cls(_map(fd, address.nbytes, flags), address)
        finally:
            os.close(fd)

    def was_written(self) -> bool:
        """Whether this process has pages of its own in a private mapping. Takes about 10 ns for each KiB."""
        pages = -(-self.address.nbytes // mmap.PAGESIZE)
        first = ctypes.addressof(self.memory) // mmap.PAGESIZE
        with Path(_PAGEMAP).open("rb", buffering=0) as pagemap:
            pagemap.seek(8 * first)
            entries = torch.frombuffer(bytearray(pagemap.read(8 * pages)), dtype=torch.int64)
        there = (entries >> 62) != 0  # in memory or swapped out
        of_file = (entries >> 61) & 1 != 0
        return bool((there & ~of_file).any())

    def discard_writes(self) -> None:
        _libc().madvise(ctypes.addressof(self.memory), self.address.nbytes, mmap.MADV_DONTNEED)

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor that begins ``start`` bytes into the segment, with a storage of its own and no more in it."""
        with torch.inference_mode(False):
            if numel == 0:
                return torch.empty(0, dtype=dtype, device="cpu")
            return torch.frombuffer(self.memory, dtype=dtype, offset=start, count=numel)

    def numbers(self, start: int, count: int) -> ctypes.Array[ctypes.c_int64]:
        """``count`` 64-bit integers that begin ``start`` bytes into the segment."""
        return (ctypes.c_int64 * count).from_buffer(self.memory, start)


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
