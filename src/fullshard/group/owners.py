"""Which parameter objects were taken by which group.

A tied parameter may be found again as the object that it was before sharding, and an optimizer may have been built from
such an object. Owns weak references to these objects, by which the group is found.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch
import torch.nn as nn

from fullshard.group.context import GroupContext

#: By id: the group, which of its parameters it is, and the object itself unless the group still holds it.
_owners: dict[int, tuple[weakref.ref[GroupContext], int, weakref.ref[nn.Parameter] | None]] = {}


def register(group: GroupContext, tensors: Iterable[tuple[int, nn.Parameter]]) -> None:
    """Note tensors that stand for parameters of ``group``, by index: the original ones, or those that modules show."""
    for index, param in tensors:
        key = id(param)
        _owners[key] = (weakref.ref(group), index, weakref.ref(param, partial(_forget, key)))


def register_sharded(group: GroupContext) -> None:
    """Note the sharded parameters of ``group``, which live as long as it does. A weak reference would keep torch from
    swapping their contents in ``module.to()``."""
    for index, param in enumerate(group.params):
        _owners[id(param.sharded)] = (weakref.ref(group), index, None)


def refuse_gradients(original: nn.Parameter, name: str) -> None:
    """Make a backward raise if it reaches a parameter as it was before sharding: no group reduces its gradient."""

    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError(
            f"a gradient arrived at parameter '{name}' as it was before sharding: something outside its module (a "
            f"closure, an object) still computes with it. Read the parameter from its module in each forward"
        )

    original.register_hook(refuse)


def _forget(key: int, gone: weakref.ref[nn.Parameter]) -> None:
    if key in _owners and _owners[key][2] is gone:
        del _owners[key]


def owner_of(param: torch.Tensor | None) -> tuple[GroupContext, int] | None:
    """The group that took this object, and the index of its parameter there."""
    if id(param) not in _owners:
        return None
    reference, index, original = _owners[id(param)]
    group = reference()
    if group is not None and param is (original() if original is not None else group.params[index].sharded):
        return group, index
    del _owners[id(param)]
    return None
