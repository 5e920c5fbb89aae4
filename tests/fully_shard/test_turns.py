"""Ranks that give their part of a model its values, or another dtype, in turns: none of it takes the other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from tests.fully_shard.cases import assert_close, environment, groups_of, inputs, shard_mlp
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded

TRANSPORTS = pytest.mark.parametrize("transport", ["host", "p2p", "collective"])


def in_turns(world: World, act: Any) -> None:
    for rank in range(world.size):
        if rank == world.rank:
            act()
        dist.barrier()


def materialise(model: nn.Module) -> None:
    """As the same model would be that was never on meta."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, (_, value) in zip(model.parameters(), seeded(MLP).named_parameters(), strict=True):
            place: Any = parameter
            rank, size = dist.get_rank(), dist.get_world_size()
            chunks = value.chunk(size) if value.ndim else (value,)
            if place.to_local().numel():
                place.to_local().copy_(chunks[rank])


@ranks(2, timeout=20)
@TRANSPORTS
@pytest.mark.parametrize("how", ["to_empty", "to", "assign"])
def test_ranks_take_in_new_memory_one_after_the_other(world: World, transport: str, how: str) -> None:
    with environment(FULLSHARD_TRANSPORT=transport):
        model = shard_mlp() if how != "to_empty" else seeded(MLP).to("meta")
        if how == "to_empty":
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
    reference, x = seeded(MLP), inputs()
    if how == "to_empty":
        in_turns(world, lambda: materialise(model))
    elif how == "to":
        model(x)  # they share memory already
        in_turns(world, lambda: model.to(torch.float64))
        reference, x = reference.double(), x.double()
    else:
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        in_turns(world, lambda: model.load_state_dict(state, assign=True))
    parameters = list(model.parameters())
    alias = parameters[0].to_local()
    for _ in range(2):
        found, expected = model(x), reference(x)
        assert_close(found, expected, "output")
        found.sum().backward()
        expected.sum().backward()
        with torch.no_grad():
            for each in (*parameters, *reference.parameters()):
                each.sub_(0.1 * each.grad)
                each.grad = None
    if transport == "host":
        assert all(group.memory.shared is not None for group in groups_of(model))
    if how != "assign":
        assert alias.data_ptr() == parameters[0].to_local().data_ptr(), "what was taken before stays what it is"
    assert_close(model(x), reference(x), "output")


@ranks(2, timeout=20)
@TRANSPORTS
@pytest.mark.parametrize("flat", [True, False])
def test_wrapped_models_change_dtype_in_turns(world: World, transport: str, flat: bool) -> None:
    with environment(FULLSHARD_TRANSPORT=transport):
        model = FullyShardedDataParallel(seeded(MLP), use_orig_params=not flat)
    reference, x = seeded(MLP).double(), inputs().double()
    in_turns(world, model.double)
    for _ in range(2):
        assert_close(model(x), reference(x), "output")


@ranks(2, transport="host", timeout=20)
def test_a_state_dict_from_before_the_first_forward_is_that_of_the_model(world: World) -> None:
    """In low precision, in which chunks are published, and in the dtype that is stored."""
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = shard_mlp(mp_policy=policy)
        state = model.state_dict()
        before = model(inputs())
        with torch.no_grad():
            for value in state.values():
                value.to_local().mul_(0.5)
        assert not torch.equal(model(inputs()), before)
        model(inputs())
        for name, value in model.state_dict().items():
            assert value.to_local().data_ptr() == state[name].to_local().data_ptr()
