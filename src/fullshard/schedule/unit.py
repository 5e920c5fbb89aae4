"""A unit: the modules that were sharded in one call, and what runs before and after their forward and backward.

Owns the state of its modules, the autograd nodes that mark where their backward begins and ends, and the casts at their
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
from functools import cache, partial
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.compiler import disable, is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from fullshard import tree
from fullshard.group.full_buffer import State
from fullshard.group.param_group import ParamGroup
from fullshard.policies import MixedPrecisionPolicy
from fullshard.schedule import marks
from fullshard.schedule.schedule import CUT_SHORT, Schedule
from fullshard.schedule.states import IDLE, LEGAL, Backward, Forward, Idle, Recomputation, Use
from fullshard.torch_private import (
    base_of,
    compiler_callback,
    outside_transforms,
    running_backward,
    storage_id,
    transforms_are_active,
    version_of,
)
from fullshard.tree import Replacements
from fullshard.updates import refuse_updated

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


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
        self.state = IDLE
        self._replaced = Replacements()  # in the callers' containers, while a forward runs

    def __repr__(self) -> str:
        return ", ".join(type(module).__name__ for module in self.modules)

    def _change(self, state: Idle) -> None:
        """Make a transition; raise RuntimeError if it is not legal."""
        if state.name not in LEGAL[self.state.name]:
            raise RuntimeError(f"{self!r} cannot go from its {self.state.name} to its {state.name}")
        self.state = state

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Runs before the forward of each of the modules."""
        before = self.state
        if before.in_method:
            return self._cast_inputs(module, args, kwargs)
        is_transformed = transforms_are_active()
        if is_transformed:
            with outside_transforms():
                schedule = self._begin_forward()
        else:
            schedule = self._begin_forward()
        forward = self.state
        if schedule.has_streams and schedule.outermost is self and forward is not before:
            args, kwargs = tree.to_device((args, kwargs), self.device, self._replaced.of(module))
        if schedule.log.listeners:
            schedule.log("forward", self)
        if self.mp_policy.param_dtype is not None:
            args, kwargs = self._cast_inputs(module, args, kwargs)
        if not isinstance(forward, Forward):
            return args, kwargs
        forward.is_transformed = is_transformed
        if forward is not before:
            return self._mark_inputs(forward, module, args, kwargs)
        for tensor in tree.tensors((args, kwargs)) if torch.is_grad_enabled() else ():  # of the next module of several
            if tensor.grad_fn is not None:  # a leaf would keep the hook
                tensor.register_hook(partial(marks.mark_gradient, self.differentiate, forward.use))
        return args, kwargs

    def _begin_forward(self) -> Schedule:
        """Gather what a forward of one of the modules needs."""
        schedule, recomputes = self.schedule or self.start(), running_backward() >= 0
        if recomputes:
            schedule.begin_backward()  # of the tree, if all of it is recomputed
        elif self.state.to_run and not self.is_list:  # an error ended a forward, and the model may have caught it
            outermost: Any = schedule.outermost
            if outermost is self or not schedule.step.now.has_forward or _calls(self) > 1 or not _calls(outermost):
                raise RuntimeError(CUT_SHORT.format(f"the forward of {self!r}"))
            self.end_forward(schedule)
        begins = self.state is IDLE
        if begins:
            if not recomputes:
                schedule.begin_forward(self)
                schedule.order.entered += self.needed
            use = Use()
            use.updates = schedule.step.updates
            self._change((Recomputation if recomputes else Forward)(use, {*self.modules}))
        for group in self.needed:
            group.unshard()
            group.wait_for_unshard()
        if begins and not recomputes and self.prefetches_forward:
            schedule.prefetch_forward(self)
        return schedule

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Runs after the forward of each of the modules."""
        forward = self.state
        if not forward.in_method and self.schedule is not None and self.schedule.log.listeners:
            self.schedule.log("forward", self, moves=False)
        if self._replaced.calls:
            self._replaced.restore(module)
        if forward.in_method or not isinstance(forward, Forward):
            return tree.cast_floating(output, self.mp_policy.output_dtype)
        (inputs, aliases, versions), forward.marked = forward.marked, marks.NONE
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
        differentiates = forward.is_transformed or torch.is_grad_enabled()
        forward.is_opaque |= differentiates and not found
        if forward.is_transformed:
            output = marks.mark_outputs(self.pre_backward, forward.use, output)
            with outside_transforms():
                self._end_module(forward, module, None)
            return output
        mark = None  # on outputs that require gradients
        for tensor in found if differentiates else ():
            if tensor.grad_fn is not None:  # a leaf would keep the hook, and was not computed here
                mark = mark or partial(self.pre_backward, forward.use)
                tensor.register_hook(mark)
                base = base_of(tensor)  # an operation in place on a view gives it a new history without its hook
                if base is not None and base.grad_fn is not None:
                    base.register_hook(mark)
        self._end_module(forward, module, mark)
        return output

    def _end_module(self, forward: Forward, module: nn.Module, mark: object | None) -> None:
        """Reshard after the forward of a module, unless more modules of the unit are to run."""
        schedule = self.schedule or self.start()
        forward.to_run -= {module}
        if forward.name == "recomputation":
            if not forward.to_run:
                self.state = IDLE  # the backward follows, and needs the parameters
            return
        if not forward.to_run:
            self.end_forward(schedule)
        if schedule.outermost is self and schedule.step.now.has_forward:
            schedule.end_forward(mark)

    def run_method(
        self, module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a method as if it were ``forward``: the forwards that it calls find the parameters gathered. If the
        forward itself calls it, they are gathered already."""
        is_inside = isinstance(self.state, Forward) and (self.state.in_method or _calls(self) > 1)
        args, kwargs = (self._cast_inputs if is_inside else self.pre_forward)(module, args, kwargs)
        state, before = self.state, self.state.in_method
        try:
            state.in_method = True
            output = method(*args, **kwargs)
            state.in_method = is_inside
            return self.post_forward(module, args, output)
        finally:
            state.in_method = before

    def end_forward(self, schedule: Schedule) -> None:
        """Runs when the forward of the modules has ended, at the latest with that of the whole tree."""
        is_opaque, self.state = self.state.is_opaque, IDLE
        for group in self.needed:
            schedule.order.finished.append(group)
            if not [unit for unit in group.users if unit.state is not IDLE]:
                group.stays_unasked = self.chose_to_keep or is_opaque
                if is_opaque:
                    group.leave_unsharded()
                else:
                    group.reshard_after_forward()
        if schedule.has_streams and len(schedule.order.entered) >= len(schedule.order.entered_before):
            schedule.comm.give_back_memory()  # a head and a loss probably come next, when activations need most

    def _cast_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.casts_inputs:
            return args, kwargs
        found: Inputs = tree.cast_floating((args, kwargs), dtype, self._replaced.of(module))
        return found

    def _mark_inputs(
        self, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Inputs:
        """Put :class:`EndOfBackward` on the inputs that require gradients; under a transform, on all that may."""
        is_transformed = forward.is_transformed
        if not (is_transformed or torch.is_grad_enabled()):
            return args, kwargs
        wanted = marks.may_require_grad if is_transformed else attrgetter("requires_grad")
        inputs = list(filter(wanted, tree.tensors((args, kwargs) if kwargs else args)))
        if not inputs:
            return args, kwargs
        marked = (marks.EndOfBackward.apply if is_transformed else marks.mark_plain)(self, forward.use, *inputs)
        forward.marked = inputs, marked, [*map(version_of, inputs)]
        if not kwargs and [*map(id, inputs)] == [*map(id, args)]:
            return marked, kwargs
        found = dict(zip(map(id, inputs), marked, strict=True))
        given: Any = (args, kwargs) if kwargs else args
        given = tree.replace_tensors(lambda tensor: found.get(id(tensor), tensor), given, self._replaced.of(module))
        return given if kwargs else (given, kwargs)

    def pre_backward(self, use: Use, grad: torch.Tensor | None) -> None:
        """Runs when autograd has a gradient of an output."""
        schedule = self.schedule or self.start()
        if use.updates != schedule.step.updates:
            refuse_updated(self.needed, use.updates)
        if not schedule.step.now.has_backward:
            schedule.begin_backward()
        before = self.state
        if before.uses is None:
            self.begin_backward(schedule)
        if self.state.uses is not None:
            self.state.uses |= {use}
        if self.state is before:
            return
        if self.prefetches_backward == "before":
            schedule.prefetch_backward(self)
        if schedule.reduces_early:
            schedule.reduce_early(self)

    def post_backward(self, use: Use) -> None:
        """Runs when autograd has the gradients of the inputs."""
        schedule = self.schedule or self.start()
        if not schedule.step.now.has_backward:
            schedule.begin_backward()
        backward = self.state
        if backward.uses and use in backward.uses:
            backward.uses -= {use}
        elif not all(group.full.state.is_unsharded for group in self.groups):
            raise RuntimeError(
                f"the backward of {self!r} ended without having begun: none of its outputs reported a gradient, so "
                f"its parameters were not gathered. Its forward must return its tensors in tuples, lists, "
                f"dicts, dataclasses or containers known to pytree"
            )
        if backward.uses or backward.is_differentiated:
            return  # another forward call is still in its backward, or an earlier backward is differentiated
        self.finish_backward(schedule, ahead=True)

    def differentiate(self, use: Use, grad: torch.Tensor | None) -> None:
        """Runs when autograd goes through an earlier backward: the parameters are needed until all of it ends."""
        schedule = self.schedule or self.start()
        refuse_updated(self.needed, use.updates)
        schedule.begin_backward()
        self.begin_backward(schedule)
        self.state.is_differentiated = self.state.uses is not None

    def begin_backward(self, schedule: Schedule) -> None:
        """Runs when the backward of the modules may begin."""
        is_first = not isinstance(self.state, Backward)
        if "backward" in LEGAL[self.state.name]:
            self._change(Backward())
        for group in self.needed:
            if group.options.unshard_in_backward:
                group.unshard()
                group.wait_for_unshard()
        if is_first and schedule.log.listeners:
            schedule.log("backward", self)

    def finish_backward(self, schedule: Schedule, ahead: bool = False) -> None:
        """Runs when the backward of the modules has ended, which may be ``ahead`` of the backward of the whole tree."""
        if schedule.log.listeners:
            schedule.log("backward", self, moves=False)
        for group in self.groups:
            if group.options.strategy.reduces and (ahead or not schedule.root.finalizes_by_hand):
                schedule.reduce(group)
            else:
                group.gradients.wait_for_more()
        if self.state.name == "forward":
            return  # a backward inside of the forward, which needs the parameters until it ends
        self.state = IDLE
        for group in self.needed:
            if not [unit for unit in group.users if unit.state is not IDLE]:
                group.reshard_after_backward()
        if self.prefetches_backward == "after" and ahead:
            schedule.prefetch_backward(self)

    def end_backward(self, schedule: Schedule) -> None:
        """Runs when the backward of the whole tree has ended."""
        is_left = self.state is not IDLE
        for group in self.needed:
            is_left |= group.full.state is not State.SHARDED or group.gradients.pending
        if is_left:  # otherwise all was done when its own backward ended
            self.finish_backward(schedule)

    def reset(self) -> None:
        """Return to the state at the beginning of a step."""
        self.state = IDLE
        for group in self.groups:
            group.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """The unit of copied modules, at the beginning of a step and not yet part of a tree."""
        twin: Unit = memo.setdefault(id(self), copy.copy(self))
        twin.schedule, twin.needed, twin.emptied, twin.extents = None, [], [], []
        twin.state, twin._replaced = IDLE, Replacements()
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
            if unit.schedule is not None and unit.state is not IDLE:
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
        for group in self.needed:
            group.users.add(self)


def run_hook(unit: Unit, method: str, *args: Any) -> Any:
    """A hook on a module, as a partial function of its unit: a deep copy of the module gets a hook of its own unit."""
    if is_dynamo_compiling() or compiler_callback() is not None:
        return outside_graphs()(unit, method, *args)
    return getattr(unit, method)(*args)


@cache
def outside_graphs() -> Callable[..., Any]:
    """Makes a caller of a unit's methods outside of compiled graphs: what these do to parameters cannot be traced."""
    return disable(lambda unit, method, *args: getattr(unit, method)(*args))


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
    """The schedule of the tree whose root is ``module``; ``None`` if there is none yet. Raises RuntimeError if it is
    not the root; ``method``, for the error, is what was called on it."""
    unit = sharded_unit(module)
    if unit.schedule is not None and unit.schedule.root is not unit:
        raise RuntimeError(f"{method} must be called on the root, {unit.schedule.root!r}, not on {unit!r}")
    return unit.schedule


def schedule_of(model: nn.Module, who: str) -> Schedule:
    """The schedule of a root module. Raises ValueError if it is not sharded; ``who``, for the error, is the function
    that was called with it."""
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
