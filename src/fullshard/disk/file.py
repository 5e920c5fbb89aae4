"""The file in which a process keeps values that do not fit into its memory.

The file has no name, so that the system removes it when the process ends, however it ends. It consists of *regions*,
one for each tensor, which threads read and write in blocks. Each block has a checksum, which stays in memory and is
compared when the block is read back.

Reads and writes bypass the page cache, which takes aligned memory. That of optimizers' steps is aligned. For other
tensors, each thread has an aligned buffer through which it copies their blocks.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
import xxhash

from fullshard.buffer.heap import bound_freed
from fullshard.platforms import open_flags, read_at, reserve_space, write_at

#: Bytes of a block.
BLOCK = 1 << 22
#: To what offsets, lengths and addresses must be aligned that bypass the page cache.
_ALIGNMENT = 4096
#: Threads of a file that read, and as many that write. While one waits for the disk, the other computes checksums.
THREADS = 2


class DiskError(OSError):
    """Values that were offloaded to a disk could not be written or read back.

    The message names the directory and the parameter, and says what to do. Checkpoints are not affected.
    """

    __module__ = "fullshard"


def file_in(directory: Path, direct: bool, staging_bytes: int) -> DiskFile:
    """The file of this process in a directory, made at the first call. Raises DiskError if it cannot be made."""
    key = directory.absolute(), direct, staging_bytes, os.getpid()
    if (found := _files.get(key)) is None:
        found = _files[key] = DiskFile(directory, direct, staging_bytes)
    return found


class DiskWork:
    """Blocks that are read or written beside the caller."""

    #: For how many seconds this process has waited for its disks.
    waited_seconds: ClassVar = 0.0
    #: Are told of each wait its begin and its end, in nanoseconds of ``time.monotonic_ns()``.
    listeners: ClassVar[list[Callable[[int, int], object]]] = []

    def __init__(self, blocks: Sequence[Future[None]] = ()) -> None:
        self.blocks = blocks

    @classmethod
    def of(cls, works: Iterable[DiskWork]) -> DiskWork:
        """The blocks of several."""
        return cls([block for work in works for block in work.blocks])

    @property
    def is_done(self) -> bool:
        """Whether none is under way."""
        return all(block.done() for block in self.blocks)

    def wait(self) -> None:
        """Wait until all are done. Raises DiskError."""
        self.wait_until_done()
        for block in self.blocks:
            block.result()
        self.blocks = ()

    def wait_until_done(self) -> None:
        """Wait until none is under way, whether it failed or not."""
        if not self.is_done:
            begin = time.monotonic_ns()
            wait(self.blocks)
            end = time.monotonic_ns()
            DiskWork.waited_seconds += (end - begin) / 1e9
            for listener in [*DiskWork.listeners]:
                listener(begin, end)


class DiskStaging:
    """Memory for what is read and written, which is used again: fresh memory costs as much as a read."""

    def __init__(self, limit: int) -> None:
        self._limit, self._nbytes = limit, 0  # of all memory; more only while it is in use
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # by size
        self._leaving = deque[tuple[Sequence[torch.Tensor], DiskWork]]()

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for so many elements, with any values. Waits for the disk rather than exceed the limit."""
        nbytes = numel * dtype.itemsize
        while True:
            while self._leaving and self._leaving[0][1].is_done:
                for each in self._leaving.popleft()[0]:
                    self._free[each.nbytes].append(each.view(torch.uint8))
            if self._free[nbytes]:
                return self._free[nbytes].pop().view(dtype)
            if self._nbytes + nbytes > self._limit:  # of other sizes
                self._nbytes -= sum(size * len(free) for size, free in self._free.items())
                self._free.clear()
            if self._nbytes + nbytes <= self._limit or not self._leaving:
                break
            self._leaving[0][1].wait_until_done()
        self._nbytes += nbytes
        memory = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8)
        start = -memory.data_ptr() % _ALIGNMENT
        return memory[start : start + nbytes].view(dtype)

    def give_back(self, memory: Sequence[torch.Tensor], work: DiskWork) -> None:
        """Let the memory be used again once the work is done."""
        self._leaving.append((memory, work))


