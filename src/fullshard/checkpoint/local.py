"""Checkpoints in a directory of the operating system: a rename publishes them, and locks protect them.

Owns the hidden directories of saves (``.step-00000010.<job>.partial``) and removals, and the locks: a save locks its
directory, readers share a lock of the manifest. The system releases the locks of a process that ends, so what has no
lock is a leftover.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import itertools
import os
import re
import shutil
import socket
import stat
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fullshard.checkpoint.blocks import (
    BlockReader,
    BlockWriter,
    CheckpointError,
    force_names,
    make_directory,
    open_regular,
    read_regular,
)
from fullshard.checkpoint.manifest import MANIFEST, StoredFile, is_checkpoint, name_of, number_of, step_of, steps_of
from fullshard.platforms import has_locks, lock, open_directory, open_flags

#: The hidden directories of a save and of a removal. Others that begin so are those of other programs.
_PARTIAL = re.compile(r"\.step-\d{8,}\..+-\d+-[0-9a-f]{8}\.partial")
_REMOVED = re.compile(r"\.step-\d{8,}(\.\d+)?\.[0-9a-f]{8}\.removed")


class LocalStorage:
    """A directory of checkpoints on a disk, or in memory."""

    is_slow = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def list(self) -> list[Path]:
        directory = self.directory
        try:
            # What is no directory, such as a link to nothing, is listed too: it is a checkpoint that cannot be read.
            found = [(number, name) for name in os.listdir(directory) if (number := number_of(name))]
            if number_of(directory.name) or (not found and is_checkpoint(directory)):
                return [directory]
        except FileNotFoundError:
            nearest = next(each for each in (directory, *directory.absolute().parents) if os.path.lexists(each))
            if not nearest.exists():
                raise CheckpointError(f"{directory} cannot be read: {nearest} is a link to nothing") from None
            return []
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
        return [directory / name for _, name in sorted(found, reverse=True)]

    def newest_first(self, step: int | None = None) -> Iterator[Path]:
        return (path for path in self.list() if step is None or step_of(path.name) in (None, step))

    def unfinished(self) -> builtins.list[Path]:
        return self._hidden(_PARTIAL)

    def leftovers(self) -> builtins.list[Path]:
        """What saves and removals write now, or have left."""
        return self._hidden(_PARTIAL) + self._hidden(_REMOVED)

    def _hidden(self, name: re.Pattern[str]) -> builtins.list[Path]:
        return sorted(path for path in self.directory.glob(".step-*") if name.fullmatch(path.name))

    def begin(self, step: int | None) -> LocalPartial:
        try:
            make_directory(self.directory)
            self._remove_leftovers()
            step = max(steps_of(self.list()), default=-1) + 1 if step is None else step
            while not (partial := LocalPartial.locked(self.directory, step)):
                pass
            return partial
        except OSError as error:
            raise CheckpointError(f"no checkpoint can be made in {self.directory}: {error.strerror}") from error

    def open_partial(self, key: str) -> LocalPartial:
        return LocalPartial(self.directory / key, 0)

    def remove(self, path: Path) -> bool:
        if path.is_symlink():
            return False
        hidden = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.removed"
        with contextlib.ExitStack() as opened:
            with contextlib.suppress(OSError):  # there is no manifest, or there are no locks
                if has_locks():  # Windows renames no directory with an open file
                    file = os.open(path / MANIFEST, os.O_RDWR)  # NFS needs write access for locks
                    opened.callback(os.close, file)
                    try:
                        lock(file)
                    except BlockingIOError:
                        return False
            try:
                path.rename(hidden)  # so that nobody sees a part of it
            except PermissionError:
                if has_locks():
                    raise
                return False  # somebody reads it
        shutil.rmtree(hidden)
        return True

    def _remove_leftovers(self) -> None:
        """Removes directories of processes that ended in the middle of a save."""
        for path in self.leftovers():
            try:
                opened = open_directory(path)
            except OSError:
                continue
            if opened is None:
                return
            try:
                lock(opened)
                shutil.rmtree(path, ignore_errors=True)
            except OSError:
                pass  # somebody writes to it
            finally:
                os.close(opened)

    def files(self, path: Path) -> LocalFiles:
        return LocalFiles(path)

    def note(self, name: str) -> str:
        with contextlib.suppress(OSError, ValueError):
            return (self.directory / name).read_text(encoding="utf-8")
        return ""

    def write_note(self, name: str, text: str) -> None:
        make_directory(self.directory)
        written = self.directory / f".{name}.{uuid.uuid4().hex[:8]}"
        written.write_text(text, encoding="utf-8", newline="\n")
        os.replace(written, self.directory / name)


class LocalPartial:
    """A hidden directory, locked by the process that has made it."""

    largest, unsent, attempt = float("inf"), 0, ""

    def __init__(self, path: Path, step: int, is_mine: bool = False) -> None:
        self.path, self.step, self._is_mine = path, step, is_mine
        self._lock = open_directory(path) if is_mine else None

    @property
    def key(self) -> str:
        return self.path.name

    @classmethod
    def locked(cls, directory: Path, step: int) -> LocalPartial | None:
        """Makes a hidden directory, and locks it; ``None`` if another job has removed it before it was locked."""
        job = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path = directory / f".{name_of(step)}.{job}.partial"
        path.mkdir()
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            made = cls(path, step, is_mine=True)
            try:
                if made._lock is not None:
                    lock(made._lock)
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    made._release()
                    raise
            if path.exists():  # locked, or on a file system without locks, where leftovers stay
                return made
            made._release()
        return None

    def open(self, name: str) -> BlockWriter:
        return BlockWriter(self.path / name)

    def flush(self) -> None:
        pass  # a file is on the disk when its writer is closed

    def publish(self, manifest: bytes) -> str:
        writer = self.open(MANIFEST)
        try:
            writer.write(manifest)
            writer.close()
        finally:
            writer.abandon()
        force_names(self.path)
        name = self._rename()
        force_names(self.path.parent)
        self._release()
        return name

    def _rename(self) -> str:
        directory = self.path.parent
        numbers = [number_of(path.name) or (-1, 0) for path in LocalStorage(directory).list()]
        made = [again for step, again in numbers if step == self.step]
        for again in itertools.count(max(made, default=-1) + 1):  # a lower one would be older
            name = name_of(self.step, again)
            if not os.path.lexists(directory / name):
                try:
                    os.rename(self.path, directory / name)
                    return name
                except OSError as error:  # another job was faster
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
        raise AssertionError

    def discard(self, is_empty: bool = False) -> None:
        if self._is_mine:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        opened, self._lock, self._is_mine = self._lock, None, False
        if opened is not None:
            os.close(opened)


class LocalFiles:
    """The files of a checkpoint on a disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pin(self, owner: object) -> Callable[[], object]:
        """Locks the manifest. The lock ends with the process."""
        with contextlib.suppress(OSError):  # no manifest (reading it reports that), or no locks
            file = os.open(self.path / MANIFEST, os.O_RDONLY | open_flags("O_NONBLOCK"))
            unpin = weakref.finalize(owner, os.close, file)
            with contextlib.suppress(OSError):
                lock(file, shared=True)  # waits for a save that is about to remove it
            return unpin
        return lambda: None

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def read(self, name: str, most: int | None = None) -> bytes:
        if most is None:
            return read_regular(self.path / name)
        with open(open_regular(self.path / name)[0], "rb") as file:
            return file.read(most)

    def size(self, name: str, expected: int) -> int | None:
        try:
            status = (self.path / name).stat()
        except OSError:
            return -1
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def open(self, name: str, file: StoredFile) -> BlockReader:
        return BlockReader(self.path / name, *file)

    def for_each(self, read: Callable[[str], object], files: Iterable[str]) -> None:
        for name in files:
            read(name)
