"""From gradients to `param.grad`: what is divided by, what hooks see, and in which dtype it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import MixedPrecisionPolicy
from fullshard.comm.all_reduce import AllReduceRoute
from fullshard.device import Started
from fullshard.group import reduction
from tests.fully_shard.cases import groups_of
from tests.harness import World, ranks


def gradient_of(world: World, model: nn.Linear) -> torch.Tensor:
    ((world.rank + 1) * model(torch.ones(1, 4))).sum().backward()
    grad = model.weight.grad
    assert grad is not None
    return grad.full_tensor()  # type: ignore[attr-defined, no-any-return]


@ranks(2)
def test_sums_are_divided_by_the_factor_or_the_number_of_ranks(world: World) -> None:
    for factor, expected in ((None, 1.5), (1.0, 3.0), (6.0, 0.5)):
        model = fullshard.fully_shard(nn.Linear(4, 2))
        (group,) = groups_of(model)
        group.options.divide_factor = factor
        assert gradient_of(world, model).eq(expected).all(), factor


@ranks(2)
def test_a_gradient_has_the_dtype_of_its_parameter_however_it_travelled(world: World) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    found = gradient_of(world, fullshard.fully_shard(nn.Linear(4, 2), mp_policy=policy))
    assert found.dtype == torch.float32
    assert found.eq(1.5).all()


@ranks(2)
def test_a_second_reduction_adds_to_what_is_there(world: World) -> None:
    model = fullshard.fully_shard(nn.Linear(4, 2))
    gradient_of(world, model)
    first = model.weight.grad
    assert gradient_of(world, model).eq(3).all()
    assert model.weight.grad is first


@ranks(2)
def test_of_the_replicas_the_hook_sees_the_sum_once(world: World) -> None:
    model = fullshard.fully_shard(nn.Linear(4, 2), mesh=world.mesh(2, 1, names=("replicate", "shard")))
    seen = list[float]()
    model.set_all_reduce_hook(lambda output: seen.append(output[0].item()))
    assert gradient_of(world, model).eq(1.5).all()
    assert seen == [1.5]


@ranks(2)
def test_replicas_sum_one_group_while_the_backward_computes_the_next(world: World) -> None:
    mesh = world.mesh(2, 1, names=("replicate", "shard"))
    model, happened = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), list[str]()
    for module in (*model, model):
        fullshard.fully_shard(module, mesh=mesh).set_all_reduce_hook(lambda _: None)  # or wholes would be summed
    start_sum = AllReduceRoute.start

    def start(*args: Any) -> Started:
        happened.append("start")
        pending = start_sum(*args)
        return Started(lambda: (happened.append("end"), pending.finish())[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllReduceRoute, "start", start)
        model(torch.full((1, 4), world.rank + 1.0)).sum().backward()
    assert happened == ["start", "start", "end", "start", "end", "end"]


@ranks(2)
def test_reductions_that_an_error_dropped_change_no_gradient(world: World) -> None:
    model = fullshard.fully_shard(nn.Linear(4, 2))
    (group,) = groups_of(model)
    gradient_of(world, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction.PendingReduction, "accumulate", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gradient_of(world, model)
    model.reset_iter_state()
    assert group.comm.reductions.drops > 0
    assert model.weight.grad.full_tensor().eq(1.5).all()
