"""Where a forward reads a value of a tensor, the line is named, and the user may say what it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.report.activations import Activations
from fullshard.report.explain import explain
from fullshard.report.values import Values


def numbers(x: Tensor) -> Tensor:
    return x[: int(x.sum())]


def masks(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0]


def chosen(x: Tensor) -> Tensor:
    return x[(x[:, 0] > 0).nonzero()[:, 0]]


def selected(x: Tensor) -> Tensor:
    return x.masked_select(x > 0).view(-1, 8)


class Reading(nn.Module):
    def __init__(self, read: Any) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(8, 8), [read]

    def forward(self, x: Tensor) -> Tensor:
        return self.read[0](self.linear(x)).exp().sum()  # type: ignore[no-any-return]


def traced(read: Any, values: Values | None) -> Activations:
    found = explain(lambda: Reading(read), ranks=2, batch=torch.empty(64, 8), values=values).activations
    assert found is not None
    return found


@pytest.mark.parametrize("read", [numbers, masks, chosen, selected])
def test_a_value_that_is_read_may_be_given(read: Any) -> None:
    where = f"test_values.py:{read.__code__.co_firstlineno + 1}"
    with pytest.raises(RuntimeError, match=f"reads the value of a tensor at {where} .*return x.*: give what it reads"):
        traced(read, {"other.py:1": 1})
    size = 8 if read is selected else 1
    few, many = (traced(read, {where: size * count}).kept for count in (2, 60))
    assert traced(read, size * 2).kept == few < many
