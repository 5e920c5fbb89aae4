"""Parity together with other parts of torch: checkpointing, tensor parallelism, offload, compiled blocks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from tests.harness import World, everywhere, ranks
from tests.harness.compare import Precision, Training, adamw, compare, each_block, sgd
from tests.harness.models import MLP, Block, Checkpointing, Transformer, random_batch, seeded, split_over, token_batch

CHECKPOINTING = pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
RESHARD = pytest.mark.parametrize("reshard", [True, False])


@ranks(1, 2)
@CHECKPOINTING
@RESHARD
def test_sharded_blocks_inside_checkpoints(world: World, checkpointing: Checkpointing, reshard: bool) -> None:
    training = Training(
        build=lambda: seeded(lambda: Transformer(checkpointing=checkpointing)),
        shard=each_block(reshard_after_forward=reshard),
        batch=token_batch(3, 5),
    )
    compare(world, training)


@ranks(2)
@CHECKPOINTING
@RESHARD
def test_several_sharded_blocks_inside_a_checkpoint(world: World, checkpointing: Checkpointing, reshard: bool) -> None:
    training = Training(
        build=lambda: seeded(lambda: Transformer(layers=4, checkpointing=checkpointing, region=2)),
        shard=each_block(reshard_after_forward=reshard),
        batch=token_batch(3, 5),
    )
    compare(world, training)


def wrapped(module: nn.Module, checkpointing: Checkpointing) -> nn.Module:
    """A module that recomputes its activations."""
    kinds = {"reentrant": CheckpointImpl.REENTRANT, "non-reentrant": CheckpointImpl.NO_REENTRANT}
    return checkpoint_wrapper(module, checkpoint_impl=kinds[checkpointing])


@ranks(2)
@CHECKPOINTING
@RESHARD
@pytest.mark.parametrize("order", ["checkpoint, then shard the wrapper", "shard, then checkpoint"])
def test_checkpoint_wrapper(world: World, checkpointing: Checkpointing, reshard: bool, order: str) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        for index, block in enumerate(model.blocks):
            if order == "shard, then checkpoint":
                fsdp.fully_shard(block, reshard_after_forward=reshard)
                model.blocks[index] = wrapped(block, checkpointing)
            else:
                model.blocks[index] = wrapped(block, checkpointing)
                fsdp.fully_shard(model.blocks[index], reshard_after_forward=reshard)
        fsdp.fully_shard(model)

    def build_reference() -> nn.Module:
        model = seeded(Transformer)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrapped(block, checkpointing)
        return model

    training = Training(
        build=lambda: seeded(Transformer), build_reference=build_reference, shard=shard, batch=token_batch(3, 5)
    )
    compare(world, training)


@everywhere
@ranks(2)
@CHECKPOINTING
def test_checkpoints_inside_sharded_blocks(world: World, checkpointing: Checkpointing) -> None:
    def build() -> nn.Module:
        model = seeded(Transformer)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.register_module("attention", wrapped(block.attention, checkpointing))
            block.register_module("up", wrapped(block.up, checkpointing))
        return model

    compare(world, Training(build=build, shard=each_block(), batch=token_batch(3, 5)))


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
    build = lambda: seeded(lambda: Repeating(checkpointing))  # noqa: E731
    compare(world, Training(build=build, shard=each_block(), batch=random_batch(4, 6)))


@ranks(2)
@CHECKPOINTING
def test_checkpoints_in_bf16_over_micro_batches(world: World, checkpointing: Checkpointing) -> None:
    precision = Precision(torch.bfloat16, torch.float32)
    training = Training(
        build=lambda: seeded(lambda: Transformer(checkpointing=checkpointing)),
        shard=each_block(precision=precision),
        batch=token_batch(3, 5),
        precision=precision,
        micro_batches=2,
        set_up_micro=lambda model, micro: model.set_requires_gradient_sync(micro == 1),
    )
    compare(world, training)


@ranks(4)
def test_checkpoints_and_a_smaller_group_after_forward(world: World) -> None:
    training = Training(
        build=lambda: seeded(lambda: Transformer(checkpointing="non-reentrant")),
        shard=each_block(reshard_after_forward=2),
        batch=token_batch(3, 5),
    )
    compare(world, training)


@ranks(2)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@RESHARD
def test_cpu_offload(world: World, optimizer: Any, reshard: bool) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        offload = fsdp.CPUOffloadPolicy(pin_memory=False)
        each_block(offload_policy=offload, reshard_after_forward=reshard)(fsdp, model)

    compare(world, Training(build=lambda: seeded(MLP), shard=shard, batch=random_batch(4, 6), optimizer=optimizer))


@everywhere
@ranks(2)
def test_cpu_offload_over_micro_batches(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        each_block(offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))(fsdp, model)

    training = Training(build=lambda: seeded(MLP), shard=shard, batch=random_batch(4, 6), micro_batches=3)
    compare(world, training)


def transformer_in_double(hidden: int = 18) -> nn.Module:
    """A transformer in fp64: splitting its matrices alone moves gradients by 2e-6 of their largest entry in fp32."""
    return seeded(lambda: Transformer(hidden=hidden)).double()


@ranks(4)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@RESHARD
def test_tensor_parallel(world: World, optimizer: Any, reshard: bool) -> None:
    mesh = world.mesh(2, 2, names=("data", "tensor"))

    def shard(fsdp: ModuleType, model: Any) -> None:
        split_over(mesh["tensor"], model)
        each_block(mesh=mesh["data"], reshard_after_forward=reshard)(fsdp, model)

    training = Training(build=transformer_in_double, shard=shard, batch=token_batch(3, 5), optimizer=optimizer)
    compare(world, training, data_parallel=(mesh["data"].get_local_rank(), 2))


@ranks(2)
def test_tensor_parallel_without_data_parallel(world: World) -> None:
    mesh = world.mesh(1, 2, names=("data", "tensor"))

    def shard(fsdp: ModuleType, model: Any) -> None:
        split_over(mesh["tensor"], model)
        each_block(mesh=mesh["data"])(fsdp, model)

    training = Training(build=transformer_in_double, shard=shard, batch=token_batch(3, 5))
    compare(world, training, data_parallel=(0, 1))


@ranks(4)
def test_tensor_parallel_and_data_parallel_on_different_dims(world: World) -> None:
    mesh = world.mesh(2, 2, names=("data", "tensor"))

    def columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim > 1 else None

    def shard(fsdp: ModuleType, model: Any) -> None:
        split_over(mesh["tensor"], model)
        each_block(mesh=mesh["data"], shard_placement_fn=columns)(fsdp, model)

    # Columns that do not divide by both are beyond torch.
    training = Training(build=lambda: transformer_in_double(hidden=20), shard=shard, batch=token_batch(3, 5))
    compare(world, training, data_parallel=(mesh["data"].get_local_rank(), 2))


@ranks(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks(world: World, backend: str) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        for block in model.blocks:
            block.compile(backend=backend)
        each_block()(fsdp, model)

    training = Training(build=lambda: seeded(lambda: MLP((6, 7, 5))), shard=shard, batch=random_batch(4, 6), steps=2)
    compare(world, training)
