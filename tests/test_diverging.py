"""Which replicas train apart, and what optimizers and checkpoints refuse then."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fullshard
from fullshard.diverging import refuse_mixture, refuse_uncounted, replica_of, replicas_apart
from fullshard.optim import LocalSteps
from fullshard.schedule.unit import groups_in
from tests.harness import World, ranks


@ranks(4)
def test_replicas_that_train_apart_are_known_and_mixed_by_nobody(world: World) -> None:
    model = fullshard.fully_shard(nn.Linear(4, 2), mesh=world.mesh(2, 2, names=("replicate", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert replica_of(model) is None
    refuse_mixture(model)
    local_steps = LocalSteps(model, optimizer, every=2)
    groups = groups_in(model, recurse=True)
    assert replica_of(model) == (world.rank // 2, 2)
    refuse_uncounted(optimizer, groups)
    with pytest.raises(RuntimeError, match="no LocalSteps counts the steps of this SGD"):
        refuse_uncounted(torch.optim.SGD(model.parameters()), groups)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="differ in 2 parameters"):
        refuse_mixture(model)
    with local_steps.global_parameters():
        refuse_mixture(model)
    twin = copy.deepcopy(model)
    assert replicas_apart(groups_in(twin, recurse=True)[0]) is not None
    with pytest.raises(RuntimeError, match="a copy of a model whose replicas train apart"):
        refuse_mixture(twin)
