"""From plans and dtypes to bytes: sections lie end to end, each on a boundary, and their views share no byte."""

from __future__ import annotations

import pytest
import torch

from fullshard.buffer.plan import ParamShape, make_plan
from fullshard.buffer.sections import (
    ALIGNMENT,
    Section,
    align,
    full_bytes,
    full_starts,
    full_views,
    shard_bytes,
    shard_views,
    starts,
)

SHAPES = [ParamShape("weight", (5, 3), 0), ParamShape("bias", (7,), 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


def sections(ranks: int) -> list[Section]:
    return [Section(dtype, (2 * at, 2 * at + 1), make_plan(SHAPES, ranks)) for at, dtype in enumerate(DTYPES)]


@pytest.mark.parametrize(("nbytes", "aligned"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_bytes_are_rounded_up_to_the_next_boundary(nbytes: int, aligned: int) -> None:
    assert align(nbytes) == aligned


def test_tensors_begin_where_the_one_before_ends_on_the_next_boundary() -> None:
    assert starts([17, 32, 0, 5], [torch.float32, torch.bfloat16, torch.int64, torch.uint8]) == [0, 128, 192, 192, 256]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("kind", ["full", "shard"])
def test_views_have_their_dtypes_and_share_no_byte(ranks: int, kind: str) -> None:
    found = sections(ranks)
    nbytes, make = (full_bytes, full_views) if kind == "full" else (shard_bytes, shard_views)
    memory = torch.zeros(nbytes(found, DTYPES), dtype=torch.uint8)
    views = make(memory, found, DTYPES)
    assert [view.dtype for view in views] == DTYPES
    assert [view.numel() for view in views] == [getattr(each.plan, f"{kind}_numel") for each in found]
    assert all((view.data_ptr() - memory.data_ptr()) % ALIGNMENT == 0 for view in views)
    for view in views:
        view.view(torch.uint8).add_(1)
    assert memory.sum() == sum(view.nbytes for view in views)
    assert memory.max() == 1


def test_a_full_buffer_ends_where_its_last_section_ends() -> None:
    found = sections(2)
    ends = full_starts(found, DTYPES)
    assert len(ends) == len(found) + 1
    assert ends[-1] == full_bytes(found, DTYPES)


def test_over_fewer_ranks_the_same_parameters_are_cut_anew() -> None:
    section = sections(4)[0]
    fewer = section.over(2)
    assert (fewer.dtype, fewer.members, fewer.plan.params) == (section.dtype, section.members, section.plan.params)
    assert fewer.plan == make_plan(tuple(SHAPES), 2)
