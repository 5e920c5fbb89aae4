"""Copies of sharded models: deep copies, which train on their own, and moving averages of weights."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fullshard
from fullshard.comm.point_to_point import _FIRST_TAG
from tests.fully_shard.cases import (
    Recorder,
    Twins,
    are_sharded,
    assert_close,
    first_of,
    groups_of,
    inputs,
    local,
    shard_mlp,
    twins,
)
from tests.harness import World, ranks
from tests.harness.compare import each_block, sgd, whole
from tests.harness.models import MLP, Transformer, seeded, shard_each


@ranks(2)
@pytest.mark.parametrize("when", ["before the first step", "after a step", "unsharded"])
def test_a_copy_equals_its_original_and_trains_on_its_own(world: World, when: str) -> None:
    pair = twins(world)
    recorder = Recorder(pair.sharded)
    if when == "after a step":
        pair.step()
    elif when == "unsharded":
        pair.sharded.unshard()
    model = copy.deepcopy(pair.sharded)
    reference = copy.deepcopy(pair.whole)
    assert are_sharded(model)
    pair.sharded.reshard()
    for one, other in zip(model.parameters(), pair.sharded.parameters(), strict=True):
        assert one is not other
        assert torch.equal(local(one), local(other))
    storages = [{local(p).untyped_storage().data_ptr() for p in each.parameters()} for each in (model, pair.sharded)]
    assert not storages[0] & storages[1]
    recorder.take()
    copied = Twins(world, model, reference)
    copied.step(lr=0.3)
    assert recorder.take() == [], "an observer hears the original alone"
    original = Twins(world, pair.sharded, pair.whole)
    original.step()
    copied.step(lr=0.3)
    original.step()


@ranks(2)
@first_of("transport", "shm", "p2p", "collective")
@pytest.mark.parametrize("front", ["fully_shard", "wrapper"])
def test_a_copy_has_the_parameters_that_replaced_others(world: World, transport: str, front: str) -> None:
    """Before any forward has told the groups of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", transport)
        if front == "fully_shard":
            model = shard_mlp()
            model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
        else:
            model = fullshard.FullyShardedDataParallel(seeded(MLP), use_orig_params=True)
            for parameter in model.parameters():
                parameter.data = parameter.data * 2
        twin = copy.deepcopy(model)
    plain = seeded(MLP)
    with torch.no_grad():
        torch._foreach_mul_(list(plain.parameters()), 2)
        for each in (model, twin):
            assert torch.allclose(each(inputs()), plain(inputs()))


@ranks(2)
def test_a_copy_has_the_classes_states_and_options_of_its_original_and_no_gradients(world: World) -> None:
    wrapped = fullshard.FullyShardedDataParallel(seeded(MLP), use_orig_params=True)
    for model in (shard_mlp(reshard_after_forward=False), wrapped):
        if model is not wrapped:
            model.blocks[0].set_gradient_divide_factor(3.0)
        model(inputs()).sum().backward()
        assert any(param.grad is not None for param in model.parameters())
        twin = copy.deepcopy(model)
        assert all(param.grad is None for param in twin.parameters()), "as those of no parameter are copied"
        assert type(twin) is type(model)
        assert type(twin.blocks[0]) is type(model.blocks[0])
        for one, other in zip(groups_of(twin), groups_of(model), strict=True):
            assert one is not other
            assert one.options == other.options
            assert all(location.module in set(twin.modules()) for param in one.params for location in param.locations)


@ranks(2)
def test_copying_communicates_nothing(world: World) -> None:
    model = shard_mlp()
    twin = copy.deepcopy(model) if world.rank == 0 else None
    torch.distributed.barrier()
    assert_close(model(inputs()), seeded(MLP)(inputs()), "output")
    assert (twin is None) == (world.rank != 0)


@ranks(2)
def test_no_number_of_copies_uses_up_the_tags_of_messages(world: World) -> None:
    group = groups_of(shard_mlp())[0]
    tags = [next(group._copy_tags) for _ in range(10_000)]
    assert _FIRST_TAG + 2 * max(tags) + 1 < 1 << 31


