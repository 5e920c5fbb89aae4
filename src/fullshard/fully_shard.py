"""The composable front end: ``fully_shard`` shards a module's parameters, one DTensor a parameter.

Owns the validation of arguments, the choice of each group's parameters, and the hooks on modules. In a step the units
and groups that it builds do the work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypedDict, Unpack, overload

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard import assignments as _assignments  # noqa: F401  its import registers what ``.data =`` does
from fullshard import misuse as _misuse  # noqa: F401  its import registers hooks on units
from fullshard import policies
from fullshard import raw_errors as _raw_errors  # noqa: F401  its import registers advice on errors
from fullshard.comm.process_group import backend_name
from fullshard.comm.select import select_transport
from fullshard.comm.transport import DIRECTIONS, Direction
from fullshard.comm.waits import WAITS
from fullshard.device import CPU, compute_device, move_to_device
from fullshard.group.context import GroupOptions
from fullshard.group.mesh import DataMesh
from fullshard.group.owners import owner_of, refuse_gradients, register
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import Location, ShardedParameter
from fullshard.group.verify import verify_parameters, verify_values
from fullshard.meshes import data_mesh, default_mesh, shard_replicas
from fullshard.module import ShardedModule, sharded_class
from fullshard.offload_policy import CPUOffloadPolicy, DiskOffloadPolicy, OffloadPolicy
from fullshard.optim.steps import watch_steps
from fullshard.overlaps import refuse_overlaps
from fullshard.policies import DataParallelMeshDims, MixedPrecisionPolicy, as_setting
from fullshard.schedule.hooks import attach
from fullshard.schedule.unit import Unit, unit_of
from fullshard.stages import check_stage, check_threshold, check_wires, shards_replicas, strategy_of
from fullshard.torch_private import BatchNorm, replicated
from fullshard.wire_policy import EXACT, WirePolicy
from fullshard.wrap import repeated_blocks, targets

#: Parameters, each with all its locations in modules.
_Found = dict[nn.Parameter, list[Location]]
#: The user's placement for a parameter, see :class:`~fullshard.policies.ShardPlacementResult`.
_PlacementFn = Callable[[nn.Parameter], Any] | None
#: Attributes of every module. Of these only ``_parameters`` has parameters: the registered ones.
_OF_MODULES = frozenset(nn.Module().__dict__)

_log = logging.getLogger("fullshard")


class ShardOptions(TypedDict, total=False):
    """The options of :func:`fully_shard`, for type checkers."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: _PlacementFn
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    zero_stage: int
    outer_zero_stage: int
    persistence_threshold: int
    wire_policy: WirePolicy
    outer_wire_policy: WirePolicy
    auto_wrap_policy: Any
    check_values: bool


