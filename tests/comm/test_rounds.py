"""The map of messages: every element travels once, and never more of them at a time than staging has room for."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.buffer.plan import BufferPlan, ParamShape, Piece, make_plan
from fullshard.comm.rounds import Direction, Round, Staged, plan_rounds

LARGE = 64 * 1024
# Elements of many bytes make pieces of few elements large.
ITEMSIZES = st.sampled_from([1, 8, LARGE // 16, LARGE // 2])
CAPACITIES = st.sampled_from([LARGE, LARGE + 192, 4 * LARGE, 2**40])

unhurried = settings(deadline=None)
"""How long an example takes says nothing on a busy machine."""
each_direction = pytest.mark.parametrize("direction", ["gather", "reduce"])


@st.composite
def params(draw: st.DrawFn) -> ParamShape:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 12]), max_size=3)))
    dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    return ParamShape("p", shape, dim)


@st.composite
def sections(draw: st.DrawFn) -> tuple[tuple[BufferPlan, ...], tuple[int, ...]]:
    world_size = draw(st.integers(1, 6))
    layout = draw(st.sampled_from(["even", "flat"]))
    groups = draw(st.lists(st.lists(params(), max_size=5), min_size=1, max_size=3))
    plans = tuple(make_plan(group, world_size, layout) for group in groups)
    return plans, tuple(draw(ITEMSIZES) for _ in plans)


def elements(plans: tuple[BufferPlan, ...], piece: Piece) -> list[tuple[int, int, int]]:
    """Section, place in the full buffer and place in the shard of every element."""
    plan = plans[piece.section]
    full, shard = piece.of_full(torch.arange(plan.full_numel)), piece.of_shard(torch.arange(plan.shard_numel))
    return [(piece.section, *place) for place in zip(full.flatten().tolist(), shard.flatten().tolist(), strict=True)]


def owned(plans: tuple[BufferPlan, ...], owner: int, with_kept: bool) -> list[tuple[int, int, int]]:
    found = []
    for section, plan in enumerate(plans):
        whole: set[int] = set()
        for param, offset in zip(plan.params, plan.full_offsets, strict=True):
            if plan.layout == "even" and param.dim is None:
                whole.update(range(offset, offset + param.numel))
        of_section = [element for piece in plan.pieces(owner, section) for element in elements(plans, piece)]
        found += [element for element in of_section if with_kept or element[1] not in whole]
    return found


def staged(one: Round) -> list[Staged]:
    return [*one.whole, *one.packed]


@unhurried
@given(sections(), CAPACITIES)
@each_direction
def test_every_element_travels_once(
    direction: Direction, chosen: tuple[tuple[BufferPlan, ...], tuple[int, ...]], capacity: int
) -> None:
    plans, itemsizes = chosen
    for owner in range(plans[0].world_size):
        rounds = plan_rounds(plans, itemsizes, owner, LARGE, capacity, direction)
        pieces = [piece for one in rounds for piece in (*one.unstaged, *(piece for piece, _ in staged(one)))]
        travelling = [element for piece in pieces for element in elements(plans, piece)]
        assert Counter(travelling) == Counter(owned(plans, owner, direction == "reduce"))


@unhurried
@given(sections(), CAPACITIES)
@each_direction
def test_no_round_needs_more_staging_than_there_is(
    direction: Direction, chosen: tuple[tuple[BufferPlan, ...], tuple[int, ...]], capacity: int
) -> None:
    plans, itemsizes = chosen
    for one in plan_rounds(plans, itemsizes, 0, LARGE, capacity, direction):
        end = 0
        for piece, offset in staged(one):
            assert offset >= end, "pieces overlap in staging"
            assert offset % 64 == 0
            end = offset + piece.numel * itemsizes[piece.section]
        assert one.nbytes >= end
        assert one.nbytes <= capacity + 63
        if one.packed:
            assert one.packed[0].offset == one.packed_start


@pytest.mark.slow
@unhurried
@given(sections())
@each_direction
def test_only_what_is_large_has_a_message_of_its_own(
    direction: Direction, chosen: tuple[tuple[BufferPlan, ...], tuple[int, ...]]
) -> None:
    plans, itemsizes = chosen
    for one in plan_rounds(plans, itemsizes, 0, LARGE, 2**40, direction):
        alone = [*one.unstaged, *(piece for piece, _ in one.whole)]
        small = [piece for piece in alone if piece.numel * itemsizes[piece.section] < LARGE]
        assert len(small) <= (0 if one.packed else 1), "only one that has nothing to be packed with"


@unhurried
@given(sections())
def test_a_gather_stages_no_large_contiguous_piece(chosen: tuple[tuple[BufferPlan, ...], tuple[int, ...]]) -> None:
    plans, itemsizes = chosen
    for one in plan_rounds(plans, itemsizes, 0, LARGE, 2**40, "gather"):
        assert not any(piece.is_run for piece, _ in one.whole)
        assert all(piece.numel * itemsizes[piece.section] < LARGE for piece, _ in one.packed)
        assert all(piece.is_run for piece in one.unstaged)


@each_direction
def test_a_transformer_block_takes_few_messages(direction: Direction) -> None:
    """Four large weights, and biases and norms among them."""
    shapes = [(1024, 1024), (1024,), (3072, 1024), (3072,), (4096, 1024), (4096,), (1024, 4096), (1024,), (1024,)]
    plan = make_plan([ParamShape("p", shape) for shape in shapes], 2)
    (one,) = plan_rounds((plan,), (4,), 0, LARGE, 2**30, direction)
    assert len(one.unstaged) + len(one.whole) == 4
    assert len(one.packed) == 5
