"""The composable front end: ``fully_shard`` shards a module's parameters, one DTensor a parameter.

Owns the validation of arguments, the choice of each group's parameters, and the hooks on modules. In a step the units
and groups that it builds do the work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypedDict, Unpack, overload

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard import assignments as _assignments  # noqa: F401  its import registers what ``.data =`` does
from fullshard import misuse as _misuse  # noqa: F401  its import registers hooks on units
from fullshard import policies
from fullshard import raw_errors as _raw_errors  # noqa: F401  its import registers advice on errors
from fullshard.comm.backends import backend_of
from fullshard.comm.select import select_transport
from fullshard.comm.transport import DIRECTIONS, Direction
from fullshard.comm.waits import WAITS
from fullshard.device import CPU, compute_device, move_to_device
from fullshard.first_values import FirstValues, verify_values
from fullshard.group.context import GroupOptions
from fullshard.group.mesh import DataMesh
from fullshard.group.owners import owner_of, refuse_gradients, register
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import ShardedParameter
from fullshard.group.verify import verify_parameters
from fullshard.members import (
    Found,
    attribute_parameters,
    check_modules,
    free_parameters,
    managed_modules,
    root_modules,
    swapped_class,
)
from fullshard.meshes import data_mesh, default_mesh, shard_replicas
from fullshard.module import ShardedModule
from fullshard.offload_policy import CPUOffloadPolicy, DiskOffloadPolicy, OffloadPolicy
from fullshard.optim.steps import watch_steps
from fullshard.overlaps import refuse_overlaps
from fullshard.policies import DataParallelMeshDims, MixedPrecisionPolicy, as_setting
from fullshard.schedule.hooks import attach
from fullshard.schedule.unit import Unit, unit_of
from fullshard.stages import check_stage, check_threshold, check_wires, shards_replicas, strategy_of
from fullshard.torch_private import BatchNorm, replicated
from fullshard.wire_policy import EXACT, WirePolicy
from fullshard.wrap import lambda_auto_wrap_policy, repeated_blocks, targets

#: The user's placement for a parameter, see :class:`~fullshard.policies.ShardPlacementResult`.
_PlacementFn = Callable[[nn.Parameter], Any] | None

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
    """Shard the parameters of ``module`` over the ranks of a mesh, in place. A call that raises an error listed below
    has changed nothing.

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
            that several micro-batches communicate once for each optimizer step. 0: nothing is sharded, and gradients
            are all-reduced; every rank of the mesh is a replica. In every stage parameters are DTensors between steps,
            and a checkpoint of one stage is loaded in any other.
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
        check_values: whether to compare all values of the parameters between the ranks, in one pass over them. By
            default the first forward compares some, of parameters that nobody has written until then.

    Returns:
        ``module`` itself, whose class is now ``FSDP<Name>``, a subclass of :class:`FSDPModule` and of its former class.

    Raises:
        ValueError: a stage that does not exist, or does not reshard as ``reshard_after_forward`` says; a persistence
            threshold below 0, or where every group stays whole anyway; a wire policy where nothing is gathered and
            scattered that it could encode; something that is not a module; a container without ``forward``; a module
            that PyTorch has sharded; a mesh, divisor or placement that does not fit; a lazy parameter that is not
            initialized; a DTensor on the same ranks; parameters that an outer module has taken, that share memory with
            other tensors, or that differ between ranks (with ``check_values`` also in their values); a
            ``CPUOffloadPolicy`` without a CPU backend; sparse gradients; a module of TorchScript.
        AssertionError: ``fully_shard`` was applied to the module before; a 2-D mesh without names; a shard dim that a
            parameter does not have.
        RuntimeError: a mesh without process groups.
        TypeError: an argument of a wrong type; a class that can have no subclass.

    Ranks: all ranks of the mesh alike, in the same order.
    """
    given = dict(locals())
    _check_call(calls := list[_ShardCall](), **given)
    for call in calls:  # all checks of all calls come before the first change
        call.shard()
    return module


@dataclass
class _ShardCall:
    """A call of :func:`fully_shard` that was checked: on no rank anything speaks against it."""

    unit: Unit
    params: Found
    modules: Mapping[nn.Module, str]  # whose buffers move with the parameters
    policy: MixedPrecisionPolicy
    classes: Sequence[type]
    groups: Sequence[Callable[[], None]]  # each adds a group to the unit

    def shard(self) -> None:
        move_to_device(self.params, self.modules, self.unit.device, self.policy.buffer_dtype)
        for add in self.groups:
            add()
        borrow(self.unit)
        attach(self.unit)
        for module, cls in zip(self.unit.modules, self.classes, strict=True):
            object.__setattr__(module, "__class__", cls)


def _check_call(
    calls: list[_ShardCall],
    module: Any,
    mesh: DeviceMesh | None,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: _PlacementFn,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    ignored_params: set[nn.Parameter] | None,
    dp_mesh_dims: DataParallelMeshDims | None,
    zero_stage: int,
    outer_zero_stage: int,
    persistence_threshold: int,
    wire_policy: WirePolicy,
    outer_wire_policy: WirePolicy,
    auto_wrap_policy: Any,
    check_values: bool,
) -> None:
    """Check a call of :func:`fully_shard`, and those for the modules that its policy chooses, which are to follow
    ``calls``. Append them. Nothing is changed."""
    given = dict(locals())
    modules = root_modules(module)
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
                if unit_of(inner) is None and not any(inner in call.unit.modules for call in calls):
                    _check_call(**{**given, "mesh": mesh, "auto_wrap_policy": None, "module": inner, **overrides})
    after_forward = zero_stage == 3 if reshard_after_forward is None else reshard_after_forward
    strategy_of(zero_stage, after_forward, data)
    if data.shard_group is not None and type(after_forward) is int and after_forward == 1:
        _log.warning("reshard_after_forward=1 keeps parameters whole after forward, as False does; True frees them")
    ignored = () if ignored_params is None else ignored_params
    if not isinstance(ignored, Iterable) or not all(isinstance(param, torch.Tensor) for param in ignored):
        raise TypeError(f"ignored_params must be a set of parameters, not of names or modules, got {ignored!r}")
    ignored = {*ignored, *(param for inner in torch_classes for param in inner.parameters())}
    taken = {param for call in calls for param in call.params}
    managed = managed_modules(modules, {inner for call in calls for inner in call.unit.modules})
    check_modules(modules, managed)
    params = free_parameters(managed, ignored | taken)
    _check_parameters(params, data if shard_placement_fn is None else None, device)  # else with its own mesh
    extents = refuse_overlaps(modules, params)
    mp_policy = _keep_batch_norm(mp_policy, params)
    auto_reshard = reshard_after_forward is None and zero_stage == 3
    unit = Unit(modules, device, replace(mp_policy, param_dtype_override_fn=None), auto_reshard)
    unit.ignored, unit.extents = {id(param) for param in ignored}, extents
    found = list[tuple[list[ShardedParameter], DataMesh, GroupOptions]]()
    for own_mesh, sharded in _by_mesh(params, data, shard_placement_fn, mesh).items():
        stays_whole = 0 < sum(each.shape.numel() * each.dtype.itemsize for each in sharded) <= persistence_threshold
        unit.auto_reshard = unit.auto_reshard and not stays_whole
        strategy = strategy_of(zero_stage, False if stays_whole else after_forward, own_mesh)
        check_wires(wire_policy, outer_wire_policy, own_mesh)
        found.append(
            (sharded, own_mesh, GroupOptions(mp_policy, offload_policy, *strategy, wire_policy, outer_wire_policy))
        )
    classes, groups = [*map(swapped_class, modules)], list[Callable[[], None]]()
    for sharded, own_mesh, options in found:
        if check_values:
            verify_values(sharded, own_mesh)
        groups.append(check_group(unit, sharded, own_mesh, options))
    calls.append(_ShardCall(unit, params, managed, mp_policy, classes, groups))


@cache
def _tell_of_shared_memory(unsent: tuple[Direction, ...]) -> None:
    what = "nothing" if unsent == DIRECTIONS else "no gathers" if "gather" in unsent else "no reductions"
    _log.warning(f"wire_policy encodes {what}: these ranks share memory, so they send nothing to one another")


fully_shard.state = unit_of  # type: ignore[attr-defined]


def check_group(
    unit: Unit,
    params: Sequence[ShardedParameter],
    data: DataMesh,
    options: GroupOptions,
    group_class: type[ParamGroup] = ParamGroup,
) -> Callable[[], None]:
    """Check that ``params`` can be sharded over ``data``. All ranks of the mesh must call it.

    Returns a function that shards them, as a new group of ``unit``.
    """
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
    if offloads and unit.device.type != "cpu" and not backend_of(process_group, CPU).name:
        raise ValueError(
            f"{type(offload).__name__} keeps parameters and gradients as tensors of the CPU, where the process group "
            f"has no backend, so clip_grad_norm_ and state dicts could not communicate: initialize it with both, as in "
            f"init_process_group('cpu:gloo,{unit.device.type}:nccl')"
        )
    transport = select_transport(process_group, unit.device)
    make = partial(group_class, params, unit.modules, data, unit.device, options, transport, tag)
    return partial(_add_group, unit, params, make, FirstValues(params))


def _add_group(
    unit: Unit, params: Sequence[ShardedParameter], make: Callable[[], ParamGroup], values: FirstValues
) -> None:
    watch_steps()
    originals = [param.sharded for param in params]
    group = make()
    values.keep(group)
    if group.data.shard_size > 1 and not group.options.wire.is_exact:
        wire = group.options.wire
        shared = tuple(each for each in DIRECTIONS if getattr(wire, each) != "exact" and not group.wire(each))
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

    Raises:
        TypeError: ``auto_wrap_policy`` is given.

    Ranks: all alike.
    """
    if "auto_wrap_policy" in options:
        raise TypeError("fully_shard_blocks chooses the modules inside itself: leave out auto_wrap_policy")
    policy = partial(lambda_auto_wrap_policy, lambda_fn=set(repeated_blocks(model)).__contains__)
    given: ShardOptions = {**options, "auto_wrap_policy": policy}
    return fully_shard(model, **given)


