"""What an operation of torch reads and writes, as its schema says."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fullshard.torch_private import alias_storage

#: Operations that look at no element of the tensors that they are given.
_LOOK_AT_NOTHING = {
    f"aten::{name}"
    for name in (
        *("set_", "resize_", "empty_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("record_stream", "lift_fresh", "is_same_size", "sym_size"),
    )
}
#: Collectives, whose schemas say nothing: how many of the first arguments they write. Of others, all.
_COLLECTIVES = {
    "c10d::_allgather_base_": 1,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::allgather_": 1,
    "c10d::reduce_scatter_": 1,
    "c10d::alltoall_base_": 1,
    "c10d::send": 0,
}
#: Operations whose result the host waits for.
SYNCHRONIZES = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::unique_dim"}


class Access(NamedTuple):
    """Bytes that an operation reads or writes: from the first one to that after the last, of a tensor."""

    start: int
    end: int
    writes: bool
    tensor: torch.Tensor


@functools.cache
def _kinds(func: Any) -> tuple[bool, dict[str | int, bool]]:
    """Whether an operation looks at elements, and which of its arguments it writes."""
    schema, name = func._schema, func._schema.name
    written = {}
    for position, argument in enumerate(schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if name.startswith("c10d::"):
            writes = position < _COLLECTIVES.get(name, 99)
        written[argument.name if argument.kwarg_only else position] = writes
        written[argument.name] = writes
    returns = [each.alias_info for each in schema.returns]
    is_view = any(each is not None and not each.is_write for each in returns)
    return not is_view and name not in _LOOK_AT_NOTHING and not name.startswith("prim::"), written


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which the elements of a tensor lie; equal ones if it has no memory."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.device.type != "cpu" or not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def accesses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Access]:
    """What an operation reads and writes of its arguments."""
    looks, written = _kinds(func)
    if not looks:
        return
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in given:
        for tensor in tensors_in(value):
            start, end = extent(tensor)
            if end > start:
                yield Access(start, end, written.get(key, False), tensor)


def fills(func: Any) -> bool:
    """Whether an operation writes the tensors that it makes."""
    name = func._schema.name
    return (_kinds(func)[0] and "empty" not in name) or name.endswith(("zeros_like", "ones_like", "full_like"))


def finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same address, which it keeps when the storage is given other memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return tensor
    storage = alias_storage(tensor.untyped_storage())
    made = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    made.owner = tensor.untyped_storage()  # type: ignore[attr-defined]
    return made
