"""A warning points at the line of the user's program that led to it, however deep it arises."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, StateDictType
from fullshard.wrap import ModuleWrapPolicy
from tests.harness import World, ranks


def add_a_parameter() -> None:
    model = fullshard.fully_shard(nn.Linear(2, 2))
    model.added = nn.Parameter(torch.ones(1))
    model(torch.ones(1, 2))


def leave_a_buffer_empty() -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(2)
        model.register_buffer("table", torch.zeros(2), persistent=False)
    fullshard.fully_shard(model).to_empty(device="cpu")
    model(torch.ones(2, 2))


def ask_for_a_state_dict() -> None:
    with FSDP.state_dict_type(FSDP(nn.Linear(2, 2)), StateDictType.SHARDED_STATE_DICT):
        pass


def use_a_deprecated_method() -> None:
    model = FSDP(nn.Linear(2, 2))
    FSDP.full_optim_state_dict(model, torch.optim.SGD(model.parameters()))


def trained(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> Any:
    model = FSDP(nn.Linear(2, 2), sharding_strategy=strategy, use_orig_params=True)
    model(torch.ones(1, 2)).sum().backward()
    return model


def clip_parts() -> None:
    clip_grad_norm_(trained().parameters(), 1.0)


def step_on_parts(optimizer_class: Any) -> None:
    model = trained()
    optimizer = optimizer_class(model.parameters())
    optimizer.step(lambda: model(torch.ones(1, 2)).sum())


CASES: dict[str, Callable[[], Any]] = {
    "were added after fully_shard": add_a_parameter,
    "left uninitialized by to_empty": leave_a_buffer_empty,
    "state_dict_type.. are deprecated|set_state_dict_type.. are deprecated": ask_for_a_state_dict,
    "full_optim_state_dict is deprecated": use_a_deprecated_method,
    "set_gradient_divide_factor": lambda: fullshard.fully_shard(nn.Linear(2, 2)).set_reduce_scatter_divide_factor(2.0),
    "NO_SHARD": lambda: FSDP(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD),
    "NO_SHARD ": lambda: FSDP(
        nn.Sequential(nn.Linear(2, 2)),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    ),
    "each rank computes a different norm": clip_parts,
    "LBFGS sums over whole parameters": lambda: step_on_parts(torch.optim.LBFGS),
    "Adafactor sums over whole parameters": lambda: step_on_parts(torch.optim.Adafactor),
    "the ranks read different numbers": lambda: fullshard.fully_shard(nn.Linear(2, 2)).weight.norm().item(),
    "is never run itself": lambda: FSDP(nn.ModuleList([nn.Linear(2, 2)])),
}


@ranks(2)
@pytest.mark.parametrize("what", CASES)
def test_it_points_here(world: World, what: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CASES[what]()
    ours = [each for each in caught if not each.filename.startswith(torch.__path__[0])]
    assert any(re.search(what, str(each.message)) for each in ours)
    assert all(each.filename == __file__ for each in ours), [each.filename for each in ours]


@ranks(2)
def test_nothing_is_said_where_each_rank_has_whole_gradients_or_clips_by_the_wrapper(world: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained().clip_grad_norm_(1.0)
        sharded = fullshard.fully_shard(nn.Linear(2, 2))
        sharded(torch.ones(1, 2)).sum().backward()
        clip_grad_norm_(sharded.parameters(), 1.0)
        warnings.filterwarnings("ignore", "NO_SHARD")
        clip_grad_norm_(trained(ShardingStrategy.NO_SHARD).parameters(), 1.0)
