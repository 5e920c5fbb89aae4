"""Strangers: trainable parameters of a sharded model that belong to no group, for example because ``fully_shard`` was
not called on the root.

Their gradients are not reduced, so each rank trains its own copy, and the copies drift apart without an error. Owns the
search for them in a model, at its first forward and after modules were put into others, and the search for the model to
which an optimizer's parameters belong.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook

from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import plain_name
from fullshard.policies import warn
from fullshard.schedule.schedule import Schedule, Scheduled, first_checks
from fullshard.schedule.unit import unit_of, units_in
from fullshard.torch_private import replicated

#: How many names a message has at most.
_NAMED = 6


def known_to(groups: Iterable[ParamGroup]) -> set[int]:
    """The ids of the parameters of groups: sharded, unsharded, and as modules show them."""
    shown = (each for group in groups for param in group.params for each in (param.sharded, param.unsharded))
    return {*map(id, shown), *(id(param) for group in groups for param in group.sharded)}


def strangers_in(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of a model, by name, that belong to no group and are not ignored.

    Parameters of ``DistributedDataParallel`` or ``replicate`` are left out, and so are DTensors on a mesh over ranks
    with different data, because DTensor reduces their gradients. On one rank there are none.
    """
    units = units_in(model)
    groups = [group for unit in units for group in unit.groups]
    meshes = [data.mesh.mesh for data in dict.fromkeys(group.data for group in groups) if data.mesh.size() > 1]
    if not meshes:
        return {}
    known = known_to(groups).union(*(unit.ignored for unit in units))
    known |= _replicated(model.modules())

    def is_reduced(param: nn.Parameter) -> bool:
        return isinstance(param, DTensor) and any(
            torch.isin(param.device_mesh.mesh, ranks).sum() > 1 for ranks in meshes
        )

    return {
        plain_name(name): param
        for name, param in model.named_parameters()
        if param.requires_grad and id(param) not in known and not is_reduced(param)
    }


def _replicated(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of the parameters in ``modules`` that ``DistributedDataParallel`` or ``replicate`` manages."""
    found = [*modules]
    replicas = [module for module in found if isinstance(module, nn.parallel.DistributedDataParallel)]
    return {id(param) for module in (*replicas, *replicated(found)) for param in module.parameters()}


def explain_strangers(model: nn.Module, names: Sequence[str]) -> tuple[str, str]:
    """Two sentences about strangers of a model: the problem, and what to do."""
    cls = type(model).__name__
    is_wrapped = any(unit.is_wrapper for unit in units_in(model))
    call = (
        f"Wrap this {cls} too, FullyShardedDataParallel(model),"
        if is_wrapped
        else f"Call fully_shard(model) on this {cls} too,"
    )
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"parameters of the {cls} are trained and not sharded: {[*names[:_NAMED]]}{more}. Nobody reduces their "
        f"gradients, so each rank trains a copy of its own, and the copies drift apart",
        f"{call} after the modules inside it and before the optimizer is built, or reduce these gradients yourself",
    )


def strangers_of(params: Iterable[torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Explain which of ``params``, none of which belongs to a group, are strangers of a model with sharded modules.

    A parameter does not know its module, so this searches all existing modules. It leaves out models without sharded
    modules, and parameters inside of sharded modules: these are ignored, or the first forward has warned about them.
    """
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in each.__dict__]
    sharded = [module for module in modules if unit_of(module) is not None]
    inside = {inner for module in sharded for inner in module.modules()}
    known = {id(param) for module in sharded for param in module.parameters()} | _replicated(modules)
    remaining = {id(param) for param in params} - known
    around = [module for module in modules if module not in inside and not inside.isdisjoint(module.modules())]
    while remaining:
        found = {
            model: {id(param): name for name, param in strangers_in(model).items() if id(param) in remaining}
            for model in around
        }
        # Of the models with the most strangers, the smallest that has a forward: modules around it are a framework's.
        model = max(found, key=lambda each: (len(found[each]), _runs(each), -len([*each.modules()])), default=None)
        if model is None or not found[model]:
            return
        yield explain_strangers(model, [*found[model].values()])
        remaining.difference_update(found[model])


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def warn_of_added_parameters(modules: Sequence[nn.Module], groups: Sequence[ParamGroup], ignored: set[int]) -> None:
    """Warn of trainable parameters that no group has. Call it once groups have adopted replaced parameters."""
    if any(group.summoned for group in groups):
        return
    known = ignored | {id(tensor) for group in groups for p in group.params for tensor in (p.sharded, p.unsharded)}
    strangers = [
        name
        for module in modules
        for name, param in module.named_parameters()
        if param.requires_grad and id(param) not in known
    ]
    if strangers:
        warn(
            f"these trainable parameters were added after fully_shard: {strangers}. They are neither sharded nor are "
            f"their gradients reduced: add them before sharding, or reduce their gradients yourself",
            UserWarning,
        )


_checked = weakref.WeakSet[Schedule]()  # the trees that were checked since a module was put into another


def _check_again(*_: object) -> None:
    """Check all trees again at their next forward: a module was put into another, of whichever model."""
    while _checked:
        _checked.pop().checks.append(_look_for_added)


def _look_for_added(schedule: Schedule, unit: Scheduled) -> None:
    """Warn at the first forward of a tree, and at each one after modules were put into others."""
    _checked.add(schedule)
    ignored = {param for each in schedule.units for param in each.ignored}
    warn_of_added_parameters(unit.modules, schedule.groups, ignored)


register_module_module_registration_hook(_check_again)
first_checks.append(_look_for_added)
