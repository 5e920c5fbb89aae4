"""The outline of the file that a rank writes: its contents in order. Only outlines travel to the first rank.

Owns how a rank's tensors are divided among files, and what is kept of the last save.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch

from fullshard.checkpoint import dcp
from fullshard.checkpoint.layout import Box
from fullshard.checkpoint.manifest import Piece, Stored


def outlines_of(
    rank: int,
    pairs: Sequence[tuple[Box, torch.Tensor]],
    values: list[tuple[str, int]],
    paths: dict[str, tuple[str | int, ...]],
    largest: float,
) -> Iterator[tuple[Outline, list[torch.Tensor]]]:
    """The outlines of a rank's files, with the tensors in each. Large tensors are split along their first dim."""
    for number, part in enumerate(_split(pairs, largest) if largest < float("inf") else [pairs]):
        boxes, tensors = [box for box, _ in part], [tensor for _, tensor in part]
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        yield (
            Outline(f"__{rank}_{number}.distcp", boxes, kinds, [] if number else values, {} if number else paths),
            tensors,
        )


def _split(pairs: Iterable[tuple[Box, torch.Tensor]], largest: float) -> list[list[tuple[Box, torch.Tensor]]]:
    """Groups of tensors of about ``largest`` bytes. Tensors with more are split along their first dim."""
    groups, size = [list[tuple[Box, torch.Tensor]]()], 0.0
    for box, tensor in pairs:
        rows = max(1, int(largest * len(tensor) // tensor.nbytes)) if tensor.nbytes > largest and tensor.dim() else 0
        for at in range(0, len(tensor), rows) if rows else [0]:
            part, offsets = tensor, box.offsets
            if rows:
                part, offsets = tensor[at : at + rows], (box.offsets[0] + at, *box.offsets[1:])
            if size and size + part.nbytes > largest:
                groups.append([])
                size = 0.0
            groups[-1].append((box._replace(offsets=offsets), part))
            size += part.nbytes
    return groups


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
            tensors.append((names, dtype, shape, Piece(self.name, at, length, at + len(before), offsets, tuple(sizes))))
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
