"""Parity of the ZeRO stages: each trains as the unsharded model does, on every transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


from fullshard import fully_shard
from tests.harness import World, everywhere, ranks
from tests.harness.compare import Precision, Training, adamw, compare, each_block, sgd
from tests.harness.models import MLP, Branches, Transformer, random_batch, seeded, token_batch

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
LAST = 2


def accumulating(model: Any, micro: int) -> None:
    model.set_requires_gradient_sync(micro == LAST)


def stage_of(stage: int, **changes: Any) -> Training:
    """Training of the MLP in a stage."""
    defaults: dict[str, Any] = {
        "build": lambda: seeded(MLP),
        "shard": each_block(zero_stage=stage, precision=changes.pop("precision", None)),
        "batch": random_batch(4, 6),
    }
    return Training(**{**defaults, **changes})


@everywhere
@ranks(1, 2, 3)
@STAGES
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_stages(world: World, stage: int, optimizer: Any) -> None:
    compare(world, stage_of(stage, optimizer=optimizer), with_torch=False)


@everywhere
@ranks(2)
@STAGES
def test_micro_batches(world: World, stage: int) -> None:
    compare(world, stage_of(stage, micro_batches=LAST + 1, set_up_micro=accumulating), with_torch=False)
    compare(world, stage_of(stage, micro_batches=LAST + 1), with_torch=False)
