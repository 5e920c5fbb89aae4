"""Parity of parameters that another module reads than the one that was sharded: it never runs the module itself."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from tests.harness import World, ranks
from tests.harness.compare import Batch, Call, compare, mean_square
from tests.harness.models import random_batch, seeded
from tests.harness.wrapper import ORIGINAL, STRATEGIES, no_sync_before, training, wrap

WIDTH = 6


class Attends(nn.Module):
    """Attention as torch ships it reads the weight of its projection and never runs the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, -1, WIDTH)
        out: Tensor = self.last(x + self.attention(x, x, x, need_weights=False)[0])
        return out.view(-1, WIDTH)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.run = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.read.weight, self.read.bias).tanh()
        return self.run(x) + F.linear(x, self.run.weight)


class Blocks(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(kind(), kind())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@pytest.mark.slow
@ranks(2, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@ORIGINAL
def test_projections_of_attention_under_the_wrapper(world: World, strategy: str, original: bool) -> None:
    options: dict[str, Any] = {"strategy": strategy, "original": original}

    def shard(fsdp: ModuleType, model: Any) -> Any:
        for block in model.blocks:
            block.attention.out_proj = wrap(fsdp, block.attention.out_proj, **options)
            block.last = wrap(fsdp, block.last, **options)
        return wrap(fsdp, model, **options)

    case = training(shard, build=lambda: seeded(lambda: Blocks(Attends)), batch=random_batch(4, WIDTH), steps=3)
    compare(world, case, with_torch=False)  # which reads shards there, or leaves their gradients unreduced


@ranks(2)
@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_projections_of_attention_sharded_apart(world: World, around: bool, reshard: bool) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        for block in model.blocks:
            fsdp.fully_shard(block.attention.out_proj, reshard_after_forward=reshard)
            if around:
                fsdp.fully_shard(block.attention, reshard_after_forward=reshard)
        fsdp.fully_shard(model)

    case = training(shard, build=lambda: seeded(lambda: Blocks(Attends)), batch=random_batch(4, WIDTH), steps=3)
    compare(world, case, with_torch=False)


def with_decay(call: Call, batch: Batch) -> Tensor:
    model: Any = call
    return mean_square(call, batch) + 0.01 * sum(param.square().sum() for param in model.parameters())


@ranks(2, 3)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_every_rank_has_may_be_read_by_any_module(
    world: World, micro_batches: int, frozen: bool
) -> None:
    def build() -> nn.Module:
        model = seeded(lambda: Blocks(Reads))
        model.blocks[0].read.weight.requires_grad_(not frozen)  # type: ignore[union-attr, operator]
        return model

    def shard(fsdp: ModuleType, model: Any) -> Any:
        for block in model.blocks:
            block.read = wrap(fsdp, block.read, strategy="NO_SHARD", original=True)
            block.run = wrap(fsdp, block.run, strategy="NO_SHARD", original=True)
        return wrap(fsdp, model, strategy="NO_SHARD", original=True)

    changes: dict[str, Any] = {"micro_batches": micro_batches, "around_micro": no_sync_before(micro_batches - 1)}
    case = training(shard, build=build, batch=random_batch(4, WIDTH), steps=3, **changes)
    compare(world, case, with_torch=False)


@ranks(2)
def test_a_loss_may_read_parameters_that_every_rank_has(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> Any:
        return wrap(fsdp, model, strategy="NO_SHARD", original=True)

    build = lambda: seeded(lambda: Blocks(Attends))  # noqa: E731
    case = training(shard, build=build, batch=random_batch(4, WIDTH), loss=with_decay, steps=3)
    compare(world, case)


@ranks(2)
def test_parameters_that_only_modules_outside_of_any_wrapper_read_are_an_error(world: World) -> None:
    model: Any = seeded(lambda: Blocks(Attends))
    attention = model.blocks[0].attention
    attention.out_proj = wrap(fullshard, attention.out_proj, strategy="NO_SHARD")
    with pytest.raises(RuntimeError, match=r"parameter '(weight|bias)'.*wrap the module that reads"):
        model(random_batch(4, WIDTH)(world.rank)[0]).sum().backward()


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_reading_a_flat_parameter_of_another_unit_is_refused_by_name(world: World, strategy: str) -> None:
    model: Any = Blocks(Reads)
    for block in model.blocks:
        block.read = wrap(fullshard, block.read, strategy=strategy, original=False)
    model = wrap(fullshard, model, strategy=strategy, original=False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter 'blocks\.0\.read\.weight'.*\(linear\)"):
            model(torch.ones(2, WIDTH))
    read = model.blocks[0].read.module
    x = torch.ones(3, dtype=torch.float64)
    assert x.to(read.weight.dtype).dtype is x.type_as(read.weight).dtype is x.to(read.weight).dtype is torch.float32
    assert read.weight.shape == torch.empty_like(read.weight).shape == read.weight.new_zeros(WIDTH, WIDTH).shape
    assert "nan" in repr(read.weight)
    for use in (torch.sum, torch.clone, lambda weight: torch.cat([x, weight]), lambda weight: weight.to(x)):
        with pytest.raises(RuntimeError, match=r"read\.weight"):
            use(read.weight)
    other = model.blocks[1].read
    with fullshard.summon_full_params(other):
        assert other.module.weight.isfinite().all()
