"""How a program shards its model: told as data, and done by either front end."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import fullshard
from fullshard import Ragged, WirePolicy
from fullshard.group import home
from fullshard.wrap import ModuleWrapPolicy, repeated_blocks
from tests.fuzz.models import Cell

WRAPPER = "wrapper"
EXACT_WIRE = WirePolicy(gather="int8", reduce="int8", min_numel=10**9)


@dataclass(frozen=True)
class GroupSpec:
    """One call of `fully_shard`, or one wrapped module: paths of modules in the plain model."""

    paths: tuple[str, ...]
    reshard: bool | int | None = None


@dataclass(frozen=True)
class Sharding:
    """All calls; the last is the root's. Those of `blocks` depend on the model: `groups_of` has them all.

    `by` is how the groups are told: one by one (`calls`), by a policy of all cells (`policy`), or `blocks`
    (`fully_shard_blocks`). `mesh` is the shape of a hybrid mesh, (replicate, shard), or none for the default. `cut`
    is the dim along which parameters are cut; with `ragged` all that have such blocks are cut between these, or with
    `mixed` some of them. `outer` is `outer_zero_stage`. With `wire` a wire carries the messages and encodes nothing,
    so that nothing is less close. With `disk` parameters (all, or a share of them), gradients and optimizer state are
    on a disk. Groups of up to `persists` bytes stay whole. `settings` are setters with their arguments, called on
    every sharded module. With `override` scalars are computed with in their own dtype. `options` are more arguments
    of the wrapper.
    """

    api: str
    groups: tuple[GroupSpec, ...]
    by: str = "calls"
    mesh: tuple[int, ...] = ()
    cut: str = "first"
    param_dtype: str = ""
    reduce_dtype: str = ""
    output_dtype: str = ""
    cast_inputs: bool = True
    override: bool = False
    offload: bool = False
    original: bool = True
    stage: int = 3
    outer: int = 0
    wire: bool = False
    disk: float | None = None
    persists: int = 0
    ragged: Ragged | None = None
    strategy: str = "FULL_SHARD"
    settings: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def wraps(self) -> bool:
        return self.api == WRAPPER


@dataclass(frozen=True)
class Unit:
    """The parameters of one group, by their names in the plain model, in the order in which modules have them."""

    names: tuple[str, ...]
    paths: tuple[str, ...]


_MESHES: dict[tuple[int, tuple[int, ...]], DeviceMesh] = {}


def forget_meshes() -> None:
    """Forget the meshes of process groups that have gone."""
    _MESHES.clear()


def mesh_of(sharding: Sharding, size: int) -> DeviceMesh | None:
    """The mesh of a program, made once for all programs of a process group."""
    if not sharding.mesh:
        return None
    key = size, sharding.mesh
    if key not in _MESHES:
        names = ("replicate", "shard") if len(sharding.mesh) == 2 else ("shard",)
        _MESHES[key] = init_device_mesh("cpu", sharding.mesh, mesh_dim_names=names)
    return _MESHES[key]


def groups_of(model: nn.Module, sharding: Sharding) -> tuple[GroupSpec, ...]:
    """All calls, with those that `fully_shard_blocks` makes of a plain model."""
    if sharding.by != "blocks":
        return sharding.groups
    names = {module: name for name, module in model.named_modules()}
    return (*(GroupSpec((names[block],)) for block in repeated_blocks(model)), sharding.groups[-1])


def units_of(model: nn.Module, sharding: Sharding) -> list[Unit]:
    """Which group has which parameters: each call takes those that no earlier one has taken."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken: set[nn.Parameter] = set()
    units = []
    for group in groups_of(model, sharding):
        found: list[str] = []
        for path in group.paths:
            for module in model.get_submodule(path).modules():
                for parameter in module.parameters(recurse=False):
                    if parameter not in taken:
                        taken.add(parameter)
                        found.append(names[parameter])
        units.append(Unit(tuple(found), group.paths))
    return units


