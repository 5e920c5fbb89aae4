"""What sharding makes of a model: sizes that a table shows and a step does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.report.advice import advise
from fullshard.report.explain import Explanation, explain
from fullshard.report.meta_step import ExchangeTotal
from tests.group.test_extension import Bf16Gathered

LOW = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def linear(rows: int = 64, columns: int = 64, ranks: int = 4, **options: Any) -> Explanation:
    return explain(lambda: fullshard.fully_shard(nn.Linear(columns, rows, bias=False), **options), ranks=ranks)


@pytest.mark.parametrize("options", [{}, {"mp_policy": LOW}], ids=["fp32", "bf16"])
def test_a_shard_is_kept_in_the_dtype_of_the_parameters_alone(options: dict[str, Any]) -> None:
    """Without memory that ranks share, nothing else of the parameters rests between steps."""
    found = linear(**options)
    (group,) = found.groups
    assert group.transport != "shm"
    assert (group.shard, group.whole) == (64 * 64 * 4 // 4, 64 * 64 * (2 if options else 4))
    assert found.memory[0].parts[0] == ("shards", 1, group.shard)


def test_advice_on_padding_names_the_group_that_has_most_of_it() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(2**18, rows, bias=False) for rows in (9, 17, 11)))
        for layer in model:
            fullshard.fully_shard(layer)
        return fullshard.fully_shard(model)

    (found,) = [each for each in map(str, advise(explain(build, ranks=8).facts)) if "Padding" in each]
    # 9 rows over 8 ranks take 16: a share of 7 / 9. 17 take 24, and 11 take 16.
    assert "by 78 % in 0, most of it for '0.weight' of shape (9, 262144), cut along dim 0" in found


def test_a_rank_sends_its_part_of_a_parameter_with_a_gather_of_its_own_to_each_other() -> None:
    def build() -> nn.Module:
        model = nn.Linear(16, 8, bias=False)
        model.weight = nn.Parameter(Bf16Gathered(model.weight.detach()))
        return fullshard.fully_shard(model)

    found = explain(build, ranks=4)
    assert found.groups[0].parameters[0].extends
    assert found.traffic[0] == ExchangeTotal("gather in forward", 1, 3 * (2 * 16 * 4))
