"""What the buffers of a group are told of it: sections by dtype, and the dtypes in which they are computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fullshard
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.group.context import GroupContext, GroupOptions
from tests.fully_shard.cases import groups_of
from tests.harness import fake_world

FP32, BF16, FP8, INT8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number, dtype in enumerate((FP32, BF16, FP32, FP8, INT8)):
            param = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=dtype in (FP32, BF16))
            self.register_parameter(f"p{number}", param)


def context_of(model: nn.Module, **options: Any) -> GroupContext:
    (group,) = groups_of(fullshard.fully_shard(model, **options))
    return group


def test_parameters_of_a_dtype_are_a_section() -> None:
    with fake_world(2):
        group = context_of(Mixed())
        assert [(each.dtype, each.members) for each in group.sections] == [
            (FP32, (0, 2)), (BF16, (1,)), (FP8, (3,)), (INT8, (4,)),
        ]  # fmt: skip
        assert all(len(each.plan.params) == len(each.members) for each in group.sections)
        assert group.compute_dtypes == [FP32, BF16, FP8, INT8]


def test_integers_and_packed_formats_stay_under_mixed_precision() -> None:
    with fake_world(2):
        group = context_of(Mixed(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        assert group.compute_dtypes == [BF16, BF16, FP8, INT8]


def test_a_parameter_may_have_a_precision_of_its_own() -> None:
    with fake_world(2):
        group = context_of(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
        policies = [group.policy_of(param) for param in group.params]
        assert [(policy.param_dtype, policy.reduce_dtype) for policy in policies] == [(BF16, FP32)] * 2
        group.params[1].overridden_dtype = torch.float16
        group.lay_out()
        assert [each.members for each in group.sections] == [(0,), (1,)]
        assert group.compute_dtypes == [BF16, torch.float16]


def test_what_is_offloaded_is_what_the_policy_says() -> None:
    cases = (
        (OffloadPolicy(), False, False),
        (CPUOffloadPolicy(pin_memory=False), True, False),
        (CPUOffloadPolicy(), True, True),
    )
    for policy, offloads, pins in cases:
        with fake_world(2):
            group = context_of(nn.Linear(4, 4), offload_policy=policy)
            found = bool(group.offloaded.parameters), group.offloaded.pins, group.offloaded.moves_state(0)
            assert found == (offloads, pins, False), policy


def test_buffers_of_a_kind_share_a_pool_and_others_do_not() -> None:
    with fake_world(2):
        group = context_of(nn.Linear(4, 4))
        pools = [group.parameter_pool, group.gradient_pool, group.comm.pool("staging", group.transport.private)]
        assert len(set(map(id, pools))) == 3
        assert group.parameter_pool is pools[0]


def test_a_group_is_named_after_its_module() -> None:
    with fake_world(2):
        group = context_of(nn.Linear(4, 4))
        assert (group.title, repr(group)) == ("the root", "Group(<root>, 2 parameters)")
        group.name = "layers.0"
        assert (group.title, repr(group)) == ("'layers.0'", "Group(layers.0, 2 parameters)")


def test_options_without_a_word_of_the_user_shard_fully() -> None:
    options = GroupOptions(MixedPrecisionPolicy(), OffloadPolicy())
    assert options.strategy.reduces
    assert options.strategy.all_reduces
    assert (options.divide_factor, options.all_reduce, options.max_gradient_buffers) == (None, None, None)
