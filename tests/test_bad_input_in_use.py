"""Mistakes that show when a sharded model is used: between the ranks, in the setters, and before its first step.

Each is refused where it is made, on every rank and within seconds, with a message that names the parameter or
module. Mistakes in a call of `fully_shard` by itself are in `test_fully_shard`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fullshard
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded, shard_each
from tests.test_fully_shard import mlp, refused

BATCH = torch.ones(2, 6)


def sharded_mlp(fsdp: ModuleType = fullshard, **options: Any) -> Any:
    """An MLP with a group for each block and one for the rest."""
    model = mlp()
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


def meta_mlp(fsdp: ModuleType = fullshard) -> Any:
    """The same without memory."""
    with torch.device("meta"):
        model = MLP()
    for block in model.blocks:
        fsdp.fully_shard(block)
    return fsdp.fully_shard(model)


# -- ranks that disagree ---------------------------------------------------------------------------------------------


def narrow() -> Any:
    return seeded(lambda: MLP((5, 5, 5)))


def transpose(model: Any) -> None:
    model.blocks[0] = nn.Sequential(nn.Linear(7, 6, bias=False), nn.Tanh())


def rename(model: Any) -> None:
    model.factor = model.scale
    del model.scale


def move_to_the_end(model: Any) -> None:
    weight = model.blocks[1][0].weight
    del model.blocks[1][0].weight
    model.blocks[1][0].weight = weight


def add(model: Any) -> None:
    model.blocks[3].extra = nn.Parameter(torch.ones(2))


def tie(model: Any) -> None:
    model.blocks[1][0].weight = model.blocks[0][0].weight


#: How rank 1 changes the model before both shard it, and words of what each rank must then say.
CHANGES: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "another shape": (transpose, ("'blocks.0.0.weight'", "(7, 6)", "(6, 7)")),
    "another dtype": (lambda model: model.blocks[1].double(), ("'blocks.1.0.weight'", "float32", "float64")),
    "another name": (rename, ("'scale'", "'factor'")),
    "another order": (move_to_the_end, ("'blocks.1.0.weight'", "'blocks.1.0.bias'", "(5, 7)", "(5,)")),
    "a parameter more": (add, ("'blocks.3.extra'", "(2,)")),
    "a tie": (tie, ("'blocks.1.0.weight'", "'blocks.1.0.bias'")),
}


@ranks(2)
@pytest.mark.parametrize("what", CHANGES)
def test_ranks_whose_models_differ(world: World, what: str) -> None:
    change, words = CHANGES[what]
    model = narrow() if change is tie else mlp()
    if world.rank == 1:
        change(model)
    refused(lambda fsdp: fsdp.fully_shard(model), ValueError, "rank 0", "rank 1", *words, torch_too=False)


@ranks(2)
def test_what_the_ranks_have_in_common_is_not_told(world: World) -> None:
    model = mlp() if world.rank == 0 else mlp().double()
    with pytest.raises(ValueError, match="float64") as caught:
        fullshard.fully_shard(model)
    assert "MixedPrecisionPolicy" not in str(caught.value)


def other_placements(rank: int) -> None:
    fullshard.fully_shard(mlp(), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1 if rank else 0))


def other_groups(rank: int) -> None:
    model = mlp()
    shard_each(*model.blocks[: 1 + rank], model)


def other_order(rank: int) -> None:
    """Each group would be taken for another one of the same size."""
    model = seeded(lambda: MLP((6, 6, 6, 6)))
    for index in (0, 1, 2) if rank == 0 else (2, 1, 0):
        fullshard.fully_shard(model.blocks[index])
    fullshard.fully_shard(model)(BATCH)


def other_precision(rank: int) -> None:
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if rank else None)
    fullshard.fully_shard(mlp(), mp_policy=policy)(BATCH)


def one_trains(rank: int) -> None:
    model = mlp()
    model.blocks[1][0].weight.requires_grad_(rank == 0)
    fullshard.fully_shard(model)(BATCH).sum().backward()


CALLS: dict[Callable[[int], None], tuple[str, ...]] = {
    other_placements: ("'blocks.0.0.weight'", "dim 0", "dim 1"),
    other_groups: ("'scale'", "'0.weight'"),
    other_order: ("blocks.0", "blocks.2"),
    other_precision: ("bfloat16",),
    one_trains: ("weight",),
}


@ranks(2, timeout=20)
@pytest.mark.parametrize("mistake", CALLS, ids=lambda mistake: mistake.__name__)
def test_ranks_whose_calls_differ(world: World, mistake: Callable[[int], None]) -> None:
    error = (RuntimeError, ValueError)
    refused(lambda _: mistake(world.rank), error, "rank 0", "rank 1", *CALLS[mistake], torch_too=False)


# -- parameters and buffers without memory ---------------------------------------------------------------------------


def with_a_block_on_meta(fsdp: ModuleType, index: int) -> None:
    model = mlp()
    model.blocks[index].to("meta")
    fsdp.fully_shard(model)(BATCH)


def summon_on_meta(fsdp: ModuleType) -> None:
    with torch.device("meta"):
        model = fsdp.fully_shard(MLP())
    with fullshard.summon_full_params(model):
        pass


def with_a_buffer_on_meta(fsdp: ModuleType) -> None:
    model: Any = nn.Sequential(Masked())
    model[0].mask = model[0].mask.to("meta")
    fsdp.fully_shard(model)(BATCH)


@ranks(2)
def test_parameters_and_buffers_on_meta(world: World) -> None:
    for index in (1, 3):
        words = (f"'blocks.{index}.0.weight'", "to_empty")
        refused(lambda fsdp, at=index: with_a_block_on_meta(fsdp, at), RuntimeError, "meta device", *words)
    refused(lambda fsdp: meta_mlp(fsdp)(BATCH), RuntimeError, "meta device", "'scale'", "to_empty")
    refused(lambda fsdp: meta_mlp(fsdp).blocks[1].unshard(), RuntimeError, "meta device", "0.weight", "to_empty")
    refused(summon_on_meta, RuntimeError, "meta device", "'blocks.0.0.weight'", torch_too=False)
    refused(with_a_buffer_on_meta, RuntimeError, "meta device", "'0.mask'", torch_too=False)


class Masked(nn.Module):
    """A layer with a buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.mask
        return y


