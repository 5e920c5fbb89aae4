"""Who is told of saves and changes; tests/report/test_metrics.py has what metrics make of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import fullshard
from fullshard import checkpoint
from fullshard.figures import listeners_for, listeners_of
from fullshard.schedule.unit import schedule_of
from tests.harness import World, ranks


@ranks(1)
def test_a_listener_is_told_of_each_save_until_it_has_enough(world: World, tmp_path: Path) -> None:
    model = fullshard.fully_shard(nn.Linear(4, 2))
    model(torch.ones(1, 4)).sum().backward()
    told: list[float] = []
    listeners_for(schedule_of(model, "test")).append(lambda figures: told.append(figures["save_bytes"]))
    assert len(listeners_of(nn.Sequential(model))) == 1
    checkpoint.save(tmp_path, model, step=1)
    listeners_for(schedule_of(model, "test")).clear()
    checkpoint.save(tmp_path, model, step=2)
    assert len(told) == 1
    assert told[0] >= 4 * (4 * 2 + 2)
