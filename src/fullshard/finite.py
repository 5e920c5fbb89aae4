"""A search for the first value that is not finite: in outputs, in the gradients of this rank, in reduced gradients.

The next reduction spreads a NaN from one rank to all ranks, so that nobody can tell where it came from. Owns the hooks
that check. A model without them is not checked, and pays nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fullshard import tree
from fullshard.comm.waits import WAITS
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import plain_name
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import schedule_of


class NanError(ArithmeticError):
    """A value is NaN or infinite. It names the rank, the module or parameter, the step, and the first index.

    A rank that raises it in a step ends the step of the other ranks too.
    """

    __module__ = "fullshard"


class NanDetector:
    """Checks for values that are not finite, until it is removed or its ``with`` block ends.

    Made by :func:`detect_nan`.

    Ranks: each for itself.
    """

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        self._schedule = weakref.ref(schedule)
        schedule.inspect = _look_at_gradients
        look = torch.compiler.disable(_look_at_output)
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_hook(partial(look, plain_name(name))))

    def remove(self) -> None:
        """Stop checking. May be called twice."""
        for handle in self._handles:
            handle.remove()
        schedule = self._schedule()
        if schedule is not None:
            schedule.inspect = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


def detect_nan(model: nn.Module) -> NanDetector:
    """Raise at the first NaN or infinity in an output of a module, a gradient, or a reduced gradient.

    Every step checks all of them, and waits for the device: use it to find an error, on all ranks or on one.
    Values that are infinite on purpose (masks of -inf, gradients before a scaler checks them) are reported too.

    ::

        with fullshard.detect_nan(model):
            train(model)

    Args:
        model: the root, sharded by ``fully_shard`` or wrapped.

    Returns:
        an object with ``remove()``, which is a context manager too.

    Raises:
        ValueError: ``model`` is not sharded.
        NanError: in a later forward or backward, on the ranks that find one; it names the rank, the module or
            parameter, the step, and the first index. Errors on other ranks say that they lost this one.

    Ranks: each for itself.
    """
    return NanDetector(model, schedule_of(model, "detect_nan"))


def _look_at_output(name: str, module: nn.Module, args: Any, output: Any) -> None:
    for tensor in tree.tensors(output):
        _expect_finite(
            tensor, f"the output of '{name}' ({type(module).__name__})" if name else "the output of the model"
        )


@torch.no_grad()
def _look_at_gradients(group: ParamGroup, reduced: bool) -> None:
    """Check the gradients of a group, before or after they are reduced."""
    grads: Iterable[tuple[int, torch.Tensor | None]] = (
        ((index, param.sharded.grad) for index, param in enumerate(group.params))
        if reduced
        else group.gradients.unreduced()
    )
    for index, grad in grads:
        if grad is not None:
            when = "after its reduction" if reduced else "before its reduction"
            _expect_finite(grad, f"the gradient of '{group.params[index].name}' {when}")


@torch.no_grad()
def _expect_finite(tensor: torch.Tensor, what: str) -> None:
    """
    Raises:
        NanError: ``tensor`` has a value that is not finite.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not (local.is_floating_point() or local.is_complex()) or local.is_meta or bool(torch.isfinite(local).all()):
        return
    places = (~torch.isfinite(local)).nonzero()
    first = tuple(places[0].tolist())
    part = " of this rank's part" if isinstance(tensor, DTensor) else ""
    where = f"rank {dist.get_rank()}, {WAITS.position().doing}"
    raise NanError(
        f"{where}: {what} is {local[first].item()} at index {first}{part}, the first of {len(places)} values that are "
        f"not finite, of {local.numel()}"
    )
