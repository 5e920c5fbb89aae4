"""The hooks on a unit's modules: around forward, and around state dicts.

A hook is a partial function of its unit, so that a deep copy of a module gets hooks of its own unit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fullshard.schedule.unit import Unit, outside_graphs, run_hook


def _reshard(unit: Unit, *args: Any, **kwargs: Any) -> None:
    """Let the modules show the sharded parameters, before a state dict is made or loaded."""
    for group in unit.groups:
        group.reshard()


def _adopt(unit: Unit, *args: Any) -> None:
    """Update the ``grad_dtype`` of a parameter that a state dict replaced."""
    for group in unit.groups:
        if any(param.grad_dtype != "own" for param in group.params):
            group.notice_changes()


_listeners: list[Callable[[Unit], None]] = []


def when_sharded(listener: Callable[[Unit], None]) -> Callable[[Unit], None]:
    """Call ``listener`` with each unit from now on, once its modules are sharded."""
    _listeners.append(listener)
    return listener


def attach(unit: Unit) -> None:
    """Register the hooks of ``unit`` on its modules."""
    outside_graphs()
    for module in unit.modules:
        module.__dict__["_fullshard_unit"] = unit
        module.register_forward_pre_hook(partial(run_hook, unit, "pre_forward"), prepend=True, with_kwargs=True)
        module.register_forward_hook(partial(run_hook, unit, "post_forward"))
    holders = {location.module: None for group in unit.groups for param in group.params for location in param.locations}
    for module in holders:
        module.register_state_dict_pre_hook(partial(_reshard, unit))
        module.register_load_state_dict_pre_hook(partial(_reshard, unit))
        module.register_load_state_dict_post_hook(partial(_adopt, unit))
    for listener in _listeners:
        listener(unit)
