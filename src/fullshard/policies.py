"""The settings that users pass to ``fully_shard``: dtypes, meshes and placements.

Settings are frozen data and check themselves when they are made. :class:`AllGather` and :class:`ReduceScatter` are
interfaces instead: users implement them to replace a collective. Names, fields and defaults are PyTorch's. The
``as_...`` functions convert PyTorch's objects, which they recognize by class names, so that they import nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

#: The names that :mod:`fullshard` exports.
__all__ = ["AllGather", "Comm", "DataParallelMeshDims", "MixedPrecisionPolicy", "ReduceScatter"]
__all__ += ["ShardPlacementResult"]

S = TypeVar("S")


class Checked:
    """The base of settings. Checks each ``bool``, dtype and function by the type of its field when one is made."""

    def __post_init__(self) -> None:
        for field, kind in type(self).__dataclass_fields__.items():  # type: ignore[attr-defined]
            value, name = getattr(self, field), f"{type(self).__name__}.{field}"
            if kind.type == "bool":
                expect(isinstance(value, bool), name, value, "True or False")
            elif kind.type == "torch.dtype | None" and value is not None:
                wanted = "a floating-point torch.dtype such as torch.bfloat16, or None"
                expect(isinstance(value, torch.dtype), name, value, wanted)
                if not value.is_floating_point:
                    raise ValueError(f"{name} is {value}, which is not floating-point; expected {wanted}")
            elif str(kind.type).startswith("Callable"):  # a class, where a user derived this
                expect(value is None or callable(value), name, value, "a function of a parameter, or None")


@dataclass(frozen=True)
class MixedPrecisionPolicy(Checked):
    """The dtypes of a module's computation and communication; the optimizer always sees the original dtype.

    Args:
        param_dtype: dtype of gathered parameters, and so of forward and backward. ``None``: the original dtype.
        reduce_dtype: dtype in which gradients are reduced, and accumulated while their reduction is switched off.
            ``None``: as in the installed torch. From 2.15 on, that is the parameter's ``grad_dtype``, which is its own
            dtype unless you set it. Before 2.15, it is the dtype of the computation, unless you set ``grad_dtype``. If
            these dtypes differ in a group, all its gradients are reduced in the dtype to which they promote.
            ``grad_dtype`` is set before the first forward, and is also the dtype of ``param.grad``; ``None`` is the
            dtype of the computation. It stays over ``to()`` and ``load_state_dict(assign=True)``.
        output_dtype: dtype to which floating-point outputs of forward are cast. ``None``: left as they are.
        cast_forward_inputs: whether floating-point inputs of forward are cast to ``param_dtype``.
        param_dtype_override_fn: called once with each parameter when it is sharded. It returns the parameter's own
            dtype to compute in that one; ``None`` or ``param_dtype`` changes nothing. Inputs of forward are cast to
            ``param_dtype`` all the same.
        buffer_dtype: dtype to which floating-point buffers are cast. ``None``: left as they are. (Not in PyTorch.)

    Raises:
        TypeError: a dtype is neither a ``torch.dtype`` nor ``None``, a switch is not a ``bool``, or the function cannot
            be called.
        ValueError: a dtype is not floating-point; from ``fully_shard``, if the function returns a different dtype; in
            backward, ``grad_dtype=None`` without a ``reduce_dtype`` where unused parameters are reduced.

    Ranks: each for itself, alike, which is checked when a module is sharded.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = dataclasses.field(
        default=None, kw_only=True
    )
    buffer_dtype: torch.dtype | None = None

    def overridden_dtype(self, param: nn.Parameter, name: str) -> torch.dtype | None:
        """The dtype in which ``param`` is gathered, if ``param_dtype_override_fn`` chose another than ``param_dtype``.

        Args:
            param: the parameter that the function is called with.
            name: its fully qualified name, for the error.

        Returns:
            the parameter's own dtype if the function returned it and ``param`` is floating-point; otherwise ``None``.

        Raises:
            ValueError: the function returned a dtype that is neither the parameter's own nor ``param_dtype``.
        """
        chosen = None if self.param_dtype_override_fn is None else self.param_dtype_override_fn(param)
        if chosen is None or chosen == self.param_dtype:
            return None
        what = f"what param_dtype_override_fn returned for parameter '{name}'"
        wanted = f"None, param_dtype ({self.param_dtype}) or its own dtype, {param.dtype}"
        expect(chosen == param.dtype, what, chosen, wanted, ValueError)
        return param.dtype if param.is_floating_point() else None


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names the data-parallel dimensions of a mesh that has dimensions for other kinds of parallelism too.

    Args:
        shard: name of the dimension to shard over; several names act as one dimension made of all of them.
        replicate: name of the dimension to replicate over; several act as one.

    Raises:
        TypeError: a field is neither a name, nor a sequence of names, nor ``None``.
        ValueError: no dimension is named, or one is named twice.

    Ranks: each for itself, alike.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("shard", "replicate"):
            names, what = getattr(self, field), "the name of a mesh dimension, a tuple of names, or None"
            if names is not None and not isinstance(names, str):
                are_names = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
                expect(are_names, f"DataParallelMeshDims.{field}", names, what)
                object.__setattr__(self, field, tuple(names))
        if not self.names:
            raise ValueError("DataParallelMeshDims names no dimension: set shard, replicate or both")
        if len(set(self.names)) < len(self.names):
            both = f"shard={self.shard!r}, replicate={self.replicate!r}; a mesh dimension can do only one of the two"
            raise ValueError(f"DataParallelMeshDims names a dimension twice: {both}")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names of the dimensions to shard over; empty if there are none."""
        return (self.shard,) if isinstance(self.shard, str) else self.shard or ()

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names of the dimensions to replicate over; empty if there are none."""
        return (self.replicate,) if isinstance(self.replicate, str) else self.replicate or ()

    @property
    def names(self) -> tuple[str, ...]:
        """All data-parallel names, those to shard over first."""
        return self.shard_names + self.replicate_names


