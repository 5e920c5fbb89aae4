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
from tests.harness.models import MLP, seeded
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


def disagree(world: World, change: Callable[[Any], object], *words: str, build: Callable[[], Any] = mlp) -> None:
    """Shard a model that rank 1 has changed: each rank must say what both of them have."""
    model = build()
    if world.rank == 1:
        change(model)
    refused(lambda fsdp: fsdp.fully_shard(model), ValueError, "rank 0", "rank 1", *words, torch_too=False)


@ranks(2)
def test_another_shape(world: World) -> None:
    def transpose(model: Any) -> None:
        model.blocks[0] = nn.Sequential(nn.Linear(7, 6, bias=False), nn.Tanh())

    disagree(world, transpose, "'blocks.0.0.weight'", "(7, 6)", "(6, 7)")


@ranks(2)
def test_another_dtype(world: World) -> None:
    disagree(world, lambda model: model.blocks[1].double(), "'blocks.1.0.weight'", "float32", "float64")


@ranks(2)
def test_what_the_ranks_have_in_common_is_not_told(world: World) -> None:
    model = mlp() if world.rank == 0 else mlp().double()
    with pytest.raises(ValueError, match="float64") as caught:
        fullshard.fully_shard(model)
    assert "MixedPrecisionPolicy" not in str(caught.value)


@ranks(2)
def test_another_name(world: World) -> None:
    def rename(model: Any) -> None:
        model.factor = model.scale
        del model.scale

    disagree(world, rename, "'scale'", "'factor'")


@ranks(2)
def test_another_order(world: World) -> None:
    def move_to_the_end(model: Any) -> None:
        weight = model.blocks[1][0].weight
        del model.blocks[1][0].weight
        model.blocks[1][0].weight = weight

    disagree(world, move_to_the_end, "'blocks.1.0.weight'", "'blocks.1.0.bias'", "(5, 7)", "(5,)")


@ranks(2)
def test_a_parameter_more(world: World) -> None:
    def add(model: Any) -> None:
        model.blocks[3].extra = nn.Parameter(torch.ones(2))

    disagree(world, add, "'blocks.3.extra'", "(2,)")


@ranks(2)
def test_a_tie_that_only_one_rank_has(world: World) -> None:
    def tie(model: Any) -> None:
        model.blocks[1][0].weight = model.blocks[0][0].weight

    words = ("'blocks.1.0.weight'", "'blocks.1.0.bias'")
    disagree(world, tie, *words, build=lambda: seeded(lambda: MLP((5, 5, 5))))


@ranks(2)
def test_a_parameter_is_told_with_its_place_in_the_module(world: World) -> None:
    """There may be a hundred weights of one shape in a group."""
    disagree(world, lambda model: model.blocks[1].double(), "'blocks.1.0.weight'")


@ranks(2)
def test_another_placement(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1 if world.rank else 0))

    refused(mistake, ValueError, "rank 0", "rank 1", "'blocks.0.0.weight'", "dim 0", "dim 1", torch_too=False)


