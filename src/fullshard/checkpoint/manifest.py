"""The manifest: a small JSON file that describes a checkpoint, beside the files of torch's DCP format.

Owns its fields, the names of directories and files, and the checks that make a manifest safe to use: its checksum is
right, all paths stay inside the directory, each piece is inside its file, and the pieces of a tensor cover it exactly.
For a checkpoint without a manifest, :mod:`fullshard.checkpoint.dcp` makes the same description.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count, pairwise, repeat
from operator import add, gt
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fullshard.checkpoint.blocks import BLOCK, CorruptCheckpointError, checksum

#: A ``pathlib.Path``, or a ``UPath`` of universal_pathlib, which has the same methods.
Location = Any
#: The file of torch's DCP format that lists the tensors.
METADATA = ".metadata"
MANIFEST = "manifest.json"
#: The version of the format. It grows when older code cannot read new files.
FORMAT = 2
#: The most dims of a tensor in torch, and the most dims along which a tensor may be cut.
_DIMS, _CUTS = 64, 8
_NAME = re.compile(r"step-(\d{8,4000})(?:\.(\d{1,4000}))?")  # step-10 has too few digits: another program's directory
_MARK = re.compile(rb'\{"checksum": "([0-9a-f]{16})"')
_MANIFEST = re.compile(rb'\{"checksum": "([0-9a-f]{16})", "manifest": (.*)\}\n', re.DOTALL)


class StoredPiece(NamedTuple):
    """A box of a tensor, stored in one run of bytes."""

    file: str
    start: int  # first byte of what torch.load reads
    length: int
    data: int  # first byte of its values, in row-major order; -1: only torch.load knows
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class Entry:
    """A tensor: its dtype, its shape, and its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[StoredPiece] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class TensorKind:
    """A kind of tensors: they differ only in their names, and in where their pieces start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    #: For each piece its file, its length, the distance from its start to its values (or -1), offsets, sizes.
    pieces: list[tuple[str, int, int, tuple[int, ...], tuple[int, ...]]]
    starts: list[list[int]]  # for each piece, its start for each of the tensors
    boxes: dict[Any, int] = field(init=False)  # the number of a piece, by offsets and sizes

    def __post_init__(self) -> None:
        self.boxes = {piece[3:]: number for number, piece in enumerate(self.pieces)}

    def parts(self) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The parts that ranks had. One that a rank has split for a store is one part."""
        found = {(file.rpartition("_")[0], offsets, sizes) for file, _, _, offsets, sizes in self.pieces}
        for dim in reversed(range(len(self.shape))):
            begins: dict[Any, int] = {}  # where a part begins, by its writer, its other dims, and its end
            for writer, offsets, sizes in sorted(found, key=operator.itemgetter(1)):
                others = offsets[:dim], offsets[dim + 1 :], sizes[:dim], sizes[dim + 1 :]
                at = offsets[dim]
                begins[writer, others, at + sizes[dim]] = begins.pop((writer, others, at), at)
            found = {
                (writer, (*low, at, *high), (*before, end - at, *after))
                for (writer, (low, high, before, after), end), at in begins.items()
            }
        return {(offsets, sizes) for _, offsets, sizes in found}

    def piece(self, number: int, at: int) -> StoredPiece:
        """A piece of one of the tensors."""
        (file, length, head, offsets, sizes), start = self.pieces[number], self.starts[number][at]
        return StoredPiece(file, start, length, start + head if head >= 0 else -1, offsets, sizes)


class Tensors(Mapping[str, Entry]):
    """Tensors by name. There are many tensors of few kinds, so an entry is made only when it is asked for."""

    def __init__(self, names: Sequence[str], numbers: Sequence[int], kinds: Sequence[TensorKind]) -> None:
        self.numbers, self.kinds = numbers, kinds  # numbers: that of the kind of each tensor
        self.members = [list[str]() for _ in kinds]  # the names of the tensors of each kind
        for name, number in zip(names, numbers, strict=True):
            self.members[number].append(name)
        self.positions: dict[str, Any] = dict.fromkeys(names)  # for each name, its kind and its index in that kind
        for kind, members in zip(kinds, self.members, strict=True):
            self.positions.update(zip(members, zip(repeat(kind), count(), strict=False), strict=False))

    @classmethod
    def of(cls, entries: Mapping[str, Entry]) -> Tensors:
        found: dict[tuple[Any, ...], tuple[int, list[tuple[int, ...]]]] = {}
        numbers = []
        for each in entries.values():
            pieces = [(p.file, p.length, p.data if p.data < 0 else p.data - p.start, *p[4:]) for p in each.pieces]
            number, starts = found.setdefault((each.dtype, each.shape, *pieces), (len(found), []))
            numbers.append(number)
            starts.append(tuple([piece.start for piece in each.pieces]))
        columns = ([list(column) for column in zip(*starts, strict=True)] for _, starts in found.values())
        kinds = [TensorKind(dtype, shape, pieces, next(columns)) for dtype, shape, *pieces in found]
        return cls(list(entries), numbers, kinds)

    def __getitem__(self, name: str) -> Entry:
        kind, at = self.positions[name]
        return Entry(kind.dtype, kind.shape, [kind.piece(number, at) for number in range(len(kind.pieces))])

    def __contains__(self, name: object) -> bool:
        return name in self.positions

    def __iter__(self) -> Iterator[str]:
        return iter(self.positions)

    def __len__(self) -> int:
        return len(self.positions)


