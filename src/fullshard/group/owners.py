"""Which parameter objects were taken by which group.

A tied parameter may be found again as the object that it was before sharding, and an optimizer may have been built from
such an object. Owns weak references to these objects, by which the group is found, and what an assignment to ``data``
of one does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fullshard.group.context import GroupContext
from fullshard.torch_private import local_of, set_local, spec_of

#: By id: the group, which of its parameters it is, and the object itself unless the group still holds it.
_owners: dict[int, tuple[weakref.ref[GroupContext], int, weakref.ref[nn.Parameter] | None]] = {}


def register(group: GroupContext, tensors: Iterable[tuple[int, nn.Parameter]]) -> None:
    """Note which tensors stand for the parameters of ``group``, by index: as it took them or as it shows them."""
    for index, param in tensors:
        key = id(param)
        _owners[key] = (weakref.ref(group), index, weakref.ref(param, partial(_forget, key)))


def register_sharded(group: GroupContext) -> None:
    """Note the sharded parameters of ``group``, which live as long as it does. A weak reference would keep torch from
    swapping their contents in ``module.to()``."""
    _follow_assignments()
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


@cache
def _follow_assignments() -> None:
    """Let ``param.data = values`` give a sharded parameter its values. Torch changes only the size and dtype of a
    DTensor there, silently, and DTensors that belong to no group stay so."""
    by_torch: Any = torch.Tensor.data

    def assign(tensor: Any, data: Any) -> None:
        owner = owner_of(tensor)
        if owner is None or tensor is not owner[0].params[owner[1]].sharded:
            by_torch.__set__(tensor, data)
            return
        param, local = owner[0].params[owner[1]], local_of(tensor)
        if not isinstance(data, DTensor) or spec_of(data).placements != spec_of(tensor).placements:
            placed = spec_of(data).placements if isinstance(data, DTensor) else "a plain tensor"
            raise RuntimeError(
                f"parameter '{param.name}' was given data that is {placed} where {spec_of(tensor).placements} is "
                f"expected: give it a DTensor with the same placements, such as a copy of its own data"
            )
        if local_of(data).shape != local.shape:
            raise RuntimeError(
                f"parameter '{param.name}' was given data of shape {tuple(data.shape)} where {tuple(tensor.shape)} is "
                f"expected"
            )
        by_torch.__set__(tensor, data)
        tensor._spec = spec_of(data)
        # A copy: ``data`` may lie in the shard of a group, as when two models exchange their parameters. The next
        # forward copies the values to the shard.
        set_local(tensor, local_of(data).detach().clone())

    DTensor.data = property(by_torch.__get__, assign)  # type: ignore[assignment]
