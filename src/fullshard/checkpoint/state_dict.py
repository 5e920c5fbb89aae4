"""State dicts of wrapped modules: full, sharded or local values under the names that the plain model has.

Owns what modules show while a state dict is made of them or loaded into them; how a state dict is made and loaded is
``nn.Module``'s own business, so that hooks and methods of users keep working::

    FULL      whole parameters, in private copies
    SHARDED   each rank's rows of every parameter as a DTensor, as ``fully_shard`` has them
    LOCAL     each rank's flat shard as a DTensor of one dim, without padding

What is loaded may be whole tensors or DTensors of any placement, whatever the type that is set. Every rank must take
part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard.full_params import FullGroup, gather
from fullshard.group.flat import FLAT_NAME
from fullshard.group.group import Group
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import WRAPPED_NAME, plain_name
from fullshard.torch_private import make_dtensor, sharding_spec
from fullshard.wrapper.settings import FullStateDictConfig, StateDictConfig, StateDictType
from fullshard.wrapper.unit import WrappedUnit

_PREFIX = f"{WRAPPED_NAME}."


@contextmanager
def saving(unit: WrappedUnit, kind: StateDictType, config: StateDictConfig) -> Iterator[None]:
    """While a state dict is made of the module of ``unit`` itself: it shows what ``kind`` holds."""
    shown: list[FullGroup] = []
    try:
        for group in _hidden(unit):
            group.reshard()
            group.check_in()
            if kind_for(group, kind) is not StateDictType.LOCAL_STATE_DICT:
                shown.append(FullGroup(group, _values(group, kind, config)))
        yield
    finally:
        for full in shown:
            full.close()


def _hidden(unit: WrappedUnit) -> list[Group]:
    """The groups of which modules of ``unit`` have parameters, tied ones of others too, that nobody shows yet."""
    return [group for group in (*unit.groups, *unit.borrowed) if not group.summoned]


def kind_for(group: Group, kind: StateDictType) -> StateDictType:
    """What ``kind`` comes to where nothing is sharded."""
    return kind if group.data.shard_group is not None else StateDictType.FULL_STATE_DICT


def _is_dropped(config: StateDictConfig, data: DataMesh) -> bool:
    """Whether this rank's state dict gets nothing."""
    return isinstance(config, FullStateDictConfig) and config.rank0_only and data.shard_rank != 0


def _values(group: Group, kind: StateDictType, config: StateDictConfig) -> dict[int, nn.Parameter]:
    """What each parameter shows, in compact memory of its own; nothing on ranks that keep nothing."""
    if group.memory.has_meta:
        raise RuntimeError(group.memory.meta_message())
    whole = gather(group, [param.held for param in group.params])
    if _is_dropped(config, group.data):
        return {}
    sharded = kind_for(group, kind) is StateDictType.SHARDED_STATE_DICT
    values = {}
    for index, value in whole.items():
        param = group.params[index]
        if sharded:
            rows = param.rows_of(value, group.data.shard_rank)
            value = make_dtensor(_own(rows, config), param.spec)
        elif param.unsharded_spec is not None:
            value = _own(make_dtensor(value, param.unsharded_spec).full_tensor(), config)
        else:
            value = _own(value, config)
        values[index] = nn.Parameter(value, requires_grad=param.sharded.requires_grad)
    return values


def _own(tensor: torch.Tensor, config: StateDictConfig) -> torch.Tensor:
    moved = tensor.to("cpu") if config.offload_to_cpu else tensor
    return moved.clone(memory_format=torch.contiguous_format) if moved is tensor else moved


def finish(
    wrapper: nn.Module, unit: WrappedUnit, kind: StateDictType, config: StateDictConfig, saved: Any, prefix: str
) -> None:
    """What is left to do once the state dict of a wrapped module is made: local shards, buffers, and ranks that keep
    nothing."""
    names = {module: plain_name(name) for name, module in wrapper.named_modules()}
    buffers = [(module, name, _join(prefix, names[module], name)) for module, name in unit.buffers]
    kept = not _is_dropped(config, unit.data)
    for group in (*unit.groups, *unit.borrowed):
        local = kind_for(group, kind) is StateDictType.LOCAL_STATE_DICT
        if not local and kept:
            continue
        for _, location in _locations(group):
            if location.module in names:
                saved.pop(_join(prefix, names[location.module], location.name), None)
        if group in unit.borrowed:
            continue
        for number in range(len(group.sections)):
            saved.pop(prefix + _flat_name(number), None)
        for number, value in enumerate(_local_shards(group) if local else ()):
            saved[prefix + _flat_name(number)] = value.cpu() if config.offload_to_cpu else value
    for module, name, key in buffers:
        if key not in saved:
            continue
        if not kept:
            del saved[key]
            continue
        dtype = unit.buffer_dtypes.get((module, name))
        saved[key] = saved[key].to("cpu" if config.offload_to_cpu else None, dtype or saved[key].dtype)


def _join(prefix: str, module: str, name: str) -> str:
    return f"{prefix}{module}.{name}" if module else f"{prefix}{name}"


def _flat_name(number: int) -> str:
    return f"{FLAT_NAME}_{number}" if number else FLAT_NAME


