"""A unit: the modules that were sharded in one call, and the hooks by which they run.

Owns the phase of its modules, the autograd nodes that mark where their backward begins and ends, and the casts at their
boundaries. The schedule decides what is gathered when.

A forward call, with gradients, leaves two marks in autograd's graph::

    inputs ─▶ [EndOfBackward] ─▶ forward ─▶ outputs with a hook
                    ▲                            │
                    └── its backward: reduce,    └── its backward: gather
                        reshard

A recomputation (activation checkpointing) runs the forward inside of backward. It gathers and does not reshard, because
the backward of the same modules follows. It may stop before the forward ends, so nothing relies on the hook after a
forward.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from fullshard import tree
from fullshard.device import is_host
from fullshard.group.full_buffer import State
from fullshard.group.param_group import ParamGroup
from fullshard.policies import MixedPrecisionPolicy
from fullshard.schedule import marks
from fullshard.schedule.schedule import Schedule
from fullshard.torch_private import (
    base_of,
    outside_transforms,
    running_backward,
    storage_id,
    transforms_are_active,
    version_of,
)
from fullshard.tree import Replacements
from fullshard.updates import refuse_updated

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class UnitPhase(Enum):
    """The phase of a step in which the modules of a unit are."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()


class Use:
    """One forward call."""

    updates = 0  # steps of optimizers before it


