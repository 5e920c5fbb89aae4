"""What tests break or take away on purpose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
