"""Parameters of all kinds, and what users attached to them before sharding."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor, Replicate, Shard

import fullshard
from fullshard.group.parameter import plain_name
from tests.fully_shard.cases import (
    BOTH,
    Library,
    Recorder,
    Twins,
    assert_close,
    first_of,
    groups_of,
    inputs,
    local,
    shard_mlp,
)
from tests.harness import World, fake_world, ranks
from tests.harness.compare import each_block, kept, whole
from tests.harness.models import MLP, MixedDtypes, OddParameters, seeded
from tests.harness.wrapper import wrap_blocks


def test_names_are_without_wrappers() -> None:
    for name, plain in (
        ("a.weight", "a.weight"),
        (".weight", "weight"),
        ("_fsdp_wrapped_module.a._checkpoint_wrapped_module.weight", "a.weight"),
        ("_fsdp_wrapped_module_of_mine.weight", "_fsdp_wrapped_module_of_mine.weight"),
    ):
        assert plain_name(name) == plain


@ranks(2)
def test_attributes_of_parameters_are_kept(world: World) -> None:
    model = nn.Linear(6, 5)
    model.weight.is_special = True
    seen: list[Any] = []
    model.register_forward_hook(lambda module, args, output: seen.append(getattr(module.weight, "is_special", None)))
    fullshard.fully_shard(model)
    assert model.weight.is_special is True
    model(inputs()).sum().backward()
    assert seen == [True], "while unsharded too"
    assert model.weight.is_special is True


@ranks(2)
@BOTH
def test_hooks_after_accumulation_see_the_reduced_gradient(world: World, fsdp: Library) -> None:
    for before in (False, True) if fsdp.name == "fullshard" else (False,):  # before sharding: torch forgets them
        model = seeded(lambda: nn.Linear(6, 5))
        seen: list[Any] = []
        for is_sharded in (False, True):
            if is_sharded:
                fsdp.fully_shard(model)
            if is_sharded is not before:
                model.weight.register_post_accumulate_grad_hook(
                    lambda parameter, seen=seen: seen.append((parameter, parameter.grad))
                )
        model(inputs(world.rank)).sum().backward()
        ((parameter, gradient),) = seen
        assert parameter is model.weight
        mean = (inputs(0) + inputs(1)).sum(0).expand(5, 6) / 2
        assert_close(kept(gradient), mean, "gradient")


STEPS_IN_BACKWARD = {"lr": 0.1, "momentum": 0.9}


@ranks(1, 2, 3)
@first_of("transport", "shm", "p2p", "collective")
@pytest.mark.parametrize("kind", ["composable", "original", "original, before", "flat"])
def test_torchs_optimizers_in_backward_step(world: World, kind: str, transport: str) -> None:
    """Applied after sharding, or before: original parameters of the wrapper stay the same objects."""
    os.environ["FULLSHARD_TRANSPORT"] = transport
    shard = each_block() if kind == "composable" else wrap_blocks(original=kind.startswith("original"))
    model, reference = seeded(MLP), seeded(MLP)
    plain, model = list(model.parameters()), shard(fullshard, model) or model
    for parameters in (plain if kind == "original, before" else model.parameters(), reference.parameters()):
        _apply_optimizer_in_backward(torch.optim.SGD, parameters, STEPS_IN_BACKWARD)
    for step in range(4):
        loss = model(inputs(10 * step + world.rank)).square().mean()
        loss.backward()
        losses = [reference(inputs(10 * step + rank)).square().mean() for rank in range(world.size)]
        (sum(losses) / world.size).backward()
        assert_close(loss, losses[world.rank], f"loss of step {step}")
    assert all(parameter.grad is None for parameter in model.parameters())


@ranks(2)
def test_a_copy_has_optimizers_in_backward_of_its_own(world: World) -> None:
    model = shard_mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    twin = copy.deepcopy(model)
    for step in range(2):
        assert_close(twin(inputs(step)), model(inputs(step)), "output")
        for each in (model, twin):
            each(inputs(step)).square().mean().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one is not other
        assert_close(kept(one), whole(other), "parameter")


@ranks(2)
@pytest.mark.parametrize("kind", ["composable", "flat"])
def test_optimizers_in_backward_from_before_sharding_are_refused(world: World, kind: str) -> None:
    """With original parameters of the wrapper they step, for these stay the same objects."""
    model: Any = seeded(MLP)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    if kind == "flat":
        with pytest.raises(ValueError, match=r"'scale' has hooks or optimizers.*use_orig_params"):
            fullshard.FullyShardedDataParallel(model)
        model = fullshard.FullyShardedDataParallel(model, use_orig_params=True)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model(inputs()).sum().backward()
        assert any(not torch.equal(*each) for each in zip(before, model.parameters(), strict=True))
        return
    fullshard.fully_shard(model)
    with pytest.raises(RuntimeError, match="was built before fully_shard"):
        model(inputs()).sum().backward()


class SharedModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, nn.Linear(6, 5))])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


SHARED: dict[str, Callable[[Any], list[nn.Module]]] = {
    "in two groups": lambda model: [*model.blocks, model],
    "twice in one group": lambda model: [model],
    "sharded itself": lambda model: [model.blocks[0][0], model],
}


@ranks(2)
@BOTH
def test_a_module_in_two_places(world: World, fsdp: Library) -> None:
    for how, modules in SHARED.items():
        if (fsdp.name, how) != ("torch", "in two groups"):  # which fails in torch
            model, reference = seeded(SharedModules), seeded(SharedModules)
            for module in modules(model):
                fsdp.fully_shard(module)
            pair = Twins(world, model, reference)
            for _ in range(3):
                assert model.blocks[0][0].weight is model.blocks[1][0].weight, how
                pair.step()


@ranks(2)
def test_scalars_are_whole_strides_are_kept_and_what_is_frozen_stays_frozen(world: World) -> None:
    model, reference = seeded(OddParameters), seeded(OddParameters)
    seen: list[Any] = []
    model.blocks[1].register_forward_hook(lambda *_: seen.append((model.crossed.stride(), model.frozen.requires_grad)))
    fullshard.fully_shard(model)
    assert isinstance(model.gain, DTensor)
    assert (model.gain.placements, model.gain.shape, local(model.gain).item()) == ((Replicate(),), (), 1.25)
    assert model.crossed.stride() == reference.crossed.stride() == (1, 7)
    assert torch.equal(whole(model.crossed), reference.crossed)
    assert (model.row.requires_grad, model.frozen.requires_grad) == (True, False)
    (model(inputs()).sum() * (world.rank + 1)).backward()
    (reference(inputs()).sum() * 1.5).backward()
    assert seen == [((1, 7), False)], "while unsharded too"
    assert model.frozen.grad is None
    assert_close(kept(model.gain.grad), reference.gain.grad, "mean over ranks")


@ranks(2)
def test_several_dtypes_are_one_group_and_one_gather(world: World) -> None:
    model = seeded(MixedDtypes)
    fullshard.fully_shard(model)
    recorder = Recorder(model, "gather")
    (group,) = groups_of(model)
    assert {parameter.dtype for parameter in group.params} == {torch.float32, torch.bfloat16, torch.float64}
    model(inputs())
    assert recorder.take() == ["gather root"]


@ranks(2)
@BOTH
def test_a_parameter_without_elements(world: World, fsdp: Library) -> None:
    for trainable in (True, False):
        model = nn.Linear(6, 5)
        model.empty = nn.Parameter(torch.empty(0, 3), requires_grad=trainable)
        fsdp.fully_shard(model)
        model(inputs()).sum().backward()
        assert model.empty.shape == (0, 3)
        assert model.weight.grad is not None


@first_of("size", 2, 3)
@first_of("dim", -1, 0, 1)
def test_a_placement_for_each_parameter(size: int, dim: int) -> None:
    with fake_world(size):
        model = seeded(MLP)
        each_block(shard_placement_fn=lambda each: Shard(dim) if each.ndim == 2 else None)(fullshard, model)
        weight, bias = model.blocks[0][0].weight, model.blocks[0][0].bias
        assert (weight.placements, bias.placements) == ((Shard(dim % 2),), (Shard(0),))
        assert torch.equal(local(weight), seeded(MLP).blocks[0][0].weight.chunk(size, dim)[0])


def test_buffers_are_kept_or_cast_to_the_dtype_of_buffers() -> None:
    kept, cast = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    with fake_world(2):
        fullshard.fully_shard(kept, mp_policy=fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fullshard.fully_shard(cast, mp_policy=fullshard.MixedPrecisionPolicy(buffer_dtype=torch.float64))
    dtypes = [each.dtype for each in (kept.running_mean, cast.running_mean, cast.num_batches_tracked, cast.weight)]  # type: ignore[union-attr]
    assert dtypes == [torch.float32, torch.float64, torch.int64, torch.float32]
