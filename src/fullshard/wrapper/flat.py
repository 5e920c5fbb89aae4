"""Parameters that a rank holds as runs of one flat shard, and what the modules show of them between uses.

Owns the second way to show a group, with the layout *flat*: parameters lie end to end, and are cut wherever a rank's
shard ends::

    fragments     every parameter stays where it was, the same object with its attributes, and holds the run of its
                  elements that this rank has: 1-D, and of size 0 if the rank has none
    flat          one :class:`FlatParameter` for each dtype holds the whole shard. Modules do not have their parameters;
                  attributes with the names of these have the values while the group is unsharded

If one rank keeps everything, a fragment is the whole parameter, in its shape. Users may swap ``.data`` and ``.grad`` of
a shown parameter, and replace it: the group adopts it before the next step.
"""

from __future__ import annotations

import copy
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, TypeGuard

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fullshard.buffer.plan import BufferPlan
from fullshard.buffer.sections import Section
from fullshard.group.gradients import Gradients
from fullshard.group.mesh import DataMesh
from fullshard.group.module_parameters import ModuleParameters, Presentation
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import IndexedTensor, Location, ShardedParameter
from fullshard.leaf_hooks import hooks_of_users
from fullshard.policies import warn
from fullshard.torch_private import PlainAttributes, altered_spec, gradient_hooks, set_data
from fullshard.tree import tensors
from fullshard.waiting_grad import own_memory

FLAT_NAME = "_flat_param"


def flat_name(number: int) -> str:
    """The name of the flat parameter of a group's section."""
    return f"{FLAT_NAME}_{number}" if number else FLAT_NAME


class ShardMetadata(NamedTuple):
    """What this rank's shard of a flat parameter holds; one entry for each original parameter that has elements in it.

    Attributes:
        param_names: relative to the wrapped module.
        param_shapes: of the whole parameters.
        param_numels: elements of the whole parameters.
        param_offsets: index of the first and of the last element here, in each flattened parameter.
    """

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


class _IsFlat(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, "_is_flat_param", False)


class FlatParameter(nn.Parameter, metaclass=_IsFlat):
    """This rank's shard of several parameters laid end to end: 1-D, padded at the end to the same size on all ranks.

    The constructor makes an ``nn.Parameter`` from ``data`` (``None`` for no elements) and ``requires_grad``, which
    ``isinstance`` knows as this class. Sharding fills in ``_fqns``, ``_shapes`` and ``_numels`` of the parameters,
    ``_num_params``, the sizes ``_unpadded_unsharded_size``, ``_padded_unsharded_size`` and ``_sharded_size``, and
    ``shard_metadata``: names, shapes and numbers of elements of the parameters, and the first and last element of each
    that this rank has.
    """

    _fqns: tuple[str, ...]
    _shapes: tuple[torch.Size, ...]
    _numels: tuple[int, ...]
    shard_metadata: ShardMetadata

    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True) -> FlatParameter:
        param: Any = nn.Parameter(torch.empty(0) if data is None else data, requires_grad)
        param._is_flat_param = True
        return param


class Hidden(torch.Tensor):
    """Stands for a part of a flat parameter between uses. It has a shape and a dtype; reading it raises an error."""

    param: ShardedParameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, is_like = func.__name__, not isinstance(args[0], Hidden) and func.__name__ in ("to", "type_as")
        if is_like or name in _WITHOUT_VALUES or name.startswith("new_") or name.endswith("_like"):
            with PlainAttributes():
                return func(*args, **(kwargs or {}))
        hidden = next(each for each in tensors((args, kwargs)) if isinstance(each, Hidden))
        raise RuntimeError(
            f"the values of parameter '{hidden.param.name}' exist only while the wrapped module that has it runs, "
            f"and something else reads them ({name}): let that module compute with them, wrap it together with the one "
            f"that reads them, or read them inside summon_full_params"
        )

    def __deepcopy__(self, memo: Any) -> Hidden:
        return self


_WITHOUT_VALUES = ("__get__", "__len__", "__repr__", "data_ptr", "dim", "is_floating_point", "numel", "size", "stride")


