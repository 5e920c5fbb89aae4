"""Lets a rank leave out a module that other ranks run in the same forward.

All ranks must take part in each gather and each reduction. A rank whose batch has no image does not run the vision
tower, but the others need its shards, and its part in the sums of gradients. For each unit of the module,
:func:`skip_module` does what forward and backward would do, without the computation in between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from fullshard.schedule.unit import Unit, unit_of
from fullshard.torch_private import running_backward


class _Zeros(torch.autograd.Function):
    """Returns its tensor, as a copy; its backward gives zeros to the parameters.

    It is not a view, because a view would share the hooks that units register on its base.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.params = params
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads[0], *map(torch.zeros_like, ctx.params)


class _ShareBackward(torch.autograd.Function):
    """Returns the first of two tensors, as a copy. Its backward runs the backward of both."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        ctx.token = token.shape, token.dtype, token.device
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype, device = ctx.token
        return grads[0], torch.zeros(shape, dtype=dtype, device=device)


def skip_module(module: nn.Module, tensor: torch.Tensor, *, input_has_gradient: bool = False) -> torch.Tensor:
    """Take part in the gathers and reductions of ``module`` on a rank that does not run it in this forward.

    Call it in the ``forward`` of the root, where other ranks call ``module``, once for each of their calls, and go on
    with what it returns::

        x = self.text(tokens)
        x = x + self.vision(images) if images is not None else fullshard.skip_module(self.vision, x)

    The units inside are gathered in the order in which their modules are registered, which must be the one in which
    they run. Activation checkpointing inside of a unit, or around one, changes no order; around several units it does,
    and the ranks say so. The gradients of the module on this rank are zeros, so that a step equals unsharded training
    on the batches of all ranks. Nothing is computed.

    Args:
        module: has sharded modules in it, or is one.
        tensor: a tensor from which the loss is computed, of any shape and any floating-point or complex dtype.
        input_has_gradient: whether the inputs of ``module`` on the other ranks require gradients. Hidden states do,
            images do not. This decides when the gradients of the module's first units are complete.

    Returns:
        ``tensor``, with the gradients of ``module`` in its history if gradients are enabled.

    Raises:
        TypeError: ``tensor`` cannot have a gradient.
        ValueError: nothing in ``module`` is sharded.
        RuntimeError: it is called outside the forward of the root.

    Ranks: those that leave the module out.
    """
    if not tensor.is_floating_point() and not tensor.is_complex():
        raise TypeError(
            f"skip_module expects a floating-point tensor that the loss is computed from, got {tensor.dtype}: pass "
            f"what the module's output would be added to"
        )
    units = [unit for inner in module.modules() if (unit := unit_of(inner)) is not None]
    if not units:
        raise ValueError(f"skip_module was called with {type(module).__name__}, in which nothing is sharded")
    in_forward = any(unit.schedule is not None and unit.schedule.step.now.has_forward for unit in units)
    if not in_forward and running_backward() < 0:
        raise RuntimeError(
            f"skip_module({type(module).__name__}) must be called in the forward of the root, where other ranks call it"
        )
    token = torch.zeros((), device=tensor.device, requires_grad=input_has_gradient and torch.is_grad_enabled())
    shared: torch.Tensor = _ShareBackward.apply(tensor, _skip(module, token))  # type: ignore[no-untyped-call]
    return shared


def _skip(module: nn.Module, token: torch.Tensor) -> torch.Tensor:
    """Do what the forward of a module would do with its own unit and the units inside it."""
    unit: Unit | None = unit_of(module)
    if unit is not None:
        (token,), _ = unit.pre_forward(module, (token,), {})
    for child in module.children():
        token = _skip(child, token)
    params = [param for param in module._parameters.values() if param is not None]
    if unit is not None:  # a flat parameter hides the others
        hidden = [param for group in unit.groups for param in group.params if param.hidden is not None]
        params += [param.unsharded for param in hidden if param.unsharded is not None]
    trained = {id(param): param for param in params if param.requires_grad}
    if trained:
        token = _Zeros.apply(token, *trained.values())  # type: ignore[no-untyped-call]
    if unit is not None:
        token = unit.post_forward(module, (token,), token)
    return token
