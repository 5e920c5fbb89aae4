"""Reads checkpoints without a process group and without a model: which are there, which are whole, what is in them.

Owns the order of the checkpoints of a directory, and the way from a box of a tensor to the bytes that hold it: of each
file only the blocks are read that are needed, in their order, and none twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import operator
import os
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from fullshard.checkpoint import dcp
from fullshard.checkpoint.blocks import BlockReader, BrokenCheckpoint, CheckpointError, bytes_of, read_regular
from fullshard.checkpoint.manifest import MANIFEST, METADATA, Kind, Manifest, Piece, Tensors, decode, few, number_of

#: A box of a tensor that is to be read into memory: the name of the tensor in the checkpoint, its shape, where the box
#: begins, and what takes its values, on any device, of any dtype and strides.
Target = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]


def checkpoints(directory: str | Path) -> list[Path]:
    """The checkpoints of a directory by their names, the newest first; the directory itself if it is one.

    Where another job saves and removes older ones, some may be gone when their turn comes.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return []
    with os.scandir(directory) as entries:  # which know what is a directory: one that was removed is not asked
        found = [(number, entry.name) for entry in entries if (number := number_of(entry.name)) and entry.is_dir()]
    if number_of(directory.name) or (not found and is_checkpoint(directory)):
        return [directory]
    return [directory / name for _, name in sorted(found, reverse=True)]


def newest_first(directory: str | Path) -> Iterator[Path]:
    """The same, but each is taken from a new listing: while one was tried, a save may have removed others, and have
    made a newer one."""
    tried = set[Path]()

    def untried() -> Path | None:
        return next((path for path in checkpoints(directory) if path not in tried), None)

    while path := untried() or untried():  # a listing may miss what is renamed meanwhile, but not two in a row
        tried.add(path)
        yield path


def newest(directory: str | Path) -> Checkpoint | None:
    """The newest checkpoint whose manifest and files are there; what the files hold is checked when it is read. Close
    it after use: until then no save removes it."""
    for path in newest_first(directory):
        try:
            return Checkpoint(path)
        except BrokenCheckpoint:
            continue
    return None


def is_checkpoint(path: Path) -> bool:
    if not path.is_dir() or number_of(path.name):
        return path.is_dir()
    names = os.listdir(path)  # other programs have a manifest.json too
    return METADATA in names or (MANIFEST in names and any(name.endswith(".distcp") for name in names))


