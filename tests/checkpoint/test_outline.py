"""How a rank's tensors are divided among its files, and what stands where in them."""

from __future__ import annotations

import torch

from fullshard.checkpoint import dcp
from fullshard.checkpoint.layout import ONLY_HERE, Box
from fullshard.checkpoint.outline import BLANK, Outline, outlines_of


def pair(name: str, tensor: torch.Tensor, *offsets: int) -> tuple[Box, torch.Tensor]:
    return Box((name,), (100, 4), offsets, ONLY_HERE), tensor


def test_without_a_limit_a_rank_writes_one_file() -> None:
    pairs = [pair("a", torch.zeros(30, 4), 5, 0), pair("b", torch.zeros(0), 0)]
    [(outline, tensors)] = outlines_of(3, pairs, [("x", 7)], {"x": ("x",)}, float("inf"), False)
    assert outline.name == "__3_0.distcp"
    assert [box.names for box in outline.boxes] == [("a",), ("b",)]
    assert (outline.values, outline.paths) == ([("x", 7)], {"x": ("x",)})
    assert [each.data_ptr() for each in tensors] == [each.data_ptr() for _, each in pairs]


def test_large_tensors_are_split_so_that_no_file_is_larger_and_values_come_first() -> None:
    large, wide = torch.arange(4000.0).view(1000, 4), torch.arange(6000.0).view(2, 3000)
    pairs = [pair("a", large, 5, 0), pair("wide", wide, 0, 0), pair("b", torch.zeros(2), 0)]
    values = [("x", 7000), ("y", 2000)]
    parts = [*outlines_of(0, pairs, values, {}, 8192.0, True)]
    assert [outline.name for outline, _ in parts] == [f"__0_{number}-{BLANK}.distcp" for number in range(len(parts))]
    assert [value for outline, _ in parts for value in outline.values] == values
    for outline, _ in parts:
        laid_out, found, _ = outline.laid_out()
        pieces = [*(each[3] for each in laid_out), *found.values()]
        assert max(each.start + each.length for each in pieces) <= 8192
    for name, whole, first in (("a", large, 5), ("wide", wide, 0)):
        again = torch.zeros_like(whole)
        for outline, tensors in parts:
            for box, each in zip(outline.boxes, tensors, strict=True):
                if box.names == (name,):
                    at, column = box.offsets[0] - first, box.offsets[1]
                    again[at : at + each.shape[0], column : column + each.shape[1]] = each
        assert again.equal(whole)


def test_the_layout_of_a_file_has_each_value_and_tensor_where_it_is_written() -> None:
    box, tensor = pair("a", torch.zeros(3, 4), 5, 0)
    outline = Outline("__0_0.distcp", [box], [(tensor.dtype, tensor.shape)], [("x", 7), ("y", 9)], {})
    tensors, values, between = outline.laid_out()
    assert [(each.start, each.length) for each in values.values()] == [(0, 7), (7, 9)]
    [(names, dtype, shape, piece)] = tensors
    assert (names, dtype, shape, piece.file) == (("a",), torch.float32, (100, 4), "__0_0.distcp")
    before, after, length = dcp.around(torch.float32, (3, 4))
    assert between == [bytes(-16 % dcp.ALIGNMENT) + before, after]
    assert (piece.start, piece.length, piece.data) == (dcp.ALIGNMENT, length, dcp.ALIGNMENT + len(before))
    assert (len(before) + tensor.nbytes + len(after)) % dcp.ALIGNMENT == 0