@overload
def fully_shard(module: nn.Module, **options: Unpack[ShardOptions]) -> ShardedModule: ...
@overload
def fully_shard(module: Sequence[nn.Module], **options: Unpack[ShardOptions]) -> list[ShardedModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: _PlacementFn = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    zero_stage: int = 3,
    outer_zero_stage: int = 0,
    persistence_threshold: int = 0,
    wire_policy: WirePolicy = EXACT,
    outer_wire_policy: WirePolicy = EXACT,
    auto_wrap_policy: Any = None,
    check_values: bool = False,
) -> Any:
    """Shard the parameters of ``module`` over the ranks of a mesh, in place.

    ::

        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())   # after sharding

    Each call makes one group of the parameters that no earlier call has taken, so call it on inner modules first. A
    group is gathered in one collective before its module runs, and reduced in one after its backward.
    ``fully_shard.state(module)`` returns the internal unit of a sharded module, or ``None``.

    Args:
        module: the module, or a list of modules that form one group and may run at different times.
        mesh: 1-D: shard over it. 2-D with names: replicate over the first dim and shard over the second. With
            ``dp_mesh_dims``: a mesh of all parallelisms. By default all ranks.
        reshard_after_forward: in stage 3, ``True`` frees the gathered parameters between forward and backward,
            ``False`` keeps them as stage 2 does, an int (a divisor of the number of ranks that shard) keeps them
            sharded over that many neighbouring ranks. ``None`` is ``True``, and ``False`` for the root.
        shard_placement_fn: for each parameter ``None``, a ``Shard(dim)``, a :class:`Ragged`, or a
            ``ShardPlacementResult`` that names a mesh too. Dims need not divide evenly.
        mp_policy: dtypes of gathers, reductions, inputs, outputs and buffers. Parameters of batch norms keep the dtype
            of their running statistics.
        offload_policy: what lives on the CPU between uses. Like ``mp_policy``, fullshard's or PyTorch's.
        ignored_params: parameters that are neither sharded nor reduced.
        dp_mesh_dims: the data-parallel dims of ``mesh``. All parameters are DTensors on that mesh.
        zero_stage: how much is sharded (Rajbhandari et al., "ZeRO", 2020). 3: parameters, gradients and optimizer
            state. 2: parameters are whole from forward to backward. 1: also across backwards without gradient sync, so
            that several micro-batches communicate once for each optimizer step. 0: nothing is sharded, as in DDP; every
            rank of the mesh is a replica. In every stage parameters are DTensors between steps, and a checkpoint of one
            stage is loaded in any other.
        outer_zero_stage: what the replicas of a 2-D mesh have. 0: all of their shards, as in HSDP. 1: only a part of
            each, as of the optimizer state and the gradients; each shard is gathered over the replicas once for each
            optimizer step, and gradients are reduce-scattered over them in place of the all-reduce (the hybrid of
            Megatron-FSDP). Parameters are then DTensors on the mesh with its dims exchanged.
        persistence_threshold: in stage 3, a group whose parameters have at most so many bytes together stays whole from
            forward to backward, whatever ``reshard_after_forward`` says: that saves a gather for little memory. The
            idea is DeepSpeed's ``stage3_param_persistence_threshold``.
        wire_policy: how what ranks send to those with which they shard is encoded, see :class:`WirePolicy`. Where ranks
            share memory nothing is sent, and nothing encoded.
        outer_wire_policy: the same between the replicas of a 2-D mesh, with ``outer_zero_stage=1``.
        auto_wrap_policy: chooses submodules to shard before ``module``, with the same options or those that it
            returns; see ``fullshard.wrap``. One call on the root is then enough.
        check_values: whether to compare the parameters' values between the ranks, in one pass over them. Ranks with
            different seeds would otherwise shard different models.

    Returns:
        ``module`` itself, whose class is now ``FSDP<Name>``, a subclass of :class:`FSDPModule` and of its former class.

    Raises:
        ValueError: a stage that does not exist, or does not reshard as ``reshard_after_forward`` says; a persistence
            threshold below 0, or where every group stays whole anyway; a wire policy where nothing is gathered and
            scattered that it could encode; something that is not a module; a container without ``forward``; a module
            that PyTorch has sharded; a mesh, divisor or placement that does not fit; a lazy parameter that is not
            initialized; a DTensor on the same ranks; parameters that an outer module has taken, that share memory with
            other tensors, or that differ between ranks (with ``check_values`` also in their values); a
            ``CPUOffloadPolicy`` without a CPU backend.
        AssertionError: ``fully_shard`` was applied to the module before; a 2-D mesh without names; a shard dim that a
            parameter does not have.
        RuntimeError: a mesh without process groups.
        TypeError: an argument of a wrong type.

    Ranks: all ranks of the mesh alike, in the same order.
    """
    given = dict(locals())
    modules = _root_modules(module)
    mp_policy = as_setting(mp_policy, MixedPrecisionPolicy, "mp_policy")
    offload_policy = as_setting(offload_policy, OffloadPolicy, "offload_policy")
    dims = None if dp_mesh_dims is None else as_setting(dp_mesh_dims, DataParallelMeshDims, "dp_mesh_dims")
    mesh = default_mesh() if mesh is None else mesh
    policies.expect(isinstance(mesh, DeviceMesh), "mesh", mesh, "a DeviceMesh")
    data = data_mesh(mesh, dims, shards=check_stage(zero_stage, reshard_after_forward) > 0)
    if shards_replicas(outer_zero_stage):
        data = shard_replicas(data)
    check_wires(wire_policy, outer_wire_policy, data)
    check_threshold(persistence_threshold, zero_stage, reshard_after_forward)
    device = compute_device(mesh.device_type)
    torch_classes = replicated(modules)
    if auto_wrap_policy is not None:
        for root in modules:
            for inner, overrides in targets(root, auto_wrap_policy, torch_classes).items():
                if unit_of(inner) is None:
                    fully_shard(**{**given, "mesh": mesh, "auto_wrap_policy": None, "module": inner, **overrides})
    after_forward = zero_stage == 3 if reshard_after_forward is None else reshard_after_forward
    strategy_of(zero_stage, after_forward, data)  # raise errors before anything is changed
    if data.shard_group is not None and type(after_forward) is int and after_forward == 1:
        _log.warning("reshard_after_forward=1 keeps parameters whole after forward, as False does; True frees them")
    ignored = () if ignored_params is None else ignored_params
    if not isinstance(ignored, Iterable) or not all(isinstance(param, torch.Tensor) for param in ignored):
        raise TypeError(f"ignored_params must be a set of parameters, not of names or modules, got {ignored!r}")
    ignored = {*ignored, *(param for inner in torch_classes for param in inner.parameters())}
    params = free_parameters(modules, ignored)
    _check_parameters(params, data if shard_placement_fn is None else None, device)  # else with its own mesh
    extents = refuse_overlaps(modules, params)
    move_to_device(params, managed_modules(modules), device, mp_policy.buffer_dtype)
    mp_policy = _keep_batch_norm(mp_policy, params)
    auto_reshard = reshard_after_forward is None and zero_stage == 3
    unit = Unit(modules, device, replace(mp_policy, param_dtype_override_fn=None), auto_reshard)
    unit.ignored, unit.extents = {id(param) for param in ignored}, extents
    for own_mesh, sharded in _by_mesh(params, data, shard_placement_fn, mesh).items():
        if check_values:
            verify_values(sharded, own_mesh)
        stays_whole = 0 < sum(each.shape.numel() * each.dtype.itemsize for each in sharded) <= persistence_threshold
        unit.auto_reshard = unit.auto_reshard and not stays_whole
        strategy = strategy_of(zero_stage, False if stays_whole else after_forward, own_mesh)
        check_wires(wire_policy, outer_wire_policy, own_mesh)
        options = GroupOptions(mp_policy, offload_policy, *strategy, wire_policy, outer_wire_policy)
        add_group(unit, sharded, own_mesh, options)
    borrow(unit)
    attach(unit)
    for target in modules:
        cls: type = type(target)
        target.__class__ = sharded_class(cls)
    return module


