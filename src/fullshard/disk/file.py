"""The file in which a process keeps values that do not fit into its memory.

The file has no name, so that the system removes it when the process ends, however it ends. It consists of *regions*,
one for each tensor, which threads read and write in blocks. Each block has a checksum, which stays in memory and is
compared when the block is read back.

A thread moves every block through one aligned buffer. So reads and writes can bypass the page cache, tensors need no
alignment, and what is under way takes no more memory than these buffers.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import torch
import xxhash

#: Bytes of a block.
BLOCK = 1 << 22
#: To what offsets, lengths and addresses must be aligned that bypass the page cache.
_ALIGNMENT = 4096
#: Threads of a file. While one waits for the disk, the other computes checksums.
_THREADS = 2


class DiskError(OSError):
    """Values that were offloaded to a disk could not be written or read back.

    The message names the directory and the parameter, and says what to do. Checkpoints are not affected.
    """


def file_in(directory: Path, direct: bool, staging_bytes: int) -> DiskFile:
    """The file of this process in a directory, made at the first call. Raises DiskError if it cannot be made."""
    key = directory.absolute(), direct, staging_bytes, os.getpid()
    if (found := _files.get(key)) is None:
        found = _files[key] = DiskFile(directory, direct, staging_bytes)
    return found


class Work:
    """Blocks that are read or written beside the caller."""

    #: For how many seconds this process has waited for its disks.
    waited_seconds: ClassVar = 0.0
    #: Called after each wait, with its begin and its end in nanoseconds of ``time.monotonic_ns()``.
    on_wait: ClassVar[Callable[[int, int], object]] = staticmethod(lambda begin, end: None)

    def __init__(self, blocks: Sequence[Future[None]] = ()) -> None:
        self.blocks = blocks

    def wait(self) -> None:
        """Wait until all are done. Raises DiskError."""
        self.settle()
        for block in self.blocks:
            block.result()
        self.blocks = ()

    def settle(self) -> None:
        """Wait until none is under way, whether it failed or not."""
        if any(not block.done() for block in self.blocks):
            begin = time.monotonic_ns()
            wait(self.blocks)
            end = time.monotonic_ns()
            Work.waited_seconds += (end - begin) / 1e9
            Work.on_wait(begin, end)


class DiskFile:
    """The file of this process in a directory. Raises DiskError if it cannot be made.

    Attributes:
        directory: where it is.
        direct: whether reads and writes bypass the page cache. ``False`` where the file system cannot do that.
        staging_bytes: for what is in memory while it is read or written.
        nbytes: its size.
        moved: the bytes of all reads, and of all writes.
    """

    def __init__(self, directory: Path, direct: bool = True, staging_bytes: int = 1 << 26) -> None:
        self.directory, self.direct, self.staging_bytes, self.nbytes = directory, direct, staging_bytes, 0
        self.moved = {"read": 0, "write": 0}
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # where regions begin that are free, by size
        self._behind: deque[tuple[Work, int]] = deque()
        self.lock = threading.RLock()  # a region may be freed, by a collection, while another is allocated
        self._local, self._process = threading.local(), os.getpid()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.fd = self._open()
        except OSError as error:
            why = f"the file for offloaded values cannot be made in {directory}: {error.strerror}"
            raise DiskError(error.errno, f"{why}. Give DiskOffloadPolicy a directory that can be written") from error
        self._threads = ThreadPoolExecutor(_THREADS, "fullshard.disk")
        weakref.finalize(self, _close, self.fd, self._threads)

    @staticmethod
    def opened() -> list[DiskFile]:
        """The files of this process."""
        return list(_files.values())

    @staticmethod
    def moved_by_all() -> tuple[int, int]:
        """The bytes that this process has read from its files, and written to them."""
        files = DiskFile.opened()
        return sum(file.moved["read"] for file in files), sum(file.moved["write"] for file in files)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        if self.direct and hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # the file system has only cached reads
                return _open_unnamed(self.directory, flags | os.O_DIRECT)
        self.direct = False
        return _open_unnamed(self.directory, flags)

    def allocate(self, numel: int, dtype: torch.dtype, what: str) -> Region:
        """A region for ``numel`` elements; ``what`` names the tensor in errors. Raises DiskError: the disk is full."""
        size = -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        with self.lock:
            if self._free[size]:
                return Region(self, self._free[size].pop(), size, numel, dtype, what)
            start = self.nbytes
            if size:
                try:
                    os.posix_fallocate(self.fd, start, size)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # file systems without this call
                        raise self.failure("write", what, error) from error
            self.nbytes += size
        return Region(self, start, size, numel, dtype, what)

    def free(self, start: int, size: int) -> None:
        """Let other tensors have a region. Nothing is under way there: it would refer to the region."""
        with self.lock:
            self._free[size].append(start)

    def submit(self, move: Callable[[int], None], blocks: Sequence[int]) -> Work:
        """Move blocks beside the caller. Raises RuntimeError in a forked process."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "a parameter that is offloaded to a disk was used in a forked process: use it where the model was made"
            )
        return Work([self._threads.submit(move, number) for number in blocks])

    def bound(self, work: Work, nbytes: int) -> None:
        """Wait for earlier writes until those under way, the last of which is ``work``, have few bytes together."""
        self._behind.append((work, nbytes))
        while sum(nbytes for _, nbytes in self._behind) > self.staging_bytes:
            self._behind.popleft()[0].settle()

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
        self._last = Work()  # what is under way here
        self._failure: BaseException | None = None
        weakref.finalize(self, file.free, start, size).atexit = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def step(self) -> int:
        """The elements of a block. Parts of a region begin at multiples of it."""
        return BLOCK // self.dtype.itemsize

    def read(self, target: torch.Tensor, start: int = 0) -> Work:
        """Start to fill ``target`` (1-D, contiguous, any dtype) with the elements from ``start`` on."""
        return self._move(target, start, self._read)

    def write(self, values: torch.Tensor, start: int = 0) -> Work:
        """Start to write ``values`` (1-D, contiguous, of the dtype), as the elements from ``start`` on. They must not
        change before it is done. They end where a block or the region ends."""
        self.writes += 1
        return self._move(values, start, self._write)

    def _move(self, tensor: torch.Tensor, start: int, move: Callable[..., None]) -> Work:
        assert start % self.step == 0, "parts of a region begin where a block begins"
        first, before = start // self.step, self._last
        tensor = tensor.detach()

        def run(number: int) -> None:
            wait(before.blocks)  # they were submitted before, so a thread has them already
            move(number, tensor[number * self.step - start : (number + 1) * self.step - start])

        blocks = range(first, first - (-tensor.numel() // self.step))
        work = self.file.submit(run, blocks)
        self._last = Work([*(each for each in before.blocks if not each.done()), *work.blocks])
        return work

    def _read(self, number: int, target: torch.Tensor) -> None:
        if self._failure is not None:
            raise self._failure
        if self._checksums[number] is None:
            target.zero_()
            return
        length, buffer = self._length(number), self.file.bounce()
        self._transfer(os.preadv, "read", number)
        if xxhash.xxh3_64_intdigest(buffer[:length]) != self._checksums[number]:
            raise self.file.failure("read", self.what, "they are not what was written (wrong checksum)")
        target.copy_(torch.frombuffer(buffer, dtype=self.dtype, count=length // self.dtype.itemsize)[: target.numel()])

    def _write(self, number: int, values: torch.Tensor) -> None:
        length, buffer = self._length(number), self.file.bounce()
        assert values.nbytes == length, "parts of a region end where a block ends"
        torch.frombuffer(buffer, dtype=self.dtype, count=values.numel()).copy_(values)
        self._checksums[number] = xxhash.xxh3_64_intdigest(buffer[:length])
        try:
            self._transfer(os.pwritev, "write", number)
        except DiskError as error:
            self._failure = error
            raise

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], verb: str, number: int) -> None:
        """Read a block into the buffer of this thread, or write it from there. Raises DiskError."""
        length, done = self._length(number), 0
        block = self.file.bounce()[: -(-length // _ALIGNMENT) * _ALIGNMENT]
        while done < length:
            try:
                count = call(self.file.fd, [block[done:]], self._start + number * BLOCK + done)
            except OSError as error:
                raise self.file.failure(verb, self.what, error) from error
            if count == 0:
                why = "the file ends before them" if verb == "read" else "no byte was taken"
                raise self.file.failure(verb, self.what, why)
            done += count if done + count >= length else count // _ALIGNMENT * _ALIGNMENT or count
        with self.file.lock:
            self.file.moved[verb] += length

    def _length(self, number: int) -> int:
        """The bytes of a block that are the tensor's."""
        return min(BLOCK, self.nbytes - number * BLOCK)


def _open_unnamed(directory: Path, flags: int) -> int:
    """Open a new file that has no name."""
    with suppress(OSError, AttributeError):  # not every file system can make one
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    path = directory / f"fullshard-{os.getpid()}-{os.urandom(8).hex()}"
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        path.unlink(missing_ok=True)


def _close(fd: int, threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False)  # nothing is under way: it would refer to the file. A thread may run this
    os.close(fd)
