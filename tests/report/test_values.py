"""Where a forward reads a value of a tensor, the line is named, and the user may say what it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.report.activations import trace_step
from fullshard.report.explain import explain
from fullshard.report.snapshot import Snapshot
from fullshard.report.values import Values
from tests.harness import World, ranks


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


@ranks(1)
@pytest.mark.parametrize("read", [numbers, masks, chosen, selected])
def test_a_value_that_is_read_may_be_given(world: World, read: Any) -> None:
    model, program = fullshard.fully_shard(Reading(read)), Snapshot()

    def kept(values: Values) -> int:
        return trace_step(model, torch.empty(64, 8), None, values, program).kept

    where = f"test_values.py:{read.__code__.co_firstlineno + 1}"
    with pytest.raises(RuntimeError, match=f"reads the value of a tensor at {where} .*return x.*: give what it reads"):
        kept({"other.py:1": 1})
    size = 8 if read is selected else 1
    assert kept(size * 2) == kept({where: size * 2}) < kept({where: size * 60})


class Routed(nn.Module):
    """Two operators of which torch knows results only from values, or shapes only in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.empty(2, 16, 16)), nn.Linear(16, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = torch._grouped_mm(x, self.weight, offs=lengths.cumsum(0, dtype=torch.int32))
        scores = self.head(y[12:, None]).log_softmax(-1)
        return nn.functional.ctc_loss(scores, torch.ones(1, 2, dtype=torch.long), lengths[1:], lengths[1:] * 0 + 2)


def test_operators_whose_results_have_no_values_are_known() -> None:
    batch = torch.empty(32, 16), torch.tensor([12, 20])
    assert explain(Routed, ranks=2, batch=batch).activations.kept > 0  # type: ignore[union-attr]
