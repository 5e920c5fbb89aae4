"""Files in blocks with checksums: a read checks exactly the blocks that it needs.

The checksum of a block is XXH3 of its :data:`BLOCK` bytes. It is computed while they are in the processor's cache, and
costs a fraction of copying them. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

import torch
import xxhash

from fullshard.disk.file import bytes_of
from fullshard.disk.tensor import DiskTensor
from fullshard.platforms import force, libc, open_directory, open_flags, read_at

#: Bytes of a block. The last block of a file may be shorter.
BLOCK = 1 << 18
#: Buffers of this many bytes are written directly. Smaller ones are collected first, because a call for each costs
#: more.
_LARGE = 1 << 16
#: After this many bytes, the kernel is asked to start writing them to the disk, so that ``fsync`` waits less at the
#: end.
_AHEAD = 32 * BLOCK
_start_writeback = getattr(libc, "sync_file_range", None)


#: A function that writers of this thread call with the number of bytes written.
ON_WRITTEN: ContextVar[Callable[[int], object]] = ContextVar("ON_WRITTEN", default=lambda _: None)


def printable(text: str) -> str:
    """A text as one line for a terminal or a log. Unprintable characters, such as escape sequences, are replaced."""
    return "".join(each if each.isprintable() else " " if each == "\n" else "?" for each in text)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message may contain names from an untrusted file."""

    __module__ = "fullshard.checkpoint"

    def __str__(self) -> str:
        return printable(super().__str__())


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is incomplete or was changed after it was written. The message names the file and the tensor."""

    __module__ = "fullshard.checkpoint"


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Disables Python's garbage collection. With tens of thousands of live objects it would take half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def open_regular(path: Path) -> tuple[int, int]:
    """Opens a file for reading, and returns its descriptor and its size. Raises CorruptCheckpointError if it is not a
    regular file: reading a pipe or a device might never end."""
    try:
        file = os.open(path, os.O_RDONLY | open_flags("O_NONBLOCK", "O_NOCTTY"))
        found = os.fstat(file)
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise CorruptCheckpointError(f"{path} cannot be read: it is not a regular file")
    return file, found.st_size


def read_regular(path: Path) -> bytes:
    """Reads a whole file that must have no holes, such as a manifest."""
    opened, size = open_regular(path)
    with open(opened, "rb") as file:
        if size and hasattr(os, "SEEK_HOLE") and os.lseek(opened, 0, os.SEEK_HOLE) < size:
            raise CorruptCheckpointError(f"{path} has a hole, so it is not what was written")
        os.lseek(opened, 0, os.SEEK_SET)
        data = file.read(size)
    if len(data) != size:
        raise CorruptCheckpointError(f"{path} ended while it was read")
    return data


def checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64(data).hexdigest()


def in_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie in the memory of the CPU, in their order."""
    return tensor.is_cpu and tensor.is_contiguous() and not isinstance(tensor, DiskTensor)


def _memory(nbytes: int) -> tuple[memoryview, int]:
    """New memory, and its address."""
    memory = bytearray(nbytes)
    return memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory))


def make_directory(path: Path) -> None:
    """Makes a directory and its missing parents. Their names are on the disk when it returns."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        force_names(path.parent)


def force_names(directory: Path) -> None:
    """Forces the names in a directory to the disk, where a directory can be opened."""
    if (opened := open_directory(directory)) is not None:
        try:
            force(opened)
        finally:
            os.close(opened)


class BlockWriter:
    """Writes a new file sequentially, in large calls. :meth:`close` forces it to the disk. ``checksums`` are those of
    the blocks, complete once the file is closed. ``size`` is the number of bytes in the file."""

    def __init__(self, path: Path) -> None:
        self.checksums = list[str]()
        self._hash = xxhash.xxh3_64()  # hash of the current block
        self.size, self._room = 0, BLOCK  # _room: bytes that still fit into the current block
        self._small, self._address, self._buffered = *_memory(BLOCK), 0  # buffer in which small parts are collected
        self._on_written = ON_WRITTEN.get()
        self._open(path)

    def _open(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | open_flags(), 0o666)

    def _append(self, part: memoryview) -> int:
        """Adds bytes to the file, and returns how many."""
        return os.write(self._file, part)

    def _start_writing(self) -> None:
        """Lets the kernel start to write the last bytes to the disk."""
        if _start_writeback is not None:  # SYNC_FILE_RANGE_WRITE exists only on Linux
            _start_writeback(self._file, ctypes.c_int64(self.size - _AHEAD), ctypes.c_int64(_AHEAD), 2)

    def _finish(self) -> None:
        force(self._file)

    def write(self, data: memoryview | bytes) -> None:
        """Adds bytes."""
        if len(data) >= _LARGE:
            self._write_small()
            self._write(memoryview(data))
            return
        while data:
            part = data[: self._room - self._buffered]
            self._small[self._buffered : self._buffered + len(part)] = part
            self._buffered += len(part)
            if self._buffered == self._room:
                self._write_small()
            data = data[len(part) :]

    def write_tensors(self, tensors: Iterable[tuple[bytes, torch.Tensor]]) -> None:
        """Adds the values of tensors. Before each tensor it adds the bytes that are given with it."""
        for before, tensor in tensors:
            length, nbytes, plain = len(before), tensor.nbytes, in_memory(tensor)
            at = self._buffered + length
            if plain and nbytes < _LARGE and at + nbytes < self._room:
                self._small[self._buffered : at] = before
                ctypes.memmove(self._address + at, tensor.data_ptr(), nbytes)
                self._buffered = at + nbytes
            else:
                self.write(before)
                if isinstance(tensor, DiskTensor):
                    for part in tensor.parts():
                        self.write(bytes_of(part))
                else:
                    values = tensor if plain else tensor.cpu().contiguous()
                    self.write(bytes_of(values))

    def _write_small(self) -> None:
        buffered, self._buffered = self._buffered, 0
        self._write(self._small[:buffered])

    def _write(self, data: memoryview) -> None:
        while data:
            part = data[: self._room]
            self._hash.update(part)
            data = data[len(part) :]
            while part:
                written = self._append(part)
                self._on_written(written)
                self.size += written
                part = part[written:]
            self._room = BLOCK - self.size % BLOCK
            if self._room == BLOCK:
                self._end_block()

    def close(self) -> None:
        """Completes the file. It is on the disk when this returns."""
        self._write_small()
        if self._room < BLOCK:
            self._end_block()
        self._finish()
        self.abandon()

    def abandon(self) -> None:
        """Closes the file without completing it."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _end_block(self) -> None:
        self.checksums.append(self._hash.hexdigest())
        self._hash.reset()
        if self.size % _AHEAD == 0:
            self._start_writing()


