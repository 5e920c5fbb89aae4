"""What a checkpoint holds and where: the manifest, a small JSON file beside the files of torch's DCP format.

Owns its fields, the names of directories and files, and the checks that make it safe to believe: a manifest is used
only if its own checksum is right, all paths stay inside the directory, and every piece lies in its file and in its
tensor. :mod:`fullshard.checkpoint.dcp` makes the same description of a checkpoint that has no manifest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import add, gt
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fullshard.checkpoint.blocks import BLOCK, BrokenCheckpoint, checksum

#: The file of torch's DCP format that says which tensors there are.
METADATA = ".metadata"
MANIFEST = "manifest.json"
#: Grows when older code could not read what is written.
FORMAT = 2
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")  # what others call step-10 is not ours
_MARK = re.compile(rb'\{"checksum": "([0-9a-f]{16})"')
_MANIFEST = re.compile(rb'\{"checksum": "([0-9a-f]{16})", "manifest": (.*)\}\n', re.DOTALL)


class Piece(NamedTuple):
    """A box of a tensor, stored in one run of bytes."""

    file: str
    start: int  # of what torch.load reads
    length: int
    data: int  # byte of the file where its values begin, in the order of rows; -1: what torch.load reads says it
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


#: Makes a piece of a tuple, a few times as fast as its class does.
_piece: Callable[[tuple[Any, ...]], Piece] = partial(tuple.__new__, Piece)


@dataclass
class Entry:
    """A tensor: its dtype and shape, and the pieces that make it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Stored(NamedTuple):
    """A value that is no tensor."""

    file: str
    start: int
    length: int


class StoredFile(NamedTuple):
    size: int
    checksums: list[str] | None


@dataclass
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: the training step, as :func:`fullshard.checkpoint.save` was told, or a number that was counted on.
        world_size: how many ranks wrote it; 0 if nobody knows.
        frozen: whether frozen parameters were saved.
        versions: of fullshard and torch.
        files: by name, inside the directory.
        tensors: by their names in the format of DCP, such as ``model.blocks.0.weight``.
        objects: other values, by name.
        state: by the names that ``save`` was given, the number of the value that each rank has.
        paths: of what DCP wrote, by name, the keys that lead there in the nested state dict.
        near: of a near copy, which training it belongs to, as :mod:`fullshard.checkpoint.near` says.
    """

    step: int = 0
    world_size: int = 0
    frozen: bool = True
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)
    objects: dict[str, Stored] = field(default_factory=dict)
    state: dict[str, list[int]] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    near: dict[str, str] = field(default_factory=dict)


def name_of(step: int, again: int = 0) -> str:
    """The directory of a save; ``again``: how many of this step are there already."""
    return f"step-{step:08d}" + (f".{again}" if again else "")


def number_of(name: str) -> tuple[int, int] | None:
    """The step of a directory, and how many of the same step are older; ``None`` if it is no save."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else None


