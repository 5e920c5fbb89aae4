"""Copies of sharded models: deep copies, which train on their own, and moving averages of weights."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fullshard
from fullshard.comm.point_to_point import _FIRST_TAG
from tests.fully_shard.cases import (
    Recorder,
    Twins,
    are_sharded,
    assert_close,
    groups_of,
    inputs,
    local,
    shard_mlp,
    twins,
)
from tests.harness import World, ranks
from tests.harness.compare import each_block, sgd, whole
from tests.harness.models import MLP, Transformer, seeded


@ranks(2)
@pytest.mark.parametrize("when", ["before the first step", "after a step", "unsharded"])
def test_a_copy_equals_its_original_and_trains_on_its_own(world: World, when: str) -> None:
    pair = twins(world)
    if when == "after a step":
        pair.step()
    elif when == "unsharded":
        pair.sharded.unshard()
    model = copy.deepcopy(pair.sharded)
    reference = copy.deepcopy(pair.whole)
    assert are_sharded(model)
    for one, other in zip(model.parameters(), pair.sharded.parameters(), strict=True):
        assert one is not other
        assert torch.equal(local(one), local(other))
    copied = Twins(world, model, reference)
    original = Twins(world, pair.sharded, pair.whole)
    for _ in range(2):
        copied.step(lr=0.3)
        original.step()


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])
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
def test_a_copy_shares_no_memory(world: World) -> None:
    model = shard_mlp()
    model(inputs()).sum().backward()
    twin = copy.deepcopy(model)
    model.reshard()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert_close(model(inputs()), seeded(MLP)(inputs()), "output")
    storages = [{local(p).untyped_storage().data_ptr() for p in each.parameters()} for each in (model, twin)]
    model.reshard()
    assert not storages[0] & storages[1]


@ranks(2)
def test_a_copy_has_the_classes_states_and_options_of_its_original(world: World) -> None:
    model = shard_mlp(reshard_after_forward=False)
    model.blocks[0].set_gradient_divide_factor(3.0)
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    assert type(twin.blocks[0]) is type(model.blocks[0])
    assert fullshard.fully_shard.state(twin) is not fullshard.fully_shard.state(model)
    for one, other in zip(groups_of(twin), groups_of(model), strict=True):
        assert one is not other
        assert one.options == other.options
        assert all(location.module in set(twin.modules()) for param in one.params for location in param.locations)


@ranks(2)
def test_a_copy_hears_its_own_hooks_and_observers(world: World) -> None:
    model = shard_mlp()
    recorder = Recorder(model)
    twin = copy.deepcopy(model)
    twin(inputs()).sum().backward()
    assert recorder.take() == []


@ranks(2)
def test_copying_communicates_nothing(world: World) -> None:
    model = shard_mlp()
    twin = copy.deepcopy(model) if world.rank == 0 else None
    torch.distributed.barrier()
    assert_close(model(inputs()), seeded(MLP)(inputs()), "output")
    assert (twin is None) == (world.rank != 0)


@ranks(2)
def test_gradients_are_not_copied_as_those_of_no_parameter_are(world: World) -> None:
    wrapped = fullshard.FullyShardedDataParallel(seeded(MLP), use_orig_params=True)
    for model in (shard_mlp(), wrapped):
        model(inputs()).sum().backward()
        assert any(param.grad is not None for param in model.parameters())
        assert all(param.grad is None for param in copy.deepcopy(model).parameters())


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
    for module in (model.tokens, *model.blocks, model.head, model):
        fullshard.fully_shard(module)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.tokens.weight
    assert twin.head.weight is not model.head.weight
    pair = Twins(world, twin, build())
    for _ in range(2):
        pair.step(batch=lambda seed: (torch.arange(6).view(2, 3) + seed) % 13)


@ranks(2)
@pytest.mark.parametrize("front", ["fully_shard", "stays whole", "wrapper", "flat parameters"])
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
    for block in model.blocks[2:]:
        fullshard.fully_shard(block)
    fullshard.fully_shard(model)
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[2]])
    twin = copy.deepcopy(model)
    pair = Twins(world, twin, seeded(MLP))
    pair.step()
    pair.step()


@ranks(2)
@pytest.mark.parametrize("use_buffers", [True, False])
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
def test_a_plain_moving_average_by_hand(world: World) -> None:
    model, reference = shard_mlp(), seeded(MLP)
    average, expected = copy.deepcopy(model), copy.deepcopy(reference)

    def update(mean: nn.Module, each: nn.Module) -> None:
        with torch.no_grad():
            for slow, fast in zip(mean.parameters(), each.parameters(), strict=True):
                slow.lerp_(fast, 0.5)

    def step(each: Any, x: Tensor) -> None:
        parameters = list(each.parameters())
        each(x).sum().backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None

    for seed in range(2):
        step(model, inputs(seed))
        step(reference, inputs(seed))
        update(average, model)
        update(expected, reference)
    with torch.no_grad():
        assert_close(average(inputs()), expected(inputs()), "output of the average")


@ranks(2)
def test_copies_of_several_groups_on_a_hybrid_mesh(world: World) -> None:
    model = seeded(MLP)
    each_block(mesh=world.mesh(2, 1, names=("replicate", "shard")))(fullshard, model)
    Twins(world, copy.deepcopy(model), seeded(MLP)).step()


@ranks(2)
def test_a_copy_has_what_was_loaded_in_the_place_of_parameters(world: World) -> None:
    model, other = shard_mlp(), seeded(MLP, seed=1)
    placed = model.state_dict()
    values = {
        name: distribute_tensor(value, placed[name].device_mesh, placed[name].placements)
        for name, value in other.state_dict().items()
    }
    model.load_state_dict(values, assign=True)
    twin = copy.deepcopy(model)
    for each in (twin, model):
        assert_close(each(inputs()), other(inputs()), "output")


@ranks(2)
def test_copies_of_copies_have_tags_of_their_own(world: World) -> None:
    """Messages of two models under one tag would be taken for one another's."""
    model = shard_mlp()
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    family = [model, first, second, copy.deepcopy(first), copy.deepcopy(copy.deepcopy(first)), copy.deepcopy(model)]
    groups = [group for each in family for group in groups_of(each)]
    assert len({group.tag for group in groups}) == len(groups)
