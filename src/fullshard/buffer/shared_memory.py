"""Memory that several processes of a host map, and the numbers by which they tell each other where they are.

A :class:`Segment` has no name in the file system: its owner makes it (``memfd``, with its space reserved, so that no
limit of ``/dev/shm`` holds for it and no later access fails) and others open it through the owner's ``/proc``. It is
mapped without the ``mmap`` objects of Python, each of which keeps a file open (before 3.13 always). :class:`Counters`
are one number for each process. Others decide what is in a segment, and who may read it when.

What this process holds in shared memory is copied when it forks, and in the child that copy takes the place of the
shared memory: the child sees, as with any other memory, what was there when it was forked.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fullshard.platforms import after_fork, libc, linux, resource

ROUND = 1 << 32  # numbers between two calls of :meth:`Counters.skip_round`
LINE = 64  # bytes that counters take for each process: no two share a cache line
#: Once in this number of uses, the pages of a private mapping are checked even if no use had a page fault: a program
#: may keep a leaf, and write to it outside of any use.
_USES = 64
_NAME, _PAGEMAP = "fullshard", "/proc/self/pagemap"
SHARED, PRIVATE, _OF_PROCESS = 1, 2, 0x22  # of Linux, as all that follows: MAP_SHARED, MAP_PRIVATE, and | MAP_ANONYMOUS
_ACCESS, _DONTNEED = 3, 4  # PROT_READ | PROT_WRITE, MADV_DONTNEED
_MOVE, _LEAVE = 3, 4  # MREMAP_MAYMOVE | MREMAP_FIXED, MREMAP_DONTUNMAP
#: What segments, waits for them and forks need of a system.
_CALLS = [(linux, name) for name in ("memfd_create", "pidfd_open", "posix_fallocate", "register_at_fork")]
_CALLS += [(linux, "sched_yield"), (select, "poll"), (resource, "getrusage"), (libc, "mremap")]


class Address(NamedTuple):
    """Where another process finds a segment: a file of a process, which file it is, and its size in bytes."""

    pid: int
    fd: int
    inode: int
    nbytes: int


def missing() -> str:
    """What this system lacks of what segments need, three things at most; empty if it has all. Processors other than
    x86-64 may reorder writes; Python may be built for older systems; some sandboxes do not tell of writes to a view."""
    lacks = [] if (machine := platform.machine()) == "x86_64" else [f"a processor x86-64 (this is {machine})"]
    lacks += [name for owner, name in _CALLS if not hasattr(owner, name)]
    lacks += [] if os.access(_PAGEMAP, os.R_OK) else [_PAGEMAP]
    return ", ".join(lacks[:3]) or ("" if _tells_of_writes() else "page faults for writes to a private mapping")


@cache
def _tells_of_writes() -> bool:
    """Whether the system counts the fault of a write to a private page, and shows that the page is one, as far as it
    has memory for a trial."""
    try:
        shared = Segment.create(mmap.PAGESIZE)
        view = Segment.open(shared.address, PRIVATE)
    except OSError:
        return True
    value, before = view.memory[0], page_faults()
    clean = view.was_written()
    view.memory[0] = value
    return page_faults() > before and view.was_written() and not clean


def page_faults() -> int:
    """How many pages this process has been given since it began. A first write to a private page is one of them."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@cache
def _libc() -> Any:
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = libc.mremap.restype = address
    libc.mmap.argtypes = [address, size, *3 * [number], ctypes.c_int64]
    libc.mremap.argtypes = [address, size, size, number, address]
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, number]
    libc.memcmp.argtypes = [address, address, size]
    return libc


class Pages:
    """Where a file, or memory of this process alone, is mapped."""

    def __init__(self, fd: int, nbytes: int, flags: int, access: int = _ACCESS) -> None:
        self.start = _checked(_libc().mmap(None, nbytes, access, flags, fd, 0))
        self.nbytes = nbytes
        self.is_shared = bool(flags & SHARED)
        #: The parts, where each begins and how many bytes it has, that a forked child is to see.
        self.own: Sequence[tuple[int, int]] = ()
        self.memory: Callable[[], object] = lambda: None  # what keeps them mapped, as long as it is there
        self._copy: Pages | None = None

    def replace(self, other: Pages) -> None:
        """Take the place of ``other``, of the same size."""
        _checked(_libc().mremap(self.start, self.nbytes, self.nbytes, _MOVE, other.start))

    def unmap(self) -> None:
        _mapped.pop(self.start, None)
        self.forget_copy()
        _libc().munmap(self.start, self.nbytes)

    def forget_copy(self) -> None:
        with _copying:
            copy, self._copy = self._copy, None
            _copied.discard(self)
            if copy is not None:
                copy.unmap()

    def copy_for_children(self) -> None:
        """Copy the parts that a forked child must see. Children that are forked one after the other share a copy."""
        copy = self._copy
        if copy is None or any(_libc().memcmp(copy.start + at, self.start + at, nbytes) for at, nbytes in self.own):
            self.forget_copy()
            if self.own:
                self._copy = Pages(-1, self.nbytes, _OF_PROCESS)
                self.copy_own(self._copy)
                _copied.add(self)

    def copy_own(self, other: Pages) -> None:
        for at, nbytes in self.own:
            ctypes.memmove(other.start + at, self.start + at, nbytes)

    def make_private(self) -> None:
        """Become memory of this process alone, in a forked child. If no copy could be made, a read ends the child."""
        if self.is_shared or self.own:
            other = self._copy or Pages(-1, self.nbytes, _OF_PROCESS, 0 if self.own else _ACCESS)
            other.replace(self)
            self._copy, self.is_shared = None, False


