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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard.full_params import FullGroup, gather, local_tensor
from fullshard.group.flat import FLAT_NAME, FlatParameter, flat_name
from fullshard.group.group import Group
from fullshard.group.memory import give_own_storage
from fullshard.group.parameter import WRAPPED_NAME, ShardedParameter, plain_name
from fullshard.schedule.unit import Phase
from fullshard.torch_private import (
    altered_spec,
    is_sharded_tensor,
    local_of,
    make_dtensor,
    sharding_spec,
    spec_of,
    whole_of_sharded_tensor,
)
from fullshard.wrapper.settings import FullStateDictConfig, StateDictConfig, StateDictType
from fullshard.wrapper.unit import WrappedUnit

_PREFIX = f"{WRAPPED_NAME}."


@contextmanager
def saving(unit: WrappedUnit, kind: StateDictType, config: StateDictConfig) -> Iterator[None]:
    """While a state dict is made of the module of ``unit`` itself: it shows what ``kind`` holds."""
    check_idle(unit, "state_dict")
    shown: list[FullGroup] = []
    try:
        for group in (*unit.groups, *unit.borrowed):
            if isinstance(group.summoned, _Saved):
                continue  # by a module around this one, which has a parameter of this group too
            group.check_in()
            group.reshard()
            if kind_for(group, kind) is not StateDictType.LOCAL_STATE_DICT:
                shown.append(_Saved(group, _values(group, kind, config)))
        yield
    finally:
        for full in shown:
            full.close()


class _Saved(FullGroup):
    """The full parameters that a group shows to a state dict."""


class _Loaded(FullGroup):
    """The full parameters into which values are loaded. If loading fails in the middle, no hook closes them."""

    is_left_by_errors = True


def check_idle(unit: WrappedUnit, method: str) -> None:
    unit.recover()
    if unit.phase is not Phase.IDLE:
        phase = unit.phase.name.lower()
        raise AssertionError(f"{method}() of {unit!r} was called inside its {phase}: call it after, on all ranks")


def kind_for(group: Group, kind: StateDictType) -> StateDictType:
    """The kind of state dict to make: ``kind``, or a full one where nothing is sharded."""
    return kind if group.data.shard_group is not None else StateDictType.FULL_STATE_DICT


def _is_dropped(config: StateDictConfig, group: Group) -> bool:
    """Whether this rank's state dict gets nothing of a group's module."""
    return isinstance(config, FullStateDictConfig) and config.rank0_only and group.data.shard_rank != 0


def _values(group: Group, kind: StateDictType, config: StateDictConfig) -> dict[int, nn.Parameter]:
    """The value that each parameter shows, in compact memory of its own; none on ranks that keep nothing."""
    if group.memory.has_meta:
        raise RuntimeError(group.memory.meta_message())
    summoned: FullGroup | None = group.summoned
    if summoned is None:
        whole = gather(group, [param.held for param in group.params])
    else:
        whole = {index: local_tensor(full) for index, full in summoned.shown().items()}
    if _is_dropped(config, group):
        return {}
    as_rows, to_cpu = kind_for(group, kind) is StateDictType.SHARDED_STATE_DICT, config.offload_to_cpu
    values = {}
    for index, value in whole.items():
        param = group.params[index]
        values[index] = nn.Parameter(given_out(value, param, as_rows, to_cpu), param.sharded.requires_grad)
    return values


def given_out(whole: torch.Tensor, param: ShardedParameter, as_rows: bool, to_cpu: bool) -> torch.Tensor:
    """The entry of a state dict for a whole value of ``param``, in its own memory: this rank's rows of it as a DTensor,
    or all of it, also beside tensor parallel."""
    if as_rows:
        rows = own_copy(param.rows_of(whole, param.data.shard_rank), to_cpu)
        return make_dtensor(rows, altered_spec(param.spec, dtype=whole.dtype))
    if param.unsharded_spec is not None:
        whole = make_dtensor(whole, altered_spec(param.unsharded_spec, dtype=whole.dtype)).full_tensor()
    return own_copy(whole, to_cpu)


