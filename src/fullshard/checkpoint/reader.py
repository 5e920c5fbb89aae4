"""Reads checkpoints without a process group and without a model: lists them, checks them, and reads their contents.

Owns the order of the checkpoints in a directory, and how a box of a tensor is found in the files. Only the necessary
blocks of a file are read, in their order, and each once.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fullshard.checkpoint import dcp
from fullshard.checkpoint.blocks import BlockReader, CheckpointError, CorruptCheckpointError, in_memory
from fullshard.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Location,
    StoredPiece,
    TensorKind,
    Tensors,
    decode,
    few,
    number_of,
)
from fullshard.checkpoint.storage import files_of, located, storage_of
from fullshard.disk.file import bytes_of

#: A box of a tensor to read: the name of the tensor in the checkpoint, its shape, the offsets of the box, and the
#: tensor to fill, on any device, of any dtype and strides.
Target = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]


def list_checkpoints(directory: str | Path) -> list[Path]:
    """The checkpoints in a directory, the newest first by their names.

    If another job saves there and removes older checkpoints, some may be gone when you open them.

    Args:
        directory: the directory that was given to :func:`save`; if it is itself a checkpoint, only that is listed.

    Ranks: each for itself.
    """
    return storage_of(located(directory)).list()


def is_there(path: Location) -> bool:
    """Whether a checkpoint that could not be read was not removed by another job meanwhile."""
    return os.path.lexists(path) if isinstance(path, Path) else bool(storage_of(path).list())


def newest_first(directory: str | Path, step: int | None = None) -> Iterator[Path]:
    """Like :func:`list_checkpoints`, but lists the directory again before each one: while the caller tried one, a save
    may have removed others and made a newer one. With ``step``, only those that may be of it."""
    tried, storage = set[Path](), storage_of(located(directory))

    def untried() -> Path | None:
        return next((path for path in storage.newest_first(step) if path not in tried), None)

    while path := untried() or untried():  # a listing may miss a directory that is being renamed; two listings do not
        tried.add(path)
        yield path


def latest(directory: str | Path) -> Checkpoint | None:
    """The newest checkpoint with a manifest and all files. Their contents are checked when they are read.

    Args:
        directory: the directory that was given to :func:`save`.

    Returns:
        the checkpoint, or ``None`` if there is none. Close it after use, because until then no save removes it.

    Raises:
        CheckpointError: there are checkpoints, and none is whole; or the directory cannot be read.

    Ranks: each for itself.
    """
    broken = list[str]()
    for path in newest_first(directory):
        try:
            return Checkpoint(path)
        except CorruptCheckpointError as error:
            broken.append(str(error))
    if broken:
        raise CheckpointError(f"no checkpoint in {directory} is whole: {'; '.join(broken)}")
    return None


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """A checkpoint on the disk, made by fullshard or by DCP's ``save``. Needs no process group and no model.

    It is a context manager, which closes its files. Until it is closed, ``keep_last`` of other jobs does not remove it,
    if the file system supports locks.

    Args:
        path: its directory.
        whole: ``False``: files may be missing, so that :meth:`verify` can name them.

    Attributes:
        path: its directory.
        manifest: the description of its contents: ``step``, ``world_size``, ``versions``, ``files`` and more.

    Raises:
        CorruptCheckpointError: the manifest or the sizes of files are wrong.

    Ranks: each for itself.
    """

    def __init__(self, path: str | Path, *, whole: bool = True) -> None:
        self.path = located(path)
        self._files = files_of(self.path)
        self._readers: dict[str, BlockReader] = {}
        self._unpin = self._files.pin(self)
        try:
            files, of_dcp = self._files, self.path / METADATA
            if number_of(self.path.name) or files.exists(MANIFEST) or not files.exists(METADATA):
                self.manifest = decode(files.read(MANIFEST), self.path / MANIFEST)
            else:
                self.manifest = dcp.read_metadata(files.read(METADATA), of_dcp)
            for sentence in self.lacking().values() if whole else ():
                raise CorruptCheckpointError(sentence)
            if whole and METADATA in self.manifest.files:  # read only by DCP, so check all of it here
                for first, last in self._reader(METADATA).check():
                    raise CorruptCheckpointError(f"{of_dcp}: bytes {first} to {last} are not what was written")
                self._readers.pop(METADATA).close()
        except BaseException:
            self.close()
            raise

    @property
    def tensors(self) -> Tensors:
        """Its tensors by name: dtype, shape, bytes, and the files that contain them."""
        return self.manifest.tensors

    @property
    def model(self) -> dict[str, str]:
        """The tensors of the model: a dict from the names in the model to the names in the checkpoint.

        In a checkpoint of DCP these are the tensors under a key ``model``, or else all tensors that are under no key.
        """
        paths = {name: self.path_of(name) for name in self.tensors}
        found = {
            ".".join(path[path.index("model") + 1 :]): name for name, path in paths.items() if "model" in path[:-1]
        }
        return found or {name: name for name, path in paths.items() if len(path) == 1}

    def path_of(self, name: str) -> tuple[str, ...]:
        """The keys that lead to the tensor or value ``name`` in the nested state dict."""
        keys = tuple(map(str, self.manifest.paths.get(name, ())))
        return keys or (tuple(name.split(".", 1)) if self.manifest.versions else (name,))

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU.

        Args:
            name: a name of ``tensors``.

        Raises:
            KeyError: there is no such tensor.
            CorruptCheckpointError: a checksum is wrong.
        """
        kind, _ = self._position(name)
        whole = torch.empty(kind.shape, dtype=kind.dtype)
        self.read([(name, kind.shape, (0,) * len(kind.shape), whole)])
        return whole

    def value(self, name: str) -> Any:
        """A value that is not a tensor.

        Args:
            name: a name of ``manifest.objects``.

        Raises:
            KeyError: there is no such value.
            CorruptCheckpointError: a checksum is wrong.
        """
        if name not in self.manifest.objects:
            raise KeyError(f"{self.path} has no value '{name}', only {sorted(self.manifest.objects)}")
        stored = self.manifest.objects[name]
        try:
            data = self._bytes(*stored)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"'{name}': {error}") from error
        return dcp.loaded(data, f"'{name}' in {self.path / stored.file}")

    def state(self, rank: int = 0) -> dict[str, Any]:
        """The further state that a rank gave to ``save``, by name. If fewer ranks saved than ``rank``, their states are
        repeated from the first rank on.

        Raises:
            CorruptCheckpointError: a checksum is wrong.
        """
        numbers = {name: each[rank % len(each)] for name, each in self.manifest.state.items()}
        return {name: self.value(f"state.{name}.{number}") for name, number in numbers.items()}

    def differing(self) -> list[str]:
        """The names of :meth:`state` under which ranks gave different values."""
        return sorted(name for name, numbers in self.manifest.state.items() if len(set(numbers)) > 1)

    def verify(self, tell: Callable[[int], object] = lambda _: None) -> Iterator[str]:
        """Reads everything, and yields a sentence for each file or block that is missing or was changed. A sentence
        names the file, the bytes, and the tensors in them.

        Args:
            tell: is called with the number of bytes read, after each read.
        """
        lacking = self.lacking()
        yield from lacking.values()
        for name, file in self.manifest.files.items():
            if file.checksums is None or name in lacking:
                continue
            for first, last in self._reader(name).check(tell):
                names = ", ".join(sorted(self._in(name, first, last))) or "nothing but headers"
                yield f"{self.path / name}: bytes {first} to {last} are not what was written; they hold {names}"
        if not any(file.checksums for file in self.manifest.files.values()):
            reads = [(self.tensor, name, self.tensors[name].nbytes) for name in self.tensors]
            reads += [(self.value, name, each.length) for name, each in self.manifest.objects.items()]
            for read, name, nbytes in reads:
                try:
                    read(name)
                except CorruptCheckpointError as error:
                    yield str(error)
                tell(nbytes)

    def read(self, targets: Iterable[Target]) -> None:
        """Fills boxes of tensors, and increments their versions for autograd.

        Args:
            targets: each has the name of a tensor, its shape, the offsets of the box, and the tensor to fill, on any
                device, of any dtype and strides.

        Raises:
            KeyError: there is no such tensor.
            ValueError: it has a different shape.
            CorruptCheckpointError: a checksum is wrong. Some boxes may then be filled already.
        """
        reads: dict[str, list[tuple[int, str, torch.Tensor, _Overlap | None]]] = {}
        written: list[torch.Tensor] = []
        for name, shape, offsets, into in targets:
            kind, at = self.tensors.positions.get(name) or self._position(name)
            if kind.shape != shape:
                raise ValueError(f"'{name}' has the shape {shape} here, but {kind.shape} in {self.path}")
            same = kind.boxes.get((offsets, into.shape), -1)
            if same >= 0 and into.dtype == kind.dtype and in_memory(into):
                file, _, head, _, _ = kind.pieces[same]
                if head >= 0:
                    reads.setdefault(file, []).append((kind.starts[same][at] + head, name, into, None))
                    written.append(into)
                    continue
            for number in range(len(kind.pieces)) if same < 0 else [same]:
                if part := _Overlap.of(piece := kind.piece(number, at), kind.dtype, offsets, into.detach()):
                    reads.setdefault(piece.file, []).append((part.start, name, part.into, part))

        def read_file(file: str) -> None:
            runs = sorted(reads[file], key=operator.itemgetter(0))
            _, name, _, _ = runs[0]
            try:
                reader = self._reader(file)
                reader.prefetch((start, part.stop if part else start + into.nbytes) for start, _, into, part in runs)
                for start, name, into, part in runs:  # noqa: B007 - for the error
                    if part is None:
                        reader.read_to(into, start)
                    else:
                        self._copy(part)
            except CorruptCheckpointError as error:
                raise CorruptCheckpointError(f"tensor '{name}': {error}") from error

        self._files.for_each(read_file, {file: self.manifest.files[file] for file in sorted(reads)})
        torch.autograd.graph.increment_version(written)

    def close(self) -> None:
        """Closes the files that were read. A later read opens them again."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._unpin()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _position(self, name: str) -> tuple[TensorKind, int]:
        if name not in self.tensors.positions:
            raise KeyError(f"{self.path} has no tensor '{name}'")
        return self.tensors.positions[name]

    def _copy(self, part: _Overlap) -> None:
        piece, into, dtype = part.piece, part.into, part.dtype
        if piece.data < 0:
            data = self._bytes(piece.file, piece.start, piece.length)
            whole = dcp.loaded_tensor(data, dtype, piece.sizes, f"its piece in {self.path / piece.file}")
            into.copy_(whole[tuple(slice(at, at + size) for at, size in zip(part.begins, into.shape, strict=True))])
            return
        span = (part.stop - part.start) // dtype.itemsize
        direct = span == into.numel() and into.dtype == dtype and in_memory(into)
        run = into if direct else torch.empty(span, dtype=dtype)
        self._reader(piece.file).read_into(bytes_of(run), part.start)
        if direct:
            torch.autograd.graph.increment_version(into)
        else:
            into.copy_(run.as_strided(into.shape, part.strides))

    def _bytes(self, file: str, start: int, length: int) -> bytes:
        data = bytearray(length)
        self._reader(file).read_into(memoryview(data), start)
        return bytes(data)

    def _reader(self, file: str) -> BlockReader:
        if file not in self._readers:
            self._readers[file] = self._files.open(file, self.manifest.files[file])
        return self._readers[file]

    def lacking(self) -> dict[str, str]:
        """For each file that is missing or has a wrong size, a sentence about it."""
        found = {}
        for name, file in self.manifest.files.items():
            size = self._files.size(name, file.size)
            if size != file.size:
                lacks = "is not a regular file" if size is None else f"has {size} bytes, but {file.size} were written"
                found[name] = f"{self.path / name} {'is missing' if size == -1 else lacks}"
                if names := sorted(self._in(name, max(size or 0, 0), file.size)):
                    found[name] += f"; parts of {few(names)} are lost"
        return found

    def _in(self, file: str, first: int, last: int) -> Iterator[str]:
        """The names of what is stored between two bytes of a file."""
        for name, entry in self.tensors.items():
            if any(p.file == file and p.start < last and first < p.start + p.length for p in entry.pieces):
                yield name
        for name, stored in self.manifest.objects.items():
            if stored.file == file and stored.start < last and first < stored.start + stored.length:
                yield name


class _Overlap(NamedTuple):
    """The intersection of a piece and a box to read."""

    piece: StoredPiece
    dtype: torch.dtype
    into: torch.Tensor
    begins: tuple[int, ...]  # its offsets in the piece
    strides: list[int]  # those of the piece
    start: int  # the bytes of the file from its first element to its last, or those of the whole piece
    stop: int

    @classmethod
    def of(cls, piece: StoredPiece, dtype: torch.dtype, offsets: Sequence[int], into: torch.Tensor) -> _Overlap | None:
        """``None`` if they have no element in common."""
        lows, shape = [*map(max, piece.offsets, offsets)], into.shape
        ends = map(min, map(operator.add, piece.offsets, piece.sizes), map(operator.add, offsets, shape))
        sizes = [*map(operator.sub, ends, lows)]
        if any(size <= 0 for size in sizes):
            return None
        for dim, (low, size) in enumerate(zip(lows, sizes, strict=True)):
            if size != shape[dim]:
                into = into.narrow(dim, low - offsets[dim], size)
        begins = tuple(map(operator.sub, lows, piece.offsets))
        strides = [math.prod(piece.sizes[dim + 1 :]) for dim in range(len(sizes))]
        if piece.data < 0:
            return cls(piece, dtype, into, begins, strides, piece.start, piece.start + piece.length)
        start = piece.data + dtype.itemsize * sum(map(operator.mul, begins, strides))
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        return cls(piece, dtype, into, begins, strides, start, start + dtype.itemsize * span)