class Stored(NamedTuple):
    """The position of a value that is not a tensor."""

    file: str
    start: int
    length: int


class StoredFile(NamedTuple):
    size: int
    checksums: list[str] | None


@dataclass
class Manifest:
    """The contents of a checkpoint."""

    step: int = 0  # the training step that was given to save, or the next number
    world_size: int = 0  # how many ranks wrote it; 0 if unknown
    frozen: bool = True  # whether frozen parameters were saved
    versions: dict[str, str] = field(default_factory=dict)  # those of fullshard and torch
    files: dict[str, StoredFile] = field(default_factory=dict)  # the files inside the directory, by name
    #: The tensors, by their names in DCP's format, such as ``model.blocks.0.weight``.
    tensors: Tensors = field(default_factory=lambda: Tensors((), (), ()))
    objects: dict[str, Stored] = field(default_factory=dict)  # other values, by name
    #: For each name that was given to ``save``, the number of the value that each rank has.
    state: dict[str, list[int]] = field(default_factory=dict)
    #: For a checkpoint of DCP, the keys that lead to each name in the nested state dict.
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    #: For an in-memory replica, the training it belongs to, see :mod:`fullshard.checkpoint.replicas`.
    binding: dict[str, str] = field(default_factory=dict)
    time: datetime | None = None  # when it was saved, in UTC; None if an older version saved it
    metrics: dict[str, float] = field(default_factory=dict)  # those that were given to save


def is_checkpoint(path: Location) -> bool:
    """Whether a directory is a checkpoint, also one of DCP. Other programs have a manifest.json, too."""
    if not path.is_dir() or number_of(path.name):
        return bool(path.is_dir())
    names = {each.name for each in path.iterdir()}
    return METADATA in names or (MANIFEST in names and any(name.endswith(".distcp") for name in names))


def name_of(step: int, again: int = 0) -> str:
    """The name of a save's directory. ``again``: how many saves of this step exist already."""
    return f"step-{step:08d}" + (f".{again}" if again else "")


def number_of(name: str) -> tuple[int, int] | None:
    """The step of a save's directory, and how many saves of that step are older; ``None`` for other directories."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else None


def step_of(name: str) -> int | None:
    """The step of a save's directory; ``None`` for other directories."""
    return (number_of(name) or (None,))[0]


def steps_of(paths: Iterable[Path]) -> list[int]:
    """The steps of saves' directories, in order."""
    return sorted({number[0] for path in paths if (number := number_of(path.name))})


def encode_contents(manifest: Manifest) -> bytes:
    """The part of the file that lists tensors and values. It is the same for every save of the same model."""
    numbers = {name: number for number, name in enumerate(manifest.files)}
    kinds = [
        (str(kind.dtype), kind.shape, [(numbers[file], *rest) for file, *rest in kind.pieces], kind.starts)
        for kind in manifest.tensors.kinds
    ]
    contents = {
        "kinds": kinds,
        "tensors": list(manifest.tensors),
        "kind": manifest.tensors.numbers,
        "objects": {name: [numbers[each.file], *each[1:]] for name, each in manifest.objects.items()},
    }
    return json.dumps(contents, separators=(",", ":")).encode()


def encode(manifest: Manifest, contents: bytes) -> bytes:
    """The bytes of the file: the manifest and its checksum. ``contents`` comes from :func:`encode_contents`."""
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
            # JSON has no NaN
            "metrics": {name: each if math.isfinite(each) else str(each) for name, each in manifest.metrics.items()},
            **({"time": manifest.time.isoformat()} if manifest.time else {}),
            **({"near": manifest.binding} if manifest.binding else {}),
        },
        separators=(",", ":"),
    ).encode()
    text = b"%s,%s" % (text[:-1], contents[1:])
    return b'{"checksum": "%s", "manifest": %s}\n' % (checksum(text).encode(), text)


