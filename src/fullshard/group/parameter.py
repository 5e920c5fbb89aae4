"""One parameter of a group: what it was, and what stands for it while it is sharded and while it is unsharded.

Owns the DTensor that optimizers and state dicts see, the leaf that autograd sees, and the places in the module tree
where either is shown. The group decides where the values lie and when they move.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fullshard import torch_private as private
from fullshard.buffer.plan import DEFAULT_LAYOUT, BufferPlan, ParamShape
from fullshard.buffer.sections import Section
from fullshard.comm.waits import waiting
from fullshard.group.mesh import DataMesh
from fullshard.leaf_hooks import follow_hooks
from fullshard.policies import RowPlacement
from fullshard.waiting_grad import own_memory

#: The names under which wrappers hold a module; names of parameters are given without them.
WRAPPED_NAME = "_fsdp_wrapped_module"
CHECKPOINTED_NAME = "_checkpoint_wrapped_module"
#: What a parameter has, by its index in the group.
IndexedTensor = tuple[int, torch.Tensor]


def local_tensor(value: Any) -> Any:
    """This rank's part of a tensor; the value itself if it is no DTensor."""
    return private.local_of(value) if isinstance(value, DTensor) else value


def plain_name(name: str) -> str:
    """A qualified name as it is in the model without any wrappers."""
    return ".".join(part for part in name.split(".") if part not in ("", WRAPPED_NAME, CHECKPOINTED_NAME))


@dataclass
class Location:
    """A module that holds the parameter, and the name under which it does."""

    module: nn.Module
    name: str
    path: str = ""  # of the module, as far as it is known

    @property
    def full_name(self) -> str:
        return plain_name(f"{self.path}.{self.name}")