class Comm(ABC):
    """A collective that a user implements. This class allocates its buffers, and a subclass moves the data."""

    @abstractmethod
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous, uninitialized tensor of shape ``size``, to communicate from or into.

        Called before each use. The memory may be new, come from a registered pool, or be that of an earlier buffer, if
        no two uses at the same time share it.

        Args:
            size: the shape, in elements.
            dtype: the dtype of the tensor.
            device: the device on which the group communicates.

        Ranks: each for itself.
        """


class AllGather(Comm):
    """An all-gather that a user implements."""

    @abstractmethod
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Write the ``input_tensor`` of every rank of ``group``, in rank order, to ``output_tensor``.

        Args:
            output_tensor: 1-D, as many elements as all inputs together. The input may be a part of it.
            input_tensor: 1-D, of equal size on all ranks.
            group: the ranks that take part; all of them call.
            async_op: whether to return before it is done.

        Returns:
            A handle to wait on, or ``None`` if it is done, or enqueued on the current stream of a device with streams.

        Ranks: all ranks of the group alike.
        """


class ReduceScatter(Comm):
    """A reduce-scatter that a user implements."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce the ``input_tensor`` of all ranks of ``group`` and write this rank's part to ``output_tensor``.

        Args:
            output_tensor: 1-D, ``input_tensor.numel() / group.size()`` elements. It may be a part of the input.
            input_tensor: 1-D, of equal size on all ranks; part ``r`` is for rank ``r``.
            group: the ranks that take part; all of them call.
            op: how to combine values.
            async_op: whether to return before it is done.

        Returns:
            A handle to wait on, or ``None`` if it is done, or enqueued on the current stream of a device with streams.

        Ranks: all ranks of the group alike.
        """


class InvalidShardPlacement(TypeError, ValueError):
    """A ``shard_placement_fn`` did not return a placement. It is a ValueError too, because PyTorch raises that."""


class Placed(Protocol):
    """A parameter as placements see it."""

    placement: Any  # the :class:`RowPlacement` that ``shard_placement_fn`` returned for it, if it is one
    name: str
    shape: torch.Size
    dtype: torch.dtype
    is_sharded: bool

    def cut_at(self, cuts: tuple[int, ...]) -> None: ...


class RowPlacement(ABC):
    """What a ``shard_placement_fn`` may return that says itself which rows each rank has, as :class:`Ragged` does.

    Ranks: each for itself, alike, which is checked by its ``repr`` when a module is sharded.
    """

    @staticmethod
    @abstractmethod
    def cut(params: Sequence[Placed], ranks: int, turn: int) -> list[tuple[int, ...]]:
        """Where the rows of each rank begin in each parameter, and how many rows it has. ``params`` are those of a
        group with this class of placement; ``turn`` is a number below ``ranks`` that differs from group to group."""

    @abstractmethod
    def placement(self, cuts: tuple[int, ...], name: str) -> Placement:
        """The placement of a DTensor that is cut there."""


def place_rows(params: Iterable[Placed], ranks: int, turn: int) -> None:
    """Cut parameters as their placements say. What was sharded already stays as it was cut then."""
    found: dict[type[RowPlacement], list[Placed]] = {}
    for param in params:
        if param.placement is not None and not param.is_sharded:
            found.setdefault(type(param.placement), []).append(param)
    for kind, alike in found.items():
        for param, cuts in zip(alike, kind.cut(alike, ranks, turn), strict=True):
            param.cut_at(cuts)


