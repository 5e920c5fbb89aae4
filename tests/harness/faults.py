"""What tests break or take away on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import count
from pkgutil import resolve_name
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

When = Literal["before", "after"]


class Fault(Exception):
    """What goes wrong on purpose."""


class FailingBackward(torch.autograd.Function):
    """The identity, whose backward raises :class:`Fault`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Fault("in backward")


@contextmanager
def failing(where: str, call: int, when: When) -> Iterator[None]:
    """Let one call of a function raise :class:`Fault`, ``before`` it does its work or ``after``; the first is 1."""
    module, _, path = where.partition(":")
    holder, _, name = path.rpartition(".")
    owner = resolve_name(f"{module}:{holder}" if holder else module)
    original, calls = getattr(owner, name), count(1)

    @wraps(original)
    def fail(*args: Any, **kwargs: Any) -> Any:
        fails = next(calls) == call
        if fails and when == "before":
            raise Fault(where)
        result = original(*args, **kwargs)
        if fails:
            raise Fault(where)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield
