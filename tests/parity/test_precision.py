"""Parity of mixed precision: policies of `fully_shard`, autocast, and scaled gradients in fp16.

The reference computes each rank's gradients with a low-precision copy of the whole model and takes their mean in the
dtype of the reduction, so that the comparison stays as sharp as in fp32: nothing but the order of sums may differ.
With two ranks even a sum in bf16 is rounded only once.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from tests.harness import World, ranks
from tests.harness.compare import (
    LIBRARIES,
    Batch,
    Call,
    Precision,
    Training,
    adamw,
    compare,
    each_block,
    first_difference,
    mean_square,
    sgd,
    train_sharded,
    train_unsharded,
    whole,
)
from tests.harness.models import MLP, random_batch, seeded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def training_with(precision: Precision, **changes: Any) -> Training:
    defaults: dict[str, Any] = {
        "build": lambda: seeded(MLP),
        "shard": each_block(precision=precision),
        "batch": random_batch(4, 6),
        "precision": precision,
    }
    return Training(**{**defaults, **changes})


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bf16_parameters_reduced_in_fp32(world: World, optimizer: Any, micro_batches: int) -> None:
    precision, changes = Precision(BF16, FP32), {"optimizer": optimizer}
    if micro_batches > 1:
        changes |= {
            "micro_batches": micro_batches,
            "set_up_micro": lambda model, micro: model.set_requires_gradient_sync(micro == 2),
        }
    mesh = world.mesh(2, 2, names=("replicate", "shard")) if world.size == 4 else None
    compare(world, training_with(precision, shard=each_block(precision=precision, mesh=mesh), **changes))


@ranks(2)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("param_dtype", "reduce_dtype"), [(None, BF16), (BF16, None), (BF16, BF16)])
def test_reduced_in_bf16(
    world: World, library: str, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> None:
    # What travels is bf16. The mean is either kept in fp32 or rounded to bf16, depending on who adds up; nothing else
    # may differ.
    training = training_with(Precision(param_dtype, reduce_dtype))
    steps = train_sharded(training, LIBRARIES[library], world.rank, world.size)
    differences = [
        first_difference(steps, train_unsharded(replace(training, mean_dtype=mean_dtype), world.rank, world.size))
        for mean_dtype in (BF16, FP32)
    ]
    assert None in differences, differences


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


class ThirdBlockInFp32(MLP):
    """What a rank computes when the third block has a policy of fp32 with bf16 outputs, and all else is bf16."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            dtype = FP32 if index == 2 else BF16
            weight, bias = (parameter.to(dtype) for parameter in block.parameters())
            x = torch.tanh(F.linear(x.to(dtype), weight, bias)).to(BF16)
        return x * self.scale.to(BF16)


@ranks(2)
def test_a_policy_for_each_module(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        low = Precision(BF16, FP32).policy(fsdp)
        full = Precision(FP32, FP32, output_dtype=BF16).policy(fsdp)
        for index, block in enumerate(model.blocks):
            fsdp.fully_shard(block, mp_policy=full if index == 2 else low)
        fsdp.fully_shard(model, mp_policy=low)

    training = Training(
        build=lambda: seeded(MLP),
        build_reference=lambda: seeded(ThirdBlockInFp32),
        shard=shard,
        batch=random_batch(4, 6),
    )
    compare(world, training)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


@ranks(2)
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("changes", [{}, {"scaler": scaler}], ids=["", "scaled"])
def test_fp16_parameters_reduced_in_fp32(world: World, offloaded: bool, changes: dict[str, Any]) -> None:
    precision = Precision(FP16, FP32)

    def shard(fsdp: ModuleType, model: Any) -> None:
        offload = fsdp.CPUOffloadPolicy(pin_memory=False) if offloaded else fsdp.OffloadPolicy()
        each_block(precision=precision, offload_policy=offload)(fsdp, model)

    compare(world, training_with(precision, shard=shard, **changes))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shards", [1, 2])
def test_large_gradients_in_fp16(world: World, shards: int) -> None:
    """Two gradients of 40,000 have a sum that fp16 cannot hold, and a mean that it can: over shards and replicas."""
    model = nn.Linear(1, 8, bias=False)
    mesh = world.mesh(4 // shards, shards, names=("replicate", "shard")) if world.size == 4 else None
    fullshard.fully_shard(model, mesh=mesh, mp_policy=fullshard.MixedPrecisionPolicy(reduce_dtype=FP16))
    (model(torch.ones(1, 1)) * 40_000).sum().backward()
    assert torch.equal(whole(model.weight.grad), torch.full((8, 1), 40_000.0))


class Spectral(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        real = torch.float64 if dtype == torch.complex128 else torch.float32
        self.before, self.after = nn.Linear(6, 8, dtype=real), nn.Linear(5, 3, dtype=real)
        self.filter = nn.Parameter(torch.randn(5, dtype=dtype))
        self.mixing = nn.Parameter(torch.randn(7, 5, dtype=dtype).mT)

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(self.before(x.to(self.before.weight.dtype))) * self.filter
        return self.after((frequencies @ self.mixing).abs().narrow(-1, 0, 5).to(self.after.weight.dtype))


@ranks(2, 3)
@pytest.mark.parametrize(("dtype", "reduce_dtype"), [(torch.complex64, None), (torch.complex128, FP32)], ids=str)
@pytest.mark.parametrize("replicates", [False, True])
def test_gradients_of_complex_parameters_are_summed(
    world: World, dtype: torch.dtype, reduce_dtype: torch.dtype | None, replicates: bool
) -> None:
    """A reduction in a real dtype is one of the real parameters beside them."""
    reference, model = seeded(lambda: Spectral(dtype)), seeded(lambda: Spectral(dtype))
    mesh = world.mesh(world.size, 1, names=("replicate", "shard")) if replicates else None
    fullshard.fully_shard(model, mesh=mesh, mp_policy=fullshard.MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    optimizers = [sgd(list(each.parameters())) for each in (model, reference)]
    for step in range(3):
        batches = [random_batch(4, 6)(step * world.size + rank)[0] for rank in range(world.size)]
        found = model(batches[world.rank]).square().mean()
        expected = [reference(batch).square().mean() for batch in batches]
        assert torch.allclose(found, expected[world.rank], rtol=1e-4)
        found.backward()
        torch.stack(expected).mean().backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