@cache
def _tell_of_shared_memory(unsent: tuple[Direction, ...]) -> None:
    what = "nothing" if unsent == DIRECTIONS else "no gathers" if "gather" in unsent else "no reductions"
    _log.warning(f"wire_policy encodes {what}: these ranks share memory, so they send nothing to one another")


fully_shard.state = unit_of  # type: ignore[attr-defined]


def add_group(
    unit: Unit,
    params: Sequence[ShardedParameter],
    data: DataMesh,
    options: GroupOptions,
    group_class: type[ParamGroup] = ParamGroup,
) -> None:
    """Shard ``params`` over ``data`` as a new group of ``unit``. All ranks of the mesh must call it."""
    originals = [param.sharded for param in params]
    for param in params:
        param.overridden_dtype = options.mp_policy.overridden_dtype(param.sharded, param.name)
    options.mp_policy = replace(options.mp_policy, param_dtype_override_fn=None)
    WAITS.thread = threading.current_thread()
    policies_of_all = {
        "mp_policy": options.mp_policy,
        "wire_policy": options.wire,
        "outer_wire_policy": options.outer_wire,
    }
    tag = verify_parameters(params, data, policies_of_all)
    process_group = data.shard_group or data.replicate_group
    assert process_group is not None
    offload = options.offload
    offloads = isinstance(offload, (CPUOffloadPolicy, DiskOffloadPolicy)) and offload.parameters
    if offloads and unit.device.type != "cpu" and not backend_name(process_group, CPU):
        raise ValueError(
            f"{type(offload).__name__} keeps parameters and gradients as tensors of the CPU, where the process group "
            f"has no backend, so clip_grad_norm_ and state dicts could not communicate: initialize it with both, as in "
            f"init_process_group('cpu:gloo,{unit.device.type}:nccl')"
        )
    watch_steps()
    transport = select_transport(process_group, unit.device)
    group = group_class(params, unit.modules, data, unit.device, options, transport, tag)
    if data.shard_size > 1 and not options.wire.is_exact:
        shared = tuple(each for each in DIRECTIONS if getattr(options.wire, each) != "exact" and not group.wire(each))
        _tell_of_shared_memory(shared) if shared else None
    unit.groups.append(group)
    register(group, [(index, param) for index, param in enumerate(originals) if owner_of(param) is None])
    for param, original in zip(params, originals, strict=True):
        if original is not param.sharded and original.requires_grad:
            refuse_gradients(original, param.name)