def own_copy(tensor: torch.Tensor, to_cpu: bool) -> torch.Tensor:
    moved = tensor.to("cpu") if to_cpu else tensor
    return moved.clone(memory_format=torch.contiguous_format) if moved is tensor else moved


def all_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor. What a DTensor has on the CPU after offloading goes back to its mesh, to communicate."""
    if is_sharded_tensor(tensor):
        return whole_of_sharded_tensor(tensor)
    if not isinstance(tensor, DTensor):
        return tensor
    return make_dtensor(local_of(tensor).to(tensor.device_mesh.device_type), spec_of(tensor)).full_tensor()


def finish(
    wrapper: nn.Module, unit: WrappedUnit, kind: StateDictType, config: StateDictConfig, saved: Any, prefix: str
) -> None:
    """Finish the state dict that a wrapped module has made: local shards, buffers, and ranks that keep nothing."""
    paths, groups = _paths(wrapper), (*unit.groups, *unit.borrowed)
    kept = not any(_is_dropped(config, group) for group in groups)
    for group in groups:
        local = kind_for(group, kind) is StateDictType.LOCAL_STATE_DICT
        for key in _keys(group, paths, prefix) if local or not kept else ():
            saved.pop(key, None)
        for number in range(len(group.memory.shards)) if group in unit.groups else ():
            if not kept:
                saved.pop(prefix + flat_name(number), None)
            if local:
                value = _local_shard(group, number)
                saved[prefix + flat_name(number)] = value.cpu() if config.offload_to_cpu else value
    for module, name in unit.buffers:
        for key in [_join(prefix, path, name) for path in paths.get(module, ())]:
            if key in saved and not kept:
                del saved[key]
            elif key in saved:
                dtype = unit.buffer_dtypes.get((module, name), saved[key].dtype)
                saved[key] = saved[key].to("cpu" if config.offload_to_cpu else None, dtype)


def _join(prefix: str, path: str, name: str) -> str:
    module = plain_name(path)
    return f"{prefix}{module}.{name}" if module else f"{prefix}{name}"


def _local_shard(group: Group, number: int) -> DTensor:
    """A section's shard, as it lies, as a DTensor of all that ranks have: it has torch's cuts, but no padding."""
    data, section, shard = group.data, group.sections[number], group.memory.shards[number]
    placements = [Replicate(), Shard(0)] if data.replicates else [Shard(0)]
    spec = sharding_spec(data.mesh, placements, torch.Size((section.plan.end,)), (1,), section.dtype)
    give_own_storage(local := shard.detach()[: section.plan.held(data.shard_rank)])
    return make_dtensor(local, spec)


def _paths(wrapper: nn.Module) -> dict[nn.Module, list[str]]:
    """All names that each module inside of a wrapper has there, one for each place if it is shared."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in wrapper._fsdp_wrapped_module.named_modules(remove_duplicate=False):  # type: ignore[union-attr]
        paths.setdefault(module, []).append(path)
    return paths


def _keys(group: Group, paths: Mapping[nn.Module, list[str]], prefix: str) -> dict[str, int]:
    """The keys of a group's parameters in a wrapper's state dict, and which parameters these are."""
    places = [(at, index) for index, param in enumerate(group.params) for at in param.locations]
    return {_join(prefix, path, at.name): index for at, index in places for path in paths.get(at.module, ())}


# -- names -------------------------------------------------------------------------------------------------------------


def unwrap_names(wrapper: nn.Module, saved: Any, prefix: str, metadata: Any) -> None:
    """A hook after the state dict of ``wrapper`` is made: takes the wrapper's own name out of all names."""
    for key in [key for key in saved if key.startswith(prefix + _PREFIX)]:
        saved[prefix + key.removeprefix(prefix + _PREFIX)] = saved.pop(key)
    known = getattr(saved, "_metadata", {})
    for path in [path for path in known if f"{path}.".startswith(prefix + _PREFIX)]:
        known.setdefault(f"{path}.".replace(prefix + _PREFIX, prefix, 1)[:-1], known[path])


# -- loading -----------------------------------------------------------------------------------------------------------