def _local_shards(group: Group) -> list[DTensor]:
    """Each section's shard, as it lies, as a DTensor of all that ranks have: it has torch's cuts, but no padding."""
    data = group.data
    shards = []
    for section, shard in zip(group.sections, group.memory.shards, strict=True):
        numel = section.plan.full_offsets[-1] + section.plan.params[-1].numel
        here = sum(extent.numel for extent in section.plan.extents(data.shard_rank))
        placements = [Replicate(), Shard(0)] if data.replicates else [Shard(0)]
        spec = sharding_spec(data.mesh, placements, torch.Size((numel,)), (1,), section.dtype)
        shards.append(make_dtensor(shard.detach()[:here], spec))
    return shards


# -- names -------------------------------------------------------------------------------------------------------------


def unwrap_names(wrapper: nn.Module, saved: Any, prefix: str, metadata: Any) -> None:
    """A hook after the state dict of ``wrapper`` is made: names are those without it."""
    _rename(saved, prefix + _PREFIX, prefix)
    known = getattr(saved, "_metadata", {})
    for path in [path for path in known if f"{path}.".startswith(prefix + _PREFIX)]:
        known.setdefault(f"{path}.".replace(prefix + _PREFIX, prefix, 1)[:-1], known[path])


def _rename(values: Any, old: str, new: str) -> None:
    """Give each key that begins with ``old`` its new beginning; the order stays."""
    for key in [key for key in values if key.startswith(old)]:
        values[new + key[len(old) :]] = values.pop(key)


# -- loading -----------------------------------------------------------------------------------------------------------


class Loading:
    """The hooks around a wrapped module's part of ``load_state_dict``."""

    def __init__(self, unit: WrappedUnit) -> None:
        self.unit = unit
        self._shown: list[FullGroup] = []

    def before(
        self,
        wrapper: nn.Module,
        values: Any,
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: Sequence[str],
        unexpected: Sequence[str],
        errors: Sequence[str],
    ) -> None:
        """Let the module show whole parameters, into which the values are copied: all ranks, whatever they hold."""
        self.close()
        keys = [key for key in values if key.startswith(prefix) and not key.startswith(prefix + _PREFIX)]
        for key in keys:
            values[f"{prefix}{_PREFIX}{key[len(prefix) :]}"] = values.pop(key)
        paths = {module: plain_name(name) for name, module in wrapper.named_modules()}
        for group in _hidden(self.unit):
            group.reshard()
            group.check_in()
            here = [(index, at) for index, at in _locations(group) if at.module in paths]
            names = {plain_name(_join(prefix, paths[at.module], at.name)): index for index, at in here}
            if f"{prefix}{_PREFIX}{FLAT_NAME}" in values and group in self.unit.groups:
                self._load_local(group, values, prefix + _PREFIX)
                for index, at in here:  # they have their values already
                    key = _join(prefix + _PREFIX, paths[at.module], at.name)
                    values[key] = self._blank(group, index).detach()
            for key in [key for key in values if isinstance(values[key], DTensor)]:
                if (found := names.get(plain_name(key))) is not None:
                    values[key] = self._whole(group, found, values[key])
            whole = {index: self._blank(group, index) for index in range(len(group.params))}
            self._shown.append(FullGroup(group, whole))

    def _load_local(self, group: Group, values: Any, prefix: str) -> None:
        for number, shard in enumerate(_local_shards(group)):
            value = values.pop(prefix + _flat_name(number))
            held = value.to_local() if isinstance(value, DTensor) else value
            local = shard.to_local()
            if held.shape != local.shape:
                raise RuntimeError(
                    f"'{plain_name(prefix)}{_flat_name(number)}' has {held.numel()} elements for this rank, which "
                    f"holds {local.numel()}: a local state dict loads only into the sharding of which it was made"
                )
            local.copy_(held)

    def _whole(self, group: Group, index: int, value: DTensor) -> torch.Tensor:
        moved: Any = value.to(group.device)
        full: torch.Tensor = moved.full_tensor()
        spec = group.params[index].unsharded_spec
        return full if spec is None else distribute_tensor(full, spec.mesh, spec.placements)

    def _blank(self, group: Group, index: int) -> nn.Parameter:
        """A whole parameter of which this rank's part is as it was: the other parts are nothing that it would keep."""
        param = group.params[index]
        whole = torch.zeros(param.shape, dtype=param.dtype, device=group.device)
        if not param.held.is_meta:
            param.chunk_of(whole, group.data.shard_rank).copy_(param.held)
        shown = whole if param.unsharded_spec is None else make_dtensor(whole, param.unsharded_spec)
        return nn.Parameter(shown, requires_grad=param.sharded.requires_grad)

    def after(self, wrapper: nn.Module, incompatible: Any) -> None:
        """Keep this rank's part of what was loaded."""
        for full in self._shown:
            full.write_back()
        self.close()
        for names in incompatible:
            names[:] = map(plain_name, names)

    def close(self) -> None:
        shown, self._shown = self._shown, []
        for full in shown:
            full.close()


def _locations(group: Group) -> list[tuple[int, Any]]:
    return [(index, at) for index, param in enumerate(group.params) for at in param.locations]
