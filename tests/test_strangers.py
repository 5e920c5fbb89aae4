"""A trainable parameter that no group has is told of at the first step, unless somebody else reduces its gradient."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.strangers import strangers_in, warn_of_added_parameters
from tests.fully_shard.cases import groups_of
from tests.harness import World, fake_world, ranks
from tests.harness.models import MLP


def told(step: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [f"{each.message} ({each.filename})" for each in caught if "not sharded" in str(each.message)]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Scaled(nn.Module):
    """Sharded blocks, and beside them parameters of the model's own and of a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.norm = nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mlp(x))


def only_the_blocks(front_end: str = "fully_shard") -> Scaled:
    model = Scaled()
    for index, block in enumerate(model.mlp.blocks):
        if front_end == "fully_shard":
            fullshard.fully_shard(block)
        else:
            model.mlp.blocks[index] = FSDP(block, use_orig_params=front_end == "original")
    return model


@ranks(2)
@pytest.mark.parametrize("front_end", ["fully_shard", "flat", "original"])
def test_a_forgotten_root_is_told_once_with_its_parameters_and_the_missing_call(world: World, front_end: str) -> None:
    model = only_the_blocks(front_end)
    optimizer = sgd(model.parameters())
    model(torch.randn(2, 6)).sum().backward()
    (said,) = told(optimizer.step)
    assert "parameters of the Scaled are trained and not sharded: ['mlp.scale', 'norm.weight', 'norm.bias']" in said
    call = "fully_shard(model) on this Scaled" if front_end == "fully_shard" else "FullyShardedDataParallel(model)"
    assert call in said
    assert __file__ in said
    assert not told(optimizer.step)
    assert told(sgd(model.norm.parameters()).step), "an optimizer of these parameters alone"


@ranks(2)
def test_a_model_whose_root_is_sharded_is_not_searched(world: World) -> None:
    model = fullshard.fully_shard(only_the_blocks())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_objects", lambda: pytest.fail("looked at all objects"))
        assert not told(sgd(model.parameters()).step)


@ranks(2)
def test_a_module_of_a_framework_around_the_model_is_not_the_one_to_shard(world: World) -> None:
    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = only_the_blocks(), only_the_blocks().mlp

    trainer = Trainer()
    (said,) = told(sgd(trainer.first.parameters()).step)
    assert "of the Scaled " in said
    (said,) = told(sgd(trainer.parameters()).step)
    assert "of the Trainer " in said
    assert "'first.mlp.scale'" in said
    assert "'second.scale'" in said


@ranks(2)
def test_a_list_of_modules_is_not_the_one_to_shard(world: World) -> None:
    model = MLP()
    fullshard.fully_shard(model.blocks[0])
    (said,) = told(sgd(model.blocks.parameters()).step)
    assert "of the MLP " in said


def frozen(model: Scaled) -> nn.Module:
    for param in (model.mlp.scale, *model.norm.parameters()):
        param.requires_grad_(False)
    return model


def ignored(model: Scaled) -> nn.Module:
    fullshard.fully_shard(model, ignored_params={model.mlp.scale, *model.norm.parameters()})
    return nn.Sequential(model)


def in_ddp(model: Scaled) -> nn.Module:
    model.norm = DistributedDataParallel(model.norm)
    fullshard.fully_shard(model.mlp)
    return model


def replicated(model: Scaled) -> nn.Module:
    replicate(model.norm)
    fullshard.fully_shard(model.mlp)
    return model


def around_in_ddp(model: Scaled) -> nn.Module:
    names = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def around_replicated(model: Scaled) -> nn.Module:
    return replicate(model, ignored_modules=[*model.mlp.blocks])


def in_lists(model: Scaled) -> nn.Module:
    fullshard.fully_shard(model.mlp)
    fullshard.fully_shard(model.norm)
    return model


@ranks(2)
@pytest.mark.parametrize("leave", [frozen, ignored, in_ddp, replicated, around_in_ddp, around_replicated, in_lists])
def test_what_is_left_out_on_purpose_is_not_told(world: World, leave: Callable[[Scaled], nn.Module]) -> None:
    model = leave(only_the_blocks())
    assert not strangers_in(model)
    parts = [module for module in model.modules() if list(module.parameters())]
    assert not any(told(sgd(part.parameters()).step) for part in parts)
    assert not told(sgd(model.parameters()).step)


@ranks(2)
def test_what_dtensor_reduces_is_not_told(world: World) -> None:
    model = in_lists(only_the_blocks())
    model.bias = nn.Parameter(distribute_tensor(torch.ones(2), world.mesh(2)))
    assert not told(sgd(model.parameters()).step)
    model.gain = nn.Parameter(torch.ones(2))
    (said,) = told(sgd(model.parameters()).step)
    assert "['gain']" in said


@ranks(4)
def test_a_parameter_that_only_tensor_parallel_cut_is_told(world: World) -> None:
    mesh = world.mesh(2, 2, names=("data", "tensor"))
    model = Scaled()
    model.norm.weight = nn.Parameter(distribute_tensor(model.norm.weight.detach(), mesh["tensor"]))
    for block in model.mlp.blocks:
        fullshard.fully_shard(block, mesh=mesh["data"])
    assert [*strangers_in(model)] == ["mlp.scale", "norm.weight", "norm.bias"]


@ranks(2)
def test_another_model_in_the_same_optimizer_is_its_users_affair(world: World) -> None:
    model, other = fullshard.fully_shard(Scaled()), nn.Linear(2, 2)
    assert not told(sgd([*model.parameters(), *other.parameters()]).step)


@ranks(1)
def test_one_rank_has_nothing_to_reduce(world: World) -> None:
    model = only_the_blocks()
    assert not told(sgd(model.parameters()).step)


@ranks(2)
def test_a_module_that_is_put_in_after_the_first_step_is_told(world: World) -> None:
    model: Any = fullshard.fully_shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    model(torch.ones(2, 6)).sum().backward()
    model[1] = nn.Linear(6, 6)
    with pytest.warns(UserWarning, match=r"were added after fully_shard: \['1.weight', '1.bias'\]"):
        model(torch.ones(2, 6)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 6)).sum().backward()


def test_trainable_parameters_that_no_group_has_are_named() -> None:
    with fake_world(2):
        model = fullshard.fully_shard(nn.Linear(2, 2))
        groups = groups_of(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_added_parameters([model], groups, set())
            model.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
            model.known = nn.Parameter(torch.zeros(1))
            warn_of_added_parameters([model], groups, {id(model.known)})
        with pytest.warns(UserWarning, match=r"were added after fully_shard: \['known'\]"):
            warn_of_added_parameters([model], groups, set())
