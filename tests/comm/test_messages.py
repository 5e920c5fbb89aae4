"""The map of messages: every element travels once, and never more of them at a time than staging has room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.buffer.plan import LayoutName, ParamShape, Plan, make_plan
from fullshard.comm.messages import Piece, Round, gather_rounds, reduce_rounds

LARGE = 64 * 1024
# Elements of many bytes make pieces of few elements large.
ITEMSIZES = st.sampled_from([1, 8, LARGE // 16, LARGE // 2])
CAPACITIES = st.sampled_from([LARGE, LARGE + 192, 4 * LARGE, 2**40])
Rounds = Callable[[tuple[Plan, ...], tuple[int, ...], int, int, int], tuple[Round, ...]]

unhurried = settings(deadline=None)
"""How long an example takes says nothing on a busy machine."""
each_direction = pytest.mark.parametrize("rounds_of", [gather_rounds, reduce_rounds])


@st.composite
def params(draw: st.DrawFn) -> ParamShape:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 12]), max_size=3)))
    dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    return ParamShape("p", shape, dim)


@st.composite
def sections(draw: st.DrawFn) -> tuple[tuple[Plan, ...], tuple[int, ...]]:
    world_size = draw(st.integers(1, 6))
    layout: LayoutName = draw(st.sampled_from(["even", "flat"]))
    groups = draw(st.lists(st.lists(params(), max_size=5), min_size=1, max_size=3))
    plans = tuple(make_plan(group, world_size, layout) for group in groups)
    return plans, tuple(draw(ITEMSIZES) for _ in plans)


def elements(piece: Piece) -> list[tuple[int, int, int]]:
    """Section, place in the full buffer and place in the shard of every element."""
    return [
        (piece.section, piece.full_start + row * piece.stride + i, piece.shard_start + row * piece.length + i)
        for row in range(piece.rows)
        for i in range(piece.length)
    ]


def owned(plans: tuple[Plan, ...], owner: int, with_kept_whole: bool) -> list[tuple[int, int, int]]:
    """The same of all that `owner` owns, from the plans."""
    found = []
    for section, plan in enumerate(plans):
        whole: set[int] = set()
        for param, offset in zip(plan.params, plan.full_offsets, strict=True):
            if plan.kept_whole(param):
                whole.update(range(offset, offset + param.numel))
        for extent in plan.extents(owner):
            for row in range(extent.rows):
                for i in range(extent.length):
                    place = extent.full_start + row * extent.stride + i
                    if with_kept_whole or place not in whole:
                        found.append((section, place, extent.shard_start + row * extent.length + i))
    return found


@unhurried
@given(sections(), CAPACITIES)
@each_direction
def test_every_element_travels_once(
    rounds_of: Rounds, chosen: tuple[tuple[Plan, ...], tuple[int, ...]], capacity: int
) -> None:
    plans, itemsizes = chosen
    for owner in range(plans[0].world_size):
        rounds = rounds_of(plans, itemsizes, owner, LARGE, capacity)
        pieces = [piece for one in rounds for piece in (*one.straight, *one.whole, *one.packed)]
        travelling = [element for piece in pieces for element in elements(piece)]
        assert Counter(travelling) == Counter(owned(plans, owner, rounds_of is reduce_rounds))


@unhurried
@given(sections(), CAPACITIES)
@each_direction
def test_no_round_needs_more_staging_than_there_is(
    rounds_of: Rounds, chosen: tuple[tuple[Plan, ...], tuple[int, ...]], capacity: int
) -> None:
    plans, itemsizes = chosen
    for one in rounds_of(plans, itemsizes, 0, LARGE, capacity):
        end = 0
        for piece in (*one.whole, *one.packed):
            assert piece.offset >= end, "pieces overlap in staging"
            assert piece.offset % 64 == 0
            end = piece.offset + piece.numel * itemsizes[piece.section]
        assert one.nbytes >= end
        assert one.nbytes <= capacity + 63
        if one.packed:
            assert one.packed[0].offset == one.packed_start


@unhurried
@given(sections())
@each_direction
def test_only_what_is_large_has_a_message_of_its_own(
    rounds_of: Rounds, chosen: tuple[tuple[Plan, ...], tuple[int, ...]]
) -> None:
    plans, itemsizes = chosen
    for one in rounds_of(plans, itemsizes, 0, LARGE, 2**40):
        small = [p for p in (*one.straight, *one.whole) if p.numel * itemsizes[p.section] < LARGE]
        assert len(small) <= (0 if one.packed else 1), "only one that has nothing to be packed with"


@unhurried
@given(sections())
def test_a_gather_stages_no_large_contiguous_piece(chosen: tuple[tuple[Plan, ...], tuple[int, ...]]) -> None:
    plans, itemsizes = chosen
    for one in gather_rounds(plans, itemsizes, 0, LARGE, 2**40):
        assert all(piece.rows > 1 for piece in one.whole)
        assert all(piece.numel * itemsizes[piece.section] < LARGE for piece in one.packed)
        assert all(piece.rows == 1 for piece in one.straight)


def test_a_transformer_block_takes_few_messages() -> None:
    """Four large weights, and biases and norms among them."""
    shapes = [(1024, 1024), (1024,), (3072, 1024), (3072,), (4096, 1024), (4096,), (1024, 4096), (1024,), (1024,)]
    plan = make_plan([ParamShape("p", shape) for shape in shapes], 2)
    for rounds in (gather_rounds((plan,), (4,), 0, LARGE, 2**30), reduce_rounds((plan,), (4,), 0, LARGE, 2**30)):
        (one,) = rounds
        assert len(one.straight) + len(one.whole) == 4
        assert len(one.packed) == 5