@dataclass(frozen=True)
class ShardPlacementResult:
    """How, and over which mesh, one parameter is sharded: what a ``shard_placement_fn`` may return.

    Name a mesh for parameters that are sharded over fewer ranks than the rest of the model, such as experts::

        def place(param):
            return ShardPlacementResult(Shard(0), expert_mesh) if param in experts else None

    Args:
        placement: the dimension to shard along, or :class:`Ragged`; ``None`` for the first dimension.
        mesh: a 1-D mesh to shard over, or a 2-D mesh with names to replicate over its first dimension and to shard
            over its second. An object that describes one by ``mesh`` and ``shard_mesh_dim`` (and perhaps
            ``replicate_mesh_dim``), as PyTorch's ``FSDPMeshInfo`` does, is accepted too. ``None`` for the mesh of the
            ``fully_shard`` call.

    Raises:
        InvalidShardPlacement: (a TypeError and ValueError) ``placement`` is neither a ``Shard`` nor a ``Ragged``, or
            ``mesh`` not a mesh.
        ValueError: the mesh has neither of these two forms.

    Ranks: each for itself, alike.
    """

    placement: Shard | RowPlacement | None = None
    mesh: Any = None

    def __post_init__(self) -> None:
        is_placement = self.placement is None or isinstance(self.placement, (Shard, RowPlacement))
        what = "a torch Shard(dim), a Ragged or None"
        expect(is_placement, "ShardPlacementResult.placement", self.placement, what, InvalidShardPlacement)
        _ = self.device_mesh  # so that a mesh that does not fit raises its error here, not at first use

    @cached_property
    def device_mesh(self) -> DeviceMesh | None:
        """The 1-D (shard) or 2-D (replicate, shard) mesh, or ``None`` for that of the ``fully_shard`` call."""
        mesh = self.mesh
        if isinstance(getattr(mesh, "mesh", None), DeviceMesh) and hasattr(mesh, "shard_mesh_dim"):
            return _described_mesh(mesh)
        if mesh is None:
            return None
        what = "a DeviceMesh, an FSDPMeshInfo-like object with .mesh and .shard_mesh_dim, or None"
        expect(isinstance(mesh, DeviceMesh), "ShardPlacementResult.mesh", mesh, what, InvalidShardPlacement)
        if mesh.ndim not in (1, 2):
            problem = f"of {mesh.ndim} dimensions; expected 1 (shard) or 2 (replicate, shard). Slice it by their names"
        elif mesh.ndim == 2 and mesh.mesh_dim_names is None:
            problem = 'of two dimensions without names; make it with mesh_dim_names=("replicate", "shard")'
        else:
            return mesh
        raise ValueError(f"ShardPlacementResult.mesh is {mesh}, {problem}")


def _described_mesh(info: Any) -> DeviceMesh:
    """The data-parallel part of ``info.mesh``, replicate before shard."""
    mesh: DeviceMesh = info.mesh
    shard, replicate = info.shard_mesh_dim, getattr(info, "replicate_mesh_dim", None)
    dims = (shard,) if replicate is None else (replicate, shard)
    if shard is None or not all(0 <= dim < mesh.ndim for dim in dims) or list(dims) != sorted(set(dims)):
        raise ValueError(
            f"ShardPlacementResult.mesh says replicate_mesh_dim={replicate} and shard_mesh_dim={shard} of {mesh}; "
            f"expected dimensions from 0 to {mesh.ndim - 1}, that for replication before that for sharding"
        )
    if len(dims) == mesh.ndim:
        return mesh
    if mesh.mesh_dim_names is not None:
        return mesh[tuple(mesh.mesh_dim_names[dim] for dim in dims)]
    if len(dims) == 1:
        return DeviceMesh.from_group(mesh.get_group(shard), mesh.device_type)
    raise ValueError(
        f"ShardPlacementResult.mesh says to use dimensions {dims} of {mesh}, which has no names to slice it by; make "
        "the mesh with mesh_dim_names"
    )


def as_shard_placement(result: object) -> ShardPlacementResult:
    """Convert what a ``shard_placement_fn`` returned. Raises InvalidShardPlacement if it is no placement."""
    if isinstance(result, ShardPlacementResult):
        return result
    if result is None or isinstance(result, (Shard, RowPlacement)):
        return ShardPlacementResult(result)
    if is_foreign(result, "ShardPlacementResult", "placement", "mesh_info"):
        return ShardPlacementResult(result.placement, result.mesh_info)  # type: ignore[attr-defined]
    kinds = "a torch.distributed.tensor Shard(dim), a Ragged, or a ShardPlacementResult (fullshard's or PyTorch's)"
    expected = f"None, {kinds}"
    raise InvalidShardPlacement(f"shard_placement_fn returned {describe(result)}; expected {expected}")


