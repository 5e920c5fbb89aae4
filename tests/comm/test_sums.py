"""How a sum becomes a mean, for each backend and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState

from fullshard.comm.sums import choose_scaling, divide_

LOW_AND_HIGH = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", LOW_AND_HIGH, ids=str)
def test_nccl_multiplies_by_any_other_factor(dtype: torch.dtype) -> None:
    scaling = choose_scaling(dtype, 8, 24.0, False, True)
    assert (scaling.before, scaling.after) == (1, 1)
    assert scaling.op.op == dist.ReduceOp.PREMUL_SUM


@pytest.mark.parametrize(
    ("ranks", "sums", "divides", "op", "after"),
    [
        (8, False, True, dist.ReduceOp.AVG, 1),
        (8, False, False, dist.ReduceOp.SUM, 8),
        (8, True, True, dist.ReduceOp.SUM, 8),  # which it was told to do
        (1, False, True, dist.ReduceOp.SUM, 1),  # nothing is divided
    ],
)
def test_a_mean_is_taken_by_nccl_and_divided_after_others(
    ranks: int, sums: bool, divides: bool, op: Any, after: int
) -> None:
    for dtype in LOW_AND_HIGH:
        scaling = choose_scaling(dtype, ranks, float(ranks), sums, divides)
        assert (scaling.before, scaling.op, scaling.after) == (1, op, after)


@given(st.integers(1, 4096), st.booleans())
def test_fp16_is_divided_by_about_the_square_root_on_each_side(divisor: int, divides: bool) -> None:
    scaling = choose_scaling(torch.float16, divisor, float(divisor), False, divides)
    assert scaling.op == dist.ReduceOp.SUM
    assert scaling.before * scaling.after == divisor
    assert 1 <= scaling.before**2 / divisor < 4


def test_fp16_is_divided_before_by_at_least_what_torch_divides_by() -> None:
    """Torch stops at the first power of two that does not divide the number of ranks, as early as 2."""
    for size in range(1, 1025):
        before = choose_scaling(torch.float16, size, float(size), False, False).before
        torchs = DefaultState._get_gradient_predivide_factor(size)
        assert before == torchs if size & (size - 1) == 0 else before >= torchs, f"{size} ranks"


@given(st.sampled_from([1.0, 2.0, 3.0, 7.0, 64.0, 0.5, 1000.0]))
def test_division_gives_the_bits_of_a_division(divisor: float) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    divided = values.clone()
    divide_(divided, divisor)
    assert torch.equal(divided, values / divisor)
