"""The messages of all ranks: what is packed into them lies where shards have it, and comes out whole."""

from __future__ import annotations

import pytest
import torch

from fullshard.buffer.messages import Messages, Rows, zero_copy_in
from fullshard.buffer.plan import BufferPlan, ParamShape, make_plan
from tests.comm.cases import ODD, ZERO_COPY, Shapes, cut

EVEN: Shapes = (((8, 3), 0), ((4,), 0), ((12, 5), 0))
DTYPES = (torch.float32, torch.bfloat16)


def plan_of(shapes: Shapes, size: int) -> BufferPlan:
    return make_plan([ParamShape(f"p{i}", *shape) for i, shape in enumerate(shapes)], size)


def whole(plan: BufferPlan, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(plan.full_numel).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 64])
@pytest.mark.parametrize("shapes", [EVEN, ODD, ZERO_COPY], ids=["even", "odd", "zero-copy"])
def test_messages_have_the_chunks_of_shards_without_the_zero_copy_ones(size: int, shapes: Shapes) -> None:
    plans = [plan_of(shapes, size), plan_of(EVEN, size)]
    messages = Messages(plans, DTYPES, [0, 1], as_bytes=True)
    fulls = [whole(plan, dtype) for plan, dtype in zip(plans, DTYPES, strict=True)]
    memory = torch.empty(size * messages.numel, dtype=messages.dtype)
    there, here = messages.pieces(memory, fulls, with_kept=True)
    for target, source in zip(there, here, strict=True):
        target.copy_(source)
    for rank, message in enumerate(memory.view(size, -1)):
        for plan, full, section in zip(plans, fulls, messages.sections(message), strict=True):
            values = [
                full[at : at + param.numel].view(param.shape)
                for at, param in zip(plan.full_offsets, plan.params, strict=True)
            ]
            for index, (start, chunk) in enumerate(cut(plan, values, rank)):
                if index not in plan.zero_copy:
                    assert torch.equal(section[start : start + chunk.numel()], chunk)


@pytest.mark.parametrize("size", [2, 4])
def test_one_operation_fills_messages_and_one_cuts_them(size: int) -> None:
    """They agree on where chunks and gaps lie: what the first packs, the second puts together again."""
    plan = plan_of(EVEN, size)
    messages = Messages([plan], [torch.float32], [0], as_bytes=False)
    memory, full = torch.full((size * messages.numel,), torch.nan), whole(plan, torch.float32)
    params = {i: torch.randn(param.shape) for i, param in enumerate(plan.params)}
    assert Rows(plan.messages, range(len(params)), memory).fill(params)
    assert not memory.isnan().any(), "gaps travel too, and are added up"
    unpack = messages.cut(memory, full)
    assert unpack is not None
    unpack()
    for i, (start, param) in enumerate(zip(plan.full_offsets, plan.params, strict=True)):
        assert torch.equal(full[start : start + param.numel].view(param.shape), params[i])


def test_zero_copy_parameters_travel_in_the_order_of_sections_and_of_plans() -> None:
    plans = [plan_of(ZERO_COPY, 2), plan_of(EVEN, 2), plan_of(ZERO_COPY, 2).messages]
    found = zero_copy_in(plans)
    assert [(each.section, each.param) for each in found] == [
        (section, param) for section in (0, 2) for param in plans[section].zero_copy
    ]
    assert [each.number for each in found] == list(range(len(found)))
    assert all((each.whole is None) == (each.section == 2) for each in found)
    messages = Messages(plans, [torch.float32] * 3, [1, 2], as_bytes=False)
    assert {each.section for each in messages.zero_copy} == {2}
    shards = [torch.arange(plan.shard_numel) for plan in plans]
    _, _, *chunks, first = messages.parts(shards)
    assert all(
        torch.equal(chunk, shards[2][each.chunk]) for chunk, each in zip(chunks, messages.zero_copy, strict=True)
    )
    assert first is shards[1]


def test_shards_are_a_message_where_they_lie_as_in_one() -> None:
    plans = [plan_of(EVEN, 2), plan_of(EVEN, 2)]
    messages = Messages(plans, DTYPES, [0, 1], as_bytes=True)
    memory = torch.zeros(messages.numel + 64, dtype=torch.uint8)
    shards = messages.sections(memory)
    found = messages.in_shards(shards)
    assert found is not None
    assert (found.data_ptr(), found.numel()) == (memory.data_ptr(), messages.numel)
    assert messages.in_shards([shards[0], shards[1].clone()]) is None
    assert messages.in_shards([shards[0], messages.sections(memory[64:])[1]]) is None
