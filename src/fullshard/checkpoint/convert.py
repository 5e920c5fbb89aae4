"""Converts between checkpoints and files of other programs: exports the model's tensors, and imports such files.

Owns the formats: safetensors, and a dict of tensors of ``torch.save``. There is one file, or several with an index, as
``from_pretrained`` of transformers reads them. Only one tensor is in memory at a time. Files get their final names when
all of them are on the disk.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from fullshard.checkpoint import dcp
from fullshard.checkpoint.blocks import (
    ON_WRITTEN,
    CheckpointError,
    CorruptCheckpointError,
    force_names,
    open_regular,
    read_regular,
)
from fullshard.checkpoint.manifest import Location, few
from fullshard.checkpoint.reader import Checkpoint
from fullshard.checkpoint.save import save
from fullshard.disk.file import bytes_of
from fullshard.platforms import force, reserve_space

#: For each format, the name of its file in a directory, and its suffixes.
FORMATS = {
    "safetensors": ("model.safetensors", {".safetensors"}),
    "torch": ("pytorch_model.bin", {".bin", ".pt", ".pth"}),
}
#: The names of dtypes in safetensors.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
#: Keys under which training scripts put the model in a file of ``torch.save``.
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")


class WrongUse(Exception):
    """The request cannot be carried out. The message says what can be done."""


class _Item(NamedTuple):
    """A tensor to write: its name, its name in the checkpoint, and its dtype, shape and bytes in the file."""

    name: str
    stored: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    content: object  # the same for tensors that are tied


_Read = Callable[[_Item], torch.Tensor]


def export(
    checkpoint: Checkpoint,
    out: Path,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard: int | None = None,
    report: Callable[[int], object] = lambda _: None,
) -> list[Path]:
    """Writes the tensors of the model, without those of the optimizer. Returns the new files, an index last.

    Args:
        out: a file, if it has the suffix of a format; otherwise a directory, which may exist.
        format: one of :data:`FORMATS`. ``None``: the format of the suffix, or safetensors.
        dtype: the dtype to which floating-point values of 16 bits and more are cast.
        max_shard: the most bytes of a file in a directory; ``None``: 5 GB. A larger tensor gets its own file.
        report: is called with the bytes of each tensor that was written.

    Raises:
        WrongUse: the arguments do not fit together or exist already. Nothing was written.
        CheckpointError: a file could not be written, or the checkpoint is broken.
    """
    of_suffix = next((name for name, (_, suffixes) in FORMATS.items() if out.suffix in suffixes), None)
    is_file = of_suffix is not None and not out.is_dir()
    format = format or of_suffix or "safetensors"
    if is_file and (format != of_suffix or max_shard is not None):
        raise WrongUse(f"{out} is one file of {of_suffix}: name a directory for another format, or for several files")
    items = list[_Item]()
    for name, stored in checkpoint.model.items():
        entry = checkpoint.tensors[stored]
        is_cast = dtype is not None and entry.dtype.is_floating_point and entry.dtype.itemsize > 1
        to = dtype if dtype is not None and is_cast else entry.dtype
        nbytes = entry.nbytes // entry.dtype.itemsize * to.itemsize
        items.append(_Item(name, stored, to, entry.shape, nbytes, tuple(entry.pieces) if nbytes else name))
    if not items:
        raise WrongUse(f"{checkpoint.path} has no tensors of a model")
    if dtype is not None and not (dtype.is_floating_point and dtype in _DTYPES):
        raise WrongUse(f"{dtype} would change the values: name a floating-point dtype such as bf16")
    if format == "safetensors" and (odd := sorted({str(item.dtype) for item in items} - set(map(str, _DTYPES)))):
        raise WrongUse(f"safetensors has no {', '.join(odd)}: export with --format torch or --dtype")
    plain = out.name if is_file else FORMATS[format][0]
    shards = [items] if is_file else _shards(items, max_shard or 5 * 10**9)
    stem, suffix = os.path.splitext(plain)
    count = len(shards)
    names = [f"{stem}-{n:05}-of-{count:05}{suffix}" for n in range(1, count + 1)] if count > 1 else [plain]
    folder = out.parent if is_file else out
    existing = [out] if is_file and out.exists() else [] if is_file else sorted(folder.glob(f"{stem}*{suffix}*"))
    if existing:
        raise WrongUse(f"{existing[0]} exists already: name a different path, or remove it")

    def read(item: _Item) -> torch.Tensor:
        report(item.nbytes)
        return checkpoint.tensor(item.stored).to(item.dtype)

    write = _write_safetensors if format == "safetensors" else _write_torch
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise WrongUse(f"{folder} is no directory: name a different path") from None
    work = Path(tempfile.mkdtemp(prefix=".", suffix=".partial", dir=folder))
    try:
        for name, shard in zip(names, shards, strict=True):
            write(work / name, shard, read)
        if count > 1:
            where = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard}
            index = {"metadata": {"total_size": sum(item.nbytes for item in items)}, "weight_map": where}
            names.append(f"{plain}.index.json")
            (work / names[-1]).write_text(json.dumps(index, indent=2), encoding="utf-8")
        for name in names:
            with open(work / name, "rb+") as file:  # Windows forces only what may be written
                force(file.fileno())
        for name in names:
            os.rename(work / name, folder / name)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # somebody else put files there
                folder.rmdir()
        if isinstance(error, OSError):
            raise CheckpointError(f"{out} could not be written: {error.strerror}") from error
        raise
    work.rmdir()
    force_names(folder)
    return [folder / name for name in names]


def _shards(items: Iterable[_Item], most: int) -> list[list[_Item]]:
    shards: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    return shards


def _write_safetensors(path: Path, items: list[_Item], read: _Read) -> None:
    """Writes a file of safetensors, one tensor at a time. The safetensors library can only write tensors that are all
    in memory. The format is described at https://huggingface.co/docs/safetensors."""
    items = sorted(items, key=lambda item: (-item.dtype.itemsize, item.name))  # so all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in items:
        begin, end = end, end + item.nbytes
        header[item.name] = {"dtype": _DTYPES[item.dtype], "shape": item.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb", buffering=1 << 20) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for item in items:
            tensor = read(item)
            file.write(bytes_of(tensor))
            del tensor


def _write_torch(path: Path, items: list[_Item], read: _Read) -> None:
    """Writes a file of ``torch.save`` without values, and then copies each tensor into it. Tied tensors share their
    storage. Where no file can be mapped and filled so, all tensors are in memory at once."""
    state: dict[str, torch.Tensor] = {}
    distinct: dict[object, _Item] = {}
    for item in items:
        first = distinct.setdefault(item.content, item)
        state[item.name] = state.get(first.name, torch.empty(item.shape, dtype=item.dtype))  # takes no memory yet
    try:
        with torch.serialization.skip_data():
            torch.save(state, path)
        with open(path, "rb+") as file:  # on a full disk an error here, but the end of the process below
            is_reserved = reserve_space(file.fileno(), 0, path.stat().st_size)
        if not is_reserved or not hasattr(mmap, "MAP_SHARED"):
            for item in distinct.values():
                state[item.name].copy_(read(item))
            torch.save(state, path)
            return
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            mapped = torch.load(path, mmap=True, weights_only=True)
    except RuntimeError as error:  # torch's, in place of an OSError
        raise CheckpointError(f"{path} could not be written: {error}") from error
    for item in distinct.values():
        mapped[item.name].copy_(read(item))


class _StateDictModel(nn.Module):
    """A model that has only a state dict."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._tensors


def import_model(
    source: Path, directory: Location, step: int | None = None, report: Callable[[int], object] = lambda _: None
) -> tuple[Location, list[str]]:
    """Makes a checkpoint of the tensors that :func:`tensors_of` finds, with its errors. Returns the checkpoint, and the
    names of values that were left out. ``report`` is called with the number of bytes written, after each write."""
    tensors, left_out = tensors_of(source)
    token = ON_WRITTEN.set(report)
    try:
        path = save(directory, _StateDictModel(tensors), step=step)
    finally:
        ON_WRITTEN.reset(token)
    assert path is not None
    return path, left_out


def tensors_of(source: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors in a file, or in the files of a directory, by name, and the names of values that are not tensors. The
    files are mapped, not loaded.

    Raises:
        WrongUse: there are no such files, or no tensors in them.
        CorruptCheckpointError: a file cannot be loaded without executing code.
    """
    tensors: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    for file in files_of(source):
        found = _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)
        for name, value in found.items():
            if name in tensors:
                raise WrongUse(f"'{name}' is in several files of {source}: give the files that belong together")
            if isinstance(value, torch.Tensor):
                _check_plain(value, f"'{name}' in {file}")
                tensors[name] = value
            else:
                left_out.append(name)
    if not tensors:
        raise WrongUse(f"{source} has no named tensors, only {few(left_out)}")
    return tensors, left_out