def _check_parameters(params: Found, data: DataMesh | None, device: torch.device) -> None:
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


def _keep_batch_norm(policy: MixedPrecisionPolicy, params: Found) -> MixedPrecisionPolicy:
    """A policy with which batch norms compute in the dtype of their running statistics, as their kernels demand."""
    own_dtype = {
        id(param)
        for param, locations in params.items()
        for statistics in (getattr(at.module, "running_mean", None) for at in locations)
        if isinstance(locations[0].module, BatchNorm) and statistics is not None
        if statistics.dtype == param.dtype != policy.param_dtype
    }
    if policy.param_dtype is None or not own_dtype:
        return policy
    chosen = policy.param_dtype_override_fn or (lambda param: None)
    return replace(
        policy, param_dtype_override_fn=lambda param: chosen(param) or (param.dtype if id(param) in own_dtype else None)
    )


def _by_mesh(
    params: Found, data: DataMesh, placement_fn: _PlacementFn, mesh: DeviceMesh
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
        for where, param in [*registered, *attribute_parameters(module)]:
            if (owner := owner_of(param)) is None:
                continue
            group, index = owner
            assert isinstance(group, ParamGroup)
            if group not in unit.groups:
                if group not in unit.borrowed:
                    unit.borrowed.append(group)
            elif isinstance(where, str):
                continue
            group.show_also(index, module, where)
