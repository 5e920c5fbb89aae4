"""In which dtypes gradients travel: the rules in their order. tests/parity compares what comes of them with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import MixedPrecisionPolicy
from fullshard.group.gradient_dtypes import GradientDtypes
from fullshard.torch_private import GRADIENTS_KEEP_DTYPE
from tests.fully_shard.cases import groups_of
from tests.harness import fake_world

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def dtypes_of(*dtypes: torch.dtype, **policy: Any) -> GradientDtypes:
    model = nn.Module()
    for number, dtype in enumerate(dtypes):
        model.register_parameter(f"p{number}", nn.Parameter(torch.zeros(4, 4, dtype=dtype)))
    (group,) = groups_of(fullshard.fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy)))
    return GradientDtypes(group)


def test_the_dtype_of_the_reduction_comes_first_but_not_for_complex_gradients() -> None:
    with fake_world(2):
        found = dtypes_of(FP32, BF16, torch.complex64, param_dtype=FP16, reduce_dtype=FP64)
        found._group.params[0].grad_dtype = BF16
        assert [found.alone(index) for index in range(3)] == [FP64, FP64, torch.complex64]


def test_then_the_dtype_that_was_assigned() -> None:
    with fake_world(2):
        found = dtypes_of(FP32, FP32, param_dtype=BF16)
        found._group.params[0].grad_dtype = FP64
        assert found.alone(0) == FP64


def test_then_that_of_the_parameter_or_of_its_computation_as_in_the_installed_torch() -> None:
    with fake_world(2):
        found = dtypes_of(FP32, param_dtype=BF16)
        assert found.alone(0) == (FP32 if GRADIENTS_KEEP_DTYPE else BF16)


def test_where_any_dtype_may_come_the_widest_that_came_counts() -> None:
    with fake_world(2):
        found = dtypes_of(FP32, param_dtype=BF16)
        found._group.params[0].grad_dtype = "any"
        assert found.alone(0) == BF16
        found.found[0] = FP32
        assert found.alone(0) == FP32


@pytest.mark.parametrize("trainable", [(True, True, True), (True, False, True)])
def test_gradients_that_travel_together_have_the_dtype_to_which_they_promote(trainable: tuple[bool, ...]) -> None:
    with fake_world(2):
        found = dtypes_of(FP16, BF16, FP16)
        indices = [index for index, trains in enumerate(trainable) if trains]
        travels = FP32 if all(trainable) else FP16
        assert found.together(indices) == [
            ((dtype, travels), [index for index in indices if (FP16, BF16, FP16)[index] == dtype])
            for dtype in dict.fromkeys((FP16, BF16, FP16)[index] for index in indices)
        ]
        sections, dtypes = found.sections(trainable)
        assert [each.dtype for each in sections] == ([FP16, BF16] if all(trainable) else [FP16])
        assert dtypes == [travels] * len(sections)
        assert [index for each in sections for index in each.members] == sorted(indices, key=lambda i: (i == 1, i))


def test_real_gradients_do_not_become_complex() -> None:
    with fake_world(2):
        found = dtypes_of(FP32, torch.complex64, FP64)
        assert found.together(range(3)) == [
            ((FP32, FP64), [0]),
            ((torch.complex64, torch.complex64), [1]),
            ((FP64, FP64), [2]),
        ]
