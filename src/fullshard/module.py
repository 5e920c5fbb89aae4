"""``FSDPModule``: the methods that a module gets when it is sharded.

Owns the methods that users call between and inside steps. Each sets an option of the module's groups or asks the
schedule for a transition; none does the work itself.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn

from fullshard.comm.backend_memory import process_group_memory, symmetric_memory
from fullshard.comm.collective import CollectiveTransport
from fullshard.device import mark_now
from fullshard.group.param_group import ParamGroup
from fullshard.handles import GradientReductionHandle, UnshardHandle
from fullshard.meshes import new_group
from fullshard.misuse import buffers_on_meta, note_emptied
from fullshard.policies import AllGather, ReduceScatter, expect, warn
from fullshard.schedule.step_log import Observer
from fullshard.schedule.unit import Unit, groups_in, root_schedule, sharded_unit, tree_schedule, units_in
from fullshard.torch_private import allocating_backend


class FSDPModule:
    """A module to which ``fully_shard`` was applied: the base of these classes, for ``isinstance`` and its methods.

    A method acts on this module; with ``recurse``, which is the default where it exists, also on the sharded modules
    inside. Indexing or slicing a sharded container makes a plain container. A deep copy is sharded and shares nothing;
    all ranks must copy alike. ``to()``, ``to_empty()`` and similar methods reshard first and keep the sharding.

    Raises:
        TypeError: a setter was given a value of a wrong type, unless the setter lists another error for that.
        ValueError: a method was given a module to which ``fully_shard`` was not applied.
        RuntimeError: a method for the root was called on another module; or a method for a whole tree on one of a list
            of modules that ``fully_shard`` was given, and no module that contains them has run yet.

    Ranks: all alike, in the same order, unless a method says otherwise.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class: a slice of a sharded container is a plain container."""
        original: Any = cls.__mro__[2]
        module = original.__new__(original)
        module.__init__(*args, **kwargs)
        return module

    def reshard(self) -> None:
        """Free the unsharded parameters and show the sharded ones. Not recursive.

        Ranks: each for itself, but later gathers must be alike.
        """
        for group in sharded_unit(self).groups:
            group.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters as forward would (in ``param_dtype``, if set). Not recursive.

        Args:
            async_op: whether to return at once.

        Returns:
            A handle to wait on with ``async_op``, for which forward waits too. Otherwise ``None``.

        Raises:
            RuntimeError: parameters are on meta, or it is called inside ``summon_full_params``.
        """
        unit = sharded_unit(self)
        schedule = None if unit.is_list and unit.schedule is None else tree_schedule(self)  # a list is never the root
        for group in unit.groups:
            if schedule is None or schedule.is_idle:  # else replaced parameters would be hidden and lost
                group.notice_changes()
                group.step.written = mark_now(group.device)
            group.unshard()
        return UnshardHandle(lambda: [*map(ParamGroup.wait_for_unshard, unit.groups)]).returned_if(async_op)

    def reset_iter_state(self) -> None:
        """Reset the step after an exception in forward or backward. Call it on the root.

        It frees what was gathered. Gradients that are not in ``param.grad`` yet are lost, accumulated ones too.
        """
        schedule = root_schedule(self, "reset_iter_state")
        if schedule is not None:
            schedule.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set ``is_last_backward``: whether the next backward is the last before the optimizer, for the whole tree.

        Only the last backward waits for every reduction. Ranks: each for itself, alike.
        """
        _expect_bool("set_is_last_backward", is_last_backward)
        tree_schedule(self).is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether a step ends with ``finalize_backward()``, not with its last backward. Call it on the root.

        Args:
            enabled: if ``True``, ``set_is_last_backward`` has no effect.

        Raises:
            RuntimeError: the module is not the root; or the setting would change in a backward, or between a backward
                and the end of its step.
        """
        _expect_bool("set_manual_backward_finalization", enabled)
        schedule = root_schedule(self, "set_manual_backward_finalization")
        if schedule is not None:
            schedule.check_finalization(enabled)
        sharded_unit(self).finalizes_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Complete the reductions and reshards that the backwards of a step left. Call it on the root.

        Before the first forward it does nothing. If it follows several backwards, run all but the last one with
        ``set_requires_gradient_sync(False)``: the setting at the time of this call decides what is reduced.

        Args:
            async_op: whether to return at once.

        Returns:
            A handle with ``async_op``. Wait for it before you use gradients or begin a forward. Otherwise ``None``.

        Raises:
            RuntimeError: the module is not the root, ``set_manual_backward_finalization(True)`` was not called before,
                an earlier handle was not waited for, or a backward is running or still to come.
        """
        _expect_bool("finalize_backward", async_op)
        schedule = root_schedule(self, "finalize_backward")
        wait = schedule.finalize() if schedule is not None and schedule.step.forwards > 0 else None
        return GradientReductionHandle(wait).returned_if(async_op)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients.

        Args:
            requires_gradient_sync: if ``False``, gradients accumulate unsharded, in ``reduce_dtype``.
        """
        sync = requires_gradient_sync
        _switch(self, recurse, "set_requires_gradient_sync", gradients=sync, gradients_of_replicas=sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are summed over replicas (HSDP).

        Args:
            requires_all_reduce: if ``False``, gradients accumulate sharded, in ``reduce_dtype``.
        """
        _switch(self, recurse, "set_requires_all_reduce", gradients_of_replicas=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor``, not by the number of ranks with different data.

        Raises:
            ValueError: ``factor`` is not positive and finite.
        """
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        expect(is_number, "the gradient divide factor", factor, "a number")
        expect(0 < factor < math.inf, "the gradient divide factor", factor, "a positive and finite number", ValueError)
        for group in sharded_unit(self).groups:
            group.options.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated: the old name of :meth:`set_gradient_divide_factor`, with the same ``factor``."""
        warn("Use `set_gradient_divide_factor` instead", DeprecationWarning)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether to ``enable`` reductions by plain sums, scaled in a separate step, for zero-copy collectives."""
        _set(self, False, "set_force_sum_reduction_for_comms", sum_only=enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters without a gradient are reduced.

        Args:
            reduce_scatter_unused_params: if ``True``, as zeros: needed if ranks use different parameters in a step.
        """
        _set(self, recurse, "set_reduce_scatter_unused_params", reduce_unused=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many gradient buffers may be in use at once, filled or reduced.

        A group takes a buffer when it first writes to it. If none is free, it waits for the oldest reduce-scatter. The
        all-reduces of HSDP do not count, and gradients that are reduced where autograd made them need no buffer.

        Args:
            max_input_buffers: 1 by default, 2 in shared memory.

        Raises:
            ValueError: ``max_input_buffers`` is less than 1.

        Ranks: each for itself.
        """
        expect(type(max_input_buffers) is int, "max_input_buffers", max_input_buffers, "an int")
        expect(max_input_buffers > 0, "max_input_buffers", max_input_buffers, "a positive int", ValueError)
        for group in groups_in(self, recurse):
            group.options.max_gradient_buffers = max_input_buffers
            group.gradients.forget_layout()

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call ``hook`` with each reduced output (1-D, in the reduce dtype), after the all-reduce if there is one.

        Args:
            hook: takes the tensor, and may change it in place. If it communicates, all ranks must set it.
            stream: the stream to run it on. Not with native HSDP, where it runs on the stream of the all-reduce.

        Raises:
            ValueError: ``stream`` is given with native HSDP.
        """
        expect(callable(hook), "the all-reduce hook", hook, "a function of a tensor")
        groups = sharded_unit(self).groups
        if stream is not None and any(group.data.replicate_group is not None for group in groups):
            raise ValueError("stream cannot be set when using native HSDP: the hook runs where its all-reduce does")
        for group in groups:
            group.options.all_reduce_hook, group.options.all_reduce_hook_stream = hook, stream

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set ``reshard_after_forward``: whether parameters are freed between forward and backward, without a number.

        Raises:
            ValueError: ``reshard_after_forward`` is not a ``bool``.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in units_in(self, recurse):
            unit.auto_reshard = unit.chose_to_keep = False
            for group in unit.groups:
                options, reshards = group.options, reshard_after_forward and group.data.shard_group is not None
                options.strategy, options.post_forward_mesh = options.strategy.switched(after_forward=reshards), None
            if unit.schedule is not None:
                unit.schedule.size_slots()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set ``reshard_after_backward``: if ``False``, a forward before the next step gathers nothing."""
        _switch(self, recurse, "set_reshard_after_backward", after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether to ``keep`` the memory of unsharded parameters, and so their addresses, while they are resharded.

        For CUDA graphs, which use the addresses that they captured. It costs the memory of each group.

        Ranks: each for itself.
        """
        _set(self, recurse, "set_keep_unsharded_storage", keep_unsharded_storage=keep)
        for unit in units_in(self, recurse):
            for group in unit.groups:
                group.full.buffer.keep_memory(keep)
            if unit.schedule is not None:
                unit.schedule.size_slots()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set ``unshard_in_backward``: whether backward needs this module's parameters; an embedding's does not."""
        _set(self, False, "set_unshard_in_backward", unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather ``modules``, in this order, while this one runs its forward, instead of the recorded ones."""
        sharded_unit(self).forward_prefetch = _all_sharded(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather ``modules``, in this order, while this one runs its backward, instead of the recorded ones."""
        sharded_unit(self).backward_prefetch = _all_sharded(modules)

    def set_prefetch_limit(self, groups: int | None = None, *, nbytes: int | None = None) -> None:
        """Set how far this module's tree is gathered ahead of the group that runs. Not in PyTorch.

        Args:
            groups: 1 by default, 0 for none. Each costs the memory of one group.
            nbytes: in place of ``groups``, the most bytes that the groups ahead have together, unsharded.

        Raises:
            ValueError: not exactly one of them is given, or it is not an int of 0 or more.
        """
        limit = nbytes if groups is None else groups
        if type(limit) is not int or limit < 0 or None not in (groups, nbytes):
            raise ValueError(f"the prefetch limit must be one int of 0 or more, got {groups=!r} and {nbytes=!r}")
        schedule = tree_schedule(self)
        schedule.prefetch_limit, schedule.prefetch_bytes = groups, nbytes

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next forward's gathers wait for ``event``, not for all enqueued work. Used once.

        On the CPU nothing changes. Ranks: each for itself.
        """
        tree_schedule(self).after_optimizer = event

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather each group of the module with ``comm``, which allocates the buffers too."""
        _use_custom(self, "set_custom_all_gather", comm, gather=CollectiveTransport(all_gather=comm))

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce each group of the module with ``comm``, which allocates the buffers too."""
        _use_custom(self, "set_custom_reduce_scatter", comm, reduce=CollectiveTransport(reduce_scatter=comm))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether to ``enable`` zero-copy transfers: the process group allocates the buffers of collectives.

        It changes nothing if the backend has no allocator, as gloo.

        Raises:
            AssertionError: the module has a custom all-gather or reduce-scatter.
        """
        _expect_bool("set_allocate_memory_from_process_group_for_comm", enable)
        for group in _native_groups(self, "set_allocate_memory_from_process_group_for_comm"):
            if allocating_backend(group.data.shard_group, group.device) is not None:
                memory = process_group_memory(group.data.shard_group) if enable else None
                native = CollectiveTransport(memory, memory)
                group.use_transport(gather=native, reduce=native)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Gather and reduce in symmetric memory of ``backend``, which becomes the process's one. NCCL is then faster.

        Raises:
            AssertionError: the module has a custom all-gather or reduce-scatter.
            ValueError: ``backend`` is not NCCL, or gradients have more than one buffer.
        """
        groups = _native_groups(self, "set_symm_mem_for_comm")
        if any((group.options.max_gradient_buffers or 1) > 1 for group in groups):
            raise ValueError("symmetric memory is one segment: set_reduce_scatter_max_input_buffers must stay 1")
        for group in groups:
            memory = symmetric_memory(group.data.shard_group, backend)
            native = CollectiveTransport(memory, memory)
            group.use_transport(gather=native, reduce=native)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether to ``enable`` a separate process group for reductions, and so a communicator of their own."""
        _expect_bool("set_separate_reduce_scatter_group", enable)
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in groups_in(self, recurse):
            shard_group = group.data.shard_group
            if not enable or shard_group is None:
                group.reduce_over(shard_group)
            elif group.reduce_process_group is shard_group:
                ranks = tuple(dist.get_process_group_ranks(shard_group))
                if ranks not in made:
                    made[ranks] = new_group(ranks)
                group.reduce_over(made[ranks])

    def free_buffers(self) -> int:
        """Free the buffers that this tree keeps for its next step, and return their size in bytes. Not in PyTorch.

        The transports' staging memory, which all models of the process share, is freed too.
        """
        return tree_schedule(self).free_buffers()

    def add_observer(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` with each event in this module's tree, right before its work starts. Not in PyTorch.

        Args:
            observer: gets an event with ``action`` (``gather``, ``reuse``, ``unshard``, ``reshard``, ``rest``,
                ``reduce``), ``group`` (the module's name, ``""`` for the root), ``during`` (``forward``, ``backward``),
                ``step`` (counts forwards) and ``moves`` (``False`` for a gather in memory that ranks share).

        Returns:
            A function that removes the observer.

        Ranks: each for itself.
        """
        return tree_schedule(self).log.add_observer(observer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like ``nn.Module.zero_grad()`` with ``set_to_none``, also where the module shows unsharded parameters."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for param in (param.sharded for group in groups_in(self, recurse=True) for param in group.params):
            param.grad = None if set_to_none or param.grad is None else param.grad.zero_()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        with shards_may_change(self):  # type: ignore[arg-type]
            return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Make a sharded copy that shares nothing with this module, without communication."""
        for unit in units_in(self, recurse=True):  # before any module is copied: tied ones lead from group to group
            for group in (*unit.groups, *unit.borrowed):
                group.reshard()
                group.notice_changes()
                for param in group.params:
                    param.copy_values(memo)
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            twin.__dict__[name] = copy.deepcopy(value, memo)
        return twin


class ShardedModule(FSDPModule, nn.Module):
    """What type checkers are told that a sharded module is: it has the methods of both."""


@contextmanager
def shards_may_change(module: nn.Module) -> Iterator[None]:
    """A context in which a module's shards may be replaced or converted, as by ``module.to()``."""
    unit = sharded_unit(module)
    for group in unit.groups:
        group.reshard()
    on_meta = buffers_on_meta(module)
    params = [param for group in unit.groups for param in group.params]
    gradients = [param.set_gradient_aside() for param in params]
    try:
        yield
    finally:  # after an error some may be converted, as in a plain module: adopt what is there
        note_emptied(unit, on_meta)
        for group in unit.groups:
            group.adopt_parameters(group.module_params.adopt_replaced())
        for param, gradient in zip(params, gradients, strict=True):
            if gradient is not None:
                param.sharded.grad = gradient.to(param.sharded.device)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than ``forward`` gather parameters before it runs and free them after it.

    Args:
        module: if it is not sharded, nothing happens, so that one program can run both ways.
        method_name: the method.

    Raises:
        ValueError: the module is sharded and has no such method.

    Ranks: each for itself; the method itself, all alike.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} does not have a method '{method_name}'")
    method = getattr(module, method_name)
    setattr(module, method_name, functools.update_wrapper(functools.partial(_run_method, module, method), method))


def _run_method(module: nn.Module, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return sharded_unit(module).run_method(module, method, args, kwargs)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as the stages of a pipeline, use the same lanes, buffers and bound on reductions.

    Args:
        modules: the roots. They must then run in the same order on all ranks that shard together.

    Raises:
        ValueError: ``fully_shard`` was not applied to one of ``modules``.

    Ranks: each for itself, with the same modules.
    """
    schedules = [tree_schedule(unit.modules[0]) for unit in _all_sharded(modules)]
    for schedule in schedules[1:]:
        schedule.comm = schedules[0].comm
        for group in schedule.groups:
            group.use_comm_context(schedule.comm)
        schedule.size_slots()


def _expect_bool(method: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{method} expects True or False, got {value!r}")


def _set(module: Any, recurse: bool, method: str, **options: bool) -> None:
    """Set options of a module's groups, with ``recurse`` also of the groups inside."""
    for option, value in options.items():
        _expect_bool(method, value)
        for group in groups_in(module, recurse):
            setattr(group.options, option, value)


def _switch(module: Any, recurse: bool, method: str, **columns: bool) -> None:
    """Switch columns in the strategies of a module's groups, with ``recurse`` also of the groups inside."""
    for on in columns.values():
        _expect_bool(method, on)
    for group in groups_in(module, recurse):
        group.options.strategy = group.options.strategy.switched(**columns)


def _use_custom(module: Any, method: str, comm: object, **transport: CollectiveTransport) -> None:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(f"{method} expects an object that can be called and that has allocate(), got {comm!r}")
    groups = sharded_unit(module).groups
    if not all(group.options.wire.is_exact and group.options.outer_wire.is_exact for group in groups):
        raise ValueError(f"{method} moves messages as they are, and a wire_policy encodes them: leave out one of them")
    for group in groups:
        group.use_transport(**transport)
        group.has_custom_communication = True


def _all_sharded(modules: Iterable[Any]) -> list[Unit]:
    for module in modules:
        expect(isinstance(module, FSDPModule), "a module", module, "one to which fully_shard was applied", ValueError)
    return list(dict.fromkeys(sharded_unit(module) for module in modules))


def _native_groups(module: Any, method: str) -> list[ParamGroup]:
    """The groups of a module. Raises AssertionError if they use a user's collectives."""
    groups = sharded_unit(module).groups
    if any(group.has_custom_communication for group in groups):
        raise AssertionError(f"{method} cannot be combined with set_custom_all_gather or set_custom_reduce_scatter")
    return groups
