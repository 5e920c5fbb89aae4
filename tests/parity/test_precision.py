"""Parity of mixed precision: policies of `fully_shard`, autocast, and scaled gradients in fp16.

The reference computes each rank's gradients with a low-precision copy of the whole model and takes their mean in the
dtype of the reduction, so that the comparison stays as sharp as in fp32: nothing but the order of sums may differ.
With two ranks even a sum in bf16 is rounded only once, and has one right value.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import World, ranks
from tests.harness.compare import Batch, Call, Precision, Training, adamw, compare, each_block, mean_square, sgd
from tests.harness.models import MLP, Transformer, random_batch, seeded, token_batch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPTIMIZERS = pytest.mark.parametrize("optimizer", [sgd, adamw])


def training_with(precision: Precision, **changes: Any) -> Training:
    """Training of the MLP with one policy for all groups."""
    defaults: dict[str, Any] = {
        "build": lambda: seeded(MLP),
        "shard": each_block(precision=precision),
        "batch": random_batch(4, 6),
        "precision": precision,
    }
    return Training(**{**defaults, **changes})


@ranks(1, 2, 3)
@OPTIMIZERS
def test_bf16_parameters_reduced_in_fp32(world: World, optimizer: Any) -> None:
    compare(world, training_with(Precision(BF16, FP32), optimizer=optimizer))


@ranks(2)
def test_bf16_transformer_reduced_in_fp32(world: World) -> None:
    def build() -> nn.Module:
        return seeded(Transformer)

    compare(world, training_with(Precision(BF16, FP32), build=build, batch=token_batch(3, 5)))


@ranks(4)
def test_bf16_parameters_hybrid(world: World) -> None:
    precision = Precision(BF16, FP32)
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    compare(world, training_with(precision, shard=each_block(precision=precision, mesh=mesh)))


@ranks(2)
@pytest.mark.parametrize("param_dtype", [None, BF16])
@pytest.mark.parametrize("reduce_dtype", [None, BF16])
def test_reduced_in_bf16(world: World, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> None:
    compare(world, training_with(Precision(param_dtype, reduce_dtype)))


@ranks(2)
@pytest.mark.parametrize("output_dtype", [FP32, torch.float64])
def test_output_dtype(world: World, output_dtype: torch.dtype) -> None:
    def loss(call: Call, batch: Batch) -> Tensor:
        output: Tensor = call(*batch)
        assert output.dtype == output_dtype
        return output.square().mean()

    precision = Precision(BF16, FP32, output_dtype)

    def shard(fsdp: ModuleType, model: Any) -> None:
        for block in model.blocks:
            fsdp.fully_shard(block, mp_policy=Precision(BF16, FP32).policy(fsdp))
        fsdp.fully_shard(model, mp_policy=precision.policy(fsdp))

    compare(world, training_with(precision, shard=shard, loss=loss))


class CastsItself(MLP):
    """An MLP that casts its input, and notes the dtype in which it arrived."""

    seen: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return super().forward(x.to(self.scale.dtype))


@ranks(2)
@pytest.mark.parametrize("cast", [True, False])
def test_cast_forward_inputs(world: World, cast: bool) -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        value = mean_square(model, batch)
        assert model.seen == (BF16 if cast else FP32)
        return value

    precision = Precision(BF16, FP32, cast_forward_inputs=cast)
    compare(world, training_with(precision, build=lambda: seeded(CastsItself), loss=loss))


@ranks(2)
def test_a_policy_for_each_module(world: World) -> None:
    precision = Precision(BF16, FP32)

    class OneBlockInFp32(nn.Module):
        """What a rank computes if the third block keeps fp32: casts around it, and low precision elsewhere."""

        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = seeded(MLP), None

    def shard(fsdp: ModuleType, model: Any) -> None:
        for index, block in enumerate(model.blocks):
            full = fsdp.MixedPrecisionPolicy(output_dtype=BF16, param_dtype=FP32)
            fsdp.fully_shard(block, mp_policy=full if index == 2 else precision.policy(fsdp))
        fsdp.fully_shard(model, mp_policy=precision.policy(fsdp))

    raise NotImplementedError


@ranks(2)
@pytest.mark.parametrize("optimizer", [sgd])
def test_fp16_parameters(world: World, optimizer: Any) -> None:
    compare(world, training_with(Precision(FP16, FP32), optimizer=optimizer))
