"""The format of ``torch.distributed.checkpoint`` (DCP): what its ``load`` reads we write, what its ``save`` writes we
read.

A tensor's piece is what ``torch.save`` makes of it, in a run of bytes of a file. ``.metadata`` is a pickle that says
which pieces there are. Nothing in either is executed here: the pickle may name only the classes of DCP's metadata,
pieces are loaded with ``weights_only=True``, and both are checked before memory is taken for them.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fullshard.checkpoint.blocks import BrokenCheckpoint
from fullshard.checkpoint.manifest import Entry, Manifest, Piece, Stored, StoredFile, Tensors, check
from fullshard.torch_private import storage_info

#: Bytes to whose multiples pieces are aligned, as torch aligns values.
ALIGNMENT = 64
#: By module, what the pickle of DCP's metadata names beside dtypes.
_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of DCP's metadata")


def read_metadata(data: bytes, path: Path) -> Manifest:
    """The description in a ``.metadata``; a BrokenCheckpoint if it is no metadata of DCP, or promises what the files
    beside it do not have."""
    try:
        for opcode, argument, _ in pickletools.genops(data):  # the unpickler makes a table as long as the largest place
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
                raise pickle.UnpicklingError(f"place {argument} in the table of objects")
        metadata = _Unpickler(io.BytesIO(data)).load()
        manifest = _described(metadata, path)
        check(manifest, path)
        return manifest
    except BrokenCheckpoint:
        raise
    except Exception as error:  # whatever objects that do not fit one another raise
        raise BrokenCheckpoint(f"{path} is no metadata of DCP: {type(error).__name__}: {error}") from error


def _described(metadata: Metadata, path: Path) -> Manifest:
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it is a {type(metadata).__name__}")
    manifest, entries = Manifest(), dict[str, Entry]()
    places: dict[MetadataIndex, Stored] = {}
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"'{index.fqn}' was transformed when it was saved ({info.transform_descriptors})")
        file = str(info.relative_path)
        if file not in manifest.files:
            target = path.parent / file
            manifest.files[file] = StoredFile(target.stat().st_size if target.exists() else 0, None)
        places[index] = Stored(file, info.offset, info.length)
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            entry = Entry(stored.properties.dtype, tuple(stored.size))
            for chunk in stored.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                entry.pieces.append(Piece(*place, -1, tuple(chunk.offsets), tuple(chunk.sizes)))
            entries[name] = entry
        else:
            manifest.objects[name] = places[MetadataIndex(name)]
    manifest.tensors = Tensors.of(entries)
    if isinstance(metadata.planner_data, dict):
        manifest.paths = {name: tuple(map(str, path)) for name, path in metadata.planner_data.items()}
    return manifest


def write_metadata(manifest: Manifest, paths: dict[str, tuple[str | int, ...]]) -> bytes:
    """The ``.metadata`` of what a manifest describes; ``paths`` are the keys that lead to each name's value."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    size_of, kind_of = cache(torch.Size), cache(TensorProperties)  # a pickle holds an object once, and refers to it
    for name, entry in manifest.tensors.items():
        chunks = []
        for number, piece in enumerate(entry.pieces):
            offsets, sizes = size_of(piece.offsets), size_of(piece.sizes)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            storage[MetadataIndex(name, offsets, number)] = storage_info(piece.file, piece.start, piece.length)
        tensors[name] = TensorStorageMetadata(kind_of(entry.dtype), size_of(entry.shape), chunks)
    for name, stored in manifest.objects.items():
        tensors[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = storage_info(*stored)
    return pickle.dumps(Metadata(tensors, paths, storage, StorageMeta(), CURRENT_DCP_VERSION))


class _Skeleton(io.RawIOBase):
    """Takes what ``torch.save`` writes before and after the values of a tensor, which it steps over."""

    def __init__(self) -> None:
        self.parts: list[bytearray] = [bytearray()]

    def write(self, data: Any) -> int:
        self.parts[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.parts.append(bytearray())
        return 0

    def flush(self) -> None:
        pass


@lru_cache(maxsize=4096)
def around(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes, int]:
    """What ``torch.save`` writes before and after the values of a contiguous tensor, and the bytes of all three.
    Zeros follow, so that the next one begins at a multiple of :data:`ALIGNMENT`."""
    skeleton = _Skeleton()
    with torch.serialization.skip_data():
        torch.save(torch.empty(sizes, dtype=dtype), skeleton)  # type: ignore[arg-type]
    before, *rest = skeleton.parts  # no values, nothing to step over
    after = b"".join(rest)
    length = len(before) + math.prod(sizes) * dtype.itemsize + len(after)
    return bytes(before), after + bytes(-length % ALIGNMENT), length


def saved(value: Any, what: str) -> bytes:
    """The bytes of a value that is no tensor of its own: numbers, texts, tensors, and lists and dicts of these; a
    TypeError if it could not be loaded without executing code."""
    data = io.BytesIO()
    try:
        torch.save(value, data)
        torch.load(io.BytesIO(data.getbuffer()), map_location="cpu", weights_only=True)
    except Exception as error:
        odd = next(_odd(value), str(error).partition("\n")[0])
        raise TypeError(
            f"{what} cannot be saved as numbers, texts, tensors, and lists and dicts of these: {odd}"
        ) from error
    return data.getvalue()


def _odd(value: Any, at: str = "") -> Iterator[str]:
    """Says of each part of a value that is of another type, where it is and what to give."""
    if isinstance(value, (dict, list, tuple)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _odd(each, f"{at}[{key!r}]")
    elif not isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.dtype)):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        yield f"{at or 'it'} is a {kind}" + (": give torch.as_tensor() of it" if kind == "numpy.ndarray" else "")


def loaded(data: bytes, what: str) -> Any:
    """The value that ``torch.save`` made these bytes of, without executing code, and without memory that they lack."""
    try:
        check_archive(io.BytesIO(data), len(data))
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # of zipfile, torch.load and the unpickler, as they come
        raise BrokenCheckpoint(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error


def check_archive(file: Path | BinaryIO, size: int) -> None:
    """Refuses what ``torch.load`` would take more memory for than the file has bytes."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if any(each.compress_type != zipfile.ZIP_STORED for each in members):
        raise ValueError("compressed")
    if sum(each.file_size for each in members) > size:
        raise ValueError(f"{size} bytes promise more than they are")


def loaded_tensor(data: bytes, dtype: torch.dtype, sizes: Iterable[int], what: str) -> torch.Tensor:
    """The tensor that is a piece."""
    tensor, sizes = loaded(data, what), tuple(sizes)
    if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tuple(tensor.shape)) != (dtype, sizes):
        found = f"{tensor.dtype} of {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor)
        raise BrokenCheckpoint(f"{what} holds {found}, and the metadata says {dtype} of {sizes}")
    if math.prod(sizes) * dtype.itemsize > len(data):
        raise BrokenCheckpoint(f"{what} has fewer values than its shape says")
    return tensor
