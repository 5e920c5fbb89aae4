"""Optimizers that need whole matrices, or quantize by blocks, compute on ragged shards what they do on the whole."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fullshard import Ragged, checkpoint, fully_shard
from fullshard.optim import local_step
from tests.checkpoint.test_save import run
from tests.harness import RankPool, World, ranks
from tests.harness.models import seeded

#: Optimizers with quantized state, as `<library>.<class>`.
LOW_BIT = [f"torchao.{name}" for name in ("Adam4bit", "Adam8bit", "AdamFp8", "AdamW8bit")]
LOW_BIT += [f"bitsandbytes.{name}" for name in ("Adam8bit", "AdamW8bit", "AdEMAMix8bit", "Lion8bit", "RMSprop8bit")]
#: Optimizers that need whole matrices.
OF_MATRICES = ["torch.Muon", "pytorch_optimizer.Shampoo", "pytorch_optimizer.ScalableShampoo"]
#: Optimizers whose state `save` refuses if it is cut.
REFUSED = ["bitsandbytes.AdEMAMix8bit", "pytorch_optimizer.ScalableShampoo"]


def without(name: str) -> pytest.MarkDecorator:
    """Skips a test here, and not on ranks, of which one may skip before another has come to it."""
    library = name.partition(".")[0]
    return pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")


def each(*names: str, quick: Callable[[str], bool] = lambda name: True) -> pytest.MarkDecorator:
    """A parameter `name` for tests; those that are not quick are left to the long lane."""
    slow = {name: () if quick(name) else (pytest.mark.slow,) for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=(without(name), *slow[name])) for name in names])


def build(name: str, seed: int = 0) -> nn.Sequential:
    """Weights of more than 4,096 elements and fewer, and biases. The last block of bitsandbytes may have fewer elements
    than others."""
    width = 133 if name.startswith("bitsandbytes") else 130
    return seeded(
        lambda: nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, width), nn.Tanh(), nn.Linear(width, 16)),
        seed,
    )


def optimizer_of(name: str, params: list[nn.Parameter]) -> Any:
    library, _, kind = name.partition(".")
    module = importlib.import_module(library)
    if library != "pytorch_optimizer":
        module = importlib.import_module(f"{library}.optim")
    if name in OF_MATRICES:
        params = [param for param in params if param.ndim == 2]
    optimizer = getattr(module, kind)(params, lr=1e-2)
    is_known = library != "pytorch_optimizer" or not any(isinstance(param, DTensor) for param in params)
    return optimizer if is_known else local_step(optimizer, whole=True)


def train(model: Any, optimizer: Any, steps: Iterable[int] = range(3), may_communicate: int = -1) -> None:
    """Steps with gradients that are the same on every rank and in one process, to the bit. Only one communicates."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            gradient = torch.randn(param.shape, generator=generator)
            if isinstance(param, DTensor):
                param.grad = part(param, gradient)
            else:
                param.grad = gradient
        with CommDebugMode() as communication:
            optimizer.step()
        assert step == may_communicate or not communication.get_total_counts()


def part(param: DTensor, whole: Tensor) -> DTensor:
    like = torch.zeros_like(param.detach())
    replicated = DTensor.from_local(whole, param.device_mesh, [torch.distributed.tensor.Replicate()])
    like.copy_(replicated)
    return like


def compare(name: str, placement: Callable[[nn.Parameter], Any]) -> tuple[Any, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)  # takes long, for the same values
        whole = build(name)
        reference = optimizer_of(name, list(whole.parameters()))
        train(whole, reference)
        model: Any = fully_shard(build(name), shard_placement_fn=placement)
        optimizer = optimizer_of(name, list(model.parameters()))
        train(model, optimizer)
    for (where, param), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected), where
    return model, optimizer


@ranks(1, 2, 3, 4)
@each(*LOW_BIT, quick=lambda name: name.endswith(("Adam4bit", ".Adam8bit")))
def test_quantized_state_is_that_of_the_whole(world: World, name: str) -> None:
    model, optimizer = compare(name, lambda param: Ragged(block=4096))
    state = optimizer.state[model[0].weight]
    if name.startswith("torchao"):
        local = state["exp_avg"].to_local()
        assert not local.numel() or type(local).__name__.startswith("OptimState")
    else:
        assert not model[0].weight.to_local().numel() or state["state1"].dtype == torch.uint8


@ranks(1, 2, 3, 4)
@each(*OF_MATRICES, quick=lambda name: name == "torch.Muon")
def test_matrices_are_whole(world: World, name: str) -> None:
    model, _ = compare(name, lambda param: Ragged() if param.ndim == 2 else None)
    for param in (model[0].weight, model[2].weight, model[4].weight):
        assert param.to_local().shape[0] in (0, param.shape[0])