def _check_plain(value: torch.Tensor, what: str) -> None:
    """Raises an error if a tensor is not a plain tensor, or has more bytes than its file stores."""
    kind = f"{type(value).__name__} of {value.dtype} and {value.layout} on {value.device}"
    is_plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided
    if not is_plain or value.is_quantized or value.is_meta:
        raise WrongUse(f"{what} is a {kind}: save it as a plain tensor")
    if value.nbytes > (stored := value.untyped_storage().nbytes()):
        raise CorruptCheckpointError(
            f"{what} has {value.nbytes} bytes, of which {stored} are stored: save a clone() of it"
        )


def files_of(source: Path) -> list[Path]:
    """The files from which a model is imported: a single file, or those of a directory that Hugging Face's names
    choose, or else all."""
    if source.is_file():
        return [source]
    for plain, suffixes in FORMATS.values():
        index = source / f"{plain}.index.json"
        if (source / plain).is_file():
            return [source / plain]
        if index.is_file():
            try:
                names = sorted(set(json.loads(read_regular(index))["weight_map"].values()))
                if any(name != os.path.basename(name) for name in names):
                    raise ValueError(f"it names files outside its directory: {few(names)}")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CorruptCheckpointError(
                    f"{index} is not an index of files: {type(error).__name__}: {error}"
                ) from error
            if missing := [name for name in names if not (source / name).is_file()]:
                raise CorruptCheckpointError(f"{source / missing[0]} is missing, but {index.name} names it")
            return [source / name for name in names]
        if found := sorted(path for path in source.glob("*") if path.suffix in suffixes and path.is_file()):
            return found
    endings = ", ".join(sorted({suffix for _, suffixes in FORMATS.values() for suffix in suffixes}))
    raise WrongUse(f"{source} is neither a file nor a directory with files that end in one of {endings}")


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise WrongUse(f"{path} needs the package safetensors: pip install 'fullshard[cli]'") from error
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # of safetensors, and of torch where it lacks a dtype
        raise CorruptCheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        opened, size = open_regular(path)
        with open(opened, "rb") as file:
            dcp.check_archive(file, size)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of zipfile, torch.load and the unpickler, as they come
        raise CorruptCheckpointError(
            f"{path} cannot be loaded without executing code, or was not written by torch.save of torch 1.6 or newer: "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(found, dict) and not any(isinstance(value, torch.Tensor) for value in found.values()):
        found = next((found[key] for key in _MODEL_KEYS if isinstance(found.get(key), dict)), found)
    if not isinstance(found, dict):
        raise WrongUse(f"{path} holds a {type(found).__name__}: expected a dict of tensors by name")
    return {str(name): value for name, value in found.items()}
