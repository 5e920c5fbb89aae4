"""Users' hooks on the gradients of sharded parameters, which autograd never reaches: it sees leaves in their place.

Owns the hook on a leaf that calls those of its sharded parameter, with the whole gradient of this rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from fullshard.torch_private import gradient_hooks

Hook = Callable[[torch.Tensor], torch.Tensor | None]


class HasLeaf(Protocol):
    """A parameter, as it is between passes, and the leaf that autograd sees."""

    sharded: torch.nn.Parameter
    unsharded: torch.nn.Parameter | None


def hooks_of_users(param: torch.Tensor) -> list[Hook]:
    """The hooks on a parameter without those of fullshard."""
    hooks = (gradient_hooks(param) or {}).values()
    return [hook for hook in hooks if not str(getattr(hook, "func", hook).__module__).startswith("fullshard.")]


def follow_hooks(param: HasLeaf) -> bool:
    """Let the leaf call the hooks of ``param.sharded`` from now on, also those that come later; returns whether it has
    any yet."""
    if param.unsharded is None or not param.unsharded.requires_grad or not hooks_of_users(param.sharded):
        return False
    here = weakref.ref(param)  # autograd hides a cycle from Python

    def call(grad: torch.Tensor) -> torch.Tensor:
        for hook in () if (owner := here()) is None else hooks_of_users(owner.sharded):
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad

    param.unsharded.register_hook(call)
    return True
