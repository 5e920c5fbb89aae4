"""The outline of the file that a rank writes: its contents in order. Only outlines travel to the first rank.

Owns how a rank's tensors are divided among files, and what a process remembers of the last save.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch

from fullshard.checkpoint import dcp
from fullshard.checkpoint.layout import Box
from fullshard.checkpoint.manifest import Stored, StoredPiece

#: Stands in an outline for the attempt that makes the names of files unique, as the descriptions of all saves of a
#: model are to be the same.
BLANK = "of-this-attempt"


def outlines_of(
    rank: int,
    pairs: Sequence[tuple[Box, torch.Tensor]],
    values: list[tuple[str, int]],
    paths: dict[str, tuple[str | int, ...]],
    largest: float,
    is_unique: bool,
) -> Iterator[tuple[Outline, list[torch.Tensor]]]:
    """The outlines of a rank's files, with the tensors in each. Large tensors are split; a large value is not. With
    ``is_unique``, the names of files contain :data:`BLANK`."""
    end = f"-{BLANK}.distcp" if is_unique else ".distcp"
    for number, (some, part) in enumerate(
        _split(pairs, values, largest) if largest < float("inf") else [(values, pairs)]
    ):
        boxes, tensors = [box for box, _ in part], [tensor for _, tensor in part]
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        yield Outline(f"__{rank}_{number}{end}", boxes, kinds, some, {} if number else paths), tensors


def _split(
    pairs: Iterable[tuple[Box, torch.Tensor]], values: Iterable[tuple[str, int]], largest: float
) -> list[tuple[list[tuple[str, int]], list[tuple[Box, torch.Tensor]]]]:
    """Groups of values and tensors that take at most ``largest`` bytes in a file, if no value takes more."""
    groups, size = [(list[tuple[str, int]](), list[tuple[Box, torch.Tensor]]())], 0.0

    def add(length: int) -> tuple[list[tuple[str, int]], list[tuple[Box, torch.Tensor]]]:
        nonlocal size
        if size and size + length > largest:
            groups.append(([], []))
            size = 0.0
        size += length
        return groups[-1]

    for value in values:
        add(value[1])[0].append(value)
    size += -size % dcp.ALIGNMENT
    for box, tensor in pairs:
        for part in _parts(box, tensor, largest):
            add(dcp.around(part[1].dtype, tuple(part[1].shape))[2])[1].append(part)
    return groups


def _parts(box: Box, tensor: torch.Tensor, largest: float, dim: int = 0) -> Iterator[tuple[Box, torch.Tensor]]:
    """The parts of a tensor that take at most ``largest`` bytes in a file: rows, and parts of a row that takes more."""
    length = dcp.around(tensor.dtype, tuple(tensor.shape))[2]
    if length <= largest or dim == tensor.dim():
        yield box, tensor
        return
    size = tensor.shape[dim]
    rows = max(1, int((largest - (length - tensor.nbytes)) * size // tensor.nbytes))
    for at in range(0, size, rows):
        offsets = (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :])
        part = tensor[(slice(None),) * dim + (slice(at, at + rows),)]
        yield from _parts(box._replace(offsets=offsets), part, largest, dim + 1)


class Outline(NamedTuple):
    """The outline of a rank's file: its name, its contents in order, and their paths in the nested state dict."""

    name: str
    boxes: list[Box]
    kinds: list[tuple[torch.dtype, torch.Size]]
    values: list[tuple[str, int]]  # names and lengths; values come before the tensors
    paths: dict[str, tuple[str | int, ...]]

    def laid_out(self) -> tuple[list[Any], dict[str, Stored], list[bytes]]:
        """The layout of the file: names, dtype, shape and piece of each tensor; the positions of values; and the bytes
        before each tensor and after the last."""
        tensors, values, at = list[Any](), dict[str, Stored](), 0
        for name, length in self.values:
            values[name] = Stored(self.name, at, length)
            at += length
        between, concatenate = [bytes(-at % dcp.ALIGNMENT)], cache(operator.add)  # of which few are different
        at += len(between[0])
        for (names, shape, offsets, _), (dtype, sizes) in zip(self.boxes, self.kinds, strict=True):
            before, after, length = dcp.around(dtype, tuple(sizes))
            tensors.append(
                (names, dtype, shape, StoredPiece(self.name, at, length, at + len(before), offsets, tuple(sizes)))
            )
            between[-1:] = concatenate(between[-1], before), after
            at += len(before) + sizes.numel() * dtype.itemsize + len(after)
        return tensors, values, between


class LastSave:
    """A cache of the last save's descriptions. The next save of the same model has the same, and does not make them
    again.

    Attributes:
        outlines: the outlines of this rank's files. ``between`` are the bytes between their tensors, ``key`` a name.
        keys: the keys of all ranks, in the last save that this rank described. ``metadata`` and ``contents`` are the
            bytes that it wrote then.
    """

    outlines: ClassVar[list[Outline]] = []
    between: list[list[bytes]]
    key = ""
    keys: tuple[str, ...] = ()
    metadata = b""
    contents = b""
