"""Checkpoints that are written while training goes on, and copies of state dicts: on every transport."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

import fullshard
from tests.checkpoint.cases import assert_same
from tests.checkpoint.state_dicts import speaking
from tests.harness import World, ranks
from tests.harness.compare import Precision, adamw, each_block
from tests.harness.models import MLP, MixedDtypes, random_batch, seeded
from tests.harness.slow import slow
from tests.harness.wrapper import wrap_blocks

BATCH = random_batch(4, 6)
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "p2p", *slow("collective")])
FRONT_ENDS = pytest.mark.parametrize("front_end", ["composable", "flat", *slow("original")])
LOW = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(front_end: str, seed: int, build: Any = MLP, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = seeded(build, seed)
    if front_end == "composable":
        each_block(**options)(fullshard, model)
    else:
        model = wrap_blocks(original=front_end == "original", **options)(fullshard, model)
    return model, adamw(model.parameters())


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(*BATCH(step)).square().mean().backward()
        optimizer.step()


def held(state: Any) -> Any:
    """A state dict with copies of what this rank holds of its tensors."""
    if isinstance(state, dict):
        return {key: held(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        return {"shape": state.shape, "placements": state.placements, "local": state.to_local().clone()}
    return state.clone() if isinstance(state, Tensor) else state


@ranks(2)
@TRANSPORTS
@FRONT_ENDS
@pytest.mark.parametrize("precision", [None, LOW], ids=["fp32", "bf16"])
def test_what_is_written_while_training_goes_on_is_what_was_given(
    world: World, transport: str, front_end: str, precision: Precision | None, tmp_path: Path
) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model, optimizer = sharded(front_end, 0, precision=precision)
    train(model, optimizer, range(2))
    state: Any = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    given = held(state)
    of_its_own = dist.new_group()  # gloo pairs the collectives of a group by their order, threads or not
    writing = dcp.async_save(state, checkpoint_id=tmp_path, process_group=of_its_own)
    train(model, optimizer, range(2, 5))
    writing.result()  # type: ignore[union-attr]
    other, other_optimizer = sharded(front_end, 1, precision=precision)
    loaded: Any = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert_same(held(loaded), given)


@pytest.mark.slow
@ranks(2)
@TRANSPORTS
def test_local_shards_of_several_dtypes_are_written_too(world: World, transport: str, tmp_path: Path) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model, _ = sharded("flat", 0, MixedDtypes)
    with speaking(fullshard, model, "LOCAL"):
        state = model.state_dict()
        given = held(state)
        dcp.async_save(state, checkpoint_id=tmp_path).result()  # type: ignore[union-attr]
        for value in state.values():
            value.zero_()
        dcp.load(state, checkpoint_id=tmp_path)
    assert_same(held(state), given)


@ranks(1, 2)
@TRANSPORTS
@pytest.mark.parametrize("precision", [None, LOW], ids=["fp32", "bf16"])
def test_state_dicts_can_be_copied(world: World, transport: str, precision: Precision | None) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model, optimizer = sharded("composable", 0, precision=precision)
    train(model, optimizer, range(1))
    kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    before = held(kept["model"])
    train(model, optimizer, range(1, 3))
    assert_same(held(kept["model"]), before)
    model.load_state_dict(kept["model"])
    assert_same(held(model.state_dict()), before)


@ranks(2)
@TRANSPORTS
def test_a_parameter_that_is_saved_alone_is_as_large_as_it_is(world: World, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    fullshard.fully_shard(model)
    for value in model.state_dict().values():
        assert value.to_local().untyped_storage().nbytes() == value.to_local().nbytes
