"""The wrapper front end: ``FullyShardedDataParallel`` shards a module as flat parameters.

Owns the class that programs written for torch's wrapper use: its constructor, what it passes through to the module
inside, and the methods that users call between steps. The engine runs the steps; to it a wrapped module is a unit like
any other. The files beside this one make checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.device import is_host, move_to_device
from fullshard.full_params import summon_full_params
from fullshard.fully_shard import borrow, check_group
from fullshard.group.context import GroupOptions
from fullshard.group.mesh import DataMesh
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import CHECKPOINTED_NAME, WRAPPED_NAME, plain_name
from fullshard.group.strategy import FULL_SHARD, SHARD_GRAD_OP
from fullshard.group.verify import compare
from fullshard.members import Found, check_modules, free_parameters, managed_modules, refuse_torchs
from fullshard.module import FSDPModule, shards_may_change
from fullshard.offload_policy import CPUOffloadPolicy, OffloadPolicy
from fullshard.optim.clip import clip_local_shards
from fullshard.overlaps import refuse_overlaps
from fullshard.policies import as_setting, expect, warn
from fullshard.schedule.hooks import attach
from fullshard.schedule.states import IDLE
from fullshard.wrap import targets
from fullshard.wrapper import initialise
from fullshard.wrapper.flat import FlatGroup, Fragment
from fullshard.wrapper.meshes import HYBRID, strategy_and_mesh
from fullshard.wrapper.optim_methods import OptimStateMethods
from fullshard.wrapper.settings import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fullshard.wrapper.state_dict import StateDictMethods, paths_in, temporarily
from fullshard.wrapper.unit import WrappedUnit, keep_precision


class FullyShardedDataParallel(StateDictMethods, OptimStateMethods):
    """``module`` with its parameters sharded over ranks, as one flat parameter for each wrapped module.

    ::

        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.AdamW(model.parameters())   # after wrapping, unless use_orig_params=True

    Attributes and indices pass through to ``module``. torch's own enums and settings are accepted too.

    Args:
        module: the module to wrap. Modules inside of it that are wrapped already keep their parameters.
        process_group: the ranks to shard over; for a hybrid strategy a pair, to shard over and to replicate over.
        sharding_strategy: what is sharded and when it is gathered; ``FULL_SHARD`` by default. With one rank to shard
            over it becomes ``NO_SHARD``, with a warning. The attribute of this name has what was chosen.
        cpu_offload: whether shards are kept on the CPU.
        auto_wrap_policy: which modules inside are wrapped first, each on its own; see ``fullshard.wrap``.
        backward_prefetch: whether backward gathers the next module before or after it computes the current gradients.
        mixed_precision: dtypes of computation, reduction and buffers.
        ignored_modules: modules that are not sharded, with all modules inside.
        param_init_fn: gives values to modules on the meta device; by default their ``reset_parameters()`` does.
        device_id: the device to compute on, to which modules on the CPU are moved. A CPU job needs none.
        sync_module_states: whether all ranks begin with the first one's parameters and buffers.
        forward_prefetch: whether forward gathers the next module ahead. On the CPU, where nothing else runs ahead, it
            always does.
        limit_all_gathers: accepted, without effect: a gather never runs further ahead than its buffers allow.
        use_orig_params: whether modules show this rank's part of each of their parameters, not one
            :class:`FlatParameter`. Needed for parameter groups, and for frozen beside trained parameters.
        ignored_states: parameters or modules that are not sharded.
        device_mesh: a mesh instead of ``process_group``: 1-D, or 2-D (replicate, shard) for a hybrid strategy.

    Raises:
        ValueError: settings that exclude one another; a group or mesh that does not fit the strategy; parameters that
            cannot be flattened (integers, or frozen beside trained ones without ``use_orig_params``), share memory with
            other tensors, or differ between ranks; with a policy, modules that are wrapped already; modules that
            torch's FSDP has sharded.
        RuntimeError: parameters on several devices; parameters or buffers that are on the meta device after
            ``param_init_fn``.
        TypeError: an argument of a wrong type.

    Ranks: all alike, in the same order, and for methods too, unless a method says otherwise.
    """

    _has_hook = _is_summoned = False

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        options = dict(locals())  # for the modules inside that a policy chooses, but for what is made of them below
        for name in ("self", "__class__", "module", "auto_wrap_policy", "ignored_modules"):
            del options[name]
        super().__init__()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warn(f"a {type(module).__name__} is never run itself: wrap its members")
        refuse_torchs(module)
        nested: list[initialise.Ignored] = [inner._ignored for inner in self.fsdp_modules(module)]
        self._ignored: initialise.Ignored = initialise.ignored(module, ignored_modules, ignored_states, nested)
        strategy = as_setting(sharding_strategy, ShardingStrategy, "sharding_strategy", ShardingStrategy.FULL_SHARD)
        precision = as_setting(mixed_precision, MixedPrecision, "mixed_precision", MixedPrecision())
        self.mixed_precision, self.backward_prefetch = precision, backward_prefetch
        self.cpu_offload = as_setting(cpu_offload, CPUOffload, "cpu_offload", CPUOffload())
        if backward_prefetch is not None:
            self.backward_prefetch = as_setting(backward_prefetch, BackwardPrefetch, "backward_prefetch")
        self.forward_prefetch, self.limit_all_gathers = forward_prefetch, limit_all_gathers
        self._use_orig_params, ignored = use_orig_params, self._ignored.params
        device_type = device_mesh.device_type if isinstance(device_mesh, DeviceMesh) else None
        own = (param for param in module.parameters() if param not in ignored)
        device, has_policy = initialise.compute_device(own, device_id, device_type), auto_wrap_policy is not None
        self.sharding_strategy, data = strategy_and_mesh(strategy, process_group, device_mesh, has_policy, device.type)
        if has_policy:
            if strategy in HYBRID and device_mesh is None:  # children do not look for nodes again
                both = data.shard_group, data.replicate_group
                process_group = both if self.sharding_strategy in HYBRID else data.replicate_group
            made = {"process_group": process_group, "sharding_strategy": self.sharding_strategy}
            _auto_wrap(module, auto_wrap_policy, self._ignored, {**options, **made, "ignored_states": ignored}, data)
        else:
            _check_tree(module, {}, ignored, use_orig_params)
        modules = initialise.managed_modules(module, self._ignored.modules)
        initialise.materialize(modules, param_init_fn, device, self._ignored)
        found = free_parameters(managed_modules((module,)), ignored)
        skipped = {None, *self._ignored.buffers}
        buffers = [(each, name) for each in modules for name in each._buffers if each._buffers[name] not in skipped]
        extents = refuse_overlaps((module,), found)
        move_to_device(found, modules, device)
        initialise.check_flattenable({at[0].full_name: param for param, at in found.items()}, use_orig_params)
        if sync_module_states:
            initialise.sync_module_states(found, [each.get_buffer(name) for each, name in buffers], data, device)
        self._fsdp_wrapped_module = module
        auto_reshard = self.sharding_strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        unit = WrappedUnit(self, device, precision, auto_reshard)
        unit.ignored, unit.extents, unit.buffers = {id(param) for param in ignored}, extents, buffers
        if self.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
            unit.prefetches_backward = "never" if self.backward_prefetch is None else "after"
        unit.prefetches_forward = forward_prefetch or is_host(device)
        if found:
            shared = data, None if use_orig_params else self.module, precision.param_dtype
            fragments = [Fragment(param, locations, *shared) for param, locations in found.items()]
            policy = CPUOffloadPolicy() if self.cpu_offload.offload_params else OffloadPolicy()
            group_options = GroupOptions(unit.mp_policy, policy, FULL_SHARD if auto_reshard else SHARD_GRAD_OP)
            group_options.keep_computed_dtype = precision.keep_low_precision_grads
            check_group(unit, fragments, data, group_options, FlatGroup)()
        borrow(unit)
        attach(unit)

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without its wrapper for activation checkpointing if it has one."""
        inner = self._modules[WRAPPED_NAME]
        assert inner is not None
        return inner._modules.get(CHECKPOINTED_NAME) or inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if WRAPPED_NAME not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self._modules[WRAPPED_NAME], name)

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters gathered. After an error, the next step resets its state first."""
        try:
            return self._fsdp_wrapped_module(*args, **kwargs)
        except BaseException:
            self._unit.failed = True
            raise

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in ``module``, itself included; with ``root_only`` those that no other contains.

        Ranks: each for itself.
        """
        found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        if root_only:
            inner = {other for each in found for other in each.modules() if other is not each}
            found = [each for each in found if each not in inner]
        return found

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks to shard over, or to replicate over if nothing is sharded; ``None`` without parameters."""
        groups = (group.data for each in self.fsdp_modules(self) for group in each._unit.groups)
        return next((data.shard_group or data.replicate_group for data in groups), None)

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapper. If none has run yet, the call makes this wrapper the root.

        Ranks: each for itself.
        """
        return (self._unit.schedule or self._unit.start()).root is self._unit

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Like ``nn.Module.named_parameters()``; in :meth:`summon_full_params` with the names of the plain model.

        Ranks: each for itself.
        """
        for name, param in super().named_parameters(*args, **kwargs):
            yield (name.replace(f"{WRAPPED_NAME}.", "") if self._is_summoned else name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Like ``nn.Module.named_buffers()``; in :meth:`summon_full_params` with the names of the plain model.

        Ranks: each for itself.
        """
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (name.replace(f"{WRAPPED_NAME}.", "") if self._is_summoned else name), buffer

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call ``fn`` with every module inside and with this one, while they show full parameters, which it may change.

        Raises:
            ValueError: inside :meth:`summon_full_params`, or in a forward or backward.
        """
        self._unit.recover()
        if self._is_summoned or self._unit.state is not IDLE:
            raise ValueError("apply() gathers full parameters: call it between steps, outside of summon_full_params")
        with self.summon_full_params(self, recurse=False):
            super().apply(fn)
        return self

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Show full parameters, in their modules and under their names.

        Args:
            module: a wrapped model, or a model with wrappers inside.
            recurse: as in :func:`fullshard.summon_full_params`, like the other arguments.
            writeback: not with ``rank0_only``.
            rank0_only: not with ``with_grads``.
            offload_to_cpu: not with ``with_grads``, or with ``NO_SHARD``.
            with_grads: only with ``use_orig_params``.

        Raises:
            NotImplementedError: options that exclude one another, or that the wrappers' settings exclude.
            AssertionError: it was called in a forward or backward, or inside another such context.
        """
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        refused = {
            "writeback with rank0_only: ranks would be left with different parameters": writeback and rank0_only,
            "with_grads with offload_to_cpu: gradients stay on their device": with_grads and offload_to_cpu,
            "with_grads with rank0_only: gradients are gathered on all ranks": with_grads and rank0_only,
            "with_grads without use_orig_params: there are no parameters to have them": with_grads
            and not all(each._use_orig_params for each in wrappers),
            "offload_to_cpu with NO_SHARD: parameters are whole already": offload_to_cpu
            and any(each.sharding_strategy is ShardingStrategy.NO_SHARD for each in wrappers),
        }
        for what, given in refused.items():
            if given:
                raise NotImplementedError(f"summon_full_params does not support {what}")
        wrappers = wrappers if recurse else [each for each in wrappers if each is module]
        for each in wrappers:
            each._check_idle("summon_full_params")
            if each._is_summoned:
                raise AssertionError(f"summon_full_params of {each._unit!r} was called inside another: leave it first")
        summoned = summon_full_params(module, recurse, writeback, rank0_only, offload_to_cpu, with_grads)
        with summoned, temporarily(wrappers, "_is_summoned", True):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward does not communicate: gradients accumulate unsharded until a backward outside.

        They accumulate in the reduce dtype. Until then ``grad`` is zero, and clearing it discards them.

        Raises:
            RuntimeError: this is not the root.
        """
        groups = self._groups_of_root("no_sync")
        before = [group.options.strategy.reduces for group in groups]
        try:
            for group in groups:
                group.options.strategy = group.options.strategy.switched(gradients=False)
            yield
        finally:
            for group, reduces in zip(groups, before, strict=True):
                group.options.strategy = group.options.strategy.switched(gradients=reduces)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their total norm, over all parameters and ranks, is at most ``max_norm``.

        Args:
            max_norm: the largest norm that stays as it is.
            norm_type: any p above 0; ``math.inf`` for the largest absolute value.

        Returns:
            The norm before scaling, a 0-dim tensor on the compute device, the same on all ranks. It is computed in
            fp32 and returned in the dtype to which this rank's gradients promote, or in fp32 if that is fp16.

        Raises:
            RuntimeError: this is not the root.
            ValueError: ``norm_type`` is not above 0; or modules are sharded over different ranks, and none over all of
                these.
        """
        groups = self._groups_of_root("clip_grad_norm_")
        used = dict.fromkeys(group.data.shard_group for group in groups if group.data.shard_group is not None)
        process_group = max(used, key=dist.ProcessGroup.size, default=None)
        every = set(dist.get_process_group_ranks(process_group)) if used else set()
        for each in used:
            if not every.issuperset(others := dist.get_process_group_ranks(each)):
                raise ValueError(
                    f"clip_grad_norm_ sums over one process group, but some modules are sharded over ranks "
                    f"{sorted(every)} and others over {others}: shard one of them over all these ranks"
                )
        sharded: dict[torch.Tensor, int] = {}
        for data, params in ((group.data, group.params) for group in groups if group.data.shard_group is not None):
            copies = [] if data.replicate_group is None else dist.get_process_group_ranks(data.replicate_group)
            sharded.update(dict.fromkeys((param.sharded for param in params), len(every.intersection(copies)) or 1))
        whole = [param for param in self.parameters() if param not in sharded]
        return clip_local_shards(sharded, whole, max_norm, norm_type, process_group, self._unit.device)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce gradients by ``hook``, here and in all modules inside.

        Args:
            state: the first argument of ``hook``.
            hook: called with ``state``, the unsharded gradient (1-D), and a tensor for this rank's part of the reduced
                gradient. With ``NO_SHARD`` it gets no such tensor, and reduces in place. It must sum and divide itself.

        Raises:
            AssertionError: this is not the root; a hook was registered before; the strategy is hybrid.
            ValueError: ``hook`` cannot be called.
        """
        if not self.check_is_root():
            raise AssertionError("register_comm_hook must be called on the root, for all modules inside")
        expect(callable(hook), "the communication hook", hook, "a callable", ValueError)
        for each in self.fsdp_modules(self):
            if each.sharding_strategy in HYBRID:
                raise AssertionError(f"communication hooks do not know the two groups of {each.sharding_strategy}")
            if each._has_hook:
                raise AssertionError("a communication hook is registered already: there can be one")
        for each in self.fsdp_modules(self):
            each._has_hook = True
            each._unit.reduce_by(partial(hook, state))

    def _groups_of_root(self, method: str) -> list[ParamGroup]:
        if not self.check_is_root() or self._unit.schedule is None:
            raise RuntimeError(f"{method}() was called on {self._unit!r}, inside another one: call it on the outermost")
        return self._unit.schedule.groups

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        with shards_may_change(self):
            return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def free_buffers(self) -> int:
        """Free the buffers that this tree keeps for its next step, and return their size in bytes. Not in PyTorch,
        which keeps none."""
        return FSDPModule.free_buffers(self)  # type: ignore[arg-type]

    __deepcopy__ = FSDPModule.__deepcopy__


def _check_tree(
    root: nn.Module, chosen: Mapping[nn.Module, Mapping[str, Any]], ignored: set[nn.Parameter], use_orig_params: bool
) -> Found:
    """Check ``root`` and the modules inside that were ``chosen``, the innermost first, before the first is wrapped.
    Returns the parameters that are to be sharded."""
    refuse_overlaps((root,), ())
    every, before = Found(), set[nn.Module]()
    for module, overrides in [*chosen.items(), (root, dict[str, Any]())]:
        managed = managed_modules((module,), before)
        check_modules((), managed)
        found = free_parameters(managed, ignored.union(every))
        named = {locations[0].full_name: param for param, locations in found.items()}
        initialise.check_flattenable(named, overrides.get("use_orig_params", use_orig_params), were_moved=False)
        every.update(found)
        before.add(module)
    return every


def _auto_wrap(root: nn.Module, policy: Any, but: initialise.Ignored, options: dict[str, Any], data: DataMesh) -> None:
    """Wrap the modules inside of ``root`` that a policy chooses, the innermost first."""
    for name, module in root.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(f"auto_wrap_policy is given, but '{name}' is wrapped already: do one of both")
    precision = options["mixed_precision"]
    apart = () if precision is None else tuple(precision._module_classes_to_ignore)
    forced = {cls: {"mixed_precision": None} for cls in apart}
    chosen, paths = targets(root, policy, but.modules, but.params, forced), paths_in(root)
    found = _check_tree(root, chosen, but.params, options["use_orig_params"])
    named = [(plain_name(name), param) for name, param in root.named_parameters() if param in found]
    described = [f"'{name}' of shape {tuple(param.shape)}, {param.dtype}" for name, param in named]
    for group in (data.replicate_group, data.shard_group):
        compare(described, 0, group, "do not shard the same parameters")
    precise = [module for module in chosen if isinstance(module, apart)]
    if precise:
        warn(
            f"modules of {sorted({type(module).__name__ for module in precise})} are wrapped on their own and keep "
            f"their dtypes: mixed_precision._module_classes_to_ignore"
        )
    for module in precise:
        keep_precision(module)
    for module, overrides in chosen.items():
        wrapped = FullyShardedDataParallel(module, **{**options, **overrides})
        for path in paths[module]:
            root.set_submodule(path, wrapped)
