"""Mistakes around a training step: stale optimizers, odd outputs, parameters that nobody reduces, groups that are gone.

They are refused before they do harm, with a message that names the parameter or module and says what to do; what is
merely odd does not disturb the next step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.group.full_buffer import RELEASED
from tests.harness import World, ranks
from tests.harness.models import seeded, shard_each
from tests.harness.wrapper import wrap
from tests.test_bad_input_in_use import BATCH, sharded_mlp
from tests.test_fully_shard import mlp, refused

# -- optimizers ------------------------------------------------------------------------------------------------------


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """What most cases train with."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


@ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_built_before_sharding(world: World, kind: type[torch.optim.Optimizer]) -> None:
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    shard_each(*model.blocks, model)
    model(BATCH).sum().backward()
    words = (kind.__name__, "before fully_shard", "'scale'", "after sharding")
    refused(lambda _: optimizer.step(), RuntimeError, *words, torch_too=False)


@ranks(2)
@pytest.mark.parametrize("how", ["unshard", "forward"])
def test_an_optimizer_built_while_the_module_was_unsharded(world: World, how: str) -> None:
    model = sharded_mlp()
    model.unshard() if how == "unshard" else model(BATCH)
    optimizer = sgd(model)
    model(BATCH).sum().backward()
    words = ("SGD", "while the module was unsharded", "'scale'", "model.reshard()")
    refused(lambda _: optimizer.step(), RuntimeError, *words, torch_too=False)


@ranks(2)
def test_a_stale_parameter_added_to_an_optimizer_that_was_right(world: World) -> None:
    model = mlp()
    stale = model.scale
    fullshard.fully_shard(model)
    optimizer = sgd(model.blocks)
    model(BATCH).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": [stale]})
    refused(lambda _: optimizer.step(), RuntimeError, "SGD", "'scale'", torch_too=False)


@ranks(2)
def test_optimizers_that_are_right_are_left_alone(world: World) -> None:
    plain, model = mlp(), sharded_mlp()
    for trained in (plain, model):
        optimizer = sgd(trained)
        for _ in range(2):
            trained(BATCH).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(model.scale.full_tensor(), plain.scale)


# -- outputs ---------------------------------------------------------------------------------------------------------


class Hidden:
    """An object that nobody can look into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Shaped(nn.Module):
    """Layers whose result is given another shape."""

    def __init__(self, shape: Callable[[Tensor], Any], layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))
        self.shape = shape

    def forward(self, x: Any) -> Any:
        return self.shape(self.layers(x.tensor if isinstance(x, Hidden) else x))


def nothing(tensor: Tensor) -> None:
    """Forget the tensor."""


def number(tensor: Tensor) -> float:
    """A plain number."""
    return tensor.sum().item()


@ranks(2)
@pytest.mark.parametrize("shape", [nothing, number, Tensor.detach])
def test_an_output_without_tensors_that_require_gradients_disturbs_nothing(
    world: World, shape: Callable[[Tensor], Any]
) -> None:
    model: Any = seeded(lambda: Shaped(shape))
    fullshard.fully_shard(model.layers)
    fullshard.fully_shard(model, reshard_after_forward=True)
    for _ in range(2):
        model(BATCH)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.shape = Tensor.sum
    model(BATCH).backward()
    plain: Any = seeded(lambda: Shaped(Tensor.sum))
    plain(BATCH).backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter.grad.full_tensor(), other.grad)


def half_hidden(x: Tensor) -> Any:
    """One tensor where it is seen, and another in a closure."""
    return x.detach().requires_grad_(), lambda: x


@ranks(2)
def test_an_output_that_hides_its_tensors(world: World) -> None:
    model = fullshard.fully_shard(seeded(lambda: Shaped(half_hidden, layers=2)), reshard_after_forward=True)

    def mistake(fsdp: ModuleType) -> None:
        model(BATCH)[1]().sum().backward()

    refused(mistake, RuntimeError, f"is at version {RELEASED}", torch_too=False)  # the guide has this number
    model.reset_iter_state()
    model.shape = Tensor.sum
    model(BATCH).backward()


@ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_hidden_outputs_inside_a_model(world: World, prefetch: int) -> None:
    """The backward of a block begins unnoticed; what it returns is found, or nothing of it and it stays gathered."""
    model: Any
    model, plain = (
        seeded(lambda: nn.Sequential(*(Shaped(Hidden) for _ in range(4)), Shaped(Tensor.sum))) for _ in range(2)
    )
    shard_each(*model, model)
    model.set_prefetch_limit(prefetch)
    for each in (model, plain):
        each(BATCH).backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter.grad.full_tensor(), other.grad)


# -- modules that changed, or run alone ------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("kind", ["composable", "flat", "original"])
def test_parameters_that_were_loaded_in_the_place_of_others_were_not_added(world: World, kind: str) -> None:
    model = sharded_mlp() if kind == "composable" else wrap(fullshard, mlp(), original=kind == "original")
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(BATCH)


@ranks(2)
def test_modules_of_a_list_that_have_no_root(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        model = mlp()
        fsdp.fully_shard([model.blocks[0], model.blocks[1]])
        model(BATCH)

    refused(
        mistake, RuntimeError, "list of modules", "FSDPSequential", "the module that contains them", torch_too=False
    )


# -- process groups --------------------------------------------------------------------------------------------------


@ranks(2, timeout=20)
def test_a_process_group_destroyed_between_steps(world: World) -> None:
    group = dist.new_group([0, 1])
    model = sharded_mlp(mesh=DeviceMesh.from_group(group, "cpu"))
    model(BATCH).sum().backward()
    dist.destroy_process_group(group)
    refused(lambda _: model(BATCH), RuntimeError, "process group", "destroyed", torch_too=False)


@ranks(2, timeout=20)
def test_all_process_groups_destroyed_between_steps(world: World) -> None:
    model = sharded_mlp()
    model(BATCH).sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    refused(lambda _: model(BATCH), RuntimeError, "process group", "destroyed", torch_too=False)


# -- full parameters -------------------------------------------------------------------------------------------------


def summon(model: nn.Module) -> None:
    """Enter and leave."""
    with fullshard.summon_full_params(model):
        pass


def summon_in_backward(model: Any) -> None:
    output = model(BATCH)
    output.register_hook(lambda grad: summon(model))
    output.sum().backward()


def summon_twice(model: Any) -> None:
    """What is written outside of the inner ones, and after them, would be lost."""
    with fullshard.summon_full_params(model):
        summon(model)


@ranks(2)
def test_full_parameters_inside_a_pass_or_of_full_parameters(world: World) -> None:
    error, words = (AssertionError, RuntimeError), ("FSDPMLP", "between steps")
    model = sharded_mlp()
    model.blocks[0].register_forward_hook(lambda *_: summon(model))
    refused(lambda _: model(BATCH), error, *words, "forward", torch_too=False)
    refused(lambda _: summon_in_backward(sharded_mlp()), error, *words, "backward", torch_too=False)
    refused(lambda _: summon_twice(sharded_mlp()), error, "summon_full_params", torch_too=False)
