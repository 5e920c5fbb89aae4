"""Files in blocks, each with a checksum: bytes are checked as they are read, and only the blocks that are needed.

A checksum is XXH3 of :data:`BLOCK` bytes, while they are in the cache of the processor, and costs a fraction of their
copy. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

import torch
import xxhash

#: Bytes of a block; the last one of a file may be shorter.
BLOCK = 1 << 18
#: Bytes from which a buffer is written as it is; smaller ones are joined before, which costs less than to handle each.
_LARGE = 1 << 16
#: Bytes of which the system is told to begin to write them to the disk, so that the end of a file waits for less.
_AHEAD = 32 * BLOCK
_begin = getattr(ctypes.CDLL(None), "sync_file_range", None)


#: Is called, by writers that this thread makes, with the bytes that were written.
TELL: ContextVar[Callable[[int], object]] = ContextVar("TELL", default=lambda _: None)


def printable(text: str) -> str:
    """A text in one line, for a terminal or a log: what is not printable, such as escape sequences, is replaced."""
    return "".join(each if each.isprintable() else " " if each == "\n" else "?" for each in text)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message may hold names of a file from strangers."""

    def __str__(self) -> str:
        return printable(super().__str__())


class BrokenCheckpoint(CheckpointError):
    """A checkpoint is not whole, or not what was written: the message names the file and the tensor."""


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keeps Python from looking for garbage: among ten thousands of objects that stay, it takes half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def open_regular(path: Path) -> tuple[int, int]:
    """Opens a file to read; returns its descriptor and its size. A BrokenCheckpoint if there is no regular file: a pipe
    or a device would be read for ever."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        found = os.fstat(file)
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise BrokenCheckpoint(f"{path} cannot be read: it is no regular file")
    return file, found.st_size


def read_regular(path: Path) -> bytes:
    """All of a file without holes, such as a manifest."""
    opened, size = open_regular(path)
    with open(opened, "rb") as file:
        if size and os.lseek(opened, 0, os.SEEK_HOLE) < size:
            raise BrokenCheckpoint(f"{path} has a hole, so it is not what was written")
        os.lseek(opened, 0, os.SEEK_SET)
        data = file.read(size)
    if len(data) != size:
        raise BrokenCheckpoint(f"{path} ended while it was read")
    return data


def checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64(data).hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU. The tensor has to outlive it."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(_array(tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@lru_cache(maxsize=256)
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * nbytes


def _memory(nbytes: int) -> tuple[memoryview, int]:
    """New memory, and its address."""
    memory = bytearray(nbytes)
    return memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory))


def make_directory(path: Path) -> None:
    """Makes a directory, and those above it that are not there; their names are on the disk when it returns."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        force_names(path.parent)


def force_names(directory: Path) -> None:
    """Forces the names in a directory to the disk."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class BlockWriter:
    """Writes a new file from one end to the other, in large calls; :meth:`close` forces it to the disk. ``checksums``
    are those of the blocks, whole once the file is closed, and ``size`` the bytes that are in the file."""

    def __init__(self, path: Path) -> None:
        self.checksums = list[str]()
        self._hash = xxhash.xxh3_64()  # of the block that is being written
        self.size, self._room = 0, BLOCK  # and the bytes that its last block lacks
        self._small, self._address, self._held = *_memory(BLOCK), 0  # small parts, to be written in one call
        self._tell = TELL.get()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: memoryview | bytes) -> None:
        """Adds bytes."""
        if len(data) >= _LARGE:
            self._write_small()
            self._write(memoryview(data))
            return
        while data:
            part = data[: self._room - self._held]
            self._small[self._held : self._held + len(part)] = part
            self._held += len(part)
            if self._held == self._room:
                self._write_small()
            data = data[len(part) :]

    def write_tensors(self, tensors: Iterable[tuple[bytes, torch.Tensor]]) -> None:
        """Adds the values of tensors, each behind some bytes."""
        for before, tensor in tensors:
            length, nbytes, plain = len(before), tensor.nbytes, tensor.is_cpu and tensor.is_contiguous()
            at = self._held + length
            if plain and nbytes < _LARGE and at + nbytes < self._room:
                self._small[self._held : at] = before
                ctypes.memmove(self._address + at, tensor.data_ptr(), nbytes)
                self._held = at + nbytes
            else:
                self.write(before)
                whole = tensor if plain else tensor.cpu().contiguous()
                self.write(bytes_of(whole))

    def _write_small(self) -> None:
        held, self._held = self._held, 0
        self._write(self._small[:held])

    def _write(self, data: memoryview) -> None:
        while data:
            part = data[: self._room]
            self._hash.update(part)
            data = data[len(part) :]
            while part:
                written = os.write(self._file, part)
                self._tell(written)
                self.size += written
                part = part[written:]
            self._room = BLOCK - self.size % BLOCK
            if self._room == BLOCK:
                self._end_block()

    def close(self) -> None:
        """Ends the file; it is on the disk when this returns."""
        self._write_small()
        if self._room < BLOCK:
            self._end_block()
        os.fsync(self._file)
        self.abandon()

    def abandon(self) -> None:
        """Closes the file as it is."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _end_block(self) -> None:
        self.checksums.append(self._hash.hexdigest())
        self._hash.reset()
        if self.size % _AHEAD == 0 and _begin is not None:  # SYNC_FILE_RANGE_WRITE, which Linux alone has
            _begin(self._file, ctypes.c_int64(self.size - _AHEAD), ctypes.c_int64(_AHEAD), 2)