class DiskFile:
    """The file of this process in a directory. Raises DiskError if it cannot be made.

    Attributes:
        directory: where it is.
        direct: whether reads and writes bypass the page cache. ``False`` where the file system cannot do that.
        staging_bytes: for what is in memory while it is read or written.
        nbytes: its size.
        staging: memory of steps.
    """

    def __init__(self, directory: Path, direct: bool = True, staging_bytes: int = 1 << 26) -> None:
        self.directory, self.direct, self.staging_bytes, self.nbytes = directory, direct, staging_bytes, 0
        self.staging = DiskStaging(staging_bytes)
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # where regions begin that are free, by size
        self._behind: deque[tuple[DiskWork, int]] = deque()
        self.lock = threading.RLock()  # a region may be freed, by a collection, while another is allocated
        self._local, self._process = threading.local(), os.getpid()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.fd = self._open()
        except OSError as error:
            why = f"the file for offloaded values cannot be made in {directory}: {error.strerror}"
            raise DiskError(error.errno, f"{why}. Give DiskOffloadPolicy a directory that can be written") from error
        #: Reads do not queue behind writes: a step waits for them.
        self._threads = {verb: ThreadPoolExecutor(THREADS, f"fullshard.{verb}") for verb in ("read", "write")}
        weakref.finalize(self, _close, self.fd, self._threads.values())

    @staticmethod
    def opened() -> list[DiskFile]:
        """The files of this process."""
        return list(_files.values())

    @staticmethod
    def transferred() -> tuple[int, int]:
        """The bytes that this process has read from such files, and written to them."""
        return _transferred["read"], _transferred["write"]

    def _open(self) -> int:
        if self.direct and hasattr(os, "O_DIRECT") and hasattr(os, "preadv"):  # that reads to aligned memory
            with suppress(OSError):  # the file system has only cached reads
                return _open_unnamed(self.directory, os.O_DIRECT)
        self.direct = False
        return _open_unnamed(self.directory)

    def allocate(self, numel: int, dtype: torch.dtype, what: str) -> Region:
        """A region for ``numel`` elements; ``what`` names the tensor in errors. Raises DiskError: the disk is full."""
        size = -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        bound_freed(self.staging_bytes)
        with self.lock:
            if self._free[size]:
                return Region(self, self._free[size].pop(), size, numel, dtype, what)
            start = self.nbytes
            if size:
                try:
                    reserve_space(self.fd, start, size)
                except OSError as error:
                    raise self.failure("write", what, error) from error
            self.nbytes += size
        return Region(self, start, size, numel, dtype, what)

    def free(self, start: int, size: int) -> None:
        """Let other tensors have a region. Nothing is under way there: it would refer to the region."""
        with self.lock:
            self._free[size].append(start)

    def submit(self, verb: str, move: Callable[[int], None], blocks: Sequence[int]) -> DiskWork:
        """Move blocks beside the caller. Raises RuntimeError in a forked process."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "a parameter that is offloaded to a disk was used in a forked process: use it where the model was made"
            )
        return DiskWork([self._threads[verb].submit(move, number) for number in blocks])

    def bound(self, work: DiskWork, nbytes: int) -> None:
        """Wait for earlier writes until those under way, the last of which is ``work``, have few bytes together."""
        bound_freed(self.staging_bytes)
        self._behind.append((work, nbytes))
        while sum(nbytes for _, nbytes in self._behind) > self.staging_bytes // 2:
            self._behind.popleft()[0].wait_until_done()

    def bounce(self) -> memoryview:
        """The buffer of the thread that calls."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(mmap.mmap(-1, BLOCK))
        buffer: memoryview = self._local.buffer
        return buffer

    def failure(self, verb: str, what: str, why: object) -> DiskError:
        number = why.errno if isinstance(why, OSError) and why.errno else errno.EIO
        text = why.strerror if isinstance(why, OSError) else why
        return DiskError(
            number,
            f"could not {verb} {what} in the file for offloaded values in {self.directory}: {text}. The values are "
            f"lost, and so is this step; checkpoints are not affected. Check the disk and its free space, then start "
            f"again from the last checkpoint",
        )


_transferred, _counting = {"read": 0, "write": 0}, threading.Lock()
#: The files of this process, by directory and way of access. Closed with the last tensor in them.
_files: weakref.WeakValueDictionary[tuple[Path, bool, int, int], DiskFile] = weakref.WeakValueDictionary()