#: The mappings that tensors may lie in, by where they begin; and those of which there is a copy for children.
_mapped: dict[int, Pages] = {}
_copied: set[Pages] = set()
_copying = threading.RLock()  # another thread may unmap, or forget a copy, while one forks


def _checked(start: int | None) -> int:
    if start is None or start == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return start


def _before_fork() -> None:
    with _copying:
        for pages in tuple(_mapped.values()):
            if (memory := pages.memory()) is not None:
                pages.copy_for_children()
            del memory


def _in_child() -> None:
    global _copying
    _copying = threading.RLock()
    for pages in tuple(_mapped.values()):
        pages.make_private()
    _copied.clear()


after_fork(_in_child, _before_fork)


def forget_copies() -> None:
    """Let go of what was copied for children: it is about to be old. Children keep theirs."""
    for pages in tuple(_copied):
        pages.forget_copy()


class File:
    """An open file, closed with the last reference to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Segment:
    """A piece of memory; mapped until the last tensor in it is gone. To make one may raise an OSError."""

    _faults_seen = 0  # in all of this process, when a use of a private mapping last ended

    def __init__(self, pages: Pages, address: Address, file: File | None = None) -> None:
        self.pages = pages
        self.memory = (ctypes.c_char * pages.nbytes).from_address(pages.start)
        self._end = weakref.finalize(self.memory, pages.unmap)
        self._end.atexit = False  # tensors may outlive this module
        pages.memory = weakref.ref(self.memory)
        _mapped[pages.start] = pages
        self.address = address
        self._uses = self._faults = 0
        self.file = file  # of the process that made the segment: others may open it as long as this is there

    @classmethod
    def reserve(cls, nbytes: int) -> Segment:
        """Memory of this process alone, all zeros, until it becomes a segment that others map too."""
        nbytes = max(1, nbytes)
        return cls(Pages(-1, nbytes, _OF_PROCESS), Address(os.getpid(), -1, 0, nbytes))

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """New memory, all zeros."""
        nbytes = max(1, nbytes)
        file = File(linux.memfd_create(_NAME))
        linux.posix_fallocate(file.fd, 0, nbytes)
        address = Address(os.getpid(), file.fd, os.fstat(file.fd).st_ino, nbytes)
        return cls(Pages(file.fd, nbytes, SHARED), address, file)

    @classmethod
    def open(cls, address: Address, flags: int = SHARED) -> Segment:
        """The memory that a process made. With ``MAP_PRIVATE`` writes of this process go to copies of the pages, of
        which :meth:`was_written` tells, and of which :meth:`discard_writes` lets go."""
        link = f"/proc/{address.pid}/fd/{address.fd}"
        if os.readlink(link).startswith(f"/memfd:{_NAME} "):  # to open another kind of file may block
            file = File(os.open(link, os.O_RDWR))
            found = os.fstat(file.fd)
            if (found.st_ino, found.st_size) == (address.inode, address.nbytes):
                return cls(Pages(file.fd, address.nbytes, flags), address)
        raise FileNotFoundError(f"process {address.pid} has another file where its shared memory was")

    def become(self, other: Segment) -> None:
        """Move the tensors, and this process's own parts, to the memory of ``other``, in which no tensor may lie."""
        self.pages.copy_own(other.pages)
        other.pages.replace(self.pages)
        other._end.detach()
        _mapped.pop(other.pages.start, None)
        self.address, self.pages.is_shared = other.address, other.pages.is_shared

    def was_written(self) -> bool:
        """Whether this process has pages of its own in a private mapping. Takes about 10 ns for each KiB."""
        pages = -(-self.address.nbytes // mmap.PAGESIZE)
        with Path(_PAGEMAP).open("rb", buffering=0) as pagemap:
            pagemap.seek(8 * (self.pages.start // mmap.PAGESIZE))
            entries = torch.frombuffer(bytearray(pagemap.read(8 * pages)), dtype=torch.int64)
        there = (entries >> 62) != 0  # in memory or swapped out
        of_file = (entries >> 61) & 1 != 0
        return bool((there & ~of_file).any())

    def begin_use(self) -> None:
        """Begin to look for writes to a private mapping."""
        self._faults = Segment._faults_seen

    def end_use(self) -> None:
        """Discard what this process wrote to it. Writes through ``.data`` leave no version, but a page fault."""
        self._uses += 1
        Segment._faults_seen = faults = page_faults()
        if (faults != self._faults or self._uses % _USES == 0) and self.was_written():
            self.discard_writes()

    def discard_writes(self, to: Segment | None = None) -> None:
        """Drop the pages of this process. They move to ``to`` if it has the same size and the system can do so."""
        if to is not None and (nbytes := to.address.nbytes) == self.address.nbytes:
            _libc().mremap(self.pages.start, nbytes, nbytes, _MOVE | _LEAVE, to.pages.start)
        _libc().madvise(self.pages.start, self.address.nbytes, _DONTNEED)

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
        self._lines = [segment.numbers(start + LINE * each, 2) for each in range(size)]
        self._mine = self._lines[rank]
        self._others = [line for line in self._lines if line is not self._mine]
        self.value = 0

    def set(self, value: int) -> None:
        """Say that this process has come to ``value``. A process that reads the number sees what was written before."""
        self.value = self._mine[0] = value

    def reached(self, value: int) -> bool:
        """Whether all the others have come to ``value``."""
        return all(line[0] >= value for line in self._others)

    def skip_round(self) -> None:
        """Go on from the next multiple of a large number, so that processes that were apart agree again."""
        self.set((self.value // ROUND + 1) * ROUND)

    def of(self, rank: int) -> int:
        return self._lines[rank][0]

    def note(self, value: int) -> None:
        """Give another number to the processes that read the next number that is set."""
        self._mine[1] = value

    def noted(self, rank: int) -> int:
        return self._lines[rank][1]
