"""Plans, for random shapes and up to 1,024 ranks: nothing is owned twice, forgotten, or cut other than torch cuts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fullshard.buffer.plan import BufferPlan, ParamShape, Piece, make_plan
from fullshard.ragged import balance

SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 31])
WORLD_SIZES = st.sampled_from([1, 2, 3, 4, 7, 8, 64, 100, 1024])
LAYOUTS = st.sampled_from(["even", "flat"])

unhurried = settings(deadline=None)
"""How long an example takes says nothing on a busy machine."""


@st.composite
def param_shapes(draw: st.DrawFn) -> ParamShape:
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    return ParamShape("p", shape, dim)


@st.composite
def plans(draw: st.DrawFn, layouts: st.SearchStrategy[str] = LAYOUTS) -> BufferPlan:
    params = draw(st.lists(param_shapes(), max_size=6))
    return make_plan(params, draw(WORLD_SIZES), draw(layouts), draw(st.sampled_from([1, 4, 16, 100])))


def even_plans() -> st.SearchStrategy[BufferPlan]:
    return plans(st.just("even"))


def flat_plans() -> st.SearchStrategy[BufferPlan]:
    return plans(st.just("flat"))


def places(plan: BufferPlan, piece: Piece) -> list[tuple[int, int]]:
    full, shard = piece.of_full(torch.arange(plan.full_numel)), piece.of_shard(torch.arange(plan.shard_numel))
    return list(zip(full.flatten().tolist(), shard.flatten().tolist(), strict=True))


def times_owned(plan: BufferPlan) -> torch.Tensor:
    counts = torch.zeros(plan.full_numel, dtype=torch.int32)
    for rank in range(plan.world_size):
        for piece in plan.pieces(rank):
            piece.of_full(counts).add_(1)
    return counts


def param_places(plan: BufferPlan, param: ParamShape, offset: int) -> range:
    return range(offset, offset + param.numel)


@unhurried
@given(plans())
def test_every_element_of_a_parameter_has_one_owner(plan: BufferPlan) -> None:
    counts = times_owned(plan)
    for param, offset in zip(plan.params, plan.full_offsets, strict=True):
        owners = plan.world_size if plan.layout == "even" and param.dim is None else 1
        assert counts[offset : offset + param.numel].eq(owners).all()


@unhurried
@given(even_plans())
def test_nobody_owns_padding_in_even(plan: BufferPlan) -> None:
    counts = times_owned(plan)
    for param, offset in zip(plan.params, plan.full_offsets, strict=True):
        counts[offset : offset + param.numel] = 0
    assert not counts.any()


@unhurried
@given(flat_plans())
def test_flat_is_one_piece_for_each_rank_up_to_the_last_parameter(plan: BufferPlan) -> None:
    end = plan.full_offsets[-1] + plan.params[-1].numel if plan.params else 0
    assert times_owned(plan).tolist() == [1] * end + [0] * (plan.full_numel - end)
    for rank in range(plan.world_size):
        for piece in plan.pieces(rank):
            assert (piece.full_start, piece.shard_start, piece.is_run) == (rank * plan.shard_numel, 0, True)
        assert len(plan.pieces(rank)) <= 1


@unhurried
@given(plans())
def test_no_two_elements_share_a_place_in_a_shard(plan: BufferPlan) -> None:
    for rank in range(plan.world_size):
        taken = [place for piece in plan.pieces(rank) for _, place in places(plan, piece)]
        assert len(set(taken)) == len(taken)
        assert all(0 <= place < plan.shard_numel for place in taken)


@unhurried
@given(plans())
def test_parameters_are_aligned_and_nothing_more_is_added_between_them(plan: BufferPlan) -> None:
    chunk_alignment = math.gcd(plan.alignment, 4) if plan.world_size > 1 else plan.alignment
    assert all(offset % plan.alignment == 0 for offset in plan.full_offsets)
    assert all(offset % chunk_alignment == 0 for offset in plan.shard_offsets)
    assert plan.layout == "flat" or plan.shard_numel % plan.alignment == 0
    for param, (offset, following) in zip(plan.params, pairwise(plan.full_offsets), strict=False):
        assert following - offset - param.numel < plan.alignment
    for param, (offset, following) in zip(plan.params, pairwise(plan.shard_offsets), strict=False):
        assert following - offset - math.prod(param.cut(plan.world_size).chunk_shape(0)) < chunk_alignment


@unhurried
@given(even_plans())
def test_a_single_rank_has_the_full_buffer(plan: BufferPlan) -> None:
    alone = make_plan(plan.params, 1, plan.layout, plan.alignment)
    assert (alone.shard_offsets, alone.shard_numel) == (alone.full_offsets, alone.full_numel)


@unhurried
@given(flat_plans())
def test_flat_pads_the_tail_by_less_than_an_element_for_each_rank(plan: BufferPlan) -> None:
    assert plan.full_numel == plan.world_size * plan.shard_numel
    end = plan.full_offsets[-1] + plan.params[-1].numel if plan.params else 0
    assert 0 <= plan.full_numel - end < plan.world_size


@unhurried
@given(plans())
def test_gaps_are_what_no_parameter_fills(plan: BufferPlan) -> None:
    filled = torch.zeros(plan.full_numel)
    for param, offset in zip(plan.params, plan.full_offsets, strict=True):
        filled[offset : offset + param.numel] += 1
    for start, stop in plan.gaps:
        filled[start:stop] += 1
    assert bool((filled == 1).all())


def some_shards(plan: BufferPlan, full: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """What the first rank, the last and one in the middle hold of a full buffer; -1 where they hold nothing of it."""
    for rank in {0, plan.world_size // 2, plan.world_size - 1}:
        shard = torch.full((plan.shard_numel,), -1)
        for piece in plan.pieces(rank):
            piece.of_shard(shard).copy_(piece.of_full(full))
        yield rank, shard


@unhurried
@given(plans())
@example(make_plan([ParamShape("a", (3, 16))], 4))  # the last rank has a shard, and nothing of the full buffer
def test_rank_major_is_where_the_shards_end_to_end_are_the_full_buffer(plan: BufferPlan) -> None:
    full, shards = torch.arange(plan.full_numel), torch.full((plan.world_size * plan.shard_numel,), -1)
    for piece in plan.pieces_of_all(plan.shard_numel):
        piece.of_shard(shards).copy_(piece.of_full(full))
    filled = shards >= 0
    same = len(full) == len(shards) and torch.equal(shards[filled], full[filled])
    assert plan.is_rank_major == same
    assert same or plan.layout == "even"


@unhurried
@given(plans())
def test_there_are_at_most_two_pieces_for_each_parameter(plan: BufferPlan) -> None:
    assert len(plan.pieces_of_all(plan.shard_numel)) <= 2 * len(plan.params)


def test_parameters_whose_chunks_differ_are_not_whole() -> None:
    plan = make_plan([ParamShape("a", (4, 16)), ParamShape("b", (3, 16)), ParamShape("c", (2, 4), 1)], 2)
    assert [cut.is_whole for cut in plan.cuts] == [True, False, False]


def test_equal_parameters_at_equal_distances_are_one_piece() -> None:
    norms = [ParamShape("p", (1024,))]
    plan = make_plan([*norms * 32, ParamShape("w", (2048,)), *norms * 3], 64)
    assert [piece.numel for piece in plan.pieces_of_all(plan.shard_numel)] == [32 * 1024, 3 * 1024, 2048]


def test_parts_of_one_form_that_go_back_in_the_shards_are_pieces_of_their_own() -> None:
    """Rank 1 has the third element of `a`, and rank 0 the only one of `b`, after it in the full buffer only."""
    plan = make_plan([ParamShape("a", (3,)), ParamShape("b", (1,))], 2)
    assert [min(piece.shard_stride) for piece in plan.pieces_of_all(plan.shard_numel)] == [1, 1, 1]


@settings(deadline=None, max_examples=30)
@given(plans(), st.integers(1, 20))
def test_a_piece_in_parts_is_the_piece(plan: BufferPlan, numel: int) -> None:
    for piece in plan.pieces(0):
        head, rest = piece.split(numel)
        assert head is not None or rest is not None
        assert head is None or head.numel <= max(numel, piece.row)
        parts = [place for part in (head, rest) if part is not None for place in places(plan, part)]
        assert parts == places(plan, piece)
        rows = [piece.part(row, row + 1) for row in range(piece.shape[0])]
        assert [place for row in rows for place in places(plan, row)] == places(plan, piece)


@unhurried
@given(plans(), st.sampled_from([0, 5, 48]))
def test_the_pieces_of_all_ranks_are_those_of_each_rank(plan: BufferPlan, apart: int) -> None:
    """Of what all own, the shards are filled alike, whatever lies between them; and each element once."""
    full, pitch = torch.arange(plan.full_numel), plan.shard_numel + apart
    shards, times = torch.full((plan.world_size * pitch + 1,), -1), torch.zeros(plan.world_size * pitch + 1)
    for piece in plan.pieces_of_all(pitch):
        piece.of_shard(shards).copy_(piece.of_full(full))
        piece.of_shard(times).add_(1)
    assert int(times.sum()) == sum(plan.owned_numel(rank) for rank in range(plan.world_size))
    assert times.le(1).all()
    assert shards[-1] == -1
    for rank, shard in some_shards(plan, full):
        assert torch.equal(shards[rank * pitch : (rank + 1) * pitch][: plan.shard_numel], shard)


@unhurried
@given(plans())
def test_a_part_lies_in_its_place_in_the_shard(plan: BufferPlan) -> None:
    full = torch.arange(plan.full_numel)
    for rank, shard in some_shards(plan, full):
        for index, (param, offset) in enumerate(zip(plan.params, plan.full_offsets, strict=True)):
            begin, shape = plan.locate_chunk(index, rank)
            held = shard[begin : begin + torch.Size(shape).numel()]
            whole = full[offset : offset + param.numel]
            if plan.layout == "flat":
                start, stop = plan.cuts[index].chunk(rank)
                assert torch.equal(held, whole[start:stop])
                assert shape == (param.shape if plan.world_size == 1 else (stop - start,))
            else:
                assert set(held.tolist()) <= set(whole.tolist())


@unhurried
@given(param_shapes(), WORLD_SIZES)
def test_chunks_are_those_of_torch(param: ParamShape, world_size: int) -> None:
    if param.dim is None:
        assert [param.cut(world_size).chunk_shape(rank) for rank in (0, world_size - 1)] == [param.shape] * 2
        return
    whole = torch.arange(param.numel).view(param.shape)
    chunks = whole.chunk(world_size, param.dim)
    for rank in range(world_size):
        start, stop = param.cut(world_size).chunk(rank)
        found = whole.narrow(param.dim, start, stop - start)
        assert param.cut(world_size).chunk_shape(rank) == tuple(found.shape)
        assert torch.equal(found, chunks[rank] if rank < len(chunks) else whole.narrow(param.dim, 0, 0))


@unhurried
@given(even_plans())
def test_a_shard_of_even_holds_the_chunks_of_torch(plan: BufferPlan) -> None:
    full = torch.arange(plan.full_numel)
    for rank, shard in some_shards(plan, full):
        for index, (param, offset) in enumerate(zip(plan.params, plan.full_offsets, strict=True)):
            whole = full[offset : offset + param.numel].view(param.shape)
            expected = whole
            if param.dim is not None:
                chunks = whole.chunk(plan.world_size, param.dim)
                expected = chunks[rank] if rank < len(chunks) else whole.narrow(param.dim, 0, 0)
            start = plan.shard_offsets[index]
            assert torch.equal(shard[start : start + expected.numel()], expected.flatten())
            assert plan.locate_chunk(index, rank)[1] == tuple(expected.shape)


@unhurried
@given(flat_plans())
def test_fragments_of_flat_are_what_the_pieces_say(plan: BufferPlan) -> None:
    for rank in range(plan.world_size):
        owned = {place for piece in plan.pieces(rank) for place, _ in places(plan, piece)}
        for index, (param, offset) in enumerate(zip(plan.params, plan.full_offsets, strict=True)):
            start, stop = plan.cuts[index].chunk(rank)
            assert 0 <= start <= stop <= param.numel
            assert set(range(offset + start, offset + stop)) == owned.intersection(param_places(plan, param, offset))


@unhurried
@given(even_plans(), st.data())
def test_a_selection_keeps_cuts_and_places_in_the_full_buffer(plan: BufferPlan, data: st.DataObject) -> None:
    chosen = [index for index in range(len(plan.params)) if data.draw(st.booleans(), label=f"keep {index}")]
    selected = plan.select(chosen)
    assert selected.full_numel == plan.full_numel
    assert selected.params == tuple(plan.params[index] for index in chosen)
    assert selected.shard_numel <= plan.shard_numel
    inside: set[int] = set()
    for index in chosen:
        inside.update(param_places(plan, plan.params[index], plan.full_offsets[index]))
    for rank in {0, plan.world_size - 1}:
        before = [place for piece in plan.pieces(rank) for place, _ in places(plan, piece) if place in inside]
        after = [place for piece in selected.pieces(rank) for place, _ in places(selected, piece)]
        assert before == after


@unhurried
@given(flat_plans())
def test_a_selection_of_flat_is_all_of_it(plan: BufferPlan) -> None:
    assert plan.select([]) is plan


@unhurried
@given(plans())
def test_equal_arguments_give_the_same_plan(plan: BufferPlan) -> None:
    assert make_plan(list(plan.params), plan.world_size, plan.layout, plan.alignment) is plan
    assert plan.select(range(len(plan.params))) is plan


def test_a_cut_along_another_dim_is_strided() -> None:
    plan = make_plan([ParamShape("w", (3, 8), 1)], 4)
    assert plan.pieces(2) == (Piece((3, 2), full_start=4, full_stride=(8, 1), shard_start=0, shard_stride=(2, 1)),)


def test_a_parameter_that_one_rank_has_all_of_is_contiguous() -> None:
    assert make_plan([ParamShape("w", (3, 1), 1)], 4).pieces(0) == (Piece((3,), 0, (1,), 0, (1,)),)
    assert make_plan([ParamShape("w", (3, 1), 1)], 4).pieces(1) == ()


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"'w' has a negative size in its shape \(3, -1\)"):
        ParamShape("w", (3, -1))
    with pytest.raises(ValueError, match=r"'w' of shape \(3, 4\) cannot be sharded along dim 2: .* from 0 to 1"):
        ParamShape("w", (3, 4), 2)
    with pytest.raises(ValueError, match="at least one rank, got world_size=0"):
        make_plan([], 0)
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        make_plan([], 1, alignment=0)
    with pytest.raises(ValueError, match="layout must be 'even' or 'flat', got 'odd'"):
        make_plan([], 1, "odd")
    with pytest.raises(ValueError, match="rank 2 is not one of the plan's 2"):
        make_plan([], 2).pieces(2)


@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
def test_smaller_parameters_are_zero_copy_where_all_of_them_move_in_one_launch(world_size: int) -> None:
    """If they have what a channel gets at least, and no more of them come than there are channels."""

    def zero_copy(*sizes: int, together: bool = True) -> tuple[int, ...]:
        return make_plan([ParamShape("p", (size,)) for size in sizes], world_size, together=together).zero_copy

    some = (2**14, 64, 2**14 - 64, 2**15, 2**14 + 1)
    assert zero_copy(*some) == ((0, 3) if world_size > 1 else ())
    assert zero_copy(*some, together=False) == ()
    assert len(zero_copy(*[2**14] * 16)) == (16 if world_size > 1 else 0)
    assert zero_copy(*[2**14] * 17) == ()
    assert zero_copy(2**14, 2**23) == zero_copy(2**14, 2**23, together=False) == ((1,) if world_size > 1 else ())
    plan = make_plan([ParamShape("p", (size,)) for size in some], world_size, together=True)
    assert plan.select([3, 1]).zero_copy == ((0,) if world_size > 1 else ())


@st.composite
def blocks_and_ranks(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    some = st.tuples(st.sampled_from([1, 2, 3, 7, 64, 1000]), st.sampled_from([0, 1, 5, 64, 10_000]))
    return draw(st.lists(some, max_size=6)), draw(st.sampled_from([1, 2, 3, 4, 7, 64]))


@unhurried
@given(blocks_and_ranks(), st.integers(0, 63))
def test_blocks_are_balanced(given: tuple[list[tuple[int, int]], int], first: int) -> None:
    """Each block has one rank, in order; and no rank has more than another and its own largest block."""
    blocks, size = given
    loads = [0] * size
    for (count, nbytes), cuts in zip(blocks, balance(blocks, size, first % size), strict=True):
        assert (cuts[0], cuts[-1], len(cuts)) == (0, count, size + 1)
        assert list(cuts) == sorted(cuts)
        loads = [load + nbytes * (stop - start) for load, (start, stop) in zip(loads, pairwise(cuts), strict=True)]
    assert max(loads) <= min(loads) + max((nbytes for _, nbytes in blocks), default=0)


def test_equal_whole_matrices_begin_with_another_rank_in_each_group() -> None:
    assert balance([(1, 8)] * 2, 2) == [(0, 1, 1), (0, 0, 1)]
    assert balance([(1, 8)] * 3, 2, first=1) == [(0, 0, 1), (0, 1, 1), (0, 0, 1)]


def test_the_largest_blocks_are_placed_first() -> None:
    assert balance([(4, 1), (1, 4)], 2) == [(0, 0, 4), (0, 1, 1)]


@st.composite
def ragged_plans(draw: st.DrawFn) -> BufferPlan:
    size, params = draw(st.sampled_from([2, 3, 4, 7])), draw(st.lists(param_shapes(), min_size=1, max_size=6))
    for index, param in enumerate(params):
        if param.dim is not None and draw(st.booleans()):
            inside = st.lists(st.integers(0, param.shape[param.dim]), min_size=size - 1, max_size=size - 1)
            cuts = (0, *sorted(draw(inside)), param.shape[param.dim])
            params[index] = ParamShape(param.name, param.shape, param.dim, cuts)
    return make_plan(params, size, "even", draw(st.sampled_from([1, 4, 16])))


@unhurried
@given(ragged_plans())
def test_a_ragged_shard_holds_the_rows_between_the_cuts(plan: BufferPlan) -> None:
    full = torch.arange(plan.full_numel)
    for rank in range(plan.world_size):
        shard = torch.full((plan.shard_numel,), -1)
        for piece in plan.pieces(rank):
            assert (piece.of_shard(shard) == -1).all()
            piece.of_shard(shard).copy_(piece.of_full(full))
        for index, (param, offset) in enumerate(zip(plan.params, plan.full_offsets, strict=True)):
            whole, (begin, shape) = (
                full[offset : offset + param.numel].view(param.shape),
                plan.locate_chunk(index, rank),
            )
            if param.dim is not None:
                start, stop = plan.cuts[index].chunk(rank)
                whole = whole.narrow(param.dim, start, stop - start)
            assert tuple(whole.shape) == shape
            assert torch.equal(shard[begin : begin + whole.numel()], whole.flatten())
    counts = times_owned(plan)
    for param, offset in zip(plan.params, plan.full_offsets, strict=True):
        assert counts[offset : offset + param.numel].eq(plan.world_size if param.dim is None else 1).all()


@unhurried
@given(ragged_plans(), st.sampled_from([0, 5, 48]))
def test_the_messages_of_a_ragged_plan_are_the_shards_of_all_ranks(plan: BufferPlan, apart: int) -> None:
    full, pitch, size = torch.arange(plan.full_numel), plan.shard_numel + apart, plan.world_size
    shards = torch.full((size * pitch,), -1)
    for piece in plan.pieces_of_all(pitch):
        piece.of_shard(shards).copy_(piece.of_full(full))
    messages = torch.full((plan.messages.full_numel,), -1)
    for rank in range(size):
        shard = torch.full((plan.shard_numel,), -1)
        for piece in plan.pieces(rank):
            piece.of_shard(shard).copy_(piece.of_full(full))
        for piece in plan.messages.packed.pieces(rank):
            piece.of_full(messages).copy_(piece.of_shard(shard))
        assert torch.equal(shards[rank * pitch :][: plan.shard_numel], shard)
    if not plan.zero_copy:
        assert torch.equal(messages.view(size, -1), shards.view(size, -1)[:, : plan.shard_numel])
    some = plan.messages.select(range(0, len(plan.params), 2))
    for rank in range(size):
        mine = {place for piece in plan.messages.pieces(rank) for place, _ in places(plan.messages, piece)}
        assert {place for piece in some.pieces(rank) for place, _ in places(some, piece)} <= mine


def test_a_ragged_plan_needs_the_memory_of_its_largest_rank() -> None:
    whole = [ParamShape("a", (8, 8), 0, (0, 8, 8)), ParamShape("b", (8, 8), 0, (0, 0, 8)), ParamShape("c", (4,))]
    plan = make_plan(whole, 2)
    assert (plan.shard_numel, plan.full_offsets) == (80, (0, 64, 128))
    assert [plan.locate_chunk(index, 1) for index in range(3)] == [(4, (0, 8)), (4, (8, 8)), (0, (2,))]
    with pytest.raises(ValueError, match=r"'a' of shape \(8, 8\) cannot be cut along dim 0 at \(0, 9, 8\)"):
        ParamShape("a", (8, 8), 0, (0, 9, 8))


@given(even_plans(), st.data())
@unhurried
def test_a_shard_cut_again_has_the_chunks_of_its_chunks(plan: BufferPlan, data: st.DataObject) -> None:
    rank, parts = data.draw(st.integers(0, plan.world_size - 1)), data.draw(st.sampled_from([1, 2, 3, 8]))
    inside = plan.inside(rank, parts)
    assert (inside.world_size, inside.full_numel) == (parts, plan.shard_numel)
    shard = torch.arange(plan.shard_numel)
    for part in range(parts):
        own = torch.full((inside.shard_numel,), -1)
        for piece in inside.pieces(part):
            piece.of_shard(own).copy_(piece.of_full(shard))
        for position, param in enumerate(plan.params):
            (start, shape), (begin, size) = inside.locate_chunk(position, part), plan.locate_chunk(position, rank)
            chunk = shard[begin : begin + math.prod(size)].view(size)
            if param.dim is not None and math.prod(size):
                chunks = chunk.chunk(parts, param.dim)
                chunk = chunks[part] if part < len(chunks) else chunk.narrow(param.dim, 0, 0)
            assert torch.equal(own[start : start + math.prod(shape)].view(shape), chunk.reshape(shape))