class _Kind(NamedTuple):
    """What tensors have in common that differ only in their names and in where their pieces begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    #: Of each piece: file, length, how far behind the start its values begin (or -1), offsets, sizes.
    pieces: tuple[tuple[str, int, int, tuple[int, ...], tuple[int, ...]], ...]


def _by_kind(tensors: Mapping[str, Entry]) -> dict[_Kind, tuple[list[str], list[tuple[int, ...]]]]:
    """The names of tensors of each kind, and where the pieces of each begin. A model has many tensors of few kinds."""
    found: dict[_Kind, tuple[list[str], list[tuple[int, ...]]]] = {}
    for name, each in tensors.items():
        boxes = [(p.file, p.length, p.data if p.data < 0 else p.data - p.start, *p[4:]) for p in each.pieces]
        names, starts = found.setdefault(_Kind(each.dtype, each.shape, tuple(boxes)), ([], []))
        names.append(name)
        starts.append(tuple([piece.start for piece in each.pieces]))
    return found


def encode_contents(manifest: Manifest) -> bytes:
    """The part of the file that lists tensors and values. It is the same for every save of the same model."""
    numbers = {name: number for number, name in enumerate(manifest.files)}
    kinds, kind_of = list[Any](), dict[str, int]()
    for (dtype, shape, pieces), (names, starts) in _by_kind(manifest.tensors).items():
        kind_of |= dict.fromkeys(names, len(kinds))
        boxes = [(numbers[file], *rest) for file, *rest in pieces]
        kinds.append((str(dtype), shape, boxes, list(zip(*starts, strict=True))))
    contents = {
        "kinds": kinds,
        "tensors": list(manifest.tensors),
        "kind": [kind_of[name] for name in manifest.tensors],
        "objects": {name: [numbers[each.file], *each[1:]] for name, each in manifest.objects.items()},
    }
    return json.dumps(contents, separators=(",", ":")).encode()


def encode(manifest: Manifest, contents: bytes) -> bytes:
    """The bytes of the file: the manifest and its checksum; ``contents`` are those of :func:`encode_contents`."""
    text = json.dumps(
        {
            "format": FORMAT,
            "step": manifest.step,
            "world_size": manifest.world_size,
            "frozen": manifest.frozen,
            "versions": manifest.versions,
            "block": BLOCK,
            "files": {name: [file.size, file.checksums] for name, file in manifest.files.items()},
            "state": manifest.state,
            **({"near": manifest.near} if manifest.near else {}),
        },
        separators=(",", ":"),
    ).encode()
    text = b"%s,%s" % (text[:-1], contents[1:])
    return b'{"checksum": "%s", "manifest": %s}\n' % (checksum(text).encode(), text)


def decode(data: bytes, path: Path) -> Manifest:
    """The manifest that lies in a directory.

    Raises:
        BrokenCheckpoint: it is not what was written, or does not fit itself.
    """
    found = _MANIFEST.fullmatch(data)
    if found is None or checksum(found[2]) != found[1].decode():
        raise BrokenCheckpoint(f"{path} is not what was written (wrong checksum)")
    try:
        told: dict[str, Any] = json.loads(found[2])
        if told["format"] != FORMAT or told["block"] != BLOCK:
            raise BrokenCheckpoint(
                f"{path} is of format {told['format']} with blocks of {told['block']} bytes, and this version of "
                f"fullshard reads format {FORMAT} with blocks of {BLOCK}: use the version that wrote it, or a newer one"
            )
        files = list(told["files"])
        manifest = Manifest(
            int(told["step"]), int(told["world_size"]), bool(told["frozen"]), told["versions"], state=told["state"]
        )
        manifest.files = {name: StoredFile(size, sums) for name, (size, sums) in told["files"].items()}
        manifest.near = {key: str(value) for key, value in told.get("near", {}).items()}
        manifest.objects = {name: Stored(files[number], *place) for name, (number, *place) in told["objects"].items()}
        check(manifest, path)
        manifest.tensors = _tensors(manifest, told, path)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path} does not describe a checkpoint: {type(error).__name__}: {error}") from error
    return manifest


def _tensors(manifest: Manifest, told: dict[str, Any], path: Path) -> dict[str, Entry]:
    """The tensors by columns: each kind is checked and made once, for all that are alike."""
    files, names, of_kind, entries = list(manifest.files), told["tensors"], told["kind"], list[Iterator[Entry]]()
    by_kind: list[list[str]] = [[] for _ in told["kinds"]]
    for name, number in zip(names, of_kind, strict=True):
        by_kind[number].append(name)
    for (dtype, shape, boxes, starts), its_names in zip(told["kinds"], by_kind, strict=True):
        pieces = [(files[number], length, head, tuple(at), tuple(size)) for number, length, head, at, size in boxes]
        kind = _Kind(dtype_of(dtype), tuple(shape), tuple(pieces))
        _check_kind(manifest, kind, its_names, starts, path)
        columns = []
        for (file, length, head, at, size), begins in zip(pieces, starts, strict=True):
            data = [begin + head for begin in begins] if head >= 0 else repeat(-1)
            columns.append(map(_piece, zip(repeat(file), begins, repeat(length), data, repeat(at), repeat(size))))
        rows: Iterable[tuple[Piece, ...]] = zip(*columns, strict=True) if columns else repeat((), len(its_names))
        entries.append(iter([Entry(kind.dtype, kind.shape, list(row)) for row in rows]))
    found = {name: next(entries[number]) for name, number in zip(names, of_kind, strict=True)}
    if len(found) != len(names) or not set(map(type, names)) <= {str}:
        raise BrokenCheckpoint(f"{path} has a name twice, or one that is no text")
    return found


def mark_of(path: Path) -> str:
    """The checksum at the head of the manifest of a checkpoint, which tells it from others; empty if there is none."""
    try:
        with open(path / MANIFEST, "rb") as file:
            head = file.read(64)
    except OSError:
        return ""
    found = _MARK.match(head)
    return found[1].decode() if found else ""


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch {torch.__version__}")
    return found


def check(manifest: Manifest, path: Path) -> None:
    """Refuses what is not supported by the sizes of files: so nothing larger than these is ever allocated."""
    for name, file in manifest.files.items():
        if not _inside(name, path.parent):
            raise BrokenCheckpoint(f"{path} names the file {name!r}, which is not inside the directory")
        blocks = -(-file.size // BLOCK)
        if file.size < 0 or (file.checksums is not None and len(file.checksums) != blocks):
            raise BrokenCheckpoint(f"{path}: {name!r} has {file.size} bytes, which do not fit its checksums")
    for name, each in manifest.objects.items():
        _check_runs(manifest, each.file, [each.start], each.length, [name], path)
    for kind, (names, starts) in _by_kind(manifest.tensors).items():
        _check_kind(manifest, kind, names, list(zip(*starts, strict=True)), path)


def _check_kind(
    manifest: Manifest, kind: _Kind, names: Sequence[str], starts: Sequence[Sequence[int]], path: Path
) -> None:
    """Refuses tensors of one kind; ``starts``: for each piece, where it begins of each tensor."""
    (dtype, shape, pieces), what = kind, f"{path}: tensor '{next(iter(names), '')}'"
    if not _are_counts(shape):
        raise BrokenCheckpoint(f"{what} has the shape {shape}")
    for (file, length, head, offsets, sizes), begins in zip(pieces, starts, strict=True):
        _check_runs(manifest, file, begins, length, names, path)
        box = (offsets, sizes, shape)
        if not (_are_counts((*offsets, *sizes)) and len({len(each) for each in box}) == 1):
            raise BrokenCheckpoint(f"{what} has a piece of {sizes} at {offsets}")
        if any(map(gt, map(add, offsets, sizes), shape)):
            raise BrokenCheckpoint(f"{what} of shape {shape} has a piece of {sizes} at {offsets}")
        nbytes = math.prod(sizes) * dtype.itemsize
        if type(head) is not int or head < -1 or max(head, 0) + nbytes > length:
            raise BrokenCheckpoint(f"{what} has a piece of {nbytes} bytes in {length} bytes of {file!r}")
    if sum(math.prod(sizes) for *_, sizes in pieces) != math.prod(shape):
        raise BrokenCheckpoint(f"{what} of shape {shape} is not covered by its pieces")


def _check_runs(
    manifest: Manifest, file: str, starts: Sequence[int], length: int, names: Sequence[str], path: Path
) -> None:
    """Refuses runs of ``length`` bytes that a file has not; each holds what is called by one of ``names``."""
    size = manifest.files[file].size
    if len(starts) != len(names) or not _are_counts((*starts, length)):
        raise BrokenCheckpoint(f"{path}: {few(names)} lie at no bytes of {file!r}")
    if names and max(starts) + length > size:
        name, start = next(each for each in zip(names, starts, strict=True) if each[1] + length > size)
        raise BrokenCheckpoint(
            f"{path}: '{name}' lies at bytes {start} to {start + length} of {file!r}, which has fewer"
        )


def few(names: Sequence[str]) -> str:
    return f"{list(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _are_counts(numbers: Collection[Any]) -> bool:
    return not numbers or (set(map(type, numbers)) == {int} and min(numbers) >= 0)


def _inside(name: str, directory: Path) -> bool:
    """Whether a path leads to something below the directory, links included."""
    try:
        return bool(name) and (directory / name).resolve().is_relative_to(directory.resolve())
    except (OSError, ValueError, RuntimeError):
        return False
