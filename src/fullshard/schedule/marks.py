"""Marks in autograd's graph: where the backward of a unit begins and ends, and where it is differentiated.

Owns the autograd functions. Each is the identity, gives gradients on as they are, and tells its unit in its backward.
Under a transform of ``torch.func`` a function makes a node on each level that differentiates, so that the unit is told
on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fullshard import tree
from fullshard.torch_private import (
    base_of,
    outside_transforms,
    plain_apply,
    set_versions,
    transforms_are_active,
    version_of,
)

#: A method of a unit that a mark calls in a backward, with the unit's use and a gradient.
Tell = Callable[[Any, torch.Tensor | None], None]
#: No marked inputs, no aliases of these, and no versions from before.
NONE: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], list[int]] = (), (), []


class _AliasMark(torch.autograd.Function):
    """Returns aliases that are no views, so that they may be written in place."""

    @staticmethod
    def forward(unit: Any, use: object, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.Tensor.detach, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.unit, ctx.use = inputs[:2]
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, unit: None, use: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if each is None else each.view_as(each) for each in tangents)

    @classmethod
    def vmap(cls, info: object, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return cls.apply(*args), dims[2:]  # type: ignore[no-untyped-call]


class EndOfBackward(_AliasMark):
    """Marks a unit's inputs: when their gradients are there, the backward of the unit has ended."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            ctx.unit.post_backward(ctx.use)
            return (None, None, *grads)
        with outside_transforms():
            ctx.unit.post_backward(ctx.use)
        tell = ctx.unit.differentiate
        return (None, None, *(None if grad is None else mark_gradient(tell, ctx.use, grad) for grad in grads))


mark_plain = plain_apply(EndOfBackward)  # outside of transforms


class Told(_AliasMark):
    """Marks tensors under a transform. When one has a gradient, a method of a unit is told, in the unit's place."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        with outside_transforms():
            ctx.unit(ctx.use, None)
        return (None, None, *grads)


def may_require_grad(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def mark_outputs(tell: Tell, use: object, output: Any) -> Any:
    """Mark the outputs of a unit under a transform: when one has a gradient, the backward of the unit begins."""
    found = list(filter(may_require_grad, tree.tensors(output)))
    marked = dict(zip(map(id, found), Told.apply(tell, use, *found), strict=True))  # type: ignore[no-untyped-call]
    return tree.map_tensors(lambda tensor: marked.get(id(tensor), tensor), output)


def mark_gradient(tell: Tell, use: object, grad: torch.Tensor) -> torch.Tensor:
    """Mark the gradient of an input if it was computed to be differentiated (``create_graph=True``).

    A backward through this backward comes here first, and then reads what the backward read.
    """
    if transforms_are_active():
        return Told.apply(tell, use, grad)[0]  # type: ignore[no-untyped-call]
    if grad.grad_fn is not None:  # a leaf would keep the hook, and depends on nothing
        grad.register_hook(partial(tell, use))
    return grad


class _Written(torch.autograd.Function):
    """Gives a tensor the history of an alias through which it was written."""

    @staticmethod
    def forward(tensor: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(grad), grad


class _Fixed(torch.autograd.Function):
    """Returns its tensor as a view that autograd does not let anyone write to in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def own_inputs(output: Any, tensors: Sequence[torch.Tensor], aliases: Sequence[torch.Tensor]) -> Any:
    """``output`` with the ``tensors`` themselves in place of their aliases, and views of aliases fixed. Otherwise the
    caller could write to its tensors through the outputs, and they would not have the history of that."""
    own = dict(zip(map(id, aliases), tensors, strict=True))

    def replaced(each: torch.Tensor) -> torch.Tensor:
        fixed: Any = _Fixed.apply if id(base_of(each)) in own else lambda tensor: tensor
        return own[id(each)] if id(each) in own else fixed(each)

    return tree.map_tensors(replaced, output)


def follow_writes(tensors: Sequence[torch.Tensor], aliases: Sequence[torch.Tensor]) -> None:
    """Give each of ``tensors`` the history of its alias if that was written in place, as if the tensor had been."""
    for tensor, alias in zip(tensors, aliases, strict=True):
        if alias.grad_fn is not None and not alias.grad_fn.name().startswith(EndOfBackward.__name__):
            version = version_of(tensor)
            _Written.apply(tensor, alias)  # type: ignore[no-untyped-call]
            set_versions((tensor,), (version,))  # no values were written just now
