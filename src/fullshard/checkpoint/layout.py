"""Layouts: the part of a tensor that this rank holds, as boxes of the whole tensor, which DCP's format describes.

A DTensor's part is one box. A fragment's part is a run of elements that may be cut anywhere. It is several boxes: the
end of a row, whole rows, and the beginning of a row. So both front ends write and read their parts without gathering::

    a run of a (4, 5) parameter      . . . 1 1        1 box of (1, 2) at (0, 3)
                                     1 1 1 1 1        1 box of (2, 5) at (1, 0)
                                     1 1 1 1 1
                                     1 . . . .        1 box of (1, 1) at (3, 0)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fullshard.group.parameter import ShardedParameter, local_tensor
from fullshard.ragged import RaggedShard, is_ragged
from fullshard.torch_private import DTensorSpec, box_of, is_traceable_subclass, spec_of


class Copies(NamedTuple):
    """The ranks that hold the same part. One of them writes it."""

    ranks: object  # a key that is the same for all of them
    number: int  # this rank's number among them
    size: int  # how many they are
    #: The number of ranks over which the tensor is distributed. With pipelines or tensor parallel, others may have it
    #: too.
    among: int = 1


#: Tensors of torchao's and bitsandbytes' quantized state that are the same for all blocks.
TABLES = {"qmap", "qmap1", "qmap2"}
#: bitsandbytes' tensors with an element for each block, and the elements of such a block; the last one may have fewer.
SCALES = {"absmax1": 256, "absmax2": 256}
ONLY_HERE = Copies(None, 0, 1)


class Box(NamedTuple):
    """The position of a part that this rank holds, and the ranks that hold the same part. A tied tensor has several
    names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    copies: Copies

    def key(self, ranks: int) -> str:
        """A key for the box, if others of ``ranks`` may hold it without this rank's knowledge; otherwise empty."""
        if self.copies.ranks == "all":
            return self.names[0]
        return f"{self.names[0]} at {self.offsets}" if self.copies.among < ranks else ""


