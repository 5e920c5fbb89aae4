"""The hooks by which a unit's modules run: around forward, around state dicts.

Hooks are small objects that know their unit, so that a deep copy of a module gets hooks of its own unit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn as nn
from torch.compiler import is_dynamo_compiling

from fullshard.schedule.unit import Unit
from fullshard.torch_private import compiler_listens


class _Hook:
    def __init__(self, unit: Unit) -> None:
        self.unit = unit


class PreForward(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_dynamo_compiling() or compiler_listens():
            return _outside_graphs()[0](self.unit, module, args, kwargs)
        return self.unit.pre_forward(module, args, kwargs)


class PostForward(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if is_dynamo_compiling() or compiler_listens():
            return _outside_graphs()[1](self.unit, module, args, output)
        return self.unit.post_forward(module, args, output)


class Reshard(_Hook):
    """Runs before a state dict is made or loaded: lets the modules show the sharded parameters."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        for group in self.unit.groups:
            group.reshard()


class Adopt(_Hook):
    """Runs after a state dict was loaded: a parameter that it replaced passes its ``grad_dtype`` on."""

    def __call__(self, *args: Any) -> None:
        for group in self.unit.groups:
            if any(param.grad_dtype != "own" for param in group.params):
                group.check_in()


@cache
def _outside_graphs() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Keep a hook around a forward out of compiled graphs: what it does to parameters cannot be traced."""
    return torch.compiler.disable(Unit.pre_forward), torch.compiler.disable(Unit.post_forward)


def attach(unit: Unit) -> None:
    """Register the hooks of ``unit`` on its modules."""
    _outside_graphs()
    before, after, reshard, adopt = PreForward(unit), PostForward(unit), Reshard(unit), Adopt(unit)
    for module in unit.modules:
        module.__dict__["_fullshard_unit"] = unit
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after)
    holders = {location.module: None for group in unit.groups for param in group.params for location in param.locations}
    for module in holders:
        module.register_state_dict_pre_hook(reshard)
        module.register_load_state_dict_pre_hook(reshard)
        module.register_load_state_dict_post_hook(adopt)
