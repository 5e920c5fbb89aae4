"""Tensors in one piece of memory, which :mod:`fullshard.elastic.connections` sends without another copy of it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

_ALIGNED = 64


class Packed(NamedTuple):
    """The memory, and the first byte, the shape and the dtype of each tensor in it."""

    memory: memoryview
    places: tuple[tuple[int, torch.Size, torch.dtype], ...]


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[int, tuple[tuple[int, torch.Size, torch.dtype], ...]]:
    """How many bytes hold the tensors, and the place of each."""
    *starts, nbytes = accumulate([-(-each.nbytes // _ALIGNED) * _ALIGNED for each in tensors], initial=0)
    return nbytes, tuple((start, each.shape, each.dtype) for start, each in zip(starts, tensors, strict=True))


def new_memory(nbytes: int) -> memoryview:
    """Memory of zeros. Unlike that of a ``bytearray``, it is not written under the lock of Python."""
    return memoryview(mmap.mmap(-1, max(1, nbytes), access=mmap.ACCESS_COPY))[:nbytes]


def copy_of(memory: memoryview) -> memoryview:
    """A copy in new memory, made without the lock of Python."""
    copied = new_memory(memory.nbytes)
    if memory.nbytes:
        torch.frombuffer(copied, dtype=torch.uint8).copy_(torch.frombuffer(memory, dtype=torch.uint8))
    return copied


@torch.no_grad()
def pack(tensors: Sequence[torch.Tensor]) -> Packed:
    """Copies tensors, of any strides and devices."""
    nbytes, places = places_of(tensors)
    packed = Packed(new_memory(nbytes), places)
    for view, tensor in zip(unpack(packed), tensors, strict=True):
        view.copy_(tensor)
    return packed


def unpack(packed: Packed) -> list[torch.Tensor]:
    """The tensors, in that memory, on the CPU."""
    memory = torch.frombuffer(packed.memory, dtype=torch.uint8) if packed.memory.nbytes else torch.empty(0).byte()
    return [
        memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for start, shape, dtype in packed.places
    ]
