"""What an estimate counts as computing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

import fullshard
from fullshard.report.explain import explain

WIDTH, TOKENS = 32, 10
#: Multiplications and additions of one weight, for all tokens.
PRODUCT = 2 * WIDTH * WIDTH * TOKENS


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
    found = explain(layers(frozen), ranks=4).estimate(bandwidth=1e9, peak_flops=1.0, tokens=TOKENS)
    rows = {row.name: row for row in found.groups}
    for number in range(3):
        row = rows[str(number)]
        assert row.forward == PRODUCT
        assert row.backward == (1 if number in frozen else 2) * PRODUCT
    assert found.computing == sum(row.forward + row.backward for row in found.groups)
