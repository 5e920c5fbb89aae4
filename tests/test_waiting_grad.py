"""What `param.grad` notes while a gradient waits: clearing and writing, in every way in which programs do it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fullshard.waiting_grad import WaitingGrad, hide_waiting, is_cleared, show_waiting

USES: dict[str, tuple[Callable[[Tensor], object], bool, float | None]] = {
    "reads": (lambda grad: (grad.norm(), grad + 1, copy.deepcopy(grad), pickle.dumps(grad)), False, None),
    "zeroes": (lambda grad: grad.zero_(), True, 0),
    "zeroes several": (lambda grad: torch._foreach_zero_([grad]), True, 0),
    "fills": (lambda grad: grad.fill_(0), True, 0),
    "zeroes the data": (lambda grad: grad.data.zero_(), True, 0),
    "writes": (lambda grad: grad.add_(2), False, 2),
    "writes several": (lambda grad: torch._foreach_add_([grad], 2), False, 2),
    "assigns": (lambda grad: grad.__setitem__(slice(None), 2.0), False, 2),
    "writes after zeroes": (lambda grad: grad.zero_().__iadd__(2), True, 2),
}


def shown_by(param: nn.Parameter) -> WaitingGrad:
    shown = show_waiting(param, lambda: torch.zeros(()).expand(param.shape))
    assert shown is not None
    return shown


@pytest.mark.parametrize("use", USES)
def test_what_users_do_to_a_gradient_is_noted(use: str) -> None:
    act, clears, left = USES[use]
    param = nn.Parameter(torch.ones(3))
    shown = shown_by(param)
    act(shown)
    assert is_cleared(param, shown) == clears
    hide_waiting(param, shown)
    assert (None if param.grad is None else param.grad.tolist()) == (None if left is None else [left] * 3)
    assert type(shown) is Tensor


def test_a_gradient_that_was_there_stays_the_same_object() -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = before = torch.full((3,), 5.0)
    shown = shown_by(param)
    assert not is_cleared(param, shown)
    param.grad.zero_()
    assert is_cleared(param, shown)
    hide_waiting(param, shown)
    assert param.grad is before
    assert not before.any()


def test_a_gradient_that_was_replaced_is_added_to() -> None:
    """A rank that has zeros, or nothing, of it decides as the others do."""
    param = nn.Parameter(torch.ones(3))
    shown = shown_by(param)
    param.grad = torch.zeros(3)
    assert not is_cleared(param, shown)
    param.grad = None
    assert is_cleared(param, shown)
