"""Where checkpoints are stored: the narrow interface between checkpoints and a disk or an object store.

A *storage* is one directory of checkpoints. There are two: :mod:`fullshard.checkpoint.local` for directories of the
operating system, and :mod:`fullshard.checkpoint.remote` for object stores and everything else that fsspec knows. Both
promise the same: what :meth:`Storage.list` returns was published whole, whatever happened to the processes that wrote.
"""

from __future__ import annotations

import builtins
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from fullshard.checkpoint.blocks import BlockReader, BlockWriter
from fullshard.checkpoint.manifest import Location, StoredFile
from fullshard.policies import is_url, local_path


def located(directory: str | os.PathLike[str] | Any) -> Location:
    """A directory as a path: a ``Path``, or a ``UPath`` if it is a URL such as ``s3://bucket/run``.

    Raises:
        ImportError: it is a URL, and universal_pathlib is not installed.
        ValueError: it is neither a path nor a URL that can be read.
    """
    if not isinstance(directory, Path) and hasattr(directory, "fs"):
        return directory
    text = os.fspath(directory)
    if not is_url(text):
        return local_path(directory, "the directory")
    if text.startswith(("file://", "local://")):
        path = text.partition("://")[2].removeprefix("localhost")
        if not path.startswith("/") or "%" in path:
            raise ValueError(f"{text} names a host, a relative path or encoded letters: give a path such as /data/run")
        return Path(path[1:] if os.path.splitdrive(path[1:])[0] else path)  # Windows: /C:/run
    try:
        from upath import UPath
    except ImportError as error:
        raise ImportError(f"{text} needs the package universal_pathlib: pip install 'fullshard[storage]'") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "UPath .* not explicitly implemented")  # its default does
        return UPath(text)


class Partial(Protocol):
    """A checkpoint that is being written. Nobody else sees it until it is published.

    Attributes:
        path: where its files are.
        step: its step.
        largest: the largest size of a file in bytes, if files can be split.
        attempt: what the names of its files contain so that no other save has them; empty if that is not needed.
        key: with it another rank opens the checkpoint.
    """

    path: Location
    step: int
    largest: float
    attempt: str

    @property
    def key(self) -> str: ...

    @property
    def unsent(self) -> int:
        """The bytes that were written here and are still in memory."""

    def open(self, name: str) -> BlockWriter:
        """Begins a new file. Raises FileNotFoundError if this host does not see :attr:`path`."""

    def flush(self) -> None:
        """Waits until all files that this process has closed are stored."""

    def publish(self, manifest: bytes) -> str:
        """Writes the manifest, and makes the checkpoint visible, in one step. Returns its name. The first rank calls
        it when the files of all ranks are stored."""

    def discard(self, is_empty: bool = False) -> None:
        """Removes it, unless it was published. Any process may call it at any time, also twice.

        Args:
            is_empty: whether no rank has begun to write a file.
        """


class Files(Protocol):
    """The files of a published checkpoint."""

    def pin(self, owner: object) -> Callable[[], object]:
        """Keeps the checkpoint from being removed while ``owner`` lives, until the returned function is called, or
        until this process ends. Does nothing if the storage cannot do that."""

    def exists(self, name: str) -> bool:
        """Whether there is a file."""

    def read(self, name: str, most: int | None = None) -> bytes:
        """A file, or its first bytes. Raises CorruptCheckpointError if there is none."""

    def size(self, name: str, expected: int) -> int | None:
        """The size of a file; -1 if there is none; ``None`` if it is not a regular file. It is certain where it is not
        the one that is expected."""

    def open(self, name: str, file: StoredFile) -> BlockReader:
        """Opens a file, to read parts of it."""

    def for_each(self, read: Callable[[str], object], files: Mapping[str, StoredFile]) -> None:
        """Calls a function for the name of each file: in threads, several at a time, where that is faster."""


class Storage(Protocol):
    """One directory of checkpoints.

    Attributes:
        is_slow: whether a save in the background should begin there, because each request takes milliseconds.
    """

    directory: Location
    is_slow: bool

    def list(self) -> list[Location]:
        """The published checkpoints, the newest first."""

    def newest_first(self, step: int | None = None) -> Iterator[Location]:
        """Like :meth:`list`, but finds the next one when it is asked for. With ``step``, only those named after it."""

    def unfinished(self) -> builtins.list[Location]:
        """The checkpoints that saves write now, or that interrupted saves have left."""

    def begin(self, step: int | None) -> Partial:
        """Begins a checkpoint of a step (``None``: the next one). Raises CheckpointError if it cannot. It first removes
        what interrupted saves have left."""

    def open_partial(self, key: str) -> Partial:
        """The checkpoint that another rank has begun, for the files of this rank."""

    def remove(self, path: Location) -> bool:
        """Removes a checkpoint, unless it is pinned. Returns whether it did."""

    def files(self, path: Location) -> Files:
        """The files of a checkpoint."""

    def note(self, name: str) -> str:
        """The text of a file beside the checkpoints; empty if there is none."""

    def write_note(self, name: str, text: str) -> None:
        """Writes such a file, in one step."""


def storage_of(directory: Location) -> Storage:
    """The storage of a directory of checkpoints."""
    if isinstance(directory, Path):
        from fullshard.checkpoint.local import LocalStorage

        return LocalStorage(directory)
    from fullshard.checkpoint.remote import ObjectStorage

    return ObjectStorage(directory)


def files_of(path: Location) -> Files:
    """The files of a checkpoint."""
    return storage_of(path.parent).files(path)