class Region:
    """The place of one tensor in a file. Freed with the last reference.

    Attributes:
        numel, dtype: of the tensor, whose elements lie without gaps.
        what: names the tensor in errors.
        writes: counts the writes.
    """

    def __init__(self, file: DiskFile, start: int, size: int, numel: int, dtype: torch.dtype, what: str) -> None:
        self.file, self.numel, self.dtype, self.what, self.writes = file, numel, dtype, what, 0
        self._start = start
        self._checksums: list[int | None] = [None] * -(-size // BLOCK)  # ``None``: never written, so it is zeros
        self._last = DiskWork()  # what is under way here
        self._failures: dict[int, DiskError] = {}  # of the blocks that were not written the last time
        weakref.finalize(self, file.free, start, size).atexit = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def step(self) -> int:
        """The elements of a block. Parts of a region begin at multiples of it."""
        return BLOCK // self.dtype.itemsize

    def read(self, target: torch.Tensor, start: int = 0) -> DiskWork:
        """Start to fill ``target`` (1-D, contiguous, any dtype) with the elements from ``start`` on."""
        return self._move(target, start, "read", self._read)

    def write(self, values: torch.Tensor, start: int = 0) -> DiskWork:
        """Start to write ``values`` (1-D, contiguous, of the dtype), as the elements from ``start`` on. They must not
        change before it is done. They end where a block or the region ends."""
        return self._move(values, start, "write", self._write)

    def _move(self, tensor: torch.Tensor, start: int, verb: str, move: Callable[..., None]) -> DiskWork:
        assert start % self.step == 0, "parts of a region begin where a block begins"
        tensor = tensor.detach()
        first = start // self.step
        blocks = range(first, first - (-tensor.numel() // self.step))
        with self.file.lock:  # threads of the user may read while the training writes
            before = self._last
            self.writes += verb == "write"

            def run(number: int) -> None:
                wait(before.blocks)  # each waits only for what was submitted before it
                move(number, tensor[number * self.step - start : (number + 1) * self.step - start])

            work = self.file.submit(verb, run, blocks)
            self._last = DiskWork([*(each for each in before.blocks if not each.done()), *work.blocks])
        return work

    def _read(self, number: int, target: torch.Tensor) -> None:
        if number in self._failures:
            raise self._failures[number]
        if self._checksums[number] is None:
            target.zero_()
            return
        length, buffer = self._length(number), self._place(number, target)
        block = self.file.bounce() if buffer is None else buffer
        self._transfer(read_at, "read", number, block)
        if xxhash.xxh3_64_intdigest(block[:length]) != self._checksums[number]:
            raise self.file.failure("read", self.what, "they are not what was written (wrong checksum)")
        if buffer is None:
            found = torch.frombuffer(block, dtype=self.dtype, count=length // self.dtype.itemsize)
            target.copy_(found[: target.numel()])

    def _write(self, number: int, values: torch.Tensor) -> None:
        length, buffer = self._length(number), self._place(number, values)
        assert values.nbytes == length, "parts of a region end where a block ends"
        block = self.file.bounce() if buffer is None else buffer
        if buffer is None:
            torch.frombuffer(block, dtype=self.dtype, count=values.numel()).copy_(values)
        self._checksums[number] = xxhash.xxh3_64_intdigest(block[:length])
        try:
            self._transfer(write_at, "write", number, block)
        except DiskError as error:
            self._failures[number] = error
            raise
        self._failures.pop(number, None)

    def _place(self, number: int, tensor: torch.Tensor) -> memoryview | None:
        """The memory of a tensor, if a block can be read or written there. ``None`` if it goes through the buffer of
        this thread."""
        is_block = tensor.dtype == self.dtype and tensor.nbytes == self._length(number) and tensor.is_cpu
        if self.file.direct:
            is_block = is_block and tensor.nbytes % _ALIGNMENT == 0 and tensor.data_ptr() % _ALIGNMENT == 0
        return bytes_of(tensor) if is_block and tensor.is_contiguous() else None

    def _transfer(self, call: Callable[[int, memoryview, int], int], verb: str, number: int, block: memoryview) -> None:
        """Read a block into memory, or write it from there. Raises DiskError."""
        length, done = self._length(number), 0
        block = block[: -(-length // _ALIGNMENT) * _ALIGNMENT]
        while done < length:
            try:
                count = call(self.file.fd, block[done:], self._start + number * BLOCK + done)
            except OSError as error:
                raise self.file.failure(verb, self.what, error) from error
            if count == 0:
                why = "the file ends before them" if verb == "read" else "no byte was taken"
                raise self.file.failure(verb, self.what, why)
            done += count if done + count >= length else count // _ALIGNMENT * _ALIGNMENT or count
        with _counting:
            _transferred[verb] += length

    def _length(self, number: int) -> int:
        """The bytes of a block that are the tensor's."""
        return min(BLOCK, self.nbytes - number * BLOCK)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU. The tensor must live longer than the view."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(_array(tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@lru_cache(maxsize=256)
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * nbytes


def _open_unnamed(directory: Path, flags: int = 0) -> int:
    """Open a new file that has no name, or that goes when it is closed."""
    flags |= os.O_RDWR
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # not every file system can make one
            return os.open(directory, flags | os.O_TMPFILE, 0o600)
    path = directory / f"fullshard-{os.getpid()}-{os.urandom(8).hex()}"
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL | open_flags("O_TEMPORARY"), 0o600)
    finally:
        if not hasattr(os, "O_TEMPORARY"):  # otherwise the system removes it, and nobody else can
            path.unlink(missing_ok=True)


def _close(fd: int, threads: Iterable[ThreadPoolExecutor]) -> None:
    for pool in threads:
        pool.shutdown(wait=False)  # nothing is under way: it would refer to the file. A thread may run this
    os.close(fd)
