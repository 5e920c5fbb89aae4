"""Different tensors that share memory: sharding would separate them, because it copies parameters into other memory.

Owns the search for them. After sharding, ``Parameter(other.data)`` would no longer follow ``other``, and a buffer of
``param.data`` would no longer follow its parameter. Training would continue with wrong weights, without an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.nn.parameter import is_lazy

from fullshard.group.owners import owner_of
from fullshard.group.parameter import plain_name
from fullshard.schedule.unit import unit_of
from fullshard.torch_private import plain_parts


class Extent(NamedTuple):
    """The bytes of a parameter or buffer of a module, now or before it was sharded."""

    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    #: Distinguishes the storage from a later one at the same address.
    storage: weakref.ref[torch.UntypedStorage]
    module: nn.Module
    name: str
    is_trained: bool

    def overlaps(self, other: Extent) -> bool:
        """Whether any byte is in both. ``other`` must begin before this one stops."""
        taken = torch.zeros(max(self.stop, other.stop) - self.start, dtype=torch.bool, device="cpu")
        taken.as_strided(self.shape, self.strides, 0).fill_(True)
        return bool(taken.as_strided(other.shape, other.strides, other.start - self.start).any())


def refuse_overlaps(modules: Sequence[nn.Module], params: Container[torch.Tensor]) -> list[Extent]:
    """Returns the spans of ``params``, which are about to be sharded. Raises ValueError if a trained parameter in
    ``modules`` shares memory with another tensor, sharded already or not."""
    names = {module: name for root in modules for name, module in root.named_modules()}
    units = [unit for unit in dict.fromkeys(map(unit_of, names)) if unit is not None]
    found = {
        tensor: list(_extents(tensor, module, name))
        for module in names
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and not is_lazy(tensor) and owner_of(tensor) is None
    }
    lie: dict[weakref.ref[torch.UntypedStorage], list[Extent]] = {}
    for extents in (*found.values(), *(unit.extents for unit in units)):
        for extent in extents:
            lie.setdefault(extent.storage, []).append(extent)
    for extents in lie.values():
        extents.sort(key=lambda extent: extent.start)
        for index, one in enumerate(extents):
            for other in extents[index + 1 :]:
                if other.start >= one.stop:
                    break
                if (one.is_trained or other.is_trained) and one.overlaps(other):
                    where, too = (plain_name(f"{names.get(at.module, '')}.{at.name}") for at in (one, other))
                    raise ValueError(
                        f"'{where}' and '{too}' are two tensors in one memory, which sharding would separate: to tie "
                        f"them, let both modules have the same Parameter object; otherwise clone() one of them first"
                    )
    return [extent for tensor, extents in found.items() if tensor in params for extent in extents]


def _extents(tensor: torch.Tensor, module: nn.Module, name: str) -> Iterator[Extent]:
    is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    for part in plain_parts(tensor.detach()):
        if part.layout is torch.strided and not part.is_meta and part.numel():
            size, start = part.itemsize, int(part.storage_offset()) * part.itemsize
            strides = (*[stride * size for stride in part.stride()], 1)
            shape = (*[count if stride else 1 for count, stride in zip(part.shape, part.stride(), strict=True)], size)
            stop = start + sum([(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]) + 1
            yield Extent(start, stop, shape, strides, weakref.ref(part.untyped_storage()), module, name, is_trained)