def decode(data: bytes, path: Path) -> Manifest:
    """Decodes a manifest. Raises CorruptCheckpointError if its checksum is wrong, or if it contradicts itself."""
    found = _MANIFEST.fullmatch(data)
    if found is None or checksum(found[2]) != found[1].decode():
        raise CorruptCheckpointError(f"{path} is not what was written (wrong checksum)")
    try:
        fields: dict[str, Any] = json.loads(found[2])
        if fields["format"] != FORMAT or fields["block"] != BLOCK:
            raise CorruptCheckpointError(
                f"{path} is of format {fields['format']} with blocks of {fields['block']} bytes, and this version of "
                f"fullshard reads format {FORMAT} with blocks of {BLOCK}: use the version that wrote it, or a newer one"
            )
        files, (step, ranks) = list(fields["files"]), (int(fields["step"]), int(fields["world_size"]))
        manifest = Manifest(step, ranks, bool(fields["frozen"]), fields["versions"], state=fields["state"])
        manifest.files = {name: StoredFile(size, [*sums]) for name, (size, sums) in fields["files"].items()}
        manifest.binding = {key: str(value) for key, value in fields.get("near", {}).items()}
        manifest.time = datetime.fromisoformat(fields["time"]).astimezone(UTC) if "time" in fields else None
        manifest.metrics = {name: float(value) for name, value in fields.get("metrics", {}).items()}
        manifest.objects = {name: Stored(files[number], *run) for name, (number, *run) in fields["objects"].items()}
        kinds = list[TensorKind]()
        for dtype, shape, boxes, starts in fields["kinds"]:
            pieces = [(files[file], length, head, tuple(at), tuple(sizes)) for file, length, head, at, sizes in boxes]
            kinds.append(TensorKind(dtype_of(dtype), tuple(shape), pieces, starts))
        manifest.tensors = Tensors(fields["tensors"], fields["kind"], kinds)
        if len(manifest.tensors) != len(fields["tensors"]) or not set(map(type, manifest.tensors)) <= {str}:
            raise CorruptCheckpointError(f"{path} has a name twice, or one that is not a string")
        for name, numbers in manifest.state.items():
            if not numbers or not all(f"state.{name}.{number}" in manifest.objects for number in numbers):
                raise CorruptCheckpointError(f"{path} lacks a value of the state '{name}'")
        if not all(type(each) is str for each in manifest.versions.values()):
            raise CorruptCheckpointError(f"{path} has the versions {manifest.versions}")
        check(manifest, path)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{path} does not describe a checkpoint: {type(error).__name__}: {error}"
        ) from error
    return manifest


def mark_of(head: bytes) -> str:
    """The checksum at the beginning of a manifest, which identifies the checkpoint; empty if there is none."""
    found = _MARK.match(head)
    return found[1].decode() if found else ""


def entry_of(note: str | bytes, key: str) -> str:
    """What a small file of JSON has under a key; empty if that is no string, or the file is not what was written."""
    try:
        found = json.loads(note)[key]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or name.rpartition(".")[2].startswith(("q", "quint")):
        raise ValueError(f"{name!r} is not a dtype of torch {torch.__version__}")
    return found


