"""Optimizers that need whole matrices, or quantize by blocks, compute on ragged shards what they do on the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import Ragged, checkpoint, fully_shard
from tests.checkpoint.test_save import run
from tests.harness import RankPool, World, ranks
from tests.harness.models import seeded

LOW_BIT = ["Adam4bit", "Adam8bit", "AdamFp8", "AdamW8bit"]


def build() -> nn.Sequential:
    """Weights of more than 4,096 elements and fewer, and biases."""
    return nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 130), nn.Tanh(), nn.Linear(130, 16))


def optimizer_of(name: str, params: list[nn.Parameter]) -> Any:
    if name == "Muon":
        return torch.optim.Muon([param for param in params if param.ndim == 2], lr=1e-2)
    if name == "AdamW":
        return torch.optim.AdamW(params, lr=1e-2)
    import torchao.optim

    return getattr(torchao.optim, name)(params, lr=1e-2)


def train(model: Any, optimizer: Any, steps: Iterable[int] = range(3)) -> None:
    """Steps with gradients that are the same on every rank and in one process, to the bit."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            gradient = torch.randn(param.shape, generator=generator)
            if isinstance(param, DTensor):
                param.grad = part(param, gradient)
            else:
                param.grad = gradient
        optimizer.step()


def part(param: DTensor, whole: Tensor) -> DTensor:
    """A DTensor like a parameter, of whole values that every rank has."""
    like = torch.zeros_like(param.detach())
    replicated = DTensor.from_local(whole, param.device_mesh, [torch.distributed.tensor.Replicate()])
    like.copy_(replicated)
    return like


def compare(name: str, placement: Callable[[nn.Parameter], Any]) -> tuple[Any, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)  # takes long, for the same values
        whole = seeded(build)
        reference = optimizer_of(name, list(whole.parameters()))
        train(whole, reference)
        model: Any = fully_shard(seeded(build), shard_placement_fn=placement)
        optimizer = optimizer_of(name, list(model.parameters()))
        train(model, optimizer)
    for (where, param), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected), where
    return model, optimizer


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", LOW_BIT)
def test_quantized_state_is_that_of_the_whole(world: World, name: str) -> None:
    pytest.importorskip("torchao")
    model, optimizer = compare(name, lambda param: Ragged(block=4096))
    state = optimizer.state[model[0].weight]["exp_avg"]
    assert not state.to_local().numel() or type(state.to_local()).__name__.startswith("OptimState")


@ranks(1, 2, 3, 4)
def test_muon_has_whole_matrices(world: World) -> None:
    model, _ = compare("Muon", lambda param: Ragged() if param.ndim == 2 else None)
    for param in (model[0].weight, model[2].weight, model[4].weight):
        assert param.to_local().shape[0] in (0, param.shape[0])


@ranks(2)
@pytest.mark.parametrize(
    ("name", "placement", "says"),
    [
        ("Muon", Ragged(rows=1), r"Muon .* '0.weight' of shape \(128, 96\) .* \[6144\] elements.* Ragged\(\)"),
        ("Adam8bit", Ragged(rows=5), r"Adam8bit .* '0.weight' .* Ragged\(block=4096\)"),
    ],
)
def test_parameters_that_are_cut_inside_blocks_are_named(world: World, name: str, placement: Ragged, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compare(name, lambda param: placement)


def placed(name: str) -> Callable[[nn.Parameter], Any]:
    return lambda param: Ragged(block=4096) if name != "Muon" else Ragged() if param.ndim == 2 else None


def save_and_load(world: World, folder: Path, name: str, loads: bool) -> list[Tensor]:
    """The parameters after two steps, a checkpoint, and two more steps; or after loading it and these two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        model: Any = fully_shard(seeded(build, seed=int(loads)), shard_placement_fn=placed(name))
        optimizer = optimizer_of(name, list(model.parameters()))
        train(model, optimizer, [7] if loads else [0, 1])
        if loads:
            checkpoint.load(folder, model, optimizer)
        else:
            checkpoint.save(folder, model, optimizer)
        train(model, optimizer, [2, 3])
        return [param.detach().full_tensor() for param in model.parameters()]


@pytest.mark.parametrize("name", ["Adam4bit", "Adam8bit", "AdamFp8", "Muon"])
def test_state_is_loaded_by_other_numbers_of_ranks(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    if name != "Muon":
        pytest.importorskip("torchao")
    expected = run(rank_pool, save_and_load, 2, tmp_path, name, False)[0]
    for size in (1, 2, 3):
        for found in run(rank_pool, save_and_load, size, tmp_path, name, True):
            assert all(map(torch.equal, found, expected)), size


@ranks(2, 3)
@pytest.mark.parametrize("name", ["AdamW", "Muon", "Adam8bit"])
def test_state_of_a_model_with_other_cuts_is_cut_again(world: World, name: str) -> None:
    """The state dict of the optimizer is loaded as it is: the model that is sharded next begins with the next rank."""
    if name == "Adam8bit":
        pytest.importorskip("torchao")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        trained: list[tuple[Any, Any]] = []
        for seed in (0, 1):
            model: Any = fully_shard(seeded(build, seed=seed), shard_placement_fn=placed(name))
            trained.append((model, optimizer_of(name, list(model.parameters()))))
            train(*trained[-1], [seed])
        (model, optimizer), (other, its_optimizer) = trained
        pairs = list(zip(model.parameters(), other.parameters(), strict=True))
        assert any(one.placements != two.placements for one, two in pairs)
        other.load_state_dict(model.state_dict())
        if name == "Adam8bit":
            its_optimizer.load_state_dict(optimizer.state_dict())
            with pytest.raises(ValueError, match=r"'exp_avg.*shape \(128, 96\).*quantized.*fullshard.checkpoint"):
                train(other, its_optimizer, [2])
            return
        its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each in trained:
            train(*each, [2, 3])
    assert all(torch.equal(one.full_tensor(), two.full_tensor()) for one, two in pairs)
