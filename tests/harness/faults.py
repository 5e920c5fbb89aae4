"""What tests break or take away on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard.buffer import slots
from fullshard.comm.host import HostTransport


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
def memory_swap(available: bool = False) -> Iterator[None]:
    """Let storages exchange their memory only if ``available``, and it can be done; torch 2.11 has no way to."""
    with pytest.MonkeyPatch.context() as patch:
        if not available:
            patch.setattr(slots, "CAN_SWAP_MEMORY", False)
            patch.setattr(HostTransport, "compares_reductions", False)
        yield
