"""What ``param.grad`` shows while a gradient waits to be reduced, so that users can clear it, as by ``zero_grad()``.

A gradient that waits is in the buffers of its group, where users do not see it. Meanwhile ``param.grad`` is the one
that was reduced before or, if there is none, zeros without memory of their own. Owns the class that this tensor has
meanwhile. It notes what users do to it, on every rank alike, without reading any value.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fullshard.torch_private import PlainAttributes, local_of, set_local
from fullshard.tree import tensors

_ZEROING = ("zero_", "_foreach_zero_")
_WRITES_NOTHING = ("requires_grad_", "detach_", "retain_grad_", "__int__", "__index__", "__invert__")
_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class WaitingGrad(torch.Tensor):
    """A gradient, still the same object, while another one waits to be added to it.

    Attributes:
        is_blank: whether it is zeros that only show that a gradient waits.
        was_cleared: whether users have set it to zero.
        was_written: whether users have written other values to it, after that.
    """

    is_blank: bool
    was_cleared: bool
    was_written: bool
    _before_backward: RemovableHandle | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        is_write = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        with PlainAttributes():
            for each in tensors(args[0]) if is_write and name not in _WRITES_NOTHING else ():
                if isinstance(each, WaitingGrad):
                    each._note(name in _ZEROING or (name == "fill_" and args[1] == 0))
            result = func(*args, **(kwargs or {}))
        if func == _DATA:  # ``param.grad.data.zero_()``
            result.__class__, result.__dict__ = type(args[0]), args[0].__dict__
        return result

    def _note(self, zeroes: bool) -> None:
        self.was_written, self.was_cleared = not zeroes, self.was_cleared or zeroes
        if not zeroes:
            own_memory(self)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)


@cache
def _waiting_class(cls: type) -> type:
    return type(cls.__name__, (WaitingGrad, cls), {})


def show_waiting(param: torch.Tensor, make_blank: Callable[[], torch.Tensor]) -> WaitingGrad | None:
    """Show in ``param.grad`` that a gradient waits. If there is none to show, show what ``make_blank`` returns."""
    if isinstance(grad := param.grad, WaitingGrad) or not param.requires_grad:
        return grad if isinstance(grad, WaitingGrad) else None
    shown: Any = make_blank() if grad is None else grad
    if grad is None:
        param.grad = shown
    cls: type = type(shown)
    shown.__class__ = _waiting_class(cls)
    shown.is_blank, shown.was_cleared, shown.was_written = grad is None, False, False
    shown._before_backward = param.register_hook(partial(_autograd_writes, shown)) if grad is None else None
    return shown


def _autograd_writes(shown: WaitingGrad, grad: torch.Tensor) -> torch.Tensor | None:
    """Runs before autograd adds to a blank, as where a loss has a penalty on a sharded parameter."""
    shown._note(zeroes=False)
    if isinstance(grad, DTensor) and isinstance(shown, DTensor) and grad.placements != shown.placements:
        return grad.redistribute(placements=shown.placements)
    return None


def own_memory(grad: torch.Tensor) -> None:
    """Give a blank memory of its own: somebody writes to it."""
    if isinstance(grad, WaitingGrad) and grad.is_blank:
        grad.was_written = True
        with PlainAttributes():
            if isinstance(grad, DTensor):
                set_local(grad, local_of(grad).contiguous())
            else:
                grad.data = grad.contiguous()


def is_cleared(param: torch.Tensor, shown: WaitingGrad) -> bool:
    """Whether users have cleared ``param.grad``, which was ``shown``. A different gradient in its place is added to."""
    now = param.grad
    return now is None or (now is shown and getattr(shown, "was_cleared", False))  # ``module.to()`` swaps attributes


def hide_waiting(param: torch.Tensor, shown: WaitingGrad) -> None:
    """Stop to show that a gradient waits: remove zeros that nobody wrote to, so that the reduced one has its own
    dtype. Zeros that users wrote stay, and optimizers step by them. A rank without elements of a parameter keeps no
    gradient."""
    if not isinstance(shown, WaitingGrad):  # several parameters may have one, and one ``grad``
        return
    if shown.was_cleared and param.grad is shown:
        own_memory(shown)
    shown.__class__ = type(shown).__mro__[2]
    if shown._before_backward is not None:
        shown._before_backward.remove()
    if param.grad is shown and shown.is_blank and not (shown.was_written and shown.numel()):
        param.grad = None


class WaitingGradient(Protocol):
    """A parameter: what users see of it, and zeros as a gradient of it."""

    @property
    def sharded(self) -> torch.Tensor: ...
    def blank_gradient(self, dtype: torch.dtype) -> torch.Tensor: ...


class ForOneDtype(Protocol):
    """Parameters whose gradients users see in one dtype, by index."""

    @property
    def members(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class ShownGrads:
    """What is shown of the gradients of ``params`` that wait: ``grads``, by index."""

    def __init__(self, params: Sequence[WaitingGradient]) -> None:
        self._params = params
        self.grads: dict[int, WaitingGrad] = {}

    def show(self, sections: Iterable[ForOneDtype], indices: Container[int]) -> None:
        """Show that the gradients with these indices wait."""
        for section in sections:
            for index in section.members:
                if index in indices and index not in self.grads:
                    param = self._params[index]
                    shown = show_waiting(param.sharded, partial(param.blank_gradient, section.dtype))
                    if shown is not None:
                        self.grads[index] = shown

    def take_cleared(self) -> list[int]:
        """The indices of gradients that users have cleared, which are no longer shown."""
        cleared = [index for index, grad in self.grads.items() if is_cleared(self._params[index].sharded, grad)]
        for index in cleared:
            hide_waiting(self._params[index].sharded, self.grads.pop(index))
        return cleared

    def hide(self) -> None:
        """Show nothing any more."""
        for index, grad in self.grads.items():
            hide_waiting(self._params[index].sharded, grad)
        self.grads.clear()
