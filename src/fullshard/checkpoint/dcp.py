"""The format of ``torch.distributed.checkpoint`` (DCP): writes files that DCP's ``load`` reads, and reads files of its
``save``.

A piece of a tensor is stored as ``torch.save`` writes it, in a run of bytes of a file. ``.metadata`` is a pickle that
lists the pieces. No code in either is executed: the pickle is parsed as plain data, and pieces are loaded with
``weights_only=True``. Both are checked before memory is allocated for them.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import plain
from fullshard.checkpoint.blocks import CorruptCheckpointError
from fullshard.checkpoint.manifest import Entry, Manifest, Stored, StoredFile, StoredPiece, Tensors, check, dtype_of
from fullshard.torch_private import storage_info

#: Pieces are aligned to multiples of this many bytes, as torch aligns values.
ALIGNMENT = 64
#: Functions that ``torch.load`` may call and that allocate as much memory as an argument says. (Classes of tensors and
#: storages do so too.)
_GROWS = {"torch._utils._rebuild_qtensor", "torch._utils._rebuild_nested_tensor"}
#: Dtypes by the names of storages in pickles of ``torch.save``, without ``Storage`` at the end.
_STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64, "Untyped": torch.uint8,
}  # fmt: skip
_LATIN = ("latin1", "latin-1")
Keys = tuple[str | int, ...]  # those that lead to a value in nested state


def read_metadata(data: bytes, path: Path) -> Manifest:
    """The manifest that a ``.metadata`` describes. Raises CorruptCheckpointError if it is not metadata of DCP, or if it
    describes more than the files beside it contain."""
    try:
        manifest = _described(_fields(plain.parse(data), "Metadata"), path)
        check(manifest, path)
        return manifest
    except CorruptCheckpointError:
        raise
    except Exception as error:  # wrong objects may raise any error
        raise CorruptCheckpointError(f"{path} is not DCP metadata: {type(error).__name__}: {error}") from error


def _described(metadata: dict[str, Any], path: Path) -> Manifest:
    manifest, entries, count = Manifest(), dict[str, Entry](), 0
    locations: dict[tuple[str, tuple[int, ...] | None], Stored] = {}
    for key, value in _pairs(metadata["storage_data"]):
        index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        name, file = _text(index["fqn"]), _text(info["relative_path"])
        if info.get("transform_descriptors"):
            raise ValueError(f"'{name}' was transformed when it was saved")
        if file not in manifest.files:
            target = path.parent / file
            manifest.files[file] = StoredFile(target.stat().st_size if target.exists() else 0, None)
        offset = index.get("offset")
        locations[name, None if offset is None else _numbers(offset)] = Stored(file, info["offset"], info["length"])
    for name, value in _pairs(metadata["state_dict_metadata"]):
        stored = _fields(value, "TensorStorageMetadata", "BytesStorageMetadata")
        if "chunks" not in stored:
            manifest.objects[_text(name)] = locations[name, None]
            continue
        dtype = stored["properties"].state[0]
        if type(dtype) is not plain.Global or dtype.module != "torch":
            raise TypeError("it has no dtype where one is expected")
        entry = Entry(dtype_of(dtype.name), _numbers(stored["size"]))
        for chunk in stored["chunks"]:
            box = _fields(chunk, "ChunkStorageMetadata")
            offsets = _numbers(box["offsets"])
            entry.pieces.append(StoredPiece(*locations[_text(name), offsets], -1, offsets, _numbers(box["sizes"])))
            count += 1
            if count > len(locations):  # many tensors may refer to one list of pieces
                raise ValueError("it has more pieces than stored runs of bytes")
        entries[name] = entry
    manifest.tensors = Tensors.of(entries)
    if isinstance(planner := metadata.get("planner_data"), plain.Pairs):
        for name, keys in _pairs(planner):
            if not isinstance(keys, (tuple, list)) or len(keys) > len(name) + 1:
                raise ValueError(f"the keys of '{name}' do not lead to it")
            if sum(len(str(key) if type(key) is int else _text(key)) for key in keys) > len(name):
                raise ValueError(f"'{name}' has keys that are longer than it")  # many may be the same object
            manifest.paths[name] = tuple(keys)
    return manifest


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(value, plain.Pairs):
        raise TypeError("it has no dict where one is expected")
    return zip(value[::2], value[1::2], strict=True)


def _fields(value: Any, *classes: str) -> dict[str, Any]:
    """The stored fields of an object of one of DCP's classes."""
    if not isinstance(value, plain.Made) or type(value.function) is not plain.Global:
        raise TypeError(f"it has no {classes[0]} where one is expected")
    module, name = value.function
    if name not in classes or not module.startswith("torch.distributed."):
        raise ValueError(f"it names {value.function}, which is not part of DCP's metadata")
    return {_text(key): each for key, each in _pairs(value.state)} if value.state is not None else {}


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"it has a {type(value).__name__} where a string is expected")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """A shape, or the offsets of a box."""
    value = value.args[0] if isinstance(value, plain.Made) and value.function == ("torch", "Size") else value
    if type(value) not in (tuple, list) or not set(map(type, value)) <= {int}:
        raise TypeError("it has no shape where one is expected")
    return tuple(value)