@ranks(2)
def test_other_groups(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        model = mlp()
        for block in model.blocks[: 1 + world.rank]:
            fsdp.fully_shard(block)
        fsdp.fully_shard(model)

    refused(mistake, ValueError, "rank 0", "rank 1", "'scale'", "'0.weight'", torch_too=False)


@ranks(2, timeout=10)
def test_equal_groups_made_in_another_order(world: World) -> None:
    """Each would be taken for another one of the same size."""

    def mistake(fsdp: ModuleType) -> None:
        model = seeded(lambda: MLP((6, 6, 6, 6)))
        for index in (0, 1, 2) if world.rank == 0 else (2, 1, 0):
            fsdp.fully_shard(model.blocks[index])
        fsdp.fully_shard(model)
        model(BATCH)

    refused(mistake, (RuntimeError, ValueError), "rank 0", "rank 1", "blocks.0", "blocks.2", torch_too=False)


@ranks(2, timeout=10)
def test_another_precision(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        dtype = torch.bfloat16 if world.rank == 1 else None
        model = fsdp.fully_shard(mlp(), mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=dtype))
        model(BATCH)

    refused(mistake, (RuntimeError, ValueError), "rank 0", "rank 1", "bfloat16", torch_too=False)


@ranks(2, timeout=10)
def test_a_parameter_that_only_one_rank_trains(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        model = mlp()
        model.blocks[1][0].weight.requires_grad_(world.rank == 0)
        fsdp.fully_shard(model)(BATCH).sum().backward()

    refused(mistake, (RuntimeError, ValueError), "rank 0", "rank 1", "weight", torch_too=False)


# -- parameters and buffers without memory ---------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("on_meta", [1, 3])
def test_a_block_on_meta_among_others(world: World, on_meta: int) -> None:
    def mistake(fsdp: ModuleType) -> None:
        model = mlp()
        model.blocks[on_meta].to("meta")
        fsdp.fully_shard(model)(BATCH)

    refused(mistake, RuntimeError, "meta device", f"'blocks.{on_meta}.0.weight'", "to_empty")


@ranks(2)
def test_a_model_on_meta(world: World) -> None:
    refused(lambda fsdp: meta_mlp(fsdp)(BATCH), RuntimeError, "meta device", "'scale'", "to_empty")


@ranks(2)
def test_a_block_on_meta_gathered_by_hand(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        meta_mlp(fsdp).blocks[1].unshard()

    refused(mistake, RuntimeError, "meta device", "0.weight", "to_empty")


@ranks(2)
def test_full_parameters_of_a_model_on_meta(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        with torch.device("meta"):
            model = fsdp.fully_shard(MLP())
        with fullshard.summon_full_params(model):
            pass

    refused(mistake, RuntimeError, "meta device", "'blocks.0.0.weight'", torch_too=False)


class Masked(nn.Module):
    """A layer with a buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.mask
        return y


@ranks(2)
def test_a_buffer_on_meta(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        model: Any = nn.Sequential(Masked())
        model[0].mask = model[0].mask.to("meta")
        fsdp.fully_shard(model)(BATCH)

    refused(mistake, RuntimeError, "meta device", "'0.mask'", torch_too=False)


def from_meta() -> Any:
    """A model with memory that nobody has written, but for its parameters."""
    with torch.device("meta"):
        model = nn.Sequential(Masked())
    fullshard.fully_shard(model)
    model.to_empty(device="cpu")
    model.load_state_dict({name: tensor.zero_() for name, tensor in model.state_dict().items()})
    return model


@ranks(2)
def test_a_buffer_that_to_empty_left_uninitialized(world: World) -> None:
    model = from_meta()
    with pytest.warns(UserWarning, match=r"'0\.mask'"):
        model(BATCH)


@ranks(2)
def test_a_buffer_that_was_initialized_after_to_empty(world: World) -> None:
    model = from_meta()
    model[0].mask.fill_(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(BATCH)


# -- setters ---------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("value", [2, "yes", None], ids=repr)
def test_a_choice_after_forward_that_is_no_bool(world: World, value: object) -> None:
    error = ValueError
    refused(lambda fsdp: sharded_mlp(fsdp).set_reshard_after_forward(value), error, "reshard_after_forward", "bool")


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


@ranks(2)
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_is_a_word(world: World, name: str) -> None:
    """ "no" is as true as "yes" is."""
    error = (TypeError, ValueError)
    words = (name, "'no'", "True or False")
    refused(lambda fsdp: getattr(sharded_mlp(fsdp), f"set_{name}")("no"), error, *words, torch_too=False)


@ranks(2)
@pytest.mark.parametrize("factor", [0, -2.0, float("nan"), float("inf"), "2"], ids=repr)
def test_a_divisor_that_is_no_positive_number(world: World, factor: Any) -> None:
    error = (TypeError, ValueError)
    words = ("divide factor", str(factor))
    refused(lambda fsdp: sharded_mlp(fsdp).set_gradient_divide_factor(factor), error, *words, torch_too=False)


@ranks(2)
@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_number_of_buffers_that_is_none(world: World, count: Any, error: type[Exception]) -> None:
    refused(lambda fsdp: sharded_mlp(fsdp).set_reduce_scatter_max_input_buffers(count), error, "max_input_buffers")


@ranks(2)
@pytest.mark.parametrize("limit", [-1, 1.5, True], ids=repr)
def test_a_prefetch_limit_that_is_none(world: World, limit: Any) -> None:
    refused(lambda _: sharded_mlp().set_prefetch_limit(limit), ValueError, "limit", repr(limit), torch_too=False)


@ranks(2)
@pytest.mark.parametrize("name", ["set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"])
def test_communication_that_cannot_be_called(world: World, name: str) -> None:
    refused(lambda fsdp: getattr(sharded_mlp(fsdp), name)("nccl"), TypeError, "'nccl'", torch_too=False)


@ranks(2)
def test_a_stream_for_a_hook_that_has_one(world: World) -> None:
    mesh = world.mesh(2, 1, names=("replicate", "shard"))
    stream = torch.Stream(device="cpu")

    def mistake(fsdp: ModuleType) -> None:
        sharded_mlp(fsdp, mesh=mesh).set_all_reduce_hook(lambda output: None, stream=stream)

    refused(mistake, ValueError, "stream", "native HSDP")


@ranks(2)
@pytest.mark.parametrize("name", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
def test_prefetch_of_a_module_that_is_not_sharded(world: World, name: str) -> None:
    def mistake(fsdp: ModuleType) -> None:
        model = sharded_mlp(fsdp)
        getattr(model, name)([model.blocks[0], model.blocks[0][0]])

    refused(mistake, ValueError, "fully_shard", "Linear(in_features=6, out_features=7, bias=True)")


@ranks(2)
def test_shared_lanes_for_a_module_that_is_not_sharded(world: World) -> None:
    refused(lambda fsdp: fsdp.share_comm_ctx([sharded_mlp(fsdp), nn.Tanh()]), ValueError, "fully_shard", "Tanh")


@ranks(2)
def test_a_forward_method_that_is_missing(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        fsdp.register_fsdp_forward_method(sharded_mlp(fsdp), "generate")

    refused(mistake, ValueError, "FSDPMLP", "'generate'")
    fullshard.register_fsdp_forward_method(mlp(), "generate")  # a program may run without sharding too


@ranks(2)
def test_a_reset_of_another_module_than_the_root(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        model = sharded_mlp(fsdp)
        model(BATCH)
        model.blocks[0].reset_iter_state()

    refused(mistake, RuntimeError, "root", "FSDPMLP", "FSDPSequential")