class Unit:
    """Modules that were sharded in one call.

    ``groups`` are its own, more than one if its parameters are on several meshes. ``borrowed`` are groups of other
    units that have parameters tied to ones of these modules. ``needed`` are both, once the unit is part of a tree.
    """

    is_wrapper = False  # whether its one module is not the user's, but around it
    #: The attributes that a deep copy of the modules copies too.
    tree: tuple[str, ...] = ("modules", "groups", "borrowed", "forward_prefetch", "backward_prefetch", "root_hooks")

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, mp_policy: MixedPrecisionPolicy, auto_reshard: bool
    ) -> None:
        self.modules = tuple(modules)
        self.is_list = len(self.modules) > 1  # no module contains the others: never the root
        self.device = device
        self.mp_policy = mp_policy
        self.auto_reshard = auto_reshard  # whether the root may choose to stay unsharded: the user did not say
        self.finalizes_by_hand = False  # whether the user finalizes backwards by hand, if this is the root
        self.chose_to_keep = False  # whether the root stays unsharded by itself: parameters may change meanwhile
        self.groups: list[ParamGroup] = []
        self.borrowed: list[ParamGroup] = []
        self.needed: list[ParamGroup] = []
        self.schedule: Schedule | None = None
        self.ignored: set[int] = set()
        self.extents: list[Any] = []  # where its parameters lay before they were sharded, see :mod:`fullshard.overlaps`
        self.emptied: list[Any] = []  # buffers that to_empty() left, see :mod:`fullshard.misuse`
        #: Hooks that it keeps only as the root of a tree. A deep copy of a handle needs its module beside it.
        self.root_hooks: list[tuple[nn.Module, RemovableHandle]] = []
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        #: Whether to gather ahead, and in backward whether before this unit computes its gradients or after.
        self.prefetches_forward = True
        self.prefetches_backward: Literal["before", "after", "never"] = "before"
        self.casts_inputs = mp_policy.cast_forward_inputs
        self.phase = UnitPhase.IDLE
        self.to_run: set[nn.Module] = set()  # modules whose forward has not ended, while one of them runs
        self._in_method = False
        self._replaced = Replacements()  # in the callers' containers, while a forward runs
        self._use = Use()
        #: The inputs that are marked in the forward that runs, their aliases, and their versions before it.
        self._marked = marks.NONE
        self._recomputes = self._is_transformed = False  # whether its forward does, or is under a transform
        self._is_opaque = False  # whether its forward returned no tensor: nothing tells when its backward begins
        self._in_backward: dict[Use, None] = {}  # the uses whose backward has begun and not ended
        self._is_differentiated = False  # whether the backward that runs goes through an earlier one of this unit

    def __repr__(self) -> str:
        return ", ".join(type(module).__name__ for module in self.modules)

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Runs before the forward of each of the modules."""
        before, self._is_transformed = self._use, transforms_are_active()
        if self._is_transformed:
            with outside_transforms():
                is_outermost = self._enter()
        else:
            is_outermost = self._enter()
        if is_outermost and not is_host(self.device):
            args, kwargs = tree.to_device((args, kwargs), self.device, self._replaced.of(module))
        if (dtype := self.mp_policy.param_dtype) is not None and self.casts_inputs:
            args, kwargs = tree.cast_floating((args, kwargs), dtype, self._replaced.of(module))
        if self._use is not before:
            if self._is_transformed or torch.is_grad_enabled():
                args, kwargs = self._mark_end(module, args, kwargs)
        elif self.phase is UnitPhase.FORWARD and not self._in_method:
            for tensor in tree.tensors((args, kwargs)):
                if tensor.grad_fn is not None and torch.is_grad_enabled():  # a leaf would keep the hook
                    tensor.register_hook(partial(marks.mark_gradient, self, self._use))
        if self.schedule is not None and self.schedule.log.listeners:
            self.schedule.step.log("forward", self)
        return args, kwargs

    def _enter(self) -> bool:
        """Gather what a forward of one of the modules needs. Returns whether this is the outermost forward."""
        schedule = self.schedule or self.start()
        if self._in_method:
            return False
        recomputes = running_backward() >= 0
        if recomputes:
            schedule.begin_backward()  # of the tree, if all of it is recomputed
        if self.phase is UnitPhase.BACKWARD:
            for group in self.needed:
                group.unshard()
                group.wait_for_unshard()
            return False
        if self.phase is UnitPhase.FORWARD and not recomputes and not self.is_list:
            self._end_failed_forward(schedule)
        first = self.phase is UnitPhase.IDLE
        is_outermost = first and not recomputes and schedule.begin_forward(self)
        self.phase = UnitPhase.FORWARD
        if not self.to_run:
            self.to_run = set(self.modules)
        for group in self.needed:
            if first and not recomputes:
                schedule.order.entered.append(group)
            group.unshard()
            group.wait_for_unshard()
            if first:
                group.users.add(self)
        if first:
            self._use, self._recomputes = Use(), recomputes
            self._use.updates = schedule.step.updates
            if not recomputes and self.prefetches_forward:
                schedule.prefetch_forward(self)
        return is_outermost

    def _end_failed_forward(self, schedule: Schedule) -> None:
        """End a forward that an error has ended, if the model that calls this unit again caught the error."""
        outermost: Any = schedule.outermost
        if outermost is self or not schedule.step.now.has_forward or _calls(self) > 1 or not _calls(outermost):
            schedule.refuse_forward(self)
        self.end_forward(schedule)

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Runs after the forward of each of the modules."""
        if self.schedule is not None and self.schedule.log.listeners:
            self.schedule.step.log("forward", self, moves=False)
        if self._replaced.calls:
            self._replaced.restore(module)
        if self.phase is UnitPhase.BACKWARD or self._in_method:
            return tree.cast_floating(output, self.mp_policy.output_dtype)
        (inputs, aliases, versions), self._marked = self._marked, marks.NONE
        if versions != [*map(version_of, inputs)]:
            marks.follow_writes(inputs, aliases)
        gathered = {*map(attrgetter("full.buffer.storage_id"), self.needed)}
        found = tree.reachable_tensors(output)
        if aliases and {*map(id, aliases)} & {*map(id, found), *map(id, map(base_of, found))}:
            output = marks.own_inputs(output, inputs, aliases)
            found = tree.reachable_tensors(output)
        if gathered & {*map(storage_id, found)}:  # another group is about to get their memory
            output = tree.replace_reachable(lambda each: each.clone() if storage_id(each) in gathered else each, output)
            found = tree.reachable_tensors(output)
        if self.mp_policy.output_dtype is not None:
            output = tree.cast_floating(output, self.mp_policy.output_dtype)
            found = tree.reachable_tensors(output)
        differentiates = self._is_transformed or torch.is_grad_enabled()
        self._is_opaque |= differentiates and not found
        if self._is_transformed:
            output = marks.mark_outputs(self, self._use, output)
            with outside_transforms():
                self._leave(module, None)
            return output
        self._leave(module, self._mark_begin(found) if differentiates else None)
        return output

    def _leave(self, module: nn.Module, mark: object | None) -> None:
        """Let go what a forward of one of the modules needed, unless more of them are to run."""
        schedule = self.schedule
        assert schedule is not None
        self.to_run.discard(module)
        ended = not self.to_run
        if running_backward() >= 0:  # a recomputation
            if ended:
                for group in self.needed:
                    group.users.discard(self)
                self.phase = UnitPhase.IDLE
            return
        if ended:
            self.end_forward(schedule)
        if schedule.outermost is self and schedule.step.now.has_forward:
            schedule.end_forward(mark)

    def run_method(
        self, module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a method as if it were ``forward``: the forwards that it calls find the parameters gathered. If the
        forward itself calls it, they are gathered already."""
        before = self._in_method
        is_inside = before or (self.phase is UnitPhase.FORWARD and _calls(self) > 1)
        try:
            self._in_method = is_inside
            args, kwargs = self.pre_forward(module, args, kwargs)
            self._in_method = True
            output = method(*args, **kwargs)
            self._in_method = is_inside
            return self.post_forward(module, args, output)
        finally:
            self._in_method = before

    def end_forward(self, schedule: Schedule) -> None:
        """Runs when the forward of the modules has ended, at the latest with that of the whole tree."""
        for group in self.needed:
            group.users.discard(self)
            schedule.order.finished.append(group)
            if not group.users:
                group.stays_unasked = self.chose_to_keep or self._is_opaque
                if self._is_opaque:
                    group.leave_unsharded()
                else:
                    group.reshard_after_forward()
        self.phase, self._is_opaque = UnitPhase.IDLE, False
        self.to_run.clear()
        if schedule.has_streams and len(schedule.order.entered) >= len(schedule.order.entered_before):
            schedule.comm.give_back_memory()  # a head and a loss probably come next, when activations need most

    def _mark_end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Put :class:`EndOfBackward` on the inputs that require gradients; under a transform, on all that may."""
        wanted = marks.may_require_grad if self._is_transformed else attrgetter("requires_grad")
        inputs = list(filter(wanted, tree.tensors((args, kwargs) if kwargs else args)))
        if not inputs:
            return args, kwargs
        marked = (marks.EndOfBackward.apply if self._is_transformed else marks.mark_plain)(self, self._use, *inputs)
        self._marked = inputs, marked, [*map(version_of, inputs)]
        if not kwargs and [*map(id, inputs)] == [*map(id, args)]:
            return marked, kwargs
        found = dict(zip(map(id, inputs), marked, strict=True))
        given: Any = (args, kwargs) if kwargs else args
        given = tree.replace_tensors(lambda tensor: found.get(id(tensor), tensor), given, self._replaced.of(module))
        return given if kwargs else (given, kwargs)

    def _mark_begin(self, found: Sequence[torch.Tensor]) -> object | None:
        """Put a hook, which is returned, on the outputs that require gradients.

        An in-place operation on a view gives it a new history without its hook. A hook on its base is kept.
        """
        hook = None
        for tensor in found:
            if tensor.grad_fn is not None:  # a leaf would keep the hook, and was not computed here
                hook = hook or partial(self.pre_backward, self._use)
                tensor.register_hook(hook)
                base = base_of(tensor)
                if base is not None and base.grad_fn is not None:
                    base.register_hook(hook)
        return hook

    def pre_backward(self, use: Use, grad: torch.Tensor | None) -> None:
        """Runs when autograd has a gradient of an output."""
        schedule = self.schedule
        assert schedule is not None
        if use.updates != schedule.step.updates:
            refuse_updated(self.needed, use.updates)
        if not schedule.step.now.has_backward:
            schedule.begin_backward()
        is_known = use in self._in_backward
        self._in_backward[use] = None
        if is_known or self.phase is UnitPhase.BACKWARD:
            return
        self.begin_backward(schedule)
        if self.prefetches_backward == "before":
            schedule.prefetch_backward(self)
        if schedule.reduces_early:
            schedule.reduce_early(self)

    def post_backward(self, use: Use) -> None:
        """Runs when autograd has the gradients of the inputs."""
        schedule = self.schedule
        assert schedule is not None
        if not schedule.step.now.has_backward:
            schedule.begin_backward()
        if use in self._in_backward:
            del self._in_backward[use]
        elif not all(group.full.state.is_unsharded for group in self.groups):
            raise RuntimeError(
                f"the backward of {self!r} ended without having begun: none of its outputs reported a gradient, so "
                f"its parameters were not gathered. Its forward must return its tensors in tuples, lists, "
                f"dicts, dataclasses or containers known to pytree"
            )
        if self._in_backward or self._is_differentiated:
            return  # another forward call is still in its backward, or an earlier backward is differentiated
        self.finish_backward(schedule, ahead=True)

    def differentiate(self, use: Use, grad: torch.Tensor | None) -> None:
        """Runs when autograd goes through an earlier backward: the parameters are needed until all of it ends."""
        schedule = self.schedule
        assert schedule is not None
        refuse_updated(self.needed, use.updates)
        schedule.begin_backward()
        self._is_differentiated = True
        self.begin_backward(schedule)

    def begin_backward(self, schedule: Schedule) -> None:
        """Runs when the backward of the modules may begin."""
        if self.phase is UnitPhase.BACKWARD:
            return
        self.phase = UnitPhase.BACKWARD
        for group in self.needed:
            if group.options.unshard_in_backward:
                group.unshard()
                group.wait_for_unshard()
            group.users.add(self)
        if schedule.log.listeners:
            schedule.step.log("backward", self)

    def finish_backward(self, schedule: Schedule, ahead: bool = False) -> None:
        """Runs when the backward of the modules has ended: ``ahead`` of that of the whole tree, or together with it."""
        if schedule.log.listeners:
            schedule.step.log("backward", self, moves=False)
        for group in self.groups:
            if group.options.strategy.reduces and (ahead or not schedule.root.finalizes_by_hand):
                schedule.reduce(group)
            else:
                group.gradients.wait_for_more()
        if self.phase is UnitPhase.FORWARD and not self._recomputes:
            return  # a backward inside of the forward, which needs the parameters until it ends
        self.phase, self._marked = UnitPhase.IDLE, marks.NONE
        self.to_run.clear()
        for group in self.needed:
            group.users.discard(self)
            if not group.users:
                group.reshard_after_backward()
        if self.prefetches_backward == "after" and ahead:
            schedule.prefetch_backward(self)

    def end_backward(self, schedule: Schedule) -> None:
        """Runs when the backward of the whole tree has ended."""
        self._in_backward, self._is_differentiated = {}, False
        left = [group for group in self.needed if group.full.state is not State.SHARDED or group.gradients.pending]
        if left or self.phase is not UnitPhase.IDLE:  # otherwise all was done when its own backward ended
            self.finish_backward(schedule)

    def reset(self) -> None:
        """Return to the state at the beginning of a step."""
        self.phase, self._marked = UnitPhase.IDLE, marks.NONE
        self._in_backward, self._is_differentiated, self._is_opaque = {}, False, False
        self.to_run.clear()
        for group in self.groups:
            group.users.clear()
            group.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """The unit of copied modules, at the beginning of a step and not yet part of a tree."""
        twin: Unit = memo.setdefault(id(self), copy.copy(self))
        twin.schedule, twin.needed, twin.emptied, twin.extents = None, [], [], []
        twin.to_run, twin._in_backward, twin._marked, twin._replaced = set(), {}, marks.NONE, Replacements()
        for name in self.tree:
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin

    def start(self) -> Schedule:
        """Become the root of a tree. Called for the first unit that runs, or whose groups are used."""
        if self.is_list:
            raise RuntimeError(
                f"fully_shard was called with a list of modules, {self!r}, and one of them ran, or changed a setting "
                f"of the whole tree, before the root of the tree was known: apply fully_shard to the module that "
                f"contains them, if that was not done, and call that module, or its method, first"
            )
        module = self.modules[0]
        units = units_in(module)
        for unit in units:
            if unit is not self and unit.finalizes_by_hand:
                raise RuntimeError(
                    f"set_manual_backward_finalization must be called on the root, {self!r}, but was called on {unit!r}"
                )
            if unit.schedule is not None and unit.phase is not UnitPhase.IDLE:
                raise RuntimeError(f"{unit!r} is running and cannot become part of the tree of {self!r}")
        if self.auto_reshard:
            self.chose_to_keep = True
            for group in self.groups:
                group.options.strategy = group.options.strategy.switched(after_forward=False)
        schedule = Schedule(self, units, self.device)
        schedule.begin_tree(module)
        return schedule

    def use_schedule(self, schedule: Schedule) -> None:
        """Become part of a tree."""
        self.schedule = schedule
        if schedule.root is not self:
            for _, hook in self.root_hooks:
                hook.remove()
            if self.chose_to_keep:  # as the root of its own tree, before this one
                self.chose_to_keep = False
                for group in self.groups:
                    group.options.strategy = group.options.strategy.switched(after_forward=True)
        self.needed = [*self.groups, *self.borrowed]


def unit_of(module: nn.Module) -> Unit | None:
    """The unit to which a module belongs, if ``fully_shard`` was applied to it."""
    return module.__dict__.get("_fullshard_unit")


def units_in(model: Any, recurse: bool = True) -> list[Unit]:
    """The units of a model, by their first modules; without ``recurse`` only the model's own."""
    modules = model.modules() if recurse else (model,)
    return list(dict.fromkeys(unit for module in modules if (unit := unit_of(module)) is not None))


def sharded_unit(module: Any) -> Unit:
    """The unit of a module that is known to be sharded."""
    unit = unit_of(module)
    assert unit is not None, f"{type(module).__name__} lost the state that fully_shard gave it"
    return unit


def groups_in(module: Any, recurse: bool) -> list[ParamGroup]:
    return [group for unit in units_in(module, recurse) for group in unit.groups]


def tree_schedule(module: Any) -> Schedule:
    """The schedule of the tree that a sharded module is in."""
    return (unit := sharded_unit(module)).schedule or unit.start()


def root_schedule(module: Any, method: str) -> Schedule | None:
    """The schedule of the tree whose root is ``module``; ``None`` if there is none yet.

    Raises:
        RuntimeError: ``module`` is not the root; ``method``, for the error, is what was called on it.
    """
    unit = sharded_unit(module)
    if unit.schedule is not None and unit.schedule.root is not unit:
        raise RuntimeError(f"{method} must be called on the root, {unit.schedule.root!r}, not on {unit!r}")
    return unit.schedule


def schedule_of(model: nn.Module, who: str) -> Schedule:
    """The schedule of a root module; ``who``, for the error, is the function that was called with it.

    Raises:
        ValueError: ``model`` is not sharded.
    """
    unit = unit_of(model)
    if unit is None:
        raise ValueError(
            f"{who} expects a root that was sharded or wrapped, got {type(model).__name__}: call it after fully_shard"
        )
    return unit.schedule or unit.start()


def _calls(unit: Unit) -> int:
    """The calls of a unit's modules among the callers, without those that an error ended. Programs may replace
    ``forward`` by any function."""
    count, frame = 0, inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code in _CALLS else None
        count += caller is unit or caller in unit.modules
        frame = frame.f_back
    return count


_CALLS = nn.Module.__call__.__code__, Unit.run_method.__code__