def check(manifest: Manifest, path: Path) -> None:
    """Raises CorruptCheckpointError if the manifest describes more than its files contain. So no memory is ever
    allocated for more than the files' sizes."""
    for name, (size, sums) in manifest.files.items():
        if not _inside(name, path.parent):
            raise CorruptCheckpointError(f"{path} names the file {name!r}, which is not inside the directory")
        if not _are_counts([size]) or (sums is not None and len(sums) != -(-size // BLOCK)):
            raise CorruptCheckpointError(f"{path}: {name!r} has {size} bytes, which do not fit its checksums")
    for name, each in manifest.objects.items():
        _check_runs(manifest, each.file, [each.start], each.length, [name], path)
    ordered = sorted((each, name) for name, each in manifest.objects.items() if each.length)
    for (one, name), (other, other_name) in pairwise(ordered):
        if one.file == other.file and one.start + one.length > other.start:
            raise CorruptCheckpointError(f"{path}: '{name}' and '{other_name}' lie at the same bytes of {one.file!r}")
    for kind, names in zip(manifest.tensors.kinds, manifest.tensors.members, strict=True):
        _check_kind(manifest, kind, names, path)


def _check_kind(manifest: Manifest, kind: TensorKind, names: Sequence[str], path: Path) -> None:
    """Checks the tensors of one kind."""
    files = {piece[0] for piece in kind.pieces}
    shape, what = kind.shape, f"{path}: tensor '{next(iter(names), '')}'"
    too_large = math.prod(max(1, size) for size in shape[:_DIMS]) * kind.dtype.itemsize >= 1 << 63
    if not _are_counts(shape) or len(shape) > _DIMS or too_large:
        raise CorruptCheckpointError(f"{what} has the shape {shape}")
    for (file, length, head, offsets, sizes), starts in zip(kind.pieces, kind.starts, strict=True):
        _check_runs(manifest, file, starts, length, names, path)
        box = (offsets, sizes, shape)
        if not (_are_counts((*offsets, *sizes)) and len({len(each) for each in box}) == 1):
            raise CorruptCheckpointError(f"{what} has a piece of {sizes} at {offsets}")
        if any(map(gt, map(add, offsets, sizes), shape)):
            raise CorruptCheckpointError(f"{what} of shape {shape} has a piece of {sizes} at {offsets}")
        nbytes = math.prod(sizes) * kind.dtype.itemsize
        if type(head) is not int or head < -1 or max(head, 0) + nbytes > length:
            raise CorruptCheckpointError(f"{what} has a piece of {nbytes} bytes in {length} bytes of {file!r}")
    if not _are_tiles([piece[3:] for piece in kind.pieces], shape):
        raise CorruptCheckpointError(f"{what} of shape {shape} has pieces that do not cover each element exactly once")
    nbytes, available = math.prod(shape) * kind.dtype.itemsize, sum(manifest.files[file].size for file in files)
    if nbytes > available:
        raise CorruptCheckpointError(
            f"{what} has {nbytes} bytes, but its files only {available}: some of its pieces overlap"
        )


def _are_tiles(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> bool:
    """Whether boxes inside of a tensor cover each of its elements exactly once.

    The number of boxes that cover an element changes only at the corners of boxes: along each dim by +1 where a box
    begins, and by -1 where it ends. If all changes add up to those of the whole tensor, the boxes cover it exactly.
    So pairs of boxes need not be compared::

        + . . -          + . - .     + . -         elements a, b, c of a (3,) tensor; boxes of a, b and of c: what
        a b c      =     a b     and     c         is at the border adds up to 0
    """
    if 0 in shape:
        return True
    cut = [dim for dim, size in enumerate(shape) if any(sizes[dim] != size for _, sizes in boxes)]
    if len(cut) > _CUTS:
        return False
    changes = Counter[tuple[int, ...]]()
    for whole, (offsets, sizes) in [(-1, ((0,) * len(shape), shape)), *zip(repeat(1), boxes, strict=False)]:
        corners: list[tuple[tuple[int, ...], int]] = [((), whole)]
        for dim in cut:
            at, end = offsets[dim], offsets[dim] + sizes[dim]
            corners = [((*corner, to), sign * by) for corner, by in corners for to, sign in ((at, 1), (end, -1))]
        for corner, by in corners:
            changes[corner] += by
    return not any(changes.values())


def _check_runs(
    manifest: Manifest, file: str, starts: Sequence[int], length: int, names: Sequence[str], path: Path
) -> None:
    """Checks that runs of ``length`` bytes are inside of a file. Each run stores one of ``names``."""
    size = manifest.files[file].size
    if len(starts) != len(names) or not _are_counts((*starts, length)):
        raise CorruptCheckpointError(f"{path}: {few(names)} do not lie at valid bytes of {file!r}")
    if names and max(starts) + length > size:
        name, start = next(each for each in zip(names, starts, strict=True) if each[1] + length > size)
        raise CorruptCheckpointError(
            f"{path}: '{name}' lies at bytes {start} to {start + length} of {file!r}, which is shorter"
        )


def checked_state(state: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The further state that was given to a save or a load. Raises TypeError or ValueError."""
    if not isinstance(state, Mapping | None):
        raise TypeError(f"state is of type {type(state).__name__}; expected a dict of state by name")
    for name in state or {}:
        if not isinstance(name, str) or not name or "." in name or name == "step":
            raise ValueError(f"state has the name {name!r}; expected a string without dots, and not 'step'")
    return state or {}


def checked_step(step: int | None) -> int | None:
    """The step that was given to a save or a load. Raises TypeError or ValueError."""
    if step is not None and not hasattr(step, "__index__"):
        raise TypeError(f"step is {step!r}; expected an integer")
    if step is not None and (step := operator.index(step)) < 0:
        raise ValueError(f"step is {step}; expected a number of 0 or more")
    return step


def few(names: Sequence[str]) -> str:
    return f"{list(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _are_counts(numbers: Collection[Any]) -> bool:
    return not numbers or (set(map(type, numbers)) == {int} and min(numbers) >= 0)


def _inside(name: str, directory: Path) -> bool:
    """Whether a path is below the directory, after following links, which stores and web servers do not have."""
    try:
        if not isinstance(directory, Path):
            return bool(name) and not name.startswith("/") and not {"", ".", ".."} & {*name.split("/")}
        return bool(name) and (directory / name).resolve().is_relative_to(directory.resolve())
    except (OSError, ValueError, RuntimeError):
        return False
