"""Full parameters outside of forward and backward: to read, save or change them.

Owns a context in which modules show private full copies in the original dtype, and the copies while they are shown. The
copies do not use the engine's buffers, so no other group ever writes to their memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn

from fullshard.buffer.sections import full_bytes, full_views, shard_bytes, shard_views
from fullshard.comm.process_group import StartedAllGather, all_reduce
from fullshard.comm.transport import Transfer
from fullshard.comm.waits import Wait
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import ShardedParameter, chunk_views, local_tensor, whole_views
from fullshard.schedule.states import IDLE
from fullshard.schedule.unit import unit_of


class FullParameters:
    """Full parameters of one group. Modules show them until :meth:`close`, in place of what they showed before."""

    #: Whether an error leaves it open. The next step, or the next check of the parameters, then closes it.
    is_left_by_errors = False

    def __init__(self, group: ParamGroup, full: Mapping[int, nn.Parameter]) -> None:
        self._group = group
        self._full = dict(full)
        self._outer = group.summoned
        self._full_outside = {} if self._outer is None else self._outer.current()
        group.summoned = self
        group.module_params.show_full(self._full)

    def current(self) -> Mapping[int, nn.Parameter]:
        """The parameters that are shown now, by index: users may have replaced them."""
        for index in self._full:
            at = self._group.params[index].locations[0]
            if isinstance(now := at.module._parameters.get(at.name), nn.Parameter):
                self._full[index] = now
        return self._full

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy this rank's part of what users wrote to the sharded parameters, and to their gradients."""
        for index, full in self.current().items():
            param = self._group.params[index]
            param.values.copy_(param.chunk_of(local_tensor(full)))
            grad = param.gradient
            if full.grad is not None and grad is not None:
                grad.copy_(param.chunk_of(local_tensor(full.grad)))

    def close(self) -> None:
        """Show again what was shown before."""
        group = self._group
        if group.summoned is not self:
            return
        group.summoned = self._outer
        if self._outer is not None:
            group.module_params.show_full(self._full_outside)
        else:  # also if this rank showed nothing: the next step checks what modules show
            group.module_params.show_sharded()
        self._full.clear()


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """A context in which the sharded modules in ``module`` show full parameters, plain tensors in their original dtype.

    They have memory of their own; parameters of tensor parallelism are DTensors. Forward and backward must not run
    inside.

    Args:
        module: a model, sharded by either front end.
        recurse: whether to include the sharded modules inside of ``module``.
        writeback: whether to keep what is written to the full parameters and gradients: each rank copies its part back.
        rank0_only: whether only the first of the ranks that shard together shows full parameters, and the others
            sharded ones.
        offload_to_cpu: whether to put the full parameters on the CPU.
        with_grads: whether to give the full parameters their full gradients.

    Raises:
        ValueError: ``writeback`` with ``rank0_only``, or ``with_grads`` with ``offload_to_cpu``.
        RuntimeError: it was called in a forward or backward, or in another such context with the same parameters, or
            parameters are on meta.

    Ranks: all alike, entering and leaving.
    """
    if writeback and rank0_only:
        raise ValueError("writeback with rank0_only would leave the ranks with different parameters: choose one")
    if with_grads and offload_to_cpu:
        raise ValueError("with_grads with offload_to_cpu is not supported: gradients stay on the compute device")
    modules = module.modules() if recurse else (module,)
    units = dict.fromkeys(unit for each in modules if (unit := unit_of(each)) is not None)
    for unit in units:
        if unit.state is not IDLE:
            raise RuntimeError(
                f"summon_full_params was called while {unit!r} runs its {unit.state.name}: call it between steps; "
                f"after an error in a step, first call reset_iter_state() on the root module, on every rank"
            )
    kept: list[FullParameters] = []
    with ExitStack() as summoned:
        for unit in units:
            for group in unit.groups:
                group.notice_changes()
                if group.summoned:
                    raise RuntimeError(f"summon_full_params was called inside another one that holds {group!r}")
                group.reshard()
                whole = _whole(group, offload_to_cpu, with_grads)
                dim = 0 if group.data.shards_replicas else group.data.mesh.ndim - 1  # over which ranks shard together
                shown = not rank0_only or group.data.mesh.get_local_rank(dim) == 0
                full = FullParameters(group, whole if shown else {})
                summoned.callback(full.close)
                # Unsharded flat parameters always keep what is written, as torch's wrapper does.
                if writeback or (unit.is_wrapper and group.data.shard_group is None):
                    kept.append(full)
        yield
        for full in kept:
            full.write_back()