def from_meta() -> Any:
    """A model with memory that nobody has written, but for its parameters."""
    with torch.device("meta"):
        model = nn.Sequential(Masked())
    fullshard.fully_shard(model)
    model.to_empty(device="cpu")
    model.load_state_dict({name: tensor.zero_() for name, tensor in model.state_dict().items()})
    return model


@ranks(2)
def test_a_buffer_that_was_initialized_after_to_empty(world: World) -> None:
    model = from_meta()
    model[0].mask.fill_(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(BATCH)


# -- setters ---------------------------------------------------------------------------------------------------------


SWITCHES = (
    "requires_gradient_sync",
    "requires_all_reduce",
    "is_last_backward",
    "reshard_after_backward",
    "unshard_in_backward",
    "reduce_scatter_unused_params",
    "force_sum_reduction_for_comms",
    "separate_reduce_scatter_group",
)
#: Values of setters that are refused, with words of the message, and whether torch refuses them too. "no" is as true as
#: "yes" is.
VALUES: list[tuple[str, tuple[Any, ...], tuple[str, ...], bool]] = [
    ("set_reshard_after_forward", (2, "yes", None), ("reshard_after_forward", "bool"), True),
    *((f"set_{name}", ("no",), (name, "'no'", "True or False"), False) for name in SWITCHES),
    ("set_gradient_divide_factor", (0, -2.0, float("nan"), float("inf"), "2"), ("divide factor",), False),
    ("set_reduce_scatter_max_input_buffers", (0, 1.5, True), ("max_input_buffers",), True),
    *(
        (name, ("nccl",), ("'nccl'",), False)
        for name in ("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter")
    ),
]


@ranks(2)
@pytest.mark.parametrize(("name", "values", "words", "torch_too"), VALUES, ids=[each[0] for each in VALUES])
def test_a_setter_refuses_a_value(
    world: World, name: str, values: tuple[Any, ...], words: tuple[str, ...], torch_too: bool
) -> None:
    for value in values:
        said = (*words, str(value)) if name == "set_gradient_divide_factor" else words
        refused(
            lambda fsdp, value=value: getattr(sharded_mlp(fsdp), name)(value),
            (TypeError, ValueError),
            *said,
            torch_too=torch_too,
        )


def a_stream_for_a_hook(fsdp: ModuleType, world: World) -> None:
    model = sharded_mlp(fsdp, mesh=world.mesh(2, 1, names=("replicate", "shard")))
    model.set_all_reduce_hook(lambda output: None, stream=torch.Stream(device="cpu"))


def prefetch(fsdp: ModuleType, way: str) -> None:
    model = sharded_mlp(fsdp)
    getattr(model, f"set_modules_to_{way}_prefetch")([model.blocks[0], model.blocks[0][0]])


def reset_of_a_block(fsdp: ModuleType, world: World) -> None:
    model = sharded_mlp(fsdp)
    model(BATCH)
    model.blocks[0].reset_iter_state()


LINEAR = "Linear(in_features=6, out_features=7, bias=True)"
MODULES: dict[str, tuple[Callable[[ModuleType, World], object], type[Exception], tuple[str, ...]]] = {
    "a stream for a hook that has one": (a_stream_for_a_hook, ValueError, ("stream", "native HSDP")),
    "prefetch in forward": (lambda fsdp, _: prefetch(fsdp, "forward"), ValueError, ("fully_shard", LINEAR)),
    "prefetch in backward": (lambda fsdp, _: prefetch(fsdp, "backward"), ValueError, ("fully_shard", LINEAR)),
    "shared lanes": (
        lambda fsdp, _: fsdp.share_comm_ctx([sharded_mlp(fsdp), nn.Tanh()]),
        ValueError,
        ("fully_shard", "Tanh"),
    ),
    "a forward method that is missing": (
        lambda fsdp, _: fsdp.register_fsdp_forward_method(sharded_mlp(fsdp), "generate"),
        ValueError,
        ("FSDPMLP", "does not have a method", "'generate'"),
    ),
    "a reset below the root": (reset_of_a_block, RuntimeError, ("root", "FSDPMLP", "FSDPSequential")),
}


@ranks(2)
@pytest.mark.parametrize("what", MODULES)
def test_a_method_of_another_module_or_for_one(world: World, what: str) -> None:
    mistake, error, words = MODULES[what]
    refused(lambda fsdp: mistake(fsdp, world), error, *words)