@dataclass(frozen=True)
class Layout:
    """The boxes of a parameter that this rank holds. State that is cut like the parameter has the same layout."""

    shape: tuple[int, ...]  # of the whole parameter
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # the offsets and sizes of each
    copies: Copies  # the ranks that hold the same boxes
    order: tuple[int, ...] | None = None  # the order of the dims in memory, if this rank's part is one run of elements
    keeps_blocks: bool = False  # whether it is cut only between blocks

    def of_inner(self, name: str, numel: int, inner: torch.Tensor) -> Layout | None:
        """The layout of an inner tensor of state that was quantized by blocks, if the parameter keeps them whole: its
        elements belong to blocks of this rank's ``numel`` elements, or are a table that all parts share. ``None`` if
        that is not so."""
        if not self.keeps_blocks or inner.ndim != 1:
            return None
        if name in TABLES:
            return layout_of(inner)
        block = SCALES.get(name, numel // max(1, len(inner)))
        start = self.boxes[0][0][0] * math.prod(self.shape[1:]) if self.boxes else 0
        if not block or -(-numel // block) != len(inner) or start % block:
            return None
        if math.prod(self.shape) % block and name not in SCALES:
            return None
        box = (start // block,), (len(inner),)
        return Layout((-(-math.prod(self.shape) // block),), (box,), self.copies)

    def inner_sizes(self, name: str, local: tuple[int, ...], saved: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes that an inner tensor has here, if it has the sizes ``saved`` for all of the parameter."""
        if saved == self.shape or name in TABLES or len(saved) != 1:
            return local if saved == self.shape else saved
        if name in SCALES:
            return (-(-math.prod(local) // SCALES[name]),)
        return (math.prod(local) * saved[0] // math.prod(self.shape),)

    def inner_context(self, saved: Any, local: torch.Size) -> Any:
        """The context of a subclass with the shape ``local`` here, in place of that of the part that was saved."""
        if not self.keeps_blocks or not isinstance(saved, list):
            return saved
        return [local if isinstance(each, torch.Size) else each for each in saved]

    @property
    def has_first(self) -> bool:
        """Whether this rank holds the first element. That rank saves values that belong to the whole parameter."""
        return any(not any(offsets) for offsets, _ in self.boxes)

    def named(self, names: tuple[str, ...]) -> tuple[Box, ...]:
        """The boxes of a tensor with these names and this layout."""
        return tuple([Box(names, self.shape, offsets, self.copies) for offsets, _ in self.boxes])

    def split(self, what: str, local: torch.Tensor) -> list[torch.Tensor]:
        """The values of each box, as views of ``local``."""
        local = local.new_empty(self.shape) if 0 in self.shape else local.detach() if local.requires_grad else local
        if type(local) is not torch.Tensor and is_traceable_subclass(local):
            raise TypeError(f"'{what}' is a {type(local).__name__}: its values cannot be saved as plain numbers")
        if self.order is None:
            return [local] * len(self.boxes)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        parts = local.split([math.prod(sizes) for _, sizes in self.boxes])
        shaped = [[sizes[dim] for dim in self.order] for _, sizes in self.boxes]
        return [part.view(shape).permute(inverse) for part, shape in zip(parts, shaped, strict=True)]


def layout_of(value: torch.Tensor | ShardedParameter) -> Layout:
    """The layout of a parameter, or of a tensor outside of groups. A tensor that is not a DTensor is on all ranks."""
    spec: DTensorSpec | None = None
    if isinstance(value, ShardedParameter):
        spec, local = value.spec, value.values
    else:
        local = local_tensor(value)
        spec = spec_of(value) if isinstance(value, DTensor) else None
    shape = tuple(local.shape if spec is None else spec.shape)
    if spec is not None and 0 not in shape:  # a tensor without elements is the same everywhere
        if isinstance(value, ShardedParameter) and value.run is not None:
            return _layout_of_run(value, *value.run)
        return _layout_on(spec.mesh, spec.mesh.get_coordinate(), spec.placements, shape, tuple(local.shape))
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return Layout(shape, (((0,) * len(shape), shape),), Copies("all", rank, count, count))


@lru_cache(maxsize=1024)  # models repeat themselves, and are saved again
def _layout_on(
    mesh: DeviceMesh,
    coordinate: tuple[int, ...] | None,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    local: tuple[int, ...],
) -> Layout:
    """The layout of a DTensor: one box, or none if the rank has no elements or is not in the mesh."""
    if coordinate is None:
        return Layout(shape, (), ONLY_HERE)
    extent = tuple(mesh.shape)
    number, count, offsets, sharded = 0, 1, [0] * len(shape), list[int]()
    for at, placement, size in zip(coordinate, placements, extent, strict=True):
        if placement.is_replicate():
            number, count = number * size + at, count * size
        elif isinstance(placement, RaggedShard):
            sharded.append(placement.dim)
            offsets[placement.dim] = placement.cuts[at]
        elif type(placement) is Shard:
            sharded.append(placement.dim)
            offsets[placement.dim] = min(at * -(-shape[placement.dim] // size), shape[placement.dim])
        else:
            sharded += [-1, -1]
    cut_twice = len(set(sharded)) < len(sharded)
    sizes, start = box_of(shape, mesh, placements) if cut_twice else (local, tuple(offsets))
    copies = Copies((id(mesh), placements), number, count, math.prod(extent))
    boxes = ((start, sizes),) if math.prod(sizes) else ()
    return Layout(shape, boxes, copies, keeps_blocks=is_ragged(placements))


def _layout_of_run(param: ShardedParameter, start: int, stop: int) -> Layout:
    """The layout of a parameter of which this rank has the elements from ``start`` to ``stop``."""
    data, before = param.data, param.unsharded_spec
    base = Layout(tuple(param.shape), (((0,) * len(param.shape), tuple(param.shape)),), ONLY_HERE)
    if before is not None:  # tensor parallel cut the parameter before
        coordinate = before.mesh.get_coordinate()
        base = _layout_on(before.mesh, coordinate, before.placements, tuple(before.shape), tuple(param.shape))
    replica = data.replicate_group.rank() if data.replicate_group is not None else 0
    number = base.copies.number * data.replicate_size + replica
    copies = Copies(
        (id(data), base.copies.ranks),
        number,
        base.copies.size * data.replicate_size,
        base.copies.among * data.replicate_size * data.shard_size,
    )
    if data.shard_size == 1:
        return Layout(base.shape, base.boxes, copies)
    first = base.boxes[0][0] if base.boxes else ()
    boxes = []
    for offsets, sizes in _boxes_of_run([param.shape[dim] for dim in param.order], start, stop):
        placed = [0] * len(offsets), [0] * len(offsets)
        for dim, offset, size in zip(param.order, offsets, sizes, strict=True):
            placed[0][dim], placed[1][dim] = first[dim] + offset, size
        boxes.append((tuple(placed[0]), tuple(placed[1])))
    return Layout(base.shape, tuple(boxes), copies, param.order)


def _boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes that together are the elements ``start`` to ``stop`` of a tensor in row-major order, in that order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    while start < stop:
        number, within = divmod(start, row)
        rows = (stop - start) // row
        if within == 0 and rows:
            yield (number, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            start += rows * row
        else:
            end = min(stop, (number + 1) * row)
            for offsets, sizes in _boxes_of_run(shape[1:], within, end - number * row):
                yield (number, *offsets), (1, *sizes)
            start = end