class BlockReader:
    """Reads a file. If checksums are known, checks each block of which it reads a part. Raises CorruptCheckpointError
    if the file is missing or does not have ``size`` bytes, or if a checksum is wrong."""

    _file = -1

    def __init__(self, path: Path, size: int, checksums: Sequence[str] | None) -> None:
        self.path, self.size, self._checksums = path, size, checksums
        self._first, self._last = 0, 0  # range of bytes of the block that is in memory
        self._memory, self._address = memoryview(b""), 0
        if (found := self._open(path)) != size:
            self.close()
            raise CorruptCheckpointError(f"{path} has {found} bytes, but {size} were written")

    def _open(self, path: Path) -> int:
        """Opens the file, and returns its size."""
        self._file, found = open_regular(path)
        return found

    def _fill(self, block: memoryview, start: int) -> int:
        """Reads bytes from ``start`` on, and returns how many. Raises OSError."""
        return read_at(self._file, block, start)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Says which bytes are read next, for readers that read ahead."""

    def read_into(self, target: memoryview, start: int) -> None:
        """Fills ``target`` with the bytes of the file from ``start`` on."""
        if not 0 <= start <= start + len(target) <= self.size:
            raise CorruptCheckpointError(f"{self.path} has no bytes {start} to {start + len(target)}")
        while target:
            number, within = divmod(start, BLOCK)
            length = min(BLOCK, self.size - number * BLOCK)
            part = target[: length - within]
            if len(part) == length:
                self._read(number, part)
            else:
                part[:] = self._block(number, length)[within : within + len(part)]
            target, start = target[len(part) :], start + len(part)

    def read_to(self, tensor: torch.Tensor, start: int) -> None:
        """Fills a contiguous tensor on the CPU. A small tensor is often in the block that was read last."""
        nbytes = tensor.nbytes
        if self._first <= start and start + nbytes <= self._last:
            ctypes.memmove(tensor.data_ptr(), self._address + start - self._first, nbytes)
        else:
            self.read_into(bytes_of(tensor), start)

    def check(self, report: Callable[[int], object] = lambda _: None) -> Iterator[tuple[int, int]]:
        """Reads the whole file, and yields the first and last byte of each block with a wrong checksum. Calls
        ``report`` with the size of each block that was read."""
        scratch = memoryview(bytearray(min(BLOCK, self.size)))
        self.prefetch([(0, self.size)])
        for start in range(0, self.size, BLOCK):
            try:
                self._read(start // BLOCK, scratch[: self.size - start])
            except CorruptCheckpointError:
                yield start, min(start + BLOCK, self.size)
            report(min(BLOCK, self.size - start))

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _block(self, number: int, length: int) -> memoryview:
        """Reads a block into memory, for reads of parts of it: several small tensors share a block."""
        if not self._first <= number * BLOCK < self._last:
            if not self._memory:
                self._memory, self._address = _memory(min(BLOCK, self.size))
            self._last = 0  # nothing is in memory if the read fails
            self._read(number, self._memory[:length])
            self._first, self._last = number * BLOCK, number * BLOCK + length
        return self._memory[:length]

    def _read(self, number: int, block: memoryview) -> None:
        """Fills ``block`` with a block of the file, and compares it with its checksum."""
        start, remaining = number * BLOCK, block
        while remaining:
            try:
                count = self._fill(remaining, start + len(block) - len(remaining))
            except OSError as error:
                raise CorruptCheckpointError(f"{self.path} cannot be read at byte {start}: {error.strerror}") from error
            if count == 0:
                raise CorruptCheckpointError(f"{self.path} ended while it was read")
            remaining = remaining[count:]
        self._compare(number, block)

    def _compare(self, number: int, block: memoryview) -> None:
        if self._checksums is not None and checksum(block) != self._checksums[number]:
            start = number * BLOCK
            raise CorruptCheckpointError(
                f"{self.path}: bytes {start} to {start + len(block)} are not what was written (wrong checksum)"
            )
