"""What a wrapped module does only as the root: casts, full precision in evaluation; and reductions by a user's hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fullshard.schedule.unit import unit_of
from fullshard.wrapper.unit import WrappedUnit, keep_precision
from tests.harness import World, ranks

BF16 = torch.bfloat16


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(4))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes = [x.dtype, self.linear.weight.dtype, self.table.dtype]
        return self.linear(x.to(self.linear.weight.dtype))


def wrapped(**precision: Any) -> tuple[Any, Seen, WrappedUnit]:
    inner = Seen()
    model = FullyShardedDataParallel(inner, mixed_precision=MixedPrecision(**precision), use_orig_params=True)
    unit = unit_of(model)
    assert isinstance(unit, WrappedUnit)
    return model, inner, unit


@ranks(2)
def test_the_root_casts_inputs_and_buffers_as_it_is_told(world: World) -> None:
    model, inner, unit = wrapped(param_dtype=BF16, buffer_dtype=torch.float16)
    model(torch.ones(1, 4))
    assert inner.dtypes == [BF16, BF16, torch.float16]
    assert unit.buffer_dtypes == {(inner, "table"): torch.float32}
    assert repr(unit) == "the wrapped Seen"
    model, inner, _ = wrapped(param_dtype=BF16, cast_root_forward_inputs=False)
    model(torch.ones(1, 4))
    assert inner.dtypes == [torch.float32, BF16, torch.float32]


@ranks(2)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], ids=str)
def test_a_hook_of_the_user_reduces_in_place_of_us(world: World, strategy: ShardingStrategy) -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=strategy, use_orig_params=True)
    unit: Any = unit_of(model)

    def hook(full: torch.Tensor, *reduced: torch.Tensor) -> None:
        for output in reduced or (full,):
            output.fill_(7)

    unit.reduce_by(hook)
    model(torch.ones(1, 4)).sum().backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert grads
    assert all(grad.eq(7).all() for grad in grads)


@ranks(2)
def test_a_forward_that_failed_is_forgotten_by_the_next_one(world: World) -> None:
    model, _, unit = wrapped()
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5))
    assert not unit.failed or unit.schedule is not None
    assert model(torch.ones(1, 4)).shape == (1, 4)
    assert not unit.failed


@ranks(2)
def test_a_step_that_was_reset_after_an_error_is_not_reset_again(world: World) -> None:
    """Ranks that have had no error, and run the next forward together with this one, reset nothing."""
    model, _, unit = wrapped()
    model(torch.ones(1, 4)).sum().backward()
    assert unit.schedule is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit.schedule, "end_forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 4))
    assert unit.failed
    unit.schedule.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(unit.schedule), "reset", lambda _: pytest.fail("it was reset again"))
        model(torch.ones(1, 4))


def test_a_module_keeps_its_precision_in_a_model_of_low_precision() -> None:
    inner = nn.LayerNorm(4)
    keep_precision(inner)
    seen = list[torch.dtype]()
    inner.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    assert inner(torch.ones(2, 4, dtype=BF16)).dtype == BF16
    assert inner(torch.ones(2, 4)).dtype == torch.float32
    assert seen == [torch.float32] * 2