@torch.no_grad()
def gather(
    group: ParamGroup, parts: Sequence[torch.Tensor | None], dtypes: Sequence[torch.dtype] | None = None
) -> dict[int, torch.Tensor]:
    """Gather tensors that are sharded like the parameters of ``group``, into one new piece of memory.

    Every rank of the group must call it.

    Args:
        group: the group.
        parts: for each parameter this rank's part of the tensor, in the shape of ``param.local``; ``None`` for zeros.
        dtypes: the dtype of the tensors of each section, the same on all ranks; by default the parameters'.

    Returns:
        the whole tensors on the compute device, by the index of their parameter and in its shape.
    """
    if group.shard.has_meta:
        group.shard.refuse_meta()
    found: dict[int, torch.Tensor] = {}
    data, dtypes = group.data, [section.dtype for section in group.sections] if dtypes is None else dtypes
    memory = torch.empty(full_bytes(group.sections, dtypes), dtype=torch.uint8, device=group.device)
    staging = torch.empty(shard_bytes(group.own_sections, dtypes), dtype=torch.uint8, device=group.device)
    fulls, shards = full_views(memory, group.sections, dtypes), shard_views(staging, group.own_sections, dtypes)
    for section, shard in zip(group.own_sections, shards, strict=True):
        for index, chunk in chunk_views(group.params, section.members, section.plan, shard, group.own_rank):
            part = parts[index]
            chunk.zero_() if part is None else chunk.copy_(part)
    for section, full in zip(group.sections, fulls, strict=True):
        found.update(whole_views(group.params, section, full))
    gathers = [(group.sections, fulls, data.shard_group)]
    if data.shards_replicas:
        replica = torch.empty(shard_bytes(group.sections, dtypes), dtype=torch.uint8, device=group.device)
        gathers.insert(0, (group.own_sections, shard_views(replica, group.sections, dtypes), data.replicate_group))
    for sections, wholes, over in gathers:
        transfers = list(map(Transfer, [section.plan for section in sections], wholes, shards))
        group.transport.private.gather_route(transfers, over, group.tag).start().finish()
        shards = wholes
    for index, param in enumerate(group.params):
        if param.extends:
            found[index] = _gather_extension(param, parts[index])
    return found


@torch.no_grad()
def _whole(group: ParamGroup, offload_to_cpu: bool, with_grads: bool) -> dict[int, nn.Parameter]:
    values = gather(group, [param.values for param in group.params])
    grads = gather(group, [param.gradient for param in group.params]) if with_grads else {}
    has_grad = [param.sharded.grad is not None for param in group.params]
    for over in [group.data.shard_group, group.data.replicate_group if group.data.shards_replicas else None]:
        if with_grads and over is not None:  # ranks without elements do not know
            has_any = torch.tensor(has_grad, dtype=torch.uint8, device=group.device)
            all_reduce(has_any, over, "a question to all ranks", dist.ReduceOp.MAX)
            has_grad = has_any.bool().tolist()
    shown = {}
    for index, value in values.items():
        param = group.params[index]
        value = value.to("cpu") if offload_to_cpu else value
        full = nn.Parameter(param.as_before(value), param.sharded.requires_grad)
        full.__dict__.update(param.attributes)
        if with_grads and has_grad[index]:
            full.grad = param.as_before(grads[index])
        shown[index] = full
    return shown


def _gather_extension(param: ShardedParameter, part: torch.Tensor | None) -> torch.Tensor:
    """Gather a parameter that defines its own gather, as plain values."""
    group, dim = param.data.shard_group, param.dim or 0
    plain = torch.zeros(param.cut.chunk_shape(0), dtype=param.dtype, device=param.local.device)
    if part is not None:
        plain.narrow(dim, 0, part.shape[dim]).copy_(part)
    if group is None:
        return plain
    parts = StartedAllGather(plain, Wait(f"all of {param.name}", group)).finish()
    return torch.cat([*parts], dim).narrow(dim, 0, param.shape[dim])