class BlockReader:
    """Reads a file, and checks every block of which something is read, if its checksums are known. A BrokenCheckpoint
    if the file is not there or has not ``size`` bytes, or if a block is not what was written."""

    def __init__(self, path: Path, size: int, checksums: Sequence[str] | None) -> None:
        self.path, self.size, self._checksums = path, size, checksums
        self._first, self._last = 0, 0  # byte of the block that was read last, in parts, and the memory where it lies
        self._memory, self._address = memoryview(b""), 0
        self._file = -1
        self._file, found = open_regular(path)
        if found != size:
            self.close()
            raise BrokenCheckpoint(f"{path} has {found} bytes, and {size} were written")

    def read_into(self, target: memoryview, start: int) -> None:
        """Fills ``target`` with what the file has from byte ``start`` on."""
        if not 0 <= start <= start + len(target) <= self.size:
            raise BrokenCheckpoint(f"{self.path} has no bytes {start} to {start + len(target)}")
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
        """Fills a contiguous tensor on the CPU. Small ones lie in the same block as the one before."""
        nbytes = tensor.nbytes
        if self._first <= start and start + nbytes <= self._last:
            ctypes.memmove(tensor.data_ptr(), self._address + start - self._first, nbytes)
        else:
            self.read_into(bytes_of(tensor), start)

    def check(self, tell: Callable[[int], object] = lambda _: None) -> Iterator[tuple[int, int]]:
        """Reads all of it; yields first and last byte of each block that is not what was written. ``tell`` is called
        with the bytes of each block that was read."""
        scratch = memoryview(bytearray(min(BLOCK, self.size)))
        for start in range(0, self.size, BLOCK):
            try:
                self._read(start // BLOCK, scratch[: self.size - start])
            except BrokenCheckpoint:
                yield start, min(start + BLOCK, self.size)
            tell(min(BLOCK, self.size - start))

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _block(self, number: int, length: int) -> memoryview:
        """A block that is needed in parts: small tensors lie in one."""
        if not self._first <= number * BLOCK < self._last:
            if not self._memory:
                self._memory, self._address = _memory(min(BLOCK, self.size))
            self._last = 0  # until it is there
            self._read(number, self._memory[:length])
            self._first, self._last = number * BLOCK, number * BLOCK + length
        return self._memory[:length]

    def _read(self, number: int, block: memoryview) -> None:
        """Fills ``block`` with a block of the file, and compares it with its checksum."""
        start, rest = number * BLOCK, block
        while rest:
            try:
                count = os.preadv(self._file, [rest], start + len(block) - len(rest))
            except OSError as error:
                raise BrokenCheckpoint(f"{self.path} cannot be read at byte {start}: {error.strerror}") from error
            if count == 0:
                raise BrokenCheckpoint(f"{self.path} ended while it was read")
            rest = rest[count:]
        self._compare(number, block)

    def _compare(self, number: int, block: memoryview) -> None:
        if self._checksums is not None and checksum(block) != self._checksums[number]:
            start = number * BLOCK
            raise BrokenCheckpoint(
                f"{self.path}: bytes {start} to {start + len(block)} are not what was written (wrong checksum)"
            )