class Loading:
    """The hooks around a wrapped module's part of ``load_state_dict``."""

    def __init__(self, unit: WrappedUnit) -> None:
        self.unit = unit
        self._shown: list[FullGroup] = []
        self.is_local = False  # whether a state dict of local shards is being loaded

    def before(self, wrapper: nn.Module, values: Any, prefix: str, *_: Any) -> None:
        """Let the module show whole parameters, into which the values are copied: all ranks, whatever they hold."""
        check_idle(self.unit, "load_state_dict")
        self.close()
        inner = prefix + _PREFIX
        for key in [key for key in values if key.startswith(prefix) and not key.startswith(inner)]:
            values[inner + key.removeprefix(prefix)] = values.pop(key)
        if not self.is_local and any(key.rpartition(".")[2].startswith(FLAT_NAME) for key in values):
            for inside in wrapper.modules():
                if isinstance(loading := getattr(inside, "_loading", None), Loading):
                    loading.is_local = True
        paths = _paths(wrapper)
        for group in (*self.unit.groups, *self.unit.borrowed):
            plain = _keys(group, paths, inner)
            for key in [key for key in values if key in plain]:  # in one order on all ranks, which communicate
                values[key] = self._whole(group, plain[key], values[key])
            if isinstance(group.params[0].sharded, FlatParameter):  # torch's functions know one name of what is tied
                given = {plain[key]: values[key] for key in values.keys() & plain.keys()}
                values.update((key, given[plain[key]]) for key in plain.keys() - values.keys() if plain[key] in given)
            summoned = group.summoned is not None  # by a module around this one, or by the user: they write back
            if not summoned:
                group.check_in()
                group.reshard()
            is_own = group in self.unit.groups
            if is_own and inner + FLAT_NAME in values:
                self._load_local(group, values, inner)
                values.update((name, self._blank(group, index).detach()) for name, index in plain.items())
            if not summoned:
                blank = {index: self._blank(group, index) for index in range(len(group.params))}
                self._shown.append(_Loaded(group, blank))
            if self.is_local and not is_own:  # loaded by the unit to which it belongs, before this one or after
                assert group.summoned is not None
                shown = group.summoned.shown()
                values.update((name, shown[index].detach()) for name, index in plain.items())

    def _load_local(self, group: Group, values: Any, prefix: str) -> None:
        for number in range(len(group.memory.shards)):
            local = _local_shard(group, number).to_local()
            held = values.pop(prefix + flat_name(number), None)
            if held is None:
                continue
            held = local_tensor(held)
            if held.shape != local.shape:
                raise RuntimeError(
                    f"'{plain_name(prefix)}{flat_name(number)}' has {held.numel()} elements for this rank, which "
                    f"holds {local.numel()}: a local state dict loads only into the sharding of which it was made"
                )
            local.copy_(held)

    def _whole(self, group: Group, index: int, value: Any) -> Any:
        """A value as the module shows it: without data parallelism."""
        spec, value = group.params[index].unsharded_spec, all_of(value)
        if spec is None or not isinstance(value, torch.Tensor):
            return value
        return distribute_tensor(value.to(group.device), spec.mesh, spec.placements)

    def _blank(self, group: Group, index: int) -> nn.Parameter:
        """A whole parameter with this rank's part as it was, and zeros in the parts that it does not keep."""
        param = group.params[index]
        flat = torch.zeros(param.shape.numel(), dtype=param.dtype, device=group.device)
        whole = param.view(flat, param.plan_shape.shape)
        if not param.held.is_meta:
            param.chunk_of(whole, group.data.shard_rank).copy_(param.held)
        shown = whole if param.unsharded_spec is None else make_dtensor(whole, param.unsharded_spec)
        return nn.Parameter(shown, requires_grad=param.sharded.requires_grad)

    def after(self, wrapper: nn.Module, incompatible: Any) -> None:
        """Keep this rank's part of what was loaded."""
        for full in self._shown:
            full.write_back()
        self.close()
        self.is_local = False
        for names in incompatible:
            names[:] = map(plain_name, names)

    def close(self) -> None:
        shown, self._shown = self._shown, []
        for full in shown:
            full.close()
