"""The state and the group that torch's ``FSDPMemTracker`` reads, and changes, on a sharded module.

They are views of a unit with the names of torch's tracker (torch.distributed._tools.fsdp2_mem_tracker), made when they
are first read. The tracker sees memory as tensors and the sizes of their storages. So while it runs, buffers that gave
their memory to others get empty storages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.buffer.slots import SHARED
from fullshard.group.param_group import ParamGroup
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import Phase, Unit


def _parameter(group: ParamGroup, index: int) -> SimpleNamespace:
    """The tensors of one parameter, from which the tracker knows the purpose of memory. The gradient of an unsharded
    parameter is autograd's, or the buffer into which it was copied."""
    param, gradient = group.params[index], SimpleNamespace(grad=group.gradients.unreduced_tensor(index))
    leaf = torch.empty(0) if param.unsharded is None else param.unsharded
    return SimpleNamespace(sharded_param=param.sharded, unsharded_param=leaf, _unsharded_param=gradient)


class _Group:
    """The groups of a unit. The tracker wraps ``pre_backward`` and ``post_backward``."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.is_watched = False

    @property
    def fsdp_params(self) -> list[SimpleNamespace]:
        """The parameters of the whole tree if it is known: a group's gradients may arrive in another group's
        backward."""
        schedule = self._unit.schedule
        groups = self._unit.groups if schedule is None else schedule.groups()
        return [_parameter(group, index) for group in groups for index in range(len(group.params))]

    @property
    def pre_backward(self) -> Callable[..., None]:
        return self._begin

    @pre_backward.setter
    def pre_backward(self, function: Callable[..., None]) -> None:
        self.is_watched = function != self._begin

        def begin(schedule: Schedule) -> None:
            if self._unit.phase is not Phase.BACKWARD:
                function(schedule)

        self._install("begin_backward", begin)

    @property
    def post_backward(self) -> Callable[..., None]:
        return self._end

    @post_backward.setter
    def post_backward(self, function: Callable[..., None]) -> None:
        def end(schedule: Schedule, ahead: bool = False) -> None:
            self.report_memory()
            (function if self._unit.phase is Phase.BACKWARD else self._end)(schedule, ahead)

        self._install("finish_backward", end)

    def _install(self, name: str, function: Callable[..., None]) -> None:
        """Make the unit call ``function`` instead of its own method while the tracker runs."""
        if self.is_watched:
            vars(self._unit)[name] = function
        else:
            vars(self._unit).pop(name, None)

    def _begin(self, schedule: Schedule) -> None:
        Unit.begin_backward(self._unit, schedule)
        self.report_memory()

    def _end(self, schedule: Schedule, ahead: bool) -> None:
        Unit.finish_backward(self._unit, schedule, ahead)
        for group in self._unit.groups:
            group.comm.reductions.wait_for_oldest()  # the tracker expects sharded gradients now
            group.comm.reductions.hand_over_arrived()
        self.report_memory()

    def report_memory(self) -> None:
        """Show the tracker the memory of each buffer, before anything is sent from it."""
        schedule = self._unit.schedule
        for context in {group.comm for group in schedule.groups()} if schedule is not None else ():
            for buffer in chain.from_iterable(pool.buffers for pool in context.pools.values()):
                buffer.forget_address()
                if "memory" in vars(buffer):
                    buffer.memory.detach()
        for _, lease in chain.from_iterable(SHARED.free.values()):
            lease.view(torch.uint8, 0, (lease.nbytes,))


class _State:
    """The state of a module. If a unit has several modules, the first one has the groups."""

    def __init__(self, unit: Unit, module: nn.Module) -> None:
        is_first = bool(unit.groups) and module is unit.modules[0]
        self._fsdp_param_group = _Group(unit) if is_first else None
        before, after = module._forward_pre_hooks, module._forward_hooks
        self._before, self._pre_forward_hook_handle = _find(unit, before, module._forward_pre_hooks_with_kwargs)
        self._after, self._post_forward_hook_handle = _find(unit, after)

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._report_memory()
        result = self._before(module, args, kwargs)
        self._report_memory()
        return result

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if output is None and sys.exception() is not None:
            return None  # recomputation stops early: the tracker calls this then too
        output = self._after(module, args, output)
        self._report_memory()
        return output

    def _report_memory(self) -> None:
        if self._fsdp_param_group is not None and self._fsdp_param_group.is_watched:
            self._fsdp_param_group.report_memory()


def _find(unit: Unit, hooks: dict[int, Any], *more: Any) -> tuple[Callable[..., Any], RemovableHandle]:
    """The hook of a unit among those of a module, and a handle that removes it."""
    key, hook = next((k, h) for k, h in hooks.items() if isinstance(h, partial) and h.args and h.args[0] is unit)
    handle = RemovableHandle(hooks, extra_dict=list(more))
    handle.id = key
    return hook, handle


def state_of(unit: Unit, module: nn.Module) -> Any:
    """The state of a module as torch calls it, the same object each time."""
    of, states = vars(unit).get("_states_of_torch", (None, {}))
    if of is not unit:  # it belongs to the unit of which this one is a deep copy
        states = {}
        vars(unit)["_states_of_torch"] = unit, states
    if module not in states:
        states[module] = _State(unit, module)
    return states[module]