def shard(model: nn.Module, sharding: Sharding, size: int) -> Any:
    """Shard a model, in place or by a wrapper around it; returns what is to be trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "_LEAST_ON_DISK", 1)  # these parameters are small
        sharded = _wrap(model, sharding, size) if sharding.wraps else _fully_shard(model, sharding, size)
    set_up(sharded, sharding.settings)
    return sharded


def dtype_of(name: str) -> torch.dtype | None:
    """The dtype of a name, or none."""
    dtype = getattr(torch, name) if name else None
    assert dtype is None or isinstance(dtype, torch.dtype)
    return dtype


def _fully_shard(model: Any, sharding: Sharding, size: int) -> Any:
    options: dict[str, Any] = {
        "mesh": mesh_of(sharding, size),
        "mp_policy": fullshard.MixedPrecisionPolicy(
            dtype_of(sharding.param_dtype),
            dtype_of(sharding.reduce_dtype),
            dtype_of(sharding.output_dtype),
            sharding.cast_inputs,
            param_dtype_override_fn=own_dtype_of_scalars if sharding.override else None,
        ),
        "zero_stage": sharding.stage,
        "outer_zero_stage": sharding.outer,
        "wire_policy": EXACT_WIRE if sharding.wire else WirePolicy(),
        "outer_wire_policy": EXACT_WIRE if sharding.wire and sharding.outer else WirePolicy(),
        "shard_placement_fn": None
        if sharding.cut == "first" and sharding.ragged is None
        else lambda parameter: placement_of(parameter, sharding),
    }
    if sharding.offload:
        options["offload_policy"] = fullshard.CPUOffloadPolicy(pin_memory=False)
    if sharding.disk is not None:
        options["offload_policy"] = fullshard.DiskOffloadPolicy(tempfile.gettempdir(), parameters=sharding.disk)
    reshard = sharding.groups[-1].reshard
    if sharding.by == "blocks":
        return fullshard.fully_shard_blocks(model, reshard_after_forward=reshard, **options)
    if sharding.by == "policy":
        policy = ModuleWrapPolicy({Cell})
        return fullshard.fully_shard(model, reshard_after_forward=reshard, auto_wrap_policy=policy, **options)
    for group in sharding.groups:
        modules = [model.get_submodule(path) for path in group.paths]
        which = modules[0] if len(modules) == 1 else modules
        persists = sharding.persists if sharding.stage == 3 and group.reshard is not False else 0
        fullshard.fully_shard(which, reshard_after_forward=group.reshard, persistence_threshold=persists, **options)
    return model


def own_dtype_of_scalars(parameter: nn.Parameter) -> torch.dtype | None:
    """Which dtype a parameter has in a computation, if not that of all others."""
    return parameter.dtype if parameter.ndim == 0 else None


def placement_of(parameter: nn.Parameter, sharding: Sharding) -> Shard | Ragged | None:
    """How a parameter of the plain model is cut."""
    ragged, cut = sharding.ragged, sharding.cut
    if parameter.ndim == 0:
        return None
    if ragged is not None and parameter.ndim > (ragged.tile is not None) and (cut != "mixed" or parameter.numel() % 4):
        return ragged
    if cut == "first":
        return None
    dims = {
        "last": parameter.ndim - 1,
        "largest": max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]),
        "mixed": sum(parameter.shape) % parameter.ndim,
    }
    return Shard(dims[cut])


def _wrap(model: nn.Module, sharding: Sharding, size: int) -> Any:
    options: dict[str, Any] = {
        "sharding_strategy": fullshard.ShardingStrategy[sharding.strategy],
        "use_orig_params": sharding.original,
        "cpu_offload": fullshard.CPUOffload(offload_params=sharding.offload),
        "device_mesh": mesh_of(sharding, size),
        **{name: fullshard.BackwardPrefetch[of] if isinstance(of, str) else of for name, of in sharding.options},
    }
    if sharding.param_dtype or sharding.reduce_dtype:
        options["mixed_precision"] = fullshard.MixedPrecision(
            dtype_of(sharding.param_dtype), dtype_of(sharding.reduce_dtype), cast_forward_inputs=sharding.cast_inputs
        )
    if sharding.by == "policy":
        return fullshard.FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Cell}), **options)
    for group in sharding.groups[:-1]:
        plain = model.get_submodule(group.paths[0])
        wrapped = fullshard.FullyShardedDataParallel(plain, **options)
        for parent in list(model.modules()):
            if isinstance(parent, fullshard.FullyShardedDataParallel):
                continue
            for name, child in list(parent._modules.items()):
                if child is plain:
                    parent._modules[name] = wrapped
    return fullshard.FullyShardedDataParallel(model, **options)


class OwnAllGather(fullshard.AllGather):
    """The backend's all-gather, in memory of its own."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class OwnReduceScatter(fullshard.ReduceScatter):
    """The backend's reduce-scatter, in memory of its own."""

    allocate = OwnAllGather.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def double_and_halve(output: Tensor) -> None:
    """A hook on what was reduced, which leaves it as it is."""
    output.mul_(2).div_(2)


#: What setters are called with that take more than a number.
VALUES = {
    "set_all_reduce_hook": double_and_halve,
    "set_custom_all_gather": OwnAllGather(),
    "set_custom_reduce_scatter": OwnReduceScatter(),
}


def set_up(model: Any, settings: tuple[tuple[str, Any], ...]) -> None:
    """Call setters: those of the tree on the root, and all others on every sharded module."""
    for name, value in settings:
        given = VALUES.get(name, value)
        if name in ("set_prefetch_limit", "set_is_last_backward", "set_manual_backward_finalization"):
            getattr(model, name)(value)
            continue
        if name == "prefetch_bytes":
            model.set_prefetch_limit(nbytes=value)
            continue
        if name in ("forward_prefetch", "backward_prefetch"):
            modules = [module for module in model.modules() if isinstance(module, fullshard.FSDPModule)]
            for number, module in enumerate(modules):
                after, before = modules[number + 1 :][:value], modules[:number][::-1][:value]
                getattr(module, f"set_modules_to_{name}")(after if name == "forward_prefetch" else before)
            continue
        for module in model.modules():
            only_some = name == "set_unshard_in_backward" and not isinstance(module, nn.Embedding)
            if isinstance(module, fullshard.FSDPModule) and not only_some:
                getattr(module, name)(given)


def plain_name(name: str) -> str:
    """The name that a parameter, buffer or module has in the plain model."""
    return name.replace("_fsdp_wrapped_module.", "")