def write_metadata(manifest: Manifest, paths: dict[str, tuple[str | int, ...]]) -> bytes:
    """The bytes of the ``.metadata`` for a manifest. ``paths`` are the keys that lead to each name's value."""
    tensors: dict[str, Any] = {}
    storage: dict[of_torch.MetadataIndex, Any] = {}
    size_of, kind_of = cache(torch.Size), cache(of_torch.TensorProperties)  # a pickle refers to an object it has
    index = of_torch.MetadataIndex
    for name, entry in manifest.tensors.items():
        chunks = []
        for number, piece in enumerate(entry.pieces):
            offsets, sizes = size_of(piece.offsets), size_of(piece.sizes)
            chunks.append(of_torch.ChunkStorageMetadata(offsets, sizes))
            storage[index(name, offsets, number)] = storage_info(piece.file, piece.start, piece.length)
        tensors[name] = of_torch.TensorStorageMetadata(kind_of(entry.dtype), size_of(entry.shape), chunks)
    for name, stored in manifest.objects.items():
        tensors[name] = of_torch.BytesStorageMetadata()
        storage[index(name)] = storage_info(*stored)
    return pickle.dumps(of_torch.Metadata(tensors, paths, storage, of_torch.StorageMeta(), CURRENT_DCP_VERSION))


