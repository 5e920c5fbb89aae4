"""Ranks that give their part of a model its values, or another dtype, in turns: none of it takes the other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from tests.fully_shard.cases import assert_close, environment, first_of, groups_of, inputs, local, shard_mlp
from tests.harness import World, ranks
from tests.harness.compare import each_block
from tests.harness.models import MLP, seeded

TRANSPORTS = first_of("transport", "shm", "p2p", "collective")


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


@ranks(2)
@TRANSPORTS
@pytest.mark.parametrize("how", ["to_empty", "to", "assign"])
def test_ranks_take_in_new_memory_one_after_the_other(world: World, transport: str, how: str) -> None:
    reference, x = seeded(MLP), inputs()
    with environment(FULLSHARD_TRANSPORT=transport):
        model = seeded(MLP).to("meta") if how == "to_empty" else seeded(MLP)
        each_block()(fullshard, model)
    if how == "to_empty":
        in_turns(world, lambda: materialise(model))
    elif how == "to":
        model(x)  # they share memory already
        in_turns(world, lambda: model.to(torch.float64))
        reference, x = reference.double(), x.double()
    else:
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        in_turns(world, lambda: model.load_state_dict(state, assign=True))
    parameters: list[Any] = list(model.parameters())
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
    if transport == "shm":
        assert all(group.shard.shared is not None for group in groups_of(model))
    if how != "assign":
        assert alias.data_ptr() == parameters[0].to_local().data_ptr(), "what was taken before stays what it is"
    assert_close(model(x), reference(x), "output")


def empty(model: Any) -> None:
    """Take new memory, and give it the values that were there."""
    kept = [local(parameter).detach().clone() for parameter in model.parameters()]
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), kept, strict=True):
            local(parameter).copy_(value)


def new_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def halve(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


WAYS: dict[str, Callable[[Any], None]] = {"to_empty": empty, "data": new_data, "write": halve}


def output(model: Any) -> Any:
    """What a forward returns; after it the root shows what is sharded."""
    found = model(inputs())
    if isinstance(model, FSDPModule):
        model.reshard()
    return found


@ranks(2)
@TRANSPORTS
@pytest.mark.parametrize("api", ["fully_shard", "original", "flat"])
def test_every_way_to_give_a_model_memory_may_be_taken_in_turns(world: World, transport: str, api: str) -> None:
    """Before the first forward, and after it, when ranks that share memory have mapped it."""
    with environment(FULLSHARD_TRANSPORT=transport):
        wraps = api != "fully_shard"
        model = FullyShardedDataParallel(seeded(MLP), use_orig_params=api == "original") if wraps else shard_mlp()
    reference = seeded(MLP)
    for is_mapped in (False, True):
        for how, act in WAYS.items():
            in_turns(world, lambda act=act: act(model))
            if how == "write":
                halve(reference)
            if is_mapped:
                assert_close(output(model), reference(inputs()), f"output after {how}")
        copies: list[Any] = []
        in_turns(world, lambda copies=copies: copies.append(copy.deepcopy(model)))
        assert_close(output(copies[0]), reference(inputs()), "output of a copy")
        assert_close(output(model), reference(inputs()), "output")
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    halve(model)
    in_turns(world, lambda: model.load_state_dict(state, assign=True))
    assert_close(output(model), reference(inputs()), "output after assign")
    model(inputs()).sum().backward()
    in_turns(world, model.double)
    model.reshard() if isinstance(model, FSDPModule) else None
    assert_close(model(inputs().double()), reference.double()(inputs().double()), "output in another dtype")


@ranks(2, transport="shm")
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
