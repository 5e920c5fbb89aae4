"""torchao's own subclasses, for training in float8 and int8 and beside frozen weights of 4 bits, as with torch's FSDP2.

Losses are equal to the bit. Kernels that the CPU lacks are emulated, by torchao.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fully_shard.cases import Library, first_of
from tests.harness import World, ranks
from tests.harness.models import seeded

pytest.importorskip("torchao", reason="torchao is not installed")

WIDTH = 64


class LowRank(nn.Module):
    """A frozen weight of 4 bits, and a trained one of low rank beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

        super().__init__()
        self.run = linear_nf4
        self.weight = nn.Parameter(to_nf4(linear.weight.detach(), 64, 2), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run(x, self.weight) + self.up(self.down(x))
        return out


def build() -> Any:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)], nn.Linear(WIDTH, 8))


def convert(model: Any, kind: str) -> Any:
    """Let torchao prepare all layers but the last."""
    if kind.startswith("float8"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "3")
    if kind == "int8":
        from torchao import quantize_
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig

        quantize_(model, Int8MixedPrecisionTrainingConfig(), filter_fn=lambda _, name: name in ("0", "1", "2"))
    if kind == "nf4":
        for at in range(3):
            model[at] = LowRank(model[at])
    return model


def losses(world: World, library: Any, kind: str, **options: Any) -> list[float]:
    model = seeded(lambda: convert(build(), kind))
    for layer in model:
        library.fully_shard(layer, **options)
    library.fully_shard(model, **options)
    steps = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(4):
        seed = torch.Generator().manual_seed(10 * step + world.rank)
        loss = (model(torch.randn(32, WIDTH, generator=seed)) - 1).square().mean()
        loss.backward()
        steps.step()
        steps.zero_grad()
        if kind == "float8 with scales ahead":
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
        found.append(loss.item())
    return found


@cache
def losses_with_torch(rank: int, size: int, kind: str, **options: Any) -> list[float]:
    """Once for all transports, which torch does not know."""
    return losses(World(rank, size), Library("torch"), kind, **options)


@ranks(1, 2)
@first_of("transport", "p2p", "shm", "collective")
@first_of("kind", "float8 with scales ahead", "int8", "float8")
def test_losses_are_those_of_torchs_fsdp2(world: World, kind: str, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    ours = losses(world, Library("fullshard"), kind, reshard_after_forward=True)
    assert ours == losses_with_torch(world.rank, world.size, kind, reshard_after_forward=True)
    assert ours[-1] < ours[0] / 1.5


@ranks(2)
@first_of("transport", "p2p", "shm", "collective")
def test_frozen_weights_of_4_bits(world: World, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    assert losses(world, Library("fullshard"), "nf4") == losses_with_torch(world.rank, world.size, "nf4")


@ranks(2)
def test_the_wrapper_refuses_weights_that_say_how_they_are_gathered(world: World) -> None:
    model = convert(seeded(build), "float8")
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is a WeightWithDynamicFloat8CastTensor.*fully_shard"):
        Library("fullshard").FullyShardedDataParallel(model)