#: Fields that PyTorch's objects lack, in some releases or in all.
_OURS: dict[str, set[str]] = {
    "MixedPrecisionPolicy": {"param_dtype_override_fn", "buffer_dtype"},
    "CPUOffloadPolicy": {"parameters", "optimizer_state"},
}


def as_setting(given: object, cls: type[S], argument: str, default: S | None = None) -> S:
    """Convert what a user gave for ``argument``, an object of ``cls`` or of PyTorch's class of that name, to ``cls``.
    ``None`` stands for ``default``. Raises TypeError for anything else."""
    given = default if given is None else given
    if isinstance(given, cls):
        return given
    if issubclass(cls, Enum):
        is_member = isinstance(given, Enum) and is_foreign(given, cls.__name__) and given.name in cls.__members__
        expect(is_member, argument, given, f"one of {', '.join(map(str, cls))}")
        return cls[given.name]  # type: ignore[attr-defined]
    kinds: list[Any] = [cls, *cls.__subclasses__()]  # PyTorch derives them likewise: look for subclasses first
    found = next((each for each in reversed(kinds) if is_foreign(given, each.__name__)), kinds[0])
    fields = found.__dataclass_fields__
    is_known = is_foreign(given, found.__name__, *(fields.keys() - _OURS.get(found.__name__, set())))
    names = " or ".join(each.__name__ for each in kinds)
    expect(is_known, argument, given, f"{names} (fullshard's or PyTorch's)")
    return found(**{field: getattr(given, field) for field in fields if hasattr(given, field)})


def is_foreign(obj: object, class_name: str, *fields: str) -> bool:
    """Whether ``obj`` is of a class named ``class_name``, as PyTorch's, or of a derived one, and has ``fields``."""
    named = any(cls.__name__ == class_name for cls in type(obj).__mro__)
    return named and all(hasattr(obj, field) for field in fields)


def describe(obj: object) -> str:
    """Describe an object for an error message."""
    if isinstance(obj, type):
        return f"the class {obj.__qualname__} itself"
    return f"{obj!r} (of type {_public_path(type(obj))})"


def _public_path(cls: type) -> str:
    """The shortest path from which users can import a class, for those of fullshard."""
    name, parts = cls.__qualname__, cls.__module__.split(".")
    packages = [".".join(parts[:count]) for count in range(1, len(parts) + 1)] if parts[0] == "fullshard" else []
    found = (each for each in packages if getattr(sys.modules[each], name, None) is cls)
    return f"{next(found, cls.__module__)}.{name}"


def expect(holds: bool, name: str, found: object, expected: str, error: type[Exception] = TypeError) -> None:
    """Unless ``holds``, raise ``error`` with what was found and what was expected."""
    if not holds:
        raise error(f"{name} is {describe(found)}; expected {expected}")


#: Modules whose lines no warning should point to.
_INSIDE = ("fullshard.", "torch.", "contextlib.")


#: What a path of the operating system may not begin with: it would be a new directory below the working directory.
_SEPARATOR = f"[/{re.escape(os.sep)}]"
_NO_PATH = re.compile(f"[A-Za-z][A-Za-z0-9+.-]+:{_SEPARATOR}|~({_SEPARATOR}|$)")


def is_url(text: str) -> bool:
    """Whether a text is a URL, and not a path, which on Windows may begin with a drive."""
    return "://" in text and not os.path.splitdrive(text)[0]


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """A path of the operating system. Raises ValueError for a URL, also for one that ``Path`` has changed, and for a
    "~" that no shell has expanded. ``what`` says in the error what the path is for."""
    is_upath = hasattr(path, "fs") and not isinstance(path, Path)
    text = str(path) if is_upath else os.fspath(path)
    if is_upath or is_url(text):
        raise ValueError(f"{what} is the URL {text}; expected a path on a local disk")
    if _NO_PATH.match(text):
        hint = f"os.path.expanduser({text!r})" if text[0] == "~" else "a URL as a string, because Path() changes it"
        raise ValueError(f"{what} is {text!r}, which would be below the working directory: give {hint}")
    return Path(path)


def _name_library(record: logging.LogRecord) -> bool:
    """Let messages that nobody formats begin with our name."""
    if not _log.hasHandlers():
        record.msg = f"fullshard: {record.msg}"
    return True


_log = logging.getLogger("fullshard")
_log.addFilter(_name_library)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the last line outside of fullshard and torch, which is the user's or a framework's."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