class _Skeleton(io.RawIOBase):
    """A file that collects what ``torch.save`` writes before and after the values of a tensor. (With ``skip_data`` it
    seeks over the values.)"""

    def __init__(self) -> None:
        self.parts: list[bytearray] = [bytearray()]

    def write(self, data: Any) -> int:
        self.parts[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.parts.append(bytearray())
        return 0


@lru_cache(maxsize=4096)
def around(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes, int]:
    """The bytes that ``torch.save`` writes before and after the values of a contiguous tensor, and the length of all
    three together. Padding follows, so that the next tensor begins at a multiple of :data:`ALIGNMENT`."""
    skeleton = _Skeleton()
    with torch.serialization.skip_data():
        torch.save(torch.empty(sizes, dtype=dtype), skeleton)  # type: ignore[arg-type]
    before, *later = skeleton.parts  # no values, nothing to step over
    after = b"".join(later)
    length = len(before) + math.prod(sizes) * dtype.itemsize + len(after)
    return bytes(before), after + bytes(-length % ALIGNMENT), length


def saved(value: Any, what: str) -> bytes:
    """The bytes of a value: numbers, strings, tensors, and lists and dicts of these. Raises TypeError if it could not
    be loaded without executing code."""
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


def without_dtensors(value: Any, path: Keys, found: dict[Keys, DTensor]) -> Any:
    """A copy of a value with ``None`` in place of each DTensor. The DTensors are put into ``found``, by their paths."""

    def without(path: Keys, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        found[path] = value
        return None

    return _mapped(without, value, path)


def with_dtensors(value: Any, path: Keys, found: Mapping[Keys, DTensor]) -> Any:
    """The reverse of :func:`without_dtensors`: puts the DTensors back."""
    return _mapped(found.get, value, path)


def _mapped(fn: Callable[[Keys, Any], Any], value: Any, path: Keys) -> Any:
    """A copy of nested dicts, lists and tuples with what ``fn`` makes of each other value and the keys that lead to
    it."""
    if isinstance(value, Mapping):
        whole = copy.copy(value) if isinstance(value, dict) else dict(value)
        whole.update({key: _mapped(fn, each, (*path, str(key))) for key, each in value.items()})
        return whole
    if type(value) in (list, tuple):
        return type(value)(_mapped(fn, each, (*path, number)) for number, each in enumerate(value))
    return fn(path, value)


def _odd(value: Any, at: str = "") -> Iterator[str]:
    """Yields a description of each part of a value that has an unsupported type: where it is, and what to give."""
    if isinstance(value, (dict, list, tuple)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _odd(each, f"{at}[{key!r}]")
    elif not isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.dtype)):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        yield f"{at or 'it'} is a {kind}" + (": give torch.as_tensor() of it" if kind == "numpy.ndarray" else "")


def loaded(data: bytes, what: str) -> Any:
    """Loads the value of bytes of ``torch.save``, without executing code, and without allocating more memory than the
    bytes contain."""
    try:
        check_archive(io.BytesIO(data), len(data))
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # of zipfile, torch.load and the unpickler, as they come
        raise CorruptCheckpointError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error


def check_archive(file: BinaryIO, size: int) -> None:
    """Raises an error if ``torch.load`` would need more memory or time than the file's size justifies."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(each.compress_type != zipfile.ZIP_STORED or each.file_size != each.compress_size for each in members):
            raise ValueError("compressed")
        if sum(each.file_size for each in members) > size:
            raise ValueError(f"its parts claim more than its {size} bytes")
        sizes = {each.filename.partition("/")[2].lower(): each.file_size for each in members}
        folders = {each.filename.partition("/")[0] for each in members}
        if len(sizes) != len(members) or len(folders) != 1 or any("\0" in each.orig_filename for each in members):
            raise ValueError("the names of its parts are not those of torch.save")
        _check_directory(file, size)
        values = archive.read(f"{folders.pop()}/data.pkl")
    _check_values(values, sizes)


def _check_directory(file: BinaryIO, size: int) -> None:
    """Raises an error if torch could find other parts in an archive than Python finds. The archive's directory must be
    right before its end, and both of its records must say so."""
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        raise ValueError("it does not begin like an archive of torch.save")
    file.seek(max(0, size - 98))
    tail = file.read().rjust(98)
    mark, _, _, _, _, length, start, comment = struct.unpack("<4s4H2LH", tail[-22:])
    end, wide, allowed = size - 22, (length, start), [(length, start)]
    if tail[-42:-38] == b"PK\6\7":
        wide, end = struct.unpack("<2Q", tail[40:56]), size - 98
        allowed = [wide, (0xFFFFFFFF, 0xFFFFFFFF)]
        if tail[:4] != b"PK\6\6" or struct.unpack("<Q", tail[64:72]) != (end,):
            raise ValueError("its directory is not where torch.save puts it")
    if (mark, comment, sum(wide)) != (b"PK\5\6", 0, end) or (length, start) not in allowed:
        raise ValueError("its directory is not where torch.save puts it")


def _check_values(data: bytes, sizes: Mapping[str, int]) -> None:
    """Raises an error if values would need more memory or time than their bytes justify. ``sizes`` are those of the
    storages."""
    budget = 16 * len(data) + 1024  # parts of keys and arguments, which are hashed

    def check_parts(value: Any) -> None:
        nonlocal budget
        waiting = [value]
        while waiting:
            each, budget = waiting.pop(), budget - 1
            each = each.args if isinstance(each, plain.Made) else each
            if isinstance(each, (tuple, list)):
                budget -= len(each)
                waiting += each if budget > 0 else ()
            if budget < 0:
                raise ValueError("it has more nested values than its bytes can hold")

    def check_call(function: Any, args: Any) -> None:
        name = str(function) if isinstance(function, plain.Global) else ""
        check_parts(args)
        parent, _, last = name.replace("__builtin__", "builtins").rpartition(".")
        if not name or not isinstance(args, tuple):
            raise ValueError("it calls something that has no name")
        if name.endswith("._rebuild_from_type_v2"):
            check_call(args[0], args[2])
        is_encoded = name == "_codecs.encode" and len(args) > 1 and args[1] not in _LATIN
        is_sized = name.endswith(".bytearray") and any(type(each) is int for each in args)
        is_class = last.endswith(("Tensor", "Storage")) and f"{parent}.".startswith("torch.")
        if is_encoded or is_sized or name in _GROWS or is_class:
            raise ValueError(f"it calls {name}, which could use any amount of memory")

    def check(each: Any) -> None:
        if isinstance(each, plain.Made):
            check_call(each.function, each.args)
        elif isinstance(each, plain.PlainTensor):
            _, storage, key, _, count = each.id
            nbytes = count * _STORAGES[storage.name.removesuffix("Storage")].itemsize
            if sizes[f"data/{key}".lower()] != nbytes or type(count) is not int:
                raise ValueError(f"its storage {key} does not have the {count} elements that it claims")
        else:
            check_parts(each)

    plain.parse(data, check)


def loaded_tensor(data: bytes, dtype: torch.dtype, sizes: Iterable[int], what: str) -> torch.Tensor:
    """Loads the tensor of a piece."""
    tensor, sizes = loaded(data, what), tuple(sizes)
    if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tuple(tensor.shape)) != (dtype, sizes):
        found = f"{tensor.dtype} of {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor)
        raise CorruptCheckpointError(f"{what} holds {found}, but the metadata says {dtype} of {sizes}")
    if math.prod(sizes) * dtype.itemsize > len(data):
        raise CorruptCheckpointError(f"{what} has fewer values than its shape says")
    return tensor
