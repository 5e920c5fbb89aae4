"""Tensors whose values lie in a file.

A :class:`DiskTensor` is read when an operation needs its values, and written when an operation changes them. So state
dicts, checkpoints, clipping and any optimizer work on it as on other tensors, one tensor in memory at a time. What is
fast does not use operations: gathers and steps of optimizers read regions ahead and write them back beside computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch

from fullshard.device import CPU
from fullshard.disk.file import DiskFile, Region
from fullshard.torch_private import schema_of, wrapper_subclass
from fullshard.tree import map_tensors, tensors

#: Operations that need the form of their argument and not its values.
_LIKE = {
    getattr(torch.ops.aten, name)
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
} | {getattr(torch.ops.aten, f"new_{name}") for name in ("empty", "zeros", "ones", "full", "empty_strided")}
#: Operations that write all elements of their first argument without reading any.
_OVERWRITES = {torch.ops.aten.copy_, torch.ops.aten.zero_, torch.ops.aten.fill_}
#: Operations that would give the tensor other memory.
_REFUSED = {torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_}


class DiskTensor(torch.Tensor):
    """A tensor on the CPU whose values lie in a region of a file; several may lie in one.

    Operations raise DiskError if its values cannot be read or written.
    """

    region: Region

    @staticmethod
    def __new__(cls, region: Region, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> Self:
        made: Self = wrapper_subclass(
            cls, tuple(shape), strides=tuple(stride), storage_offset=offset, dtype=region.dtype, device=CPU
        )
        made.region = region
        return made

    @classmethod
    def holding(cls, file: DiskFile, values: torch.Tensor, what: str) -> Self:
        """A tensor that gets the form of ``values``, which have no gaps, and starts to be written with them."""
        made = cls.like(file, values, what)
        file.bound(made.region.write(in_memory_order(values)), values.nbytes)
        return made

    @classmethod
    def like(cls, file: DiskFile, values: torch.Tensor, what: str, dtype: torch.dtype | None = None) -> Self:
        """A tensor of zeros of the form of ``values``, which have no gaps."""
        region = file.allocate(values.numel(), dtype or values.dtype, what)
        return cls(region, values.shape, values.stride())

    def numpy(self, *, force: bool = False) -> Any:
        """The values, as an array that cannot be written: what is written to it would be lost."""
        array = self.load().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)
        return array.copy() if copy else array

    def tolist(self) -> Any:
        return self.load().tolist()

    def __format__(self, format_spec: str) -> str:
        return format(self.load() if self.dim() == 0 else self, format_spec) if format_spec else str(self)

    def share_memory_(self) -> Self:
        raise self._without_memory("share_memory_")

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise self._without_memory("__dlpack__")

    def _without_memory(self, name: str) -> RuntimeError:
        return RuntimeError(f"{name} on {self!r}, which is offloaded to a disk: copy its values first")

    @property
    def is_whole(self) -> bool:
        """Whether it has all elements of its region."""
        return self.numel() == self.region.numel

    def load(self) -> torch.Tensor:
        """The values, as a plain tensor of the same form."""
        memory = torch.empty(self.region.numel, dtype=self.dtype)
        self.region.read(memory).wait()
        return memory.as_strided(self.shape, self.stride(), self.storage_offset())

    def parts(self) -> Iterator[torch.Tensor]:
        """The values in their order, as 1-D tensors, of which one at a time is in memory."""
        if not (self.is_whole and self.is_contiguous()):
            yield self.load().contiguous().view(-1)
            return
        numel, most = self.numel(), self.region.step
        for start in range(0, numel, most):
            part = torch.empty(min(most, numel - start), dtype=self.dtype)
            self.region.read(part, start).wait()
            yield part

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DiskTensor({self.region.what}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.load())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.load().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet in _REFUSED:
            raise next(each for each in tensors(args) if isinstance(each, DiskTensor))._without_memory(packet.__name__)
        if packet in _LIKE and isinstance(args[0], DiskTensor):
            like = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device="meta")
            return func(like, *args[1:], **{**kwargs, "device": kwargs.get("device") or CPU})
        if packet.__name__.startswith("_foreach_"):
            return _one_by_one(func, args, kwargs)
        if func.is_view and isinstance(args[0], DiskTensor):
            return _view(func, args, kwargs)
        return _on_values(func, args, kwargs)


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on lists of tensors for one tensor after another, so that one is in memory at a time."""
    count = len(args[0])
    made = [_on_values(func, _only(args, index, count), _only(kwargs, index, count)) for index in range(count)]
    if made[0] is None:
        return None
    if isinstance(made[0][0], torch.Tensor):
        return [each[0] for each in made]
    return [list(column) for column in zip(*([part[0] for part in each] for each in made), strict=True)]


