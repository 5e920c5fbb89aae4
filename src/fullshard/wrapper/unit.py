"""The unit of a wrapped module.

Owns what torch's wrapper does only at its root: casts of the root's inputs, casts of buffers, full precision in
evaluation if ``FSDP_USE_FULL_PREC_IN_EVAL`` is set. All else is the engine's :class:`~fullshard.schedule.unit.Unit`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from fullshard import tree
from fullshard.comm.collective import HookTransport
from fullshard.policies import MixedPrecisionPolicy
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import Unit
from fullshard.torch_private import running_backward
from fullshard.wrapper.settings import MixedPrecision


class WrappedUnit(Unit):
    """One wrapped module. A buffer is identified by its module and its name there."""

    tree = (*Unit.tree, "buffers", "buffer_dtypes")
    is_wrapper = True

    def __init__(self, wrapper: nn.Module, device: torch.device, precision: MixedPrecision, auto_reshard: bool) -> None:
        dtypes = precision.param_dtype, precision.reduce_dtype, None
        super().__init__((wrapper,), device, MixedPrecisionPolicy(*dtypes, precision.cast_forward_inputs), auto_reshard)
        self.precision, self._policy = precision, self.mp_policy
        self.buffers: list[tuple[nn.Module, str]] = []
        #: The original dtypes of cast buffers, by module and name. State dicts restore them.
        self.buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        self.failed = False

    def __repr__(self) -> str:
        return f"the wrapped {type(self.modules[0].module).__name__}"

    def use_schedule(self, schedule: Schedule) -> None:
        super().use_schedule(schedule)
        at_root = schedule.root is self and self.precision.cast_root_forward_inputs
        self.casts_inputs = self.precision.cast_forward_inputs or at_root
        self._cast_buffers()

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        schedule = self.schedule or self.start()
        if schedule.root is self:
            self.recover()
            for unit in schedule.units if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1" else ():
                if isinstance(unit, WrappedUnit):
                    unit._compute_in_full(not module.training)
        try:
            return super().pre_forward(module, args, kwargs)
        except BaseException:
            self.failed = True
            raise

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        try:
            return super().post_forward(module, args, output)
        except BaseException:
            self.failed = True
            raise

    def recover(self) -> None:
        """Reset the state of a step if an error ended the last one. All ranks must call it."""
        if (schedule := self.schedule) is None or running_backward() >= 0:
            return
        now = schedule.step.now
        began = (schedule.root, schedule.outermost) if now.has_forward else (schedule.root,)
        outermost = [unit for unit in began if isinstance(unit, WrappedUnit)]
        if outermost and (now.has_backward or any(unit.failed for unit in outermost)):
            schedule.reset()

    def reset(self) -> None:
        super().reset()
        self.failed = False

    def reduce_by(self, hook: Callable[..., Any]) -> None:
        """Reduce gradients by a hook from now on, with the interface of ``torch.distributed.algorithms``."""
        for group in self.groups:
            if group.data.shard_group is None:
                group.options.all_reduce = hook
                group.options.divide_factor = 1.0
            else:
                group.use_transport(reduce=HookTransport(hook))

    def _cast_buffers(self) -> None:
        dtype = self.precision.buffer_dtype
        for module, name in self.buffers if dtype is not None else ():
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_floating_point():
                self.buffer_dtypes.setdefault((module, name), buffer.dtype)
                module._buffers[name] = buffer.to(dtype)

    def _compute_in_full(self, full: bool) -> None:
        """Compute in the original dtypes from now on, or with the settings' mixed precision again."""
        if full is (self.mp_policy is not self._policy):
            return
        self.mp_policy = MixedPrecisionPolicy() if full else self._policy
        if not full:
            self._cast_buffers()
        for group in self.groups:
            group.options.mp_policy = self.mp_policy
            group.rebuild()
        for (module, name), dtype in self.buffer_dtypes.items() if full else ():
            module._buffers[name] = module._buffers[name].to(dtype)  # type: ignore[union-attr]


def keep_precision(module: nn.Module) -> None:
    """Make a module of a low-precision model compute in fp32. Its outputs get the dtype of its inputs."""
    dtypes: list[torch.dtype] = []

    def to_float32(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        dtypes[:] = [tensor.dtype for tensor in tree.tensors(args) if tensor.is_floating_point()]
        return tree.cast_floating(args, torch.float32)

    def to_input_dtype(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return tree.cast_floating(output, dtypes[0] if dtypes else None)

    module.register_forward_pre_hook(to_float32)
    module.register_forward_hook(to_input_dtype)
