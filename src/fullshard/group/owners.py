"""Which parameter objects were taken by which group.

A parameter that is tied across groups is met again as the object that it was before sharding. Owns weak references to
those objects, so that the second group can find the first; and the check that no optimizer still steps on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullshard.group.comm_context import Clock
from fullshard.group.context import GroupOptions
from fullshard.group.parameter import ShardedParameter
from fullshard.torch_private import in_backward


class Owner(Protocol):
    """A group, as the owner of parameters."""

    params: list[ShardedParameter]
    modules: tuple[nn.Module, ...]
    options: GroupOptions
    device: torch.device
    clock: Clock

    def count_write(self) -> None:
        """Note a write to the sharded parameters, perhaps without a trace."""

    def show_too(self, index: int, module: nn.Module, where: str | tuple[Any, ...]) -> None:
        """Show a parameter elsewhere too."""


#: By id: the group, which of its parameters it is, and the object itself unless the group still holds it.
_owners: dict[int, tuple[weakref.ref[Owner], int, weakref.ref[nn.Parameter] | None]] = {}
_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, list[weakref.ref[Owner]]]] = (
    weakref.WeakKeyDictionary()
)
_watching = False
_then: list[Callable[[torch.optim.Optimizer], None]] = []


def before_each_step(call: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call back before each step of an optimizer that has parameters of groups, once they were checked."""
    _then.append(call)


def register(group: Owner, tensors: Iterable[tuple[int, nn.Parameter]]) -> None:
    """Tensors stand for the parameters of ``group``, by index: as it took them or as it shows them."""
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_count_step)
        _watching = True
    for index, param in tensors:
        key = id(param)
        _owners[key] = (weakref.ref(group), index, weakref.ref(param, partial(_forget, key)))


def register_sharded(group: Owner) -> None:
    """The sharded parameters of ``group``, which live as long as it does. A weak reference would keep torch from
    swapping their contents in ``module.to()``."""
    for index, param in enumerate(group.params):
        _owners[id(param.sharded)] = (weakref.ref(group), index, None)


def refuse_gradients(original: nn.Parameter, name: str) -> None:
    """Make a backward raise if it reaches a parameter as it was before sharding: no group reduces its gradient."""

    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError(
            f"a gradient came to parameter '{name}' as it was before it was sharded: something computes with it that "
            f"holds it apart from its module (a closure, an object). Read the parameter from its module in each forward"
        )

    original.register_hook(refuse)


def _forget(key: int, gone: weakref.ref[nn.Parameter]) -> None:
    if key in _owners and _owners[key][2] is gone:
        del _owners[key]


def owner_of(param: torch.Tensor | None) -> tuple[Owner, int] | None:
    """The group that took this object, and as which of its parameters."""
    if id(param) not in _owners:
        return None
    reference, index, original = _owners[id(param)]
    group = reference()
    if group is not None and param is (original() if original is not None else group.params[index].sharded):
        return group, index
    del _owners[id(param)]
    return None


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count a step: foreach optimizers on DTensors leave no trace in any version."""
    for reference in _stepped[optimizer][1]:
        group = reference()
        if group is not None:
            group.count_write()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    count = sum([len(options["params"]) for options in optimizer.param_groups])
    known = _stepped.get(optimizer)
    if known is None or known[0] != count:
        known = _stepped[optimizer] = count, _groups_of(optimizer)
    if known[1]:
        _count_step(optimizer, args, kwargs)  # after a step that raises no hook is called
        groups = [group for reference in known[1] if (group := reference()) is not None]
        for clock in {id(group.clock): group.clock for group in groups}.values():
            clock.steps += not in_backward()  # where it steps for the parameters of which this rank has a part
        for call in _then:
            call(optimizer)


def _groups_of(optimizer: torch.optim.Optimizer) -> list[weakref.ref[Owner]]:
    """The groups whose parameters an optimizer has. It is refused if these are not what is trained."""
    groups: dict[int, Owner] = {}
    for options in optimizer.param_groups:
        for param in options["params"]:
            owner = owner_of(param)
            if owner is not None:
                groups[id(owner[0])] = owner[0]
            if owner is not None and param is not owner[0].params[owner[1]].sharded:
                group, index = owner
                unsharded = param is group.params[index].unsharded
                when = "while the module was unsharded" if unsharded else "before fully_shard"
                raise RuntimeError(
                    f"this {type(optimizer).__name__} was built {when}: its parameter '{group.params[index].name}' is "
                    f"not the one that is trained. Build the optimizer after sharding, from model.parameters(), and "
                    f"call model.reshard() first if a forward was run before"
                )
    return [weakref.ref(group) for group in groups.values()]