def _only(arguments: Any, index: int, count: int) -> Any:
    """Arguments in which lists of ``count`` have only what is at ``index``."""
    if isinstance(arguments, dict):
        return {name: _only((value,), index, count)[0] for name, value in arguments.items()}
    is_list = [isinstance(each, (list, tuple)) and len(each) == count for each in arguments]
    return tuple([each[index]] if is_one else each for each, is_one in zip(arguments, is_list, strict=True))


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The views of a tensor: they have its region."""
    base: DiskTensor = args[0]
    size = base.region.numel
    form = torch.empty(size, dtype=base.dtype, device="meta").as_strided(
        base.shape, base.stride(), base.storage_offset()
    )
    made: Any = func(form, *args[1:], **kwargs)
    if any(each.dtype != base.dtype for each in tensors(made)):
        raise RuntimeError(f"{func} on {base!r}, which is offloaded to a disk: clone it first")

    def view(form: torch.Tensor) -> torch.Tensor:
        return DiskTensor(base.region, form.shape, form.stride(), int(form.storage_offset()))

    return map_tensors(view, made)


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values, and write back those that it changes."""
    memories: dict[Region, torch.Tensor] = {}
    shown: list[tuple[torch.Tensor, DiskTensor]] = []
    unread = _overwritten(func, args)

    def load(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DiskTensor):
            return value
        if (region := value.region) not in memories:
            memories[region] = torch.empty(region.numel, dtype=region.dtype)
            if region is not unread:
                region.read(memories[region]).wait()
        found = memories[region].as_strided(value.shape, value.stride(), value.storage_offset())
        shown.append((found, value))
        return found

    made = func(*map_tensors(load, args), **map_tensors(load, kwargs))
    arguments = schema_of(func).arguments
    named = {each.name: each for each in arguments}
    passed = [*zip(args, arguments, strict=False), *((kwargs[name], named[name]) for name in kwargs)]
    is_known = func.namespace in ("aten", "prims")  # others do not always say what they write
    for value, argument in passed:
        if not is_known or (argument.alias_info is not None and argument.alias_info.is_write):
            for region in {each.region for each in tensors(value) if isinstance(each, DiskTensor)}:
                region.write(memories[region]).wait()
    return map_tensors(lambda each: next((value for found, value in shown if found is each), each), made)


def _overwritten(func: Any, args: tuple[Any, ...]) -> Region | None:
    """The region of which an operation writes all values and reads none."""
    if func.overloadpacket not in _OVERWRITES or not isinstance(args[0], DiskTensor) or not args[0].is_whole:
        return None
    region = args[0].region
    reads = any(isinstance(each, DiskTensor) and each.region is region for each in args[1:])
    return None if reads else region


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps as they lie in memory, as a 1-D view. Raises AssertionError if there are
    gaps."""
    numel = tensor.numel()
    spans = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    assert numel == 0 or math.prod(size for _, size in spans) == 1 + sum(s * (n - 1) for s, n in spans), "gaps"
    return tensor.detach().as_strided((numel,), (1,))