class Checkpoint:
    """A checkpoint on the disk, of ours or of DCP's ``save``; also a context manager, which closes its files. Until it
    is closed, ``keep_last`` of other jobs leaves it where it is, as far as the file system has locks.

    Args:
        path: its directory.
        whole: ``False``: files may be missing, for :meth:`verify` to name them.

    Attributes:
        path: its directory.
        manifest: what it holds.

    Raises:
        BrokenCheckpoint: it is not whole, as far as manifest and sizes of files tell.
    """

    _unpin: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, path: str | Path, *, whole: bool = True) -> None:
        self.path = path = Path(path)
        self._readers: dict[str, BlockReader] = {}
        self._pin()
        try:
            self._read_manifest(path, whole)
        except BaseException:
            self.close()
            raise

    def _pin(self) -> None:
        """Locks the manifest, which nobody removes then. The lock of a process that ends is gone."""
        with contextlib.suppress(OSError):  # there is none, which is said when it is read, or there are no locks
            file = os.open(self.path / MANIFEST, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._unpin = weakref.finalize(self, os.close, file)
            fcntl.flock(file, fcntl.LOCK_SH)  # waits for a save that renames it, to remove it

    def _read_manifest(self, path: Path, whole: bool) -> None:
        if (path / MANIFEST).exists() or number_of(path.name) or not (path / METADATA).exists():
            self.manifest = decode(read_regular(path / MANIFEST), path / MANIFEST)
        else:
            self.manifest = dcp.read_metadata(read_regular(path / METADATA), path / METADATA)
        for sentence in self.lacking().values() if whole else ():
            raise BrokenCheckpoint(sentence)
        if whole and METADATA in self.manifest.files:  # for other readers: what we need stands in the manifest too
            for first, last in self._reader(METADATA).check():
                raise BrokenCheckpoint(f"{path / METADATA}: bytes {first} to {last} are not what was written")
            self._readers.pop(METADATA).close()

    @property
    def tensors(self) -> Tensors:
        """The tensors that it holds, by name: dtype, shape, bytes, and the files where they lie."""
        return self.manifest.tensors

    @property
    def model(self) -> dict[str, str]:
        """The tensors of the model: by the name that each has there, the name that it has in the checkpoint.

        In what DCP wrote these are what lies under a key ``model``, or else everything that lies under no key.
        """
        paths = {name: self.path_of(name) for name in self.tensors}
        found = {
            ".".join(path[path.index("model") + 1 :]): name for name, path in paths.items() if "model" in path[:-1]
        }
        return found or {name: name for name, path in paths.items() if len(path) == 1}

    def path_of(self, name: str) -> tuple[str, ...]:
        """The keys that lead to a tensor or a value in the nested state dict."""
        keys = tuple(map(str, self.manifest.paths.get(name, ())))
        return keys or (tuple(name.split(".", 1)) if self.manifest.versions else (name,))

    def tensor(self, name: str) -> torch.Tensor:
        """All of a tensor, on the CPU.

        Raises:
            KeyError: there is no such tensor.
            BrokenCheckpoint: the bytes are not what was written.
        """
        kind, _ = self._place(name)
        whole = torch.empty(kind.shape, dtype=kind.dtype)
        self.read([(name, kind.shape, (0,) * len(kind.shape), whole)])
        return whole

    def value(self, name: str) -> Any:
        """A value that is no tensor.

        Raises:
            KeyError: there is no such value.
            BrokenCheckpoint: the bytes are not what was written.
        """
        if name not in self.manifest.objects:
            raise KeyError(f"{self.path} has no value '{name}', but {sorted(self.manifest.objects)}")
        stored = self.manifest.objects[name]
        try:
            data = self._bytes(*stored)
        except BrokenCheckpoint as error:
            raise BrokenCheckpoint(f"'{name}': {error}") from error
        return dcp.loaded(data, f"'{name}' in {self.path / stored.file}")

    def state(self, rank: int = 0) -> dict[str, Any]:
        """What a rank gave to ``save`` beside model and optimizer, by name; of more ranks than that: from the first.

        Raises:
            BrokenCheckpoint: the bytes are not what was written.
        """
        numbers = {name: each[rank % len(each)] for name, each in self.manifest.state.items()}
        return {name: self.value(f"state.{name}.{number}") for name, number in numbers.items()}

    def differing(self) -> list[str]:
        """The names of :meth:`state` under which ranks gave different values."""
        return sorted(name for name, numbers in self.manifest.state.items() if len(set(numbers)) > 1)

    def verify(self, tell: Callable[[int], object] = lambda _: None) -> Iterator[str]:
        """Reads everything; yields a sentence for each file or block that is not what was written.

        A sentence names the file, the bytes, and the tensors in them.

        Args:
            tell: is called with the number of bytes that were read, again and again.
        """
        lacking = self.lacking()
        yield from lacking.values()
        for name, file in self.manifest.files.items():
            if file.checksums is None or name in lacking:
                continue
            for first, last in self._reader(name).check(tell):
                held = ", ".join(sorted(self._in(name, first, last))) or "nothing but headers"
                yield f"{self.path / name}: bytes {first} to {last} are not what was written; they hold {held}"
        if not any(file.checksums for file in self.manifest.files.values()):
            reads = [(self.tensor, name, self.tensors[name].nbytes) for name in self.tensors]
            reads += [(self.value, name, each.length) for name, each in self.manifest.objects.items()]
            for read, name, nbytes in reads:
                try:
                    read(name)
                except BrokenCheckpoint as error:
                    yield str(error)
                tell(nbytes)

    def read(self, targets: Iterable[Target]) -> None:
        """Fills boxes of tensors; autograd is told that they were written.

        Raises:
            KeyError: there is no such tensor.
            ValueError: it has another shape.
            BrokenCheckpoint: the bytes are not what was written; some boxes may be filled then.
        """
        wanted: dict[str, list[tuple[int, str, torch.Tensor, tuple[Piece, tuple[int, ...]] | None]]] = {}
        written: list[torch.Tensor] = []
        for name, shape, offsets, into in targets:
            kind, at = self.tensors.places.get(name) or self._place(name)
            if kind.shape != shape:
                raise ValueError(f"'{name}' has the shape {shape} here, and {kind.shape} in {self.path}")
            same = kind.boxes.get((offsets, into.shape), -1)
            if same >= 0 and into.dtype == kind.dtype and into.is_cpu and into.is_contiguous():
                file, _, head, _, _ = kind.pieces[same]
                if head >= 0:
                    wanted.setdefault(file, []).append((kind.starts[same][at] + head, name, into, None))
                    written.append(into)
                    continue
            for number in range(len(kind.pieces)) if same < 0 else [same]:
                piece = kind.piece(number, at)
                wanted.setdefault(piece.file, []).append((piece.start, name, into, (piece, offsets)))
        try:
            for file in sorted(wanted):
                reader, runs = self._reader(file), wanted[file]
                for start, name, into, part in sorted(runs, key=operator.itemgetter(0)):
                    if part is None:
                        reader.read_to(into, start)
                    else:
                        self._copy(*part, self.tensors.places[name][0].dtype, into.detach())
        except BrokenCheckpoint as error:
            raise BrokenCheckpoint(f"tensor '{name}': {error}") from error
        torch.autograd.graph.increment_version(written)

    def close(self) -> None:
        """Closes the files that were read. A later read opens them again."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._unpin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _place(self, name: str) -> tuple[Kind, int]:
        if name not in self.tensors.places:
            raise KeyError(f"{self.path} has no tensor '{name}'")
        return self.tensors.places[name]

    def _copy(self, piece: Piece, offsets: tuple[int, ...], dtype: torch.dtype, into: torch.Tensor) -> None:
        """Copies what a piece and a box have in common."""
        lows, both = list(map(max, piece.offsets, offsets)), (piece.offsets, piece.sizes, offsets, into.shape)
        ends = [min(at + size, to + want) for at, size, to, want in zip(*both, strict=True)]
        sizes = [end - low for low, end in zip(lows, ends, strict=True)]
        if any(size <= 0 for size in sizes):
            return
        for dim, (low, size) in enumerate(zip(lows, sizes, strict=True)):
            if size != into.shape[dim]:
                into = into.narrow(dim, low - offsets[dim], size)
        begins = [low - at for low, at in zip(lows, piece.offsets, strict=True)]
        if piece.data < 0:
            data = self._bytes(piece.file, piece.start, piece.length)
            whole = dcp.loaded_tensor(data, dtype, piece.sizes, f"what {self.path / piece.file} has of it")
            into.copy_(whole[tuple(slice(at, at + size) for at, size in zip(begins, sizes, strict=True))])
            return
        strides = [math.prod(piece.sizes[dim + 1 :]) for dim in range(len(sizes))]
        start = piece.data + dtype.itemsize * sum(map(operator.mul, begins, strides))
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        direct = span == math.prod(sizes) and into.is_contiguous() and into.dtype == dtype and into.is_cpu
        run = into if direct else torch.empty(span, dtype=dtype)
        self._reader(piece.file).read_into(bytes_of(run), start)
        if direct:
            torch.autograd.graph.increment_version(into)
        else:
            into.copy_(run.as_strided(sizes, strides))

    def _bytes(self, file: str, start: int, length: int) -> bytes:
        data = bytearray(length)
        self._reader(file).read_into(memoryview(data), start)
        return bytes(data)

    def _reader(self, file: str) -> BlockReader:
        if file not in self._readers:
            self._readers[file] = BlockReader(self.path / file, *self.manifest.files[file])
        return self._readers[file]

    def lacking(self) -> dict[str, str]:
        """Of each file that is not there, or has another size, a sentence that says so."""
        found = {}
        for name, file in self.manifest.files.items():
            path, size, is_file = self.path / name, -1, True
            with contextlib.suppress(OSError):
                status = path.stat()
                size, is_file = status.st_size, stat.S_ISREG(status.st_mode)
            if size != file.size or not is_file:
                lacks = f"has {size} bytes, and {file.size} were written" if is_file else "is no regular file"
                found[name] = f"{path} {'is missing' if size < 0 else lacks}"
                if held := sorted(self._in(name, max(size, 0), file.size)):
                    found[name] += f"; lost are parts of {few(held)}"
        return found

    def _in(self, file: str, first: int, last: int) -> Iterator[str]:
        """What lies between two bytes of a file."""
        for name, entry in self.tensors.items():
            if any(p.file == file and p.start < last and first < p.start + p.length for p in entry.pieces):
                yield name
        for name, stored in self.manifest.objects.items():
            if stored.file == file and stored.start < last and first < stored.start + stored.length:
                yield name


__all__ = ["BrokenCheckpoint", "Checkpoint", "CheckpointError", "Manifest", "Target", "checkpoints", "newest"]
