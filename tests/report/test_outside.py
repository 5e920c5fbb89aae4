"""What belongs to no group counts in what a step needs, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.report.explain import ADAM, explain
from fullshard.report.facts import facts_of
from fullshard.report.meta_copy import on_meta
from fullshard.report.outside import bytes_outside
from fullshard.report.search import Search, _simulated
from fullshard.torch_private import simulated_world

TABLE, NBYTES = torch.zeros(2**20), 4 * 2**20


class Model(nn.Module):
    def __init__(self, hold: Callable[[Any], object]) -> None:
        super().__init__()
        self.layer, self.lstm = nn.Linear(64, 64), nn.LSTM(64, 8)  # an LSTM lists its parameters
        hold(self)

    def forward(self, x: torch.Tensor) -> Any:
        return self.lstm(self.layer(x))[0]


#: How a model holds tensors, and the bytes of these.
HELD: dict[str, tuple[Callable[[Any], object], int]] = {
    "buffer": (lambda m: m.register_buffer("table", TABLE), NBYTES),
    "attribute": (lambda m: setattr(m, "table", TABLE), NBYTES),
    "attribute of a layer": (lambda m: setattr(m.layer, "table", TABLE), NBYTES),
    "dict of lists": (lambda m: setattr(m, "tables", {"all": [TABLE, TABLE.clone()]}), 2 * NBYTES),
    "twice": (lambda m: vars(m).update(table=TABLE, part=TABLE[: 2**19]), NBYTES),
    "buffer and view": (lambda m: (m.register_buffer("part", TABLE[: 2**19]), setattr(m, "table", TABLE)), NBYTES),
    "parameters": (lambda m: vars(m).update(params=[*m.parameters()], weight=m.layer.weight), 0),
    "view of a parameter": (lambda m: setattr(m, "row", m.layer.weight.detach()[0]), 4 * 64 * 64),
}


def test_tensors_outside_of_groups_count_once() -> None:
    with simulated_world(2, 0):
        for how, (hold, nbytes) in HELD.items():
            for model in (Model(hold), on_meta(Model(hold))):
                assert facts_of(fullshard.fully_shard(model)).outside == nbytes, how
    needed = []
    for how in ("parameters", "view of a parameter", "dict of lists"):
        with _simulated(2, None):
            given = torch.ones(2, 64), ADAM, None, None, fullshard.MixedPrecisionPolicy(), {}
            needed.append(Search(Model(HELD[how][0]), *given).plan(2**30).needed - round(1.03 * HELD[how][1]))
    assert needed[1:] == pytest.approx([needed[0]] * 2, abs=16)


def test_the_views_that_a_wrapper_shows_do_not_count() -> None:
    model = Model(lambda _: None)
    assert bytes_outside(model, []) == sum(param.nbytes for param in model.parameters())
    assert explain(lambda: fullshard.FullyShardedDataParallel(model), ranks=2).facts.outside == 0