def fully_shard_blocks(model: nn.Module, **options: Unpack[ShardOptions]) -> ShardedModule:
    """Shard each repeated block of a model, and then the model: ``fully_shard`` in one line.

    :func:`fullshard.wrap.repeated_blocks` finds the blocks: the layers of a transformer, or the blocks in the stages of
    a ResNet. Options and errors are those of :func:`fully_shard`.

    Args:
        model: the model, which is returned.

    Ranks: all alike.
    """
    for block in repeated_blocks(model):
        if unit_of(block) is None:
            fully_shard(block, **options)
    return fully_shard(model, **options)


def _root_modules(module: Any) -> tuple[nn.Module, ...]:
    """The modules of a call, without those that another one contains. Raises an error for those it cannot shard."""
    modules = [module] if isinstance(module, nn.Module) else list(module) if isinstance(module, Iterable) else []
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise ValueError(f"fully_shard expects a module or a list of modules, got {module!r}")
    for each in modules:
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: {type(each).__name__} is "
                f"never run itself. Apply it to each of its members, or give it a list of them"
            )
        refuse_torchs(each)
        if unit_of(each) is not None:
            raise AssertionError(f"fully_shard was already applied to this {type(each).__name__}: call it only once")
    inside = {id(inner) for each in modules for inner in each.modules() if inner is not each}
    return tuple(dict.fromkeys(each for each in modules if id(each) not in inside))


def refuse_torchs(module: nn.Module) -> None:
    """Raise ValueError if torch's FSDP has sharded ``module`` or a module inside. It recognizes these by their class
    names, because fullshard does not import torch's FSDP."""
    torch_classes = replicated([module])
    for name, inner in module.named_modules():
        for cls in type(inner).__mro__ if inner is module or inner not in torch_classes else ():
            known = cls.__name__ in ("FSDPModule", "FullyShardedDataParallel")
            if known and cls.__module__.startswith("torch.distributed."):
                which = f"'{name}' of this {type(module).__name__}" if name else f"this {type(module).__name__}"
                raise ValueError(
                    f"{which} was sharded by torch.distributed.fsdp before: shard the whole model either with it or "
                    f"with fullshard, and import fully_shard or FullyShardedDataParallel from that one only"
                )