class Fragment(ShardedParameter):
    """A parameter of which each rank holds one run of elements. ``flat_module`` shows a flat parameter in place of
    this fragment and others; ``None`` to show the fragment."""

    def __init__(
        self,
        param: nn.Parameter,
        locations: list[Location],
        data: DataMesh,
        flat_module: nn.Module | None,
        computed_as: torch.dtype | None,
    ) -> None:
        super().__init__(param, locations, data, None)
        self.grad_dtype = "own"
        self.flat_module = flat_module
        self.stored_as = self.dtype  # a cut never moves once it was made
        self.layout = "flat", 1 if flat_module is not None else max(1, 16 // (computed_as or self.dtype).itemsize)
        self._attributes = param.__dict__
        self.run: tuple[int, int] = (0, 0)
        self._place: tuple[int, tuple[int, ...]] = (0, ())
        self._watched: torch.Tensor | None = None

    def update_grad_dtype(self) -> None:
        """Does nothing: gradients of wrapped modules are reduced in the dtype of the computation, as with torch."""

    def note_plan(self, plan: BufferPlan, position: int) -> None:
        self.run = plan.cuts[position].chunk(self.data.shard_rank)
        self._place = plan.locate_chunk(position, self.data.shard_rank)

    def chunk_of(self, whole: torch.Tensor) -> torch.Tensor:
        if self.data.shard_size == 1:
            return whole
        return whole.permute(self.order).reshape(-1)[slice(*self.run)]

    @property
    def values(self) -> torch.Tensor:
        if self.flat_module is None:
            return super().values
        return self.part_in(self.sharded) if isinstance(self.sharded, FlatParameter) else self.local

    def part_in(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter, in a tensor with the layout of the flat parameter."""
        start, shape = self._place
        return self.view(flat.detach()[start : start + torch.Size(shape).numel()], shape)

    def lies_at(self, chunk: torch.Tensor) -> bool:
        return self.is_sharded and same_memory(self.values, chunk)

    def adopt(self) -> None:
        self.dtype = self.values.dtype
        self.spec = altered_spec(self.spec, dtype=self.dtype)

    def set_chunk(self, local: torch.Tensor) -> None:
        before, is_first = self.sharded, not self.is_sharded
        self.local, self.is_sharded = local, True
        if self.flat_module is not None:
            if is_first:
                self._gradient_hooks = tuple((gradient_hooks(before) or {}).values())
                nothing = torch.full((), math.nan, dtype=self.dtype, device=local.device).expand(self.shape)
                self.hidden = nothing.as_subclass(Hidden)
                self.hidden.param = self
            return
        grad = before.grad if is_first else None
        if grad is not None:
            before.grad = None
        if isinstance(before, DTensor) or before.is_meta != local.is_meta:
            self.sharded = nn.Parameter(local, requires_grad=before.requires_grad)
            self.sharded.__dict__.update(before.__dict__)
        else:
            set_data(before, local)
        if grad is not None:
            self.sharded.grad = self.chunk_of(grad).clone()

    @property
    def gradient(self) -> torch.Tensor | None:
        grad = self.sharded.grad
        if grad is not None:
            own_memory(grad)
        return grad if grad is None or self.flat_module is None else self.part_in(grad)

    @property
    def attributes(self) -> dict[str, Any]:
        return self._attributes

    def watch(self, receive: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Call ``receive`` with each gradient that autograd is about to add to the fragment's."""
        if self._watched is not self.sharded:
            self._watched, trainable = self.sharded, self.sharded.requires_grad
            self.sharded.requires_grad_(True)  # for a frozen parameter too: it keeps the hook when it is trained again
            self.sharded.register_hook(receive)
            self.sharded.requires_grad_(trainable)

    def follow_hooks(self) -> None:
        if self.flat_module is None:
            super().follow_hooks()
        elif hooks_of_users(self.sharded):
            warn(
                "hooks on a FlatParameter (register_hook) are not called, because autograd computes the gradients of "
                "its parts: use register_post_accumulate_grad_hook, or wrap with use_orig_params=True"
            )

    def blank_gradient(self, dtype: torch.dtype) -> torch.Tensor:
        return self.sharded.new_zeros(()).expand(self.sharded.shape)

    def copy(self, memo: dict[int, Any]) -> Self:
        twin = super().copy(memo)
        twin.flat_module = copy.deepcopy(self.flat_module, memo)
        return twin


class FlatModuleParameters(ModuleParameters):
    """Shows the flat parameters of a group, or its fragments, which lie in the shards of its sections."""

    _group: FlatGroup

    def prepare(self) -> None:
        #: Where each flat parameter is shown, under which name, the parameter and its section.
        self._flats: list[tuple[nn.Module, str, nn.Parameter, Section]] = []
        group, shards = self._group, self._group.shard.shards
        for number, (section, shard) in enumerate(zip(group.sections, shards, strict=True)):
            fragments = [group.params[i] for i in section.members]
            flat_module, flat = fragments[0].flat_module, fragments[0].sharded
            if flat_module is None:
                continue
            if not isinstance(flat, FlatParameter) or flat.is_meta != shard.is_meta:
                flat = FlatParameter(shard, flat.requires_grad)
            elif not same_memory(flat, shard):
                flat.data = shard
            describe(flat, fragments, section.plan)
            for fragment in fragments:
                fragment.sharded = flat
            self._flats.append((flat_module, flat_name(number), flat, section))
        super().prepare()
        if not self._flats and group.data.shard_group is None and group.data.replicate_size > 1:
            for index, param in enumerate(group.params):
                param.watch(partial(Gradients.receive_outside, weakref.ref(group), index))
        shown = [(param.sharded, param.local) for param in group.params if param.local.numel()]
        if self._flats:
            shown = list(zip([flat for _, _, flat, _ in self._flats], shards, strict=True))
            registered = [(flat_module, {name: flat}) for flat_module, name, flat, _ in self._flats]
            self.as_sharded.registered = self.as_unsharded.registered = registered
        self._where = [(tensor, chunk.data_ptr(), chunk.shape) for tensor, chunk in shown]

    def gradient_views(
        self, indices: Sequence[int], plan: BufferPlan, shard: torch.Tensor, rank: int
    ) -> Iterable[IndexedTensor]:
        if self._flats:
            return [(indices[0], shard)]
        return [(index, part) for index, part in super().gradient_views(indices, plan, shard, rank) if part.numel()]

    def accumulate_gradients(self, grads: Iterable[IndexedTensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        more = []
        for index, local in grads:  # the gradient of a flat parameter has the index of its first parameter
            sharded = self._group.params[index].sharded
            if not sharded.requires_grad:
                continue  # frozen since the forward
            if sharded.grad is not None:
                own_memory(sharded.grad)
                more.append((sharded.grad, local))
            elif local.dtype == sharded.dtype:
                sharded.grad = local
            else:  # kept in the low precision of its reduction: autograd checks the dtype only of what is assigned
                sharded.grad = torch.empty_like(sharded)
                sharded.grad.data = local
        return more

    def show(self, what: Presentation) -> None:
        for _, param, module, name in self._indexed() if self._flats else ():
            module.__dict__.get("_parameters", {}).pop(name, None)  # none yet where the module is still being copied
            module.__dict__[name] = param.unsharded if what.is_unsharded else param.hidden
        super().show(what)

    def show_full(self, full: Mapping[int, nn.Parameter]) -> None:
        if self._flats and full:
            for flat_module, name, _, _ in self._flats:
                flat_module._parameters.pop(name, None)
            for _, _, module, name in self._indexed():
                module.__dict__.pop(name, None)
        super().show_full(full)

    def _keeps_chunks(self) -> bool:
        if os.environ.get("FSDP_SKIP_WRITEBACK_CHECK") == "1":
            return True
        return all(tensor.data_ptr() == at and tensor.shape == shape for tensor, at, shape in self._where)

    def adopt_replaced(self) -> bool:
        if not self._flats:
            return super().adopt_replaced()
        replaced = False
        for (flat_module, name, flat, section), shard in zip(self._flats, self._group.shard.shards, strict=True):
            shown = flat_module._parameters.get(name)
            if shown is None or shown is flat:
                shown = flat
            elif not isinstance(shown, FlatParameter):
                shown._is_flat_param = True  # type: ignore[attr-defined]
                shown.__dict__.update(flat.__dict__)
            self._check_shape(name, shown, (section.plan.shard_numel,))
            for index in section.members:
                self._group.params[index].sharded = shown
            replaced |= not same_memory(shown, shard)
        return replaced

    def _adopt(self, param: ShardedParameter) -> bool:
        replaced = super()._adopt(param)
        if param.local.numel() == 0:
            param.sharded.data = param.sharded.data.new_empty(0)  # it holds nothing, whatever users gave it
        elif replaced:
            self._check_shape(param.name, param.sharded, tuple(param.local.shape))
        return replaced

    def _replaces(self, shown: torch.Tensor, param: ShardedParameter) -> TypeGuard[nn.Parameter]:
        return isinstance(shown, nn.Parameter)

    @staticmethod
    def _check_shape(name: str, found: torch.Tensor, expected: tuple[int, ...]) -> None:
        if tuple(found.shape) != expected:
            raise RuntimeError(
                f"parameter '{name}' was given data of shape {tuple(found.shape)} where this rank holds {expected}: "
                f"between steps give it data of that shape, or change all of it inside summon_full_params"
            )


class FlatGroup(ParamGroup):
    """A group of fragments, all of one wrapped module."""

    params: Sequence[Fragment]
    module_params_class = FlatModuleParameters

    def reshard_after_forward(self) -> None:
        """Reshards like any group. But modules show the sharded parameters if each rank holds them whole, or if the
        user did not ask for whole ones."""
        super().reshard_after_forward()
        if self.data.shard_group is None or self.stays_unasked:
            self.leave_unsharded()


def describe(flat: nn.Parameter, params: Sequence[Fragment], plan: BufferPlan) -> None:
    """Set the attributes of a flat parameter that say which parameters lie in it."""
    here = [param for param in params if param.run[0] < param.run[1]]
    flat.__dict__.update(
        _fqns=tuple(param.name for param in params),
        _shapes=tuple(param.shape for param in params),
        _numels=tuple(param.shape.numel() for param in params),
        _num_params=len(params),
        _unpadded_unsharded_size=torch.Size((plan.end,)),
        _padded_unsharded_size=torch.Size((plan.full_numel,)),
        _sharded_size=torch.Size((plan.shard_numel,)),
        shard_metadata=ShardMetadata(
            tuple(param.name for param in here),
            tuple(param.shape for param in here),
            tuple(param.shape.numel() for param in here),
            tuple((start, stop - 1) for start, stop in (param.run for param in here)),
        ),
    )


def same_memory(tensor: torch.Tensor, chunk: torch.Tensor) -> bool:
    """Whether a tensor is in exactly the memory of a chunk."""
    if tensor.shape != chunk.shape or tensor.dtype != chunk.dtype or tensor.is_meta != chunk.is_meta:
        return False
    return tensor.numel() == 0 or (not tensor.is_meta and tensor.data_ptr() == chunk.data_ptr())