#: A cut that does not fit, and what is said of it.
CUT_INSIDE = {
    "torch.Muon": (Ragged(rows=1), r"Muon .*Ragged\(\)\. But '0.weight' of shape \(128, 96\) .* \[6144\] elements"),
    "torchao.Adam8bit": (Ragged(rows=5), r"Adam8bit .*Ragged\(block=4096\)\. But '0.weight'"),
    "pytorch_optimizer.Shampoo": (Ragged(rows=1), r"Shampoo .*Ragged\(\)\. But '0.weight' .* \[6144\] elements"),
    "bitsandbytes.Lion8bit": (Ragged(rows=5), r"Lion8bit .*Ragged\(block=4096\)\. But '0.weight'"),
}


@ranks(2)
@each(*CUT_INSIDE, quick=lambda name: name == "torch.Muon")
def test_parameters_that_are_cut_inside_blocks_are_named(world: World, name: str) -> None:
    placement, says = CUT_INSIDE[name]
    with pytest.raises(ValueError, match=says):
        compare(name, lambda param: placement)


@without("bitsandbytes")
@ranks(2)
def test_options_of_single_parameters_are_not_lost(world: World) -> None:
    optim = importlib.import_module("bitsandbytes").optim
    model = fully_shard(build("bitsandbytes"), shard_placement_fn=placed("bitsandbytes.Adam8bit"))
    optimizer = optim.Adam8bit(model.parameters())
    manager = optim.GlobalOptimManager.get_instance()
    manager.override_config(model[0].weight, "lr", 0.5)
    try:
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            train(model, optimizer)
    finally:
        manager.initialize()


def placed(name: str) -> Callable[[nn.Parameter], Any]:
    return lambda param: Ragged(block=4096) if name in LOW_BIT else Ragged() if param.ndim == 2 else None


def save_and_load(world: World, folder: Path, name: str, loads: bool) -> list[Tensor]:
    """The parameters after two steps, a checkpoint, and two more steps; or after loading it and these two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        model: Any = fully_shard(build(name, int(loads)), shard_placement_fn=placed(name))
        optimizer = optimizer_of(name, list(model.parameters()))
        train(model, optimizer, [7] if loads else [0, 1])
        if loads:
            checkpoint.load(folder, model, optimizer)
        else:
            checkpoint.save(folder, model, optimizer)
        train(model, optimizer, [2, 3])
        return [param.detach().full_tensor() for param in model.parameters()]


@ranks(2)
@each(*REFUSED, quick=lambda name: name.startswith("bitsandbytes"))
def test_state_that_cannot_be_cut_for_other_ranks_is_not_saved(world: World, tmp_path: Path, name: str) -> None:
    model: Any = fully_shard(build(name), shard_placement_fn=placed(name))
    optimizer = optimizer_of(name, list(model.parameters()))
    train(model, optimizer)
    with pytest.raises((checkpoint.CheckpointError, TypeError), match="state"):
        checkpoint.save(tmp_path, model, optimizer)


@each(
    *(name for name in [*LOW_BIT, *OF_MATRICES] if name not in REFUSED),
    quick=lambda name: name == "torch.Muon",
)
def test_state_is_loaded_by_other_numbers_of_ranks(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    expected = run(rank_pool, save_and_load, 2, tmp_path, name, False)[0]
    for size in (1, 2, 3):
        for found in run(rank_pool, save_and_load, size, tmp_path, name, True):
            assert all(map(torch.equal, found, expected)), size


@ranks(2, 3)
@each("torch.AdamW", "torch.Muon", "torchao.Adam8bit", quick=lambda name: name != "torchao.Adam8bit")
def test_state_of_a_model_with_other_cuts_is_cut_again(world: World, name: str) -> None:
    """The state dict of the optimizer is loaded as it is: the model that is sharded next begins with the next rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        trained: list[tuple[Any, Any]] = []
        for seed in (0, 1):
            model: Any = fully_shard(build(name, seed), shard_placement_fn=placed(name))
            trained.append((model, optimizer_of(name, list(model.parameters()))))
            train(*trained[-1], [seed])
        (model, optimizer), (other, its_optimizer) = trained
        pairs = list(zip(model.parameters(), other.parameters(), strict=True))
        assert any(one.placements != two.placements for one, two in pairs)
        other.load_state_dict(model.state_dict())
        if name == "torchao.Adam8bit":
            its_optimizer.load_state_dict(optimizer.state_dict())
            with pytest.raises(ValueError, match=r"'exp_avg.*shape \(128, 96\).*quantized.*fullshard.checkpoint"):
                train(other, its_optimizer, [2])
            return
        its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each in trained:
            train(*each, [2, 3], may_communicate=2)  # which cuts the state again
    assert all(torch.equal(one.full_tensor(), two.full_tensor()) for one, two in pairs)
