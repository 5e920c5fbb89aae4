"""Parity together with other parts of torch: checkpointing, tensor parallelism, offload, compiled blocks."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from tests.harness import World, ranks
from tests.harness.compare import Precision, Training, adamw, compare, each_block, sgd
from tests.harness.models import MLP, Checkpointing, Transformer, random_batch, seeded, split_over, token_batch
from tests.harness.slow import slow

CHECKPOINTING = pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
RESHARD = pytest.mark.parametrize("reshard", [True, False])


def transformer(shard: Any, build: Any = Transformer, **changes: Any) -> Training:
    return Training(**{"build": lambda: seeded(build), "shard": shard, "batch": token_batch(3, 5), **changes})


@ranks(1, 2, 4)
@CHECKPOINTING
@RESHARD
@pytest.mark.parametrize("region", [1, 2])
def test_sharded_blocks_inside_checkpoints(
    world: World, checkpointing: Checkpointing, reshard: bool, region: int
) -> None:
    build = partial(Transformer, layers=2 * region, checkpointing=checkpointing, region=region)
    shard = each_block(reshard_after_forward=2 if world.size == 4 and reshard else reshard)
    compare(world, transformer(shard, build))


def wrapped(module: nn.Module, checkpointing: Checkpointing) -> nn.Module:
    kinds = {"reentrant": CheckpointImpl.REENTRANT, "non-reentrant": CheckpointImpl.NO_REENTRANT}
    return checkpoint_wrapper(module, checkpoint_impl=kinds[checkpointing])


@pytest.mark.slow
@ranks(2)
@CHECKPOINTING
@RESHARD
@pytest.mark.parametrize("order", ["checkpoint, then shard the wrapper", "shard, then checkpoint"])
def test_checkpoint_wrapper(world: World, checkpointing: Checkpointing, reshard: bool, order: str) -> None:
    def recompute(model: Any, index: int) -> Any:
        model.blocks[index] = wrapped(model.blocks[index], checkpointing)
        return model.blocks[index]

    def shard(fsdp: ModuleType, model: Any) -> None:
        for index, block in enumerate(model.blocks):
            if order == "shard, then checkpoint":
                fsdp.fully_shard(block, reshard_after_forward=reshard)
                recompute(model, index)
            else:
                fsdp.fully_shard(recompute(model, index), reshard_after_forward=reshard)
        fsdp.fully_shard(model)

    def build_reference() -> nn.Module:
        model = seeded(Transformer)
        for index in range(len(model.blocks)):
            recompute(model, index)
        return model

    compare(world, transformer(shard, build_reference=build_reference))


@ranks(2)
@CHECKPOINTING
def test_checkpoints_inside_sharded_blocks(world: World, checkpointing: Checkpointing) -> None:
    def build() -> nn.Module:
        model: Any = Transformer()
        for block in model.blocks:
            block.attention, block.up = wrapped(block.attention, checkpointing), wrapped(block.up, checkpointing)
        return model

    compare(world, transformer(each_block(), build))


class Repeating(nn.Module):
    """Its own weight is used in two checkpoints: in reentrant ones autograd gives a gradient of it for each."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 5)])
        self.weight = nn.Parameter(torch.randn(5, 5) / 2)
        self.reentrant = checkpointing == "reentrant"

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(y @ self.weight), x, use_reentrant=self.reentrant)
        return x


@ranks(2)
@CHECKPOINTING
def test_a_weight_in_several_checkpoints(world: World, checkpointing: Checkpointing) -> None:
    compare(world, transformer(each_block(), partial(Repeating, checkpointing), batch=random_batch(4, 6)))


@pytest.mark.slow
@ranks(2)
@CHECKPOINTING
def test_checkpoints_in_bf16_over_micro_batches(world: World, checkpointing: Checkpointing) -> None:
    precision = Precision(torch.bfloat16, torch.float32)
    waits = {"micro_batches": 2, "set_up_micro": lambda model, micro: model.set_requires_gradient_sync(micro == 1)}
    build = partial(Transformer, checkpointing=checkpointing)
    compare(world, transformer(each_block(precision=precision), build, precision=precision, **waits))


@ranks(2)
@pytest.mark.parametrize("micro_batches", [1, 3])
@RESHARD
def test_cpu_offload(world: World, micro_batches: int, reshard: bool) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        offload = fsdp.CPUOffloadPolicy(pin_memory=False)
        each_block(offload_policy=offload, reshard_after_forward=reshard)(fsdp, model)

    changes = {"batch": random_batch(4, 6), "optimizer": adamw, "micro_batches": micro_batches}
    compare(world, transformer(shard, MLP, **changes))


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim > 1 else None


@ranks(2, 4)
@pytest.mark.parametrize("optimizer", [sgd, *slow(adamw)])
@RESHARD
@pytest.mark.parametrize("placement", [None, columns])
def test_tensor_parallel(world: World, optimizer: Any, reshard: bool, placement: Any) -> None:
    """In fp64: splitting matrices alone moves gradients by 2e-6 of their largest entry in fp32."""
    mesh = world.mesh(world.size // 2, 2, names=("data", "tensor"))

    def shard(fsdp: ModuleType, model: Any) -> None:
        split_over(mesh["tensor"], model)
        options = {"reshard_after_forward": reshard, "shard_placement_fn": placement}
        each_block(mesh=mesh["data"], **options)(fsdp, model)

    hidden = 18 if placement is None else 20  # columns that do not divide by both are beyond torch
    training = transformer(shard, lambda: Transformer(hidden=hidden).double(), optimizer=optimizer)
    compare(world, training, data_parallel=(mesh["data"].get_local_rank(), world.size // 2))
