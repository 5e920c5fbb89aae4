"""Ranks with different seeds are noticed at the first forward, unless values are loaded before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import fully_shard_blocks, summon_full_params
from fullshard.first_values import _hashes
from tests.fully_shard.cases import groups_of, shard_mlp
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded

X = torch.ones(2, 6)
FRONT_ENDS = {
    "fully_shard": fully_shard_blocks,
    "fragments": lambda model: FSDP(model, use_orig_params=True),
    "flat": lambda model: FSDP(model),
    "stage 0": lambda model: fully_shard_blocks(model, zero_stage=0),
}


def seeded_by(world: World) -> nn.Module:
    torch.manual_seed(world.rank)
    return MLP()


@ranks(2)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_different_seeds_are_refused_at_the_first_forward(world: World, front_end: str) -> None:
    model: Any = FRONT_ENDS[front_end](seeded_by(world))
    with pytest.raises(ValueError, match=r"parameter '.*weight' was .* other values on rank 1 than on rank 0"):
        model(X)


@ranks(2)
@pytest.mark.parametrize("how", ["state dict", "summoned", "wrapper synchronizes", "writes"])
def test_values_that_are_loaded_after_sharding_are_not_compared(world: World, how: str) -> None:
    plain = seeded_by(world)
    whole = {name: value.clone() for name, value in plain.state_dict().items()}
    if how == "wrapper synchronizes":
        FSDP(plain, sync_module_states=True)(X)
        return
    model, alike = fully_shard_blocks(plain), seeded(MLP).state_dict()
    if how == "state dict":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole if world.rank == 0 else {}, options=options)
    elif how == "summoned":
        with summon_full_params(model):
            for name, param in model.named_parameters():
                param.data.copy_(alike[name])
    else:
        for param in model.parameters():
            param.data.fill_(0.5)
    model(X)


def test_a_few_elements_of_each_parameter_are_hashed() -> None:
    values = torch.arange(1000.0)
    before, other = _hashes([values, torch.ones(2), torch.empty(0)]), _hashes([values + 1, torch.ones(2), values])
    assert before[0] != other[0]
    assert before[1] == other[1]
    assert before[2] is None
    assert _hashes([torch.ones(100)]) != _hashes([torch.full((100,), 2.0)]), "equal values do not cancel out"


@ranks(2)
def test_values_are_compared_once(world: World) -> None:
    model = shard_mlp()
    model(X)
    for group in groups_of(model):
        for param in group.params:
            param.local.fill_(world.rank)
    model(X)
