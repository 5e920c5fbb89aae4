"""Optimizer state by the names of the original parameters: against torch's wrapper, and from any sharding to any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.cases import (
    KINDS,
    OPTIMIZERS,
    OURS,
    SHARDINGS,
    TORCHS,
    assert_same,
    choose,
    optimizer_of,
    quiet,
    train,
    wrapped,
)
from tests.harness import World, ranks


@ranks(1, 2, 3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("use_orig_params", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_full_state_is_that_of_torch(world: World, optimizer: str, use_orig_params: bool, strategy: str) -> None:
    dicts = []
    for library in (OURS, TORCHS):
        model = wrapped(library, strategy=strategy, use_orig_params=use_orig_params)
        stepped = optimizer_of(model, optimizer)
        choose(library, model, "FULL", offload_to_cpu=False)
        with quiet():
            before = library.methods.optim_state_dict(model, stepped)
            train(model, stepped, range(2), world.rank)
            dicts.append([before, library.methods.optim_state_dict(model, stepped)])
    assert_same(dicts[0], dicts[1])
