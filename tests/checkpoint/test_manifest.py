"""What is checked of a description before it is believed: the pieces of a tensor make all of it, each element once."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

from fullshard.checkpoint.manifest import _are_tiles

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]
PINWHEEL: Boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]


def cut(draw: random.Random, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Boxes:
    """Boxes that make one, which is cut at random along random dims."""
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not dims or draw.random() < 0.3:
        return [(offsets, sizes)]
    dim = draw.choice(dims)
    at = draw.randrange(1, sizes[dim])
    low = (*sizes[:dim], at, *sizes[dim + 1 :])
    high = (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])
    return cut(draw, offsets, low) + cut(draw, (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]), high)


def cover(boxes: Boxes, shape: tuple[int, ...]) -> bool:
    """The same, element by element."""
    found = Counter(
        index
        for offsets, sizes in boxes
        for index in product(*(range(at, at + size) for at, size in zip(offsets, sizes, strict=True)))
    )
    return found == Counter(product(*map(range, shape)))


def test_boxes_that_make_a_tensor_are_told_from_those_with_holes_or_overlaps() -> None:
    draw, right = random.Random(0), 0
    for _ in range(2000):
        shape = tuple(draw.randrange(1, 5) for _ in range(draw.randrange(4)))
        boxes = cut(draw, (0,) * len(shape), shape)
        assert _are_tiles(boxes, shape)
        changed = [*boxes, draw.choice(boxes)] if draw.random() < 0.3 else list(boxes)
        at = draw.randrange(len(changed))
        offsets = tuple(draw.randrange(size) for size in shape)
        changed[at] = offsets, tuple(draw.randrange(size - low + 1) for size, low in zip(shape, offsets, strict=True))
        assert _are_tiles(changed, shape) == cover(changed, shape), (changed, shape)
        right += cover(changed, shape)
    assert 100 < right < 1900


def test_odd_boxes() -> None:
    cases: list[tuple[Boxes, tuple[int, ...], bool]] = [
        (PINWHEEL, (3, 3), True),
        ([*PINWHEEL[:4], PINWHEEL[0]], (3, 3), False),
        ([((0,), (2,)), ((0,), (2,))], (4,), False),
        ([((), ())], (), True),
        ([((), ()), ((), ())], (), False),
        ([], (), False),
        ([], (0, 5), True),
        ([((0, 0), (0, 3)), ((0, 3), (0, 2))], (0, 5), True),
        ([((0, 0), (2, 5)), ((2, 0), (0, 5)), ((2, 0), (1, 5))], (3, 5), True),
    ]
    for boxes, shape, are_tiles in cases:
        assert _are_tiles(boxes, shape) is are_tiles, (boxes, shape)
