"""How a rank's tensors are divided among its files, and what stands where in them."""

from __future__ import annotations

import torch

from fullshard.checkpoint import dcp
from fullshard.checkpoint.layout import ONLY_HERE, Box
from fullshard.checkpoint.outline import Outline, outlines_of


def pair(name: str, tensor: torch.Tensor, *offsets: int) -> tuple[Box, torch.Tensor]:
    return Box((name,), (100, 4), offsets, ONLY_HERE), tensor


def test_without_a_limit_a_rank_writes_one_file() -> None:
    pairs = [pair("a", torch.zeros(30, 4), 5, 0), pair("b", torch.zeros(0), 0)]
    [(outline, tensors)] = outlines_of(3, pairs, [("x", 7)], {"x": ("x",)}, float("inf"))
    assert outline.name == "__3_0.distcp"
    assert [box.names for box in outline.boxes] == [("a",), ("b",)]
    assert (outline.values, outline.paths) == ([("x", 7)], {"x": ("x",)})
    assert [each.data_ptr() for each in tensors] == [each.data_ptr() for _, each in pairs]


def test_a_large_tensor_is_split_along_its_first_dim_and_values_come_first() -> None:
    large = torch.arange(120.0).view(30, 4)
    parts = [*outlines_of(0, [pair("a", large, 5, 0), pair("b", torch.zeros(2), 0)], [("x", 7)], {}, 160.0)]
    assert [outline.name for outline, _ in parts] == [f"__0_{number}.distcp" for number in range(4)]
    assert [len(outline.values) for outline, _ in parts] == [1, 0, 0, 0]
    assert [[box.offsets for box in outline.boxes] for outline, _ in parts] == [[(5, 0)], [(15, 0)], [(25, 0)], [(0,)]]
    assert torch.cat([each for _, tensors in parts[:3] for each in tensors]).equal(large)


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
