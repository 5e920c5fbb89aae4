"""Gradient scaling for sharded gradients: a step that overflows on one rank is skipped by all.

Owns the agreement of the ranks on whether a gradient is infinite or NaN, and what becomes of what encodings have lost
of scaled gradients. ``torch.amp.GradScaler`` does everything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.comm.process_group import all_reduce
from fullshard.diverging import replicas_apart
from fullshard.group.feedback import GradientFeedback
from fullshard.group.owners import owner_of
from fullshard.group.param_group import ParamGroup
from fullshard.torch_private import OpenGradScaler, local_of
from fullshard.waiting_grad import own_memory


class ShardedGradScaler(OpenGradScaler):
    """A ``torch.amp.GradScaler`` for gradients of which each rank has a part, or none.

    An infinity or NaN on any rank skips the step on all ranks, and all change the scale alike. Gradients may be plain
    tensors, also of 0 elements, and DTensors, of any floating-point dtype, on several devices. Fused optimizers skip
    too. Errors are those of ``GradScaler``.

    Args:
        device: the type of the device of the losses, from which ranks also communicate.
        init_scale: as for ``GradScaler``, like ``backoff_factor``, ``growth_factor``, ``growth_interval`` and
            ``enabled``.
        process_group: the ranks that skip a step together; ``None`` for all ranks. The ranks of the DTensors' meshes
            also skip it, except replicas that train apart (:class:`LocalSteps`).

    Ranks: all ranks of the group call ``unscale_`` or ``step``: the first of these calls for an optimizer communicates
    one number. The other methods: each for itself.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group
        self._communicates_on = torch.device(device)
        self._unscaled = dict[GradientFeedback, None]()  # what was lost of the gradients of this step

    def scale(self, outputs: Any) -> Any:
        """Multiply ``outputs``, a tensor or nested iterables of tensors, by the scale. Each tensor keeps its dtype."""
        if isinstance(outputs, torch.Tensor) and self.is_enabled():
            scaled: torch.Tensor = super().scale(outputs)
            return scaled.to(outputs.dtype)  # a 0-dim loss in fp16, as forward gives it, would become fp32
        if not isinstance(outputs, Iterable) or not self.is_enabled():
            return super().scale(outputs)
        each = map(self.scale, outputs)
        return type(outputs)(each) if isinstance(outputs, list | tuple) else each

    def unscale_gradients(
        self, params: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        plain = [_twin(param) if isinstance(param, DTensor) else param for param in params]
        found = super().unscale_gradients(plain, inv_scale, found_inf)
        # One call on all ranks, also on those without gradients or with CPU gradients, which some backends cannot send.
        device = self._communicates_on if found_inf.is_cpu else found_inf.device
        worst = torch.stack([each.to(device) for each in (found_inf, *found.values())]).amax()
        groups = [self.process_group]
        if self.process_group not in (None, dist.group.WORLD):
            meshes = dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor))
            apart = {replicas_apart(owner[0]) for param in params if (owner := owner_of(param)) is not None}
            groups += [group for mesh in meshes for group in mesh.get_all_groups() if group not in apart]
        for group in groups:
            all_reduce(worst, group, "the search for infinite gradients", dist.ReduceOp.MAX)
        owners = (owner[0] for param in params if (owner := owner_of(param)) is not None)
        lost = dict.fromkeys(each.gradients.feedback for each in owners if isinstance(each, ParamGroup))
        lost = {each: None for each in lost if each.tensors() or each.between_replicas}
        if lost and bool(worst):  # the step is skipped
            for each in lost:
                each.scale(0.0)
        self._unscaled |= lost
        return {where: worst.to(where, copy=True) for where in found or (found_inf.device,)}

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale, and what encodings have lost of gradients (:class:`WirePolicy`) to the new scale."""
        unscaled, self._unscaled = self._unscaled, {}
        before = self.get_scale() if unscaled else 1.0
        super().update(new_scale)
        factor = self.get_scale() / before if unscaled else 1.0
        for lost in unscaled if factor != 1 else ():
            lost.scale(factor)


def _twin(param: DTensor) -> torch.Tensor:
    """An object whose gradient is the local part of the parameter's. Operations on DTensors would communicate too."""
    if not isinstance(grad := param.grad, DTensor):
        return param
    own_memory(grad)  # it is unscaled in place
    twin = local_of(grad).detach()
    twin.grad = local_of(grad)
    return twin