class ShardedParameter:
    """A parameter over the ranks of a mesh.

    Attributes:
        name: fully qualified once the root is known; the name in its module before.
        locations: all places in the module tree that have it; more than one if it is shared.
        shape: of the unsharded local tensor (all of it, unless tensor parallel cut it before).
        sharded: what the module shows between uses.
        local: what ``sharded`` holds: a view of the group's shard.
        unsharded: the leaf that autograd sees, a view of the group's full buffer; made at the first gather.
        hidden: what modules show of it between uses, if ``sharded`` stands for other parameters too.
        run: the first and the past-the-last of its elements that this rank has, if it is cut wherever a shard ends.
    """

    def __init__(
        self, param: nn.Parameter, locations: list[Location], data: DataMesh, placement: Shard | RowPlacement | None
    ) -> None:
        self.locations = locations
        #: Where modules keep it outside of their parameters: a module, and a path of keys in its attributes.
        self.kept_apart: list[tuple[nn.Module, tuple[Any, ...]]] = []
        self.name = locations[0].full_name
        self.data = data
        whole = private.local_of(param) if isinstance(param, DTensor) else param.detach()
        self.shape = whole.shape
        self.dtype = whole.dtype
        self.order = _memory_order(whole)
        self._inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        self.dim = self._shard_dim(placement if isinstance(placement, Shard) else None)
        self.placement = placement if isinstance(placement, RowPlacement) and self.dim is not None else None
        self.cuts: tuple[int, ...] = ()  # where the rows of each rank begin, and their number, if that chose them
        self.cut = ParamShape(self.name, tuple(self.shape), self.dim).cut(data.shard_size)
        self.unsharded_spec = private.spec_of(param) if isinstance(param, DTensor) else None
        self.extends = self.defines_gather(whole)
        why = "defines how it is gathered" if self.extends else "is a DTensor already"
        if self.placement is not None and (self.extends or self.unsharded_spec is not None):
            raise ValueError(
                f"shard_placement_fn returned {placement} for parameter '{self.name}', which {why}: return None for it"
            )
        if data.shards_replicas and (self.extends or self.unsharded_spec is not None or self.placement is not None):
            raise ValueError(
                f"outer_zero_stage=1 cuts the shard of each parameter once more, but parameter '{self.name}' "
                f"{f'is {placement}, whose blocks are never cut' if self.placement else why}: use outer_zero_stage=0"
            )
        self.spec = self._sharded_spec(whole)
        self.overridden_dtype: torch.dtype | None = None  # in which it is gathered, if not the policy's
        self.grad_dtype: private.GradDtype = private.chosen_grad_dtype(param)  # stays when it is converted or replaced
        self.sharded: nn.Parameter = param  # until the group has a chunk for it
        self.local = whole
        self.is_sharded = False
        self.unsharded: nn.Parameter | None = None
        self.updated = 0  # which of its tree's updates has changed it last
        self.hidden: Any = None
        self._gradient_hooks: tuple[Callable[[torch.Tensor], torch.Tensor | None], ...] = ()

    run: tuple[int, int] | None = None
    layout: tuple[str, int] = DEFAULT_LAYOUT  # of parameters of this kind; and to how many elements they are aligned
    stored_as: torch.dtype | None = None  # those of different ones lie in different sections
    _follows_hooks = False  # whether the leaf calls users' hooks on ``sharded``

    @property
    def plan_shape(self) -> ParamShape:
        """The shape in the order in which the values lie in memory."""
        dim = None if self.dim is None else self.order.index(self.dim)
        return ParamShape(self.name, tuple(self.shape[i] for i in self.order), dim, self.cuts or None)

    def cut_at(self, cuts: tuple[int, ...]) -> None:
        """Cut the rows as the placement has chosen."""
        assert self.placement is not None
        self.cuts = cuts if self.data.shard_size > 1 else ()  # what one rank has is the full buffer
        chosen = self.placement.placement(cuts, self.name)
        self.spec = private.altered_spec(self.spec, None, [chosen if p.is_shard() else p for p in self.spec.placements])

    def note_plan(self, plan: BufferPlan, position: int) -> None:
        """Note how the parameter is cut and where it lies in its group's plan."""
        self.cut = plan.cuts[position]

    def rename(self, name: str) -> None:
        """Set the name, also where errors of torch's operators find it."""
        self.name = name
        for placement in self.spec.placements:
            if hasattr(placement, "name"):  # it is not torch's
                placement.name = name

    def view(self, flat: torch.Tensor, memory_shape: Sequence[int]) -> torch.Tensor:
        """A 1-D tensor as the parameter or its chunk."""
        shaped = flat.view(tuple(memory_shape))
        return shaped.permute(self._inverse) if shaped.ndim == len(self.shape) else shaped  # a run of a fragment

    def chunk_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of an unsharded tensor that this rank holds, as a view."""
        return self.rows_of(whole)

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part that a DTensor sharded along ``dim`` has on this rank."""
        start, stop = self.rows
        return whole if self.dim is None else whole.narrow(self.dim, start, stop - start)

    @property
    def rows(self) -> tuple[int, int]:
        """The first and the past-the-last index along ``dim`` that this rank holds."""
        data = self.data
        start, stop = self.cut.chunk(data.shard_rank)
        if not data.shards_replicas or self.dim is None:
            return start, stop
        first, last = ParamShape(self.name, (stop - start,)).cut(data.replicate_size).chunk(data.replicate_rank)
        return start + first, start + last

    def _shard_dim(self, placement: Shard | None) -> int | None:
        if self.data.shard_group is None or not self.shape:
            return None
        dim = 0 if placement is None else placement.dim
        if not -len(self.shape) <= dim < len(self.shape):
            raise AssertionError(
                f"shard_placement_fn asks to shard parameter '{self.name}' of shape {tuple(self.shape)} "
                f"along dim {dim}, which it does not have"
            )
        return dim % len(self.shape)

    def defines_gather(self, tensor: torch.Tensor) -> bool:
        before, after = hasattr(tensor, "fsdp_pre_all_gather"), hasattr(tensor, "fsdp_post_all_gather")
        if before != after:
            missing = "fsdp_post_all_gather" if before else "fsdp_pre_all_gather"
            raise AssertionError(
                f"parameter '{self.name}' is a {type(tensor).__name__}, which defines one of fsdp_pre_all_gather and "
                f"fsdp_post_all_gather and lacks {missing}: define both or neither"
            )
        return before

    @property
    def values(self) -> torch.Tensor:
        """The tensor in ``sharded``: all of the parameter before it is sharded, this rank's part after."""
        return private.local_of(self.sharded) if isinstance(self.sharded, DTensor) else self.sharded.detach()

    def lies_at(self, chunk: torch.Tensor) -> bool:
        """Whether this rank's part is still in ``chunk``, the tensor that the parameter got for it."""
        return self.is_sharded and self.values is chunk

    def adopt(self) -> None:
        """Take over the dtype and mesh of the values that ``sharded`` now holds."""
        self.spec = private.spec_of(self.sharded)  # type: ignore[arg-type]
        self.dtype = self.values.dtype
        self.extends = self.defines_gather(self.values)
        if self.extends:  # no plan has it any more, nor its order in memory
            self.cut = ParamShape(self.name, tuple(self.shape), self.dim).cut(self.data.shard_size)

    def update_grad_dtype(self) -> None:
        """Take over the ``grad_dtype`` of ``sharded``; if none was assigned to this object, assign the one known."""
        chosen = private.chosen_grad_dtype(self.sharded)
        if chosen != "own":
            self.grad_dtype = chosen
        else:
            private.choose_grad_dtype(self.sharded, self.grad_dtype)

    def set_gradient_aside(self) -> torch.Tensor | None:
        """Remove and return a gradient whose dtype was chosen: a conversion of the parameter must not convert it."""
        self.update_grad_dtype()
        gradient = self.sharded.grad
        if self.grad_dtype == "own" or gradient is None:
            return None
        self.sharded.grad = None
        return gradient

    @property
    def gradient(self) -> torch.Tensor | None:
        """This rank's part of the gradient."""
        if (grad := self.sharded.grad) is None:
            return None
        assert isinstance(grad, DTensor), f"the gradient of '{self.name}' became a {type(grad)}"
        own_memory(grad)
        return private.local_of(grad)

    def blank_gradient(self, dtype: torch.dtype) -> torch.Tensor:
        """Zeros without memory of their own, as a gradient of ``dtype``."""
        local = torch.zeros((), dtype=dtype, device=self.local.device).expand(self.local.shape)
        return private.make_dtensor(local, private.altered_spec(self.spec, dtype=dtype))

    def _sharded_spec(self, whole: torch.Tensor) -> private.DTensorSpec:
        if self.unsharded_spec is None:
            if self.data.spmd_mesh is not None:
                raise ValueError(
                    f"with dp_mesh_dims every parameter must be a DTensor on the full mesh, but '{self.name}' is a "
                    f"plain tensor: distribute it first, for example with distribute_module"
                )
            return private.sharding_spec(self.data.mesh, self._placements(), whole.shape, whole.stride(), whole.dtype)
        if self.data.spmd_mesh is not None:
            return self._spec_on_full_mesh(self.data.spmd_mesh, self.unsharded_spec)
        mesh = private.concatenate_meshes([self.data.mesh, self.unsharded_spec.mesh])
        return private.altered_spec(self.unsharded_spec, mesh, [*self._placements(), *self.unsharded_spec.placements])

    def _placements(self, before: int = -1) -> list[Placement]:
        """The placements on the data mesh. Dims of tensor parallel that follow it may cut the same tensor dim again."""
        if self.data.shard_group is None:
            return [Replicate()]
        placement: Placement = Replicate()
        if self.dim is not None:
            parts = 1 if self.unsharded_spec is None else private.parts_of(self.unsharded_spec, self.dim, before)
            placement = Shard(self.dim) if parts == 1 else private.StridedShard(self.dim, split_factor=parts)
        if self.data.replicate_group is None:
            return [placement]
        return [placement, placement] if self.data.shards_replicas else [Replicate(), placement]

    def _spec_on_full_mesh(self, mesh: DeviceMesh, before: private.DTensorSpec) -> private.DTensorSpec:
        if before.mesh != mesh:
            raise ValueError(
                f"parameter '{self.name}' is a DTensor on {before.mesh}, not on the mesh given to fully_shard, {mesh}"
            )
        names, shard_dims, placements = mesh.mesh_dim_names or (), self.data.shard_dims, list(before.placements)
        for at in self.data.spmd_dims:
            if not placements[at].is_replicate():
                raise ValueError(
                    f"parameter '{self.name}' must be Replicate() on the data-parallel dim '{names[at]}', found "
                    f"{placements[at]}"
                )
        if shard_dims:
            first = shard_dims[0]
            placements[first] = self._placements(first)[-1]
        if len(shard_dims) < 2:
            return private.altered_spec(before, mesh, placements)
        # Several dims that shard become one axis in the place of the first one, with the replicating axis beside it.
        meshes, flattened = [], []
        for at, name in enumerate(names):
            if at == first:
                meshes.append(self.data.mesh)
                flattened += self._placements(first)
            elif at not in self.data.spmd_dims:
                meshes.append(mesh[name])
                flattened.append(placements[at])
        return private.altered_spec(before, private.concatenate_meshes(meshes), flattened)

    def set_chunk(self, local: torch.Tensor) -> None:
        """Let ``sharded`` have ``local``, in which the values are already; the first time it is made."""
        self.local, before = local, self.sharded
        if not self.is_sharded:
            self.sharded = nn.Parameter(private.make_dtensor(local, self.spec), requires_grad=before.requires_grad)
        private.set_local(self.sharded, local)  # type: ignore[arg-type]  # a Parameter holds an alias: its version misses writes
        if self.is_sharded:
            return
        self.is_sharded = True
        own = before.detach().__dict__  # of a tensor subclass: what it is made of, whole
        self.sharded.__dict__.update({name: value for name, value in before.__dict__.items() if name not in own})
        private.choose_grad_dtype(self.sharded, self.grad_dtype)
        for hook in tuple((private.post_accumulate_hooks(before) or {}).values()):
            self.sharded.register_post_accumulate_grad_hook(hook)
        self._gradient_hooks = tuple((private.gradient_hooks(before) or {}).values())

    def set_extension_chunk(self, offload: bool) -> None:
        """Give a subclass that defines its gather a separate chunk, padded to the largest; keep users' attributes."""
        if self.is_sharded:
            self.set_chunk(self.values)
            return
        whole, rank, dim = self.sharded.detach(), self.data.shard_rank, self.dim or 0
        chunks = [whole] if self.dim is None else whole.chunk(self.data.shard_size, dim)  # what subclasses know
        chunk = chunks[rank] if rank < len(chunks) else self.chunk_of(whole)
        local = whole.new_zeros(self.cut.chunk_shape(0)).narrow(dim, 0, chunk.shape[dim])
        local.copy_(chunk)
        self.set_chunk(local.cpu() if offload else local)

    def copy(self, memo: dict[int, Any]) -> Self:
        """The parameter of a copied module tree; ``memo`` is that of ``copy.deepcopy``."""
        twin = copy.copy(self)
        twin.sharded = self.copy_values(memo)  # first: modules may keep it apart
        twin.locations = [Location(copy.deepcopy(at.module, memo), at.name) for at in self.locations]
        twin.kept_apart = [(copy.deepcopy(module, memo), path) for module, path in self.kept_apart]
        twin.local = twin.values
        twin.unsharded = None
        return twin

    def copy_values(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy of what stands for the parameter, without a gradient, as ``copy.deepcopy`` makes of any parameter."""
        twin: nn.Parameter | None = memo.get(id(self.sharded))
        if twin is None:
            twin = nn.Parameter(self.sharded.detach().clone(), requires_grad=self.sharded.requires_grad)
            memo[id(self.sharded)] = twin  # first: an attached object, such as an optimizer, may refer to it
            twin.__dict__.update(copy.deepcopy(self.sharded.__dict__, memo))
            private.choose_grad_dtype(twin, self.grad_dtype)
        return twin

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that users set on the parameter."""
        return self.sharded.__dict__

    def make_unsharded(self, local: torch.Tensor) -> None:
        """Make the leaf over ``local``, a view of the full buffer, or of what an extension made of it."""
        self.unsharded = nn.Parameter(self.as_before(local), requires_grad=self.sharded.requires_grad)
        self.unsharded.__dict__.update(self.attributes)
        for hook in self._gradient_hooks:
            self.unsharded.register_hook(hook)
        self._follows_hooks = False
        self.follow_hooks()

    def follow_hooks(self) -> None:
        """Call users' hooks on the sharded parameter with gradients of the leaf."""
        self._follows_hooks = self._follows_hooks or follow_hooks(self)

    def as_before(self, whole: torch.Tensor) -> torch.Tensor:
        """A tensor of ``shape`` as what the parameter was before sharding: a DTensor, if tensor parallel has cut it."""
        if self.unsharded_spec is None:
            return whole
        return private.make_dtensor(whole, private.altered_spec(self.unsharded_spec, dtype=whole.dtype))

    def local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient that autograd computed of a DTensor, as a plain tensor of ``shape``."""
        assert isinstance(grad, DTensor), f"the gradient of the DTensor '{self.name}' is a {type(grad).__name__}"
        assert self.unsharded_spec is not None
        wanted: list[Placement] = list(self.unsharded_spec.placements)
        for at in self.data.spmd_dims:  # sums over these are the group's reduction: here they would be summed twice
            wanted[at] = grad.placements[at] if isinstance(grad.placements[at], Partial) else Replicate()
        if tuple(wanted) != tuple(grad.placements):
            changed = [at for at, one in enumerate(wanted) if one != grad.placements[at]]
            with waiting(f"the gradient of '{self.name}'", grad.device_mesh.get_group(changed[0])):
                grad = grad.redistribute(placements=wanted)
        return private.local_of(grad)


def whole_views(params: Sequence[ShardedParameter], section: Section, full: torch.Tensor) -> Iterator[IndexedTensor]:
    """Each parameter of a section, by its index in the group, as it lies in the section's full buffer."""
    plan = section.plan
    for index, shape, start in zip(section.members, plan.params, plan.full_offsets, strict=True):
        yield index, params[index].view(full[start : start + shape.numel], shape.shape)


def chunk_views(
    params: Sequence[ShardedParameter], members: Sequence[int], plan: BufferPlan, shard: torch.Tensor, rank: int
) -> Iterator[IndexedTensor]:
    """The part that ``rank`` holds of each parameter of a plan, by its index in the group, as it lies in a shard."""
    for position, index in enumerate(members):
        start, shape = plan.locate_chunk(position, rank)
        yield index, params[index].view(shard[start : start + math.prod(shape)], shape)


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dims from the slowest to the fastest, for a tensor without gaps or overlaps; otherwise the order of its dims."""
    dims, strides = tuple(range(tensor.ndim)), tensor.stride()
    order = tuple(sorted(dims, key=lambda dim: (-strides[dim], dim)))
    return order if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else dims
