"""What an estimate counts as computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import fullshard
from fullshard.report.estimate import Hardware
from fullshard.report.explain import explain

WIDTH, TOKENS = 32, 10
#: Multiplications and additions of one weight, for all tokens.
PRODUCT = 2 * WIDTH * WIDTH * TOKENS


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"bandwidth": 0.0}, "bandwidth must be positive, got 0.0"),
        ({"flops": float("nan")}, "flops must be positive, got nan"),
        ({"tokens": -1}, "tokens must be positive, got -1"),
        ({"latency": -1e-6}, "latency must not be negative, got -1e-06"),
    ],
)
def test_hardware_that_cannot_be_is_refused(given: dict[str, Any], says: str) -> None:
    assert Hardware(1.0, 1.0, 1).latency == 0
    with pytest.raises(ValueError, match=says):
        Hardware(**{"bandwidth": 1.0, "flops": 1.0, "tokens": 1, **given})


def layers(frozen: tuple[int, ...]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        for number in frozen:
            model[number].requires_grad_(False)
        for layer in model:
            fullshard.fully_shard(layer)
        return fullshard.fully_shard(model)

    return build


@pytest.mark.parametrize("frozen", [(), (0,), (0, 2), (0, 1, 2)])
def test_a_frozen_weight_costs_no_gradient_of_its_own(frozen: tuple[int, ...]) -> None:
    found = explain(layers(frozen), ranks=4).estimate(bandwidth=1e9, flops=1.0, tokens=TOKENS)
    rows = {row.name: row for row in found.groups}
    for number in range(3):
        row = rows[str(number)]
        assert row.forward == PRODUCT
        assert row.backward == (1 if number in frozen else 2) * PRODUCT
    assert found.computing == sum(row.forward + row.backward for row in found.groups)