def free_parameters(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> _Found:
    """The parameters of ``modules`` that belong to no group yet, with their locations."""
    found: _Found = {}
    for module, path in managed_modules(modules).items():
        for name, param in module._parameters.items():
            if param is not None and param not in ignored and owner_of(param) is None:
                found.setdefault(param, []).append(Location(module, name, path))
    return found


def managed_modules(modules: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """The modules inside of ``modules`` that are not sharded yet, parents before children, each with its path."""
    inside = {inner for module in modules for inner in module.modules()}
    passed = {inner for inner in inside.difference(modules) if unit_of(inner) is not None}  # with all below them
    return {inner: path for module in modules for path, inner in module.named_modules(passed)}


def _check_parameters(params: _Found, data: DataMesh | None, device: torch.device) -> None:
    for param, locations in params.items():
        where = f"parameter '{locations[0].full_name}' of a {type(locations[0].module).__name__}"
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"{where} is not initialized yet: run its lazy module once before fully_shard")
        if not isinstance(param, DTensor):
            continue
        if param.device_mesh.device_type != device.type:
            raise ValueError(
                f"{where} is a DTensor on a mesh of {param.device_mesh.device_type}, but fully_shard is given a mesh "
                f"of {device.type}: both must have one device type"
            )
        if data is not None and data.spmd_mesh is None and torch.isin(param.device_mesh.mesh, data.mesh.mesh).sum() > 1:
            raise ValueError(
                f"{where} is already a DTensor on {param.device_mesh}, whose ranks fully_shard is asked to shard over: "
                f"if a module that contains it was sharded before, apply fully_shard to the inner modules first; if it "
                f"was distributed, give the whole mesh with dp_mesh_dims"
            )


def _keep_batch_norm(policy: MixedPrecisionPolicy, params: _Found) -> MixedPrecisionPolicy:
    """A policy with which batch norms compute in the dtype of their running statistics, as their kernels demand."""
    kept = {
        id(param)
        for param, locations in params.items()
        for statistics in (getattr(at.module, "running_mean", None) for at in locations)
        if isinstance(locations[0].module, BatchNorm) and statistics is not None
        if statistics.dtype == param.dtype != policy.param_dtype
    }
    if policy.param_dtype is None or not kept:
        return policy
    chosen = policy.param_dtype_override_fn or (lambda param: None)
    return replace(
        policy, param_dtype_override_fn=lambda param: chosen(param) or (param.dtype if id(param) in kept else None)
    )


def _by_mesh(
    params: _Found, data: DataMesh, placement_fn: _PlacementFn, mesh: DeviceMesh
) -> dict[DataMesh, list[ShardedParameter]]:
    """The parameters of each mesh. There is one, ``mesh``, unless ``placement_fn`` names others."""
    groups: dict[DataMesh, list[ShardedParameter]] = {}
    meshes: dict[DeviceMesh, DataMesh] = {}
    for param, locations in params.items():
        own_mesh, placement = data, None
        if placement_fn is not None:
            try:
                result = policies.as_shard_placement(placement_fn(param))
            except policies.InvalidShardPlacement as error:
                raise policies.InvalidShardPlacement(f"for parameter '{locations[0].full_name}': {error}") from error
            placement = result.placement
            if result.device_mesh is not None and result.device_mesh not in (data.mesh, mesh):
                if data.shard_group is None:
                    raise ValueError(
                        f"shard_placement_fn names a mesh for parameter '{locations[0].full_name}', but the mesh given "
                        f"to fully_shard only replicates"
                    )
                own_mesh = meshes.setdefault(result.device_mesh, data_mesh(result.device_mesh))
                if data.shards_replicas and own_mesh.replicate_group is not None and not own_mesh.shards_replicas:
                    own_mesh = meshes[result.device_mesh] = shard_replicas(own_mesh)
            _check_parameters({param: locations}, own_mesh, torch.device(own_mesh.mesh.device_type))
        groups.setdefault(own_mesh, []).append(ShardedParameter(param, locations, own_mesh, placement))
    return groups


def borrow(unit: Unit) -> None:
    """Let ``unit`` borrow the groups that already own parameters of its modules, and show these parameters here too.
    Parameters that modules also keep in attributes, lists or dicts are shown there too."""
    for module in managed_modules(unit.modules):
        if isinstance(module, nn.MultiheadAttention):  # reads the parameters of its projection and never runs it
            inner = [found for each in module.out_proj.modules() if (found := unit_of(each)) not in (None, unit)]
            unit.borrowed += [group for each in dict.fromkeys(inner) for group in each.groups]
        registered: list[tuple[str | tuple[Any, ...], Any]] = list(module._parameters.items())
        for where, param in [*registered, *_kept_apart(module)]:
            if (owner := owner_of(param)) is None:
                continue
            group, index = owner
            assert isinstance(group, ParamGroup)
            if group not in unit.groups:
                if any(inner in unit.modules for outer in group.modules for inner in outer.modules()):
                    raise ValueError(
                        f"parameter '{group.params[index].name}' already belongs to a module that contains this "
                        f"{unit!r}: apply fully_shard to the inner modules first and to those that contain them after"
                    )
                if group not in unit.borrowed:
                    unit.borrowed.append(group)
            elif isinstance(where, str):
                continue
            group.show_also(index, module, where)


def _kept_apart(module: nn.Module) -> list[tuple[tuple[Any, ...], nn.Parameter]]:
    """The parameters that a module keeps in attributes, or in lists, deques, dicts and tuples there, as ``nn.LSTM``
    does; each with the path of keys that leads to it. Raises ValueError if one is in a tuple, where it cannot be
    replaced."""
    found: list[tuple[tuple[Any, ...], nn.Parameter]] = []
    waiting: list[tuple[tuple[Any, ...], Any]] = [
        ((name,), value) for name, value in module.__dict__.items() if name not in _OF_MODULES
    ]
    met: set[int] = set()
    for path, value in waiting:
        if isinstance(value, nn.Parameter):
            found.append((path, value))
        elif isinstance(value, tuple) and any(isinstance(each, nn.Parameter) for each in value):
            raise ValueError(
                f"a {type(module).__name__} keeps parameters in a tuple, its attribute '{path[0]}', where they cannot "
                f"be replaced by sharded and unsharded ones: keep them in a list"
            )
        elif isinstance(value, (MutableSequence, dict, tuple)) and id(value) not in met:
            met.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [((*path, key), each) for key, each in items]
    return found