@ranks(2)
def test_tied_parameters_stay_tied_in_a_copy(world: World) -> None:
    def build() -> Any:
        return seeded(lambda: Transformer(tied=True))

    model = build()
    shard_each(model.tokens, *model.blocks, model.head, model)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.tokens.weight
    assert twin.head.weight is not model.head.weight
    pair = Twins(world, twin, build())
    for _ in range(2):
        pair.step(batch=lambda seed: (torch.arange(6).view(2, 3) + seed) % 13)


@ranks(2)
@first_of("front", "fully_shard", "flat parameters", "stays whole", "wrapper", quick=2)
def test_parameters_tied_inside_of_sharded_modules_stay_tied_in_a_copy(world: World, front: str) -> None:
    """The tied layers are no units: a copy of one group leads to a layer, and from there to another group."""

    def build() -> Any:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        model[2][0].weight = model[0][0].weight
        return model

    def shard(module: nn.Module) -> Any:
        if front in ("wrapper", "flat parameters"):
            return fullshard.FullyShardedDataParallel(module, use_orig_params=front == "wrapper")
        return fullshard.fully_shard(module, reshard_after_forward=front == "fully_shard")

    model, plain = seeded(build), seeded(build)
    model = shard(nn.Sequential(*map(shard, model)))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    twin = copy.deepcopy(model)
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in model.named_parameters()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (twin, plain)]
    for _ in range(2):
        for each, optimizer in zip((twin, plain), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(twin(x), plain(x), "output of the copy")
    assert_close(model(x), seeded(build)(x), "output of the original")


@ranks(2)
def test_a_copy_outlives_its_original(world: World) -> None:
    model = shard_mlp()
    model(inputs())
    twin = copy.deepcopy(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    Twins(world, twin, seeded(MLP)).step()


@ranks(2)
def test_a_copy_of_a_block_alone_is_a_root(world: World) -> None:
    model, reference = shard_mlp(), seeded(MLP)
    block = copy.deepcopy(model.blocks[0])
    weight = block[0].weight
    block(inputs()).sum().backward()
    reference.blocks[0](inputs()).sum().backward()
    assert_close(whole(weight.grad), reference.blocks[0][0].weight.grad, "gradient")


@ranks(2)
def test_a_copy_with_prefetch_lists_and_lists_of_modules(world: World) -> None:
    model = seeded(MLP)
    fullshard.fully_shard([model.blocks[0], model.blocks[1]])
    shard_each(*model.blocks[2:], model)
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[2]])
    twin = copy.deepcopy(model)
    pair = Twins(world, twin, seeded(MLP))
    pair.step()
    pair.step()


@ranks(2)
@first_of("use_buffers", True, False)
def test_a_moving_average_of_a_sharded_model(world: World, use_buffers: bool) -> None:
    model, reference = shard_mlp(), seeded(MLP)
    averages = [
        AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=use_buffers)
        for each in (model, reference)
    ]
    optimizers = [sgd(each.parameters()) for each in (model, reference)]
    for _ in range(3):
        for each, average, optimizer in zip((model, reference), averages, optimizers, strict=True):
            each(inputs()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(each)
    with torch.no_grad():
        assert_close(averages[0](inputs()), averages[1](inputs()), "output of the average")
        assert_close(model(inputs()), reference(inputs()), "output of the model")
    averages[0].module.reshard()
    for one, other in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        assert_close(whole(one), other, "averaged parameter")


@ranks(2)
def test_copies_of_several_groups_on_a_hybrid_mesh(world: World) -> None:
    model = seeded(MLP)
    each_block(mesh=world.mesh(2, 1, names=("replicate", "shard")))(fullshard, model)
    Twins(world, copy.deepcopy(model), seeded(MLP)).step()


@ranks(2)
def test_copies_of_copies_have_tags_of_their_own(world: World) -> None:
    """Messages of two models under one tag would be taken for one another's."""
    model = shard_mlp()
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    family = [model, first, second, copy.deepcopy(first), copy.deepcopy(copy.deepcopy(first)), copy.deepcopy(model)]
    tags = [group.tag for each in family for group in groups_of(each)]
    assert len(set(tags)) == len(tags)
    every = [None] * world.size
    torch.distributed.all_gather_object(every, tags)
    assert every == [tags] * world.size
