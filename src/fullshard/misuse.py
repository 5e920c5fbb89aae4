"""Explains four mistakes for which torch's own errors name neither the module nor the remedy, or are missing.

First, a module runs outside the forward of its unit, where its parameters are sharded. Second, plain tensors of a state
dict are loaded into sharded parameters. Third, a program reads a number of which this rank has a part. Fourth,
``to_empty()`` leaves buffers without values that no state dict fills. Owns the hooks that notice this. In a step only
the root's own modules, such as an embedding and a head, have one: these are the parts of a model that programs call
directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn as nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor

from fullshard.group.owners import owner_of
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import ShardedParameter, plain_name
from fullshard.policies import warn
from fullshard.schedule.hooks import when_sharded
from fullshard.schedule.schedule import Schedule, Scheduled, first_checks
from fullshard.schedule.states import IDLE
from fullshard.schedule.unit import Unit
from fullshard.torch_private import non_persistent_buffers, version_of
from fullshard.torch_rules import on_scalar_read


@when_sharded
def watch_misuse(unit: Unit) -> None:
    """Let modules with a unit's parameters fail if they run, or load plain tensors, while these are sharded."""
    _watch_scalar_reads()
    for module in {at.module for group in unit.groups for param in group.params for at in param.locations}:
        module.register_load_state_dict_pre_hook(partial(_refuse_plain, unit))
        if module not in unit.modules:
            hook = module.register_forward_pre_hook(partial(_refuse_outside, unit), with_kwargs=True)
            unit.root_hooks.append((module, hook))


@cache
def _watch_scalar_reads() -> None:
    on_scalar_read(_warn_of_part)


def _warn_of_part(scalar: DTensor) -> None:
    """Warn if the ranks read different values from ``scalar``: their parts of a sum, a norm or a maximum."""
    sizes = scalar.device_mesh.shape
    if any(placement.is_partial() and size > 1 for placement, size in zip(scalar.placements, sizes, strict=True)):
        warn(
            f"a number was read from a DTensor placed as {scalar.placements}, of which each rank has only its part: "
            f"the ranks read different numbers. Combine the parts first, on every rank: tensor.full_tensor().item()"
        )


def _sharded(unit: Unit, module: nn.Module) -> Iterator[tuple[str, ParamGroup, ShardedParameter]]:
    """The unit's parameters that a module shows sharded, each with its name in the module and its group."""
    for name, shown in module._parameters.items():
        group, index = owner_of(shown) or (None, 0)
        if isinstance(group, ParamGroup) and group in unit.groups and shown is group.params[index].sharded:
            yield name, group, group.params[index]


def _refuse_outside(unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before a module's forward. A forward without tensors, or with DTensors, may read sharded parameters."""
    if unit.state is not IDLE or is_dynamo_compiling():
        return
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    if not given or any(isinstance(each, DTensor) for each in given):
        return
    for _, group, _ in _sharded(unit, module):
        is_whole = unit.is_wrapper and group.data.shard_group is None
        if is_whole or group.summoned is not None:
            continue
        top = unit.modules if unit.schedule is None else unit.schedule.root.modules
        names = {inner: plain_name(path) for each in top for path, inner in each.named_modules()}
        where = names.get(module, "")  # not the parameter's name: it may be tied to a different module
        method = "for another method, call register_fsdp_forward_method(model, 'name') first; "
        raise RuntimeError(
            f"'{where}' ({type(module).__name__}) was called outside the forward of {unit!r}, where its parameters are "
            f"sharded. Call {unit!r} itself: model(...), and not model.forward(...) or a part of it; "
            f"{'' if unit.is_wrapper else method}or gather the parameters with summon_full_params(model)"
        )


def _refuse_plain(
    unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
) -> None:
    """A hook before a module loads its part of a state dict. The unit was resharded before."""
    if local_metadata.get("assign_to_params_buffers"):
        return
    for name, _, param in _sharded(unit, module):
        value: Any = state_dict.get(prefix + name)
        if isinstance(param.sharded, DTensor) and type(value) in (torch.Tensor, nn.Parameter) and value.ndim > 0:
            raise RuntimeError(
                f"parameter '{prefix}{name}' is sharded, and load_state_dict() was given a plain tensor of shape "
                f"{tuple(value.shape)} for it. If every rank has the whole state dict: set_model_state_dict(model, "
                f"state_dict, options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint."
                f"state_dict; with broadcast_from_rank0=True it is enough if the first rank has it"
            )


def note_emptied(unit: Unit, buffers: Iterable[tuple[nn.Module, str, str]]) -> None:
    """Note buffers of :func:`buffers_on_meta` that are on a device now, for a warning before the next forward."""
    unit.emptied += [(module._buffers.get(name), module, name, path) for module, name, path in buffers]
    if unit.emptied and _warn_of_emptied not in first_checks:
        first_checks.append(_warn_of_emptied)
    if unit.emptied and unit.schedule is not None:
        unit.schedule.checks.append(_warn_of_emptied)


def buffers_on_meta(module: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """The buffers on the meta device that no state dict fills: their modules, names and paths."""
    return [
        (inner, name, f"{path}.{name}" if path else name)
        for path, inner in module.named_modules()
        for name, buffer in inner._buffers.items()
        if buffer is not None and buffer.is_meta and name in non_persistent_buffers(inner)
    ]


def _warn_of_emptied(schedule: Schedule, unit: Scheduled) -> None:
    """Warn of non-persistent buffers that ``to_empty()`` left undefined and that nobody has written since."""
    names: set[str] = set()
    for each in schedule.units:
        for buffer, module, name, path in each.emptied:
            is_there = buffer is not None and module._buffers.get(name) is buffer
            if is_there and not buffer.is_meta and version_of(buffer) == 0:
                names.add(path)
        each.emptied.clear()
    if names:
        warn(
            f"these buffers are in no state dict and were left uninitialized by to_empty(): {sorted(names)}. "
            f"Compute them again, for example with the module's reset_parameters()",
            UserWarning,
        )
