"""Pictures of groups: where each parameter is in its group's buffer, which rank owns which part, and the padding.

One bar is drawn for each group, or for several groups that are alike. Its upper half names the parameters in the order
of their memory. Its lower half shows their owners: all ranks if they are few, by hatches and numbers, or else one rank.
Padding is black, so the picture is readable without colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

from fullshard.report.facts import GroupFacts, ParameterFacts
from fullshard.report.tables import name_of_run, runs
from fullshard.report.text import bytes_text, percent, shape_text

#: Shades of parameters and hatches of ranks, used in turn; and the most groups and ranks that a picture shows.
_SHADES = ("#ffffff", "#e4e4e4", "#cccccc")
_HATCHES = ("", "////", "....", "xxxx")
_MOST, _MOST_RANKS = 24, 8
#: The most stripes that are drawn for a parameter that is cut along another dimension than the first.
_STRIPES = 32
#: The part of a bar's width that a letter needs. Below: the height of the upper and the lower half of a bar.
_LETTER = 0.0072
_NAMES, _OWNERS = 0.36, 0.2


def draw_groups(title: str, groups: Sequence[GroupFacts], path: str | PathLike[str]) -> None:
    """Draws groups into a file. Its name selects PNG, SVG or PDF.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = runs(groups)
    more = len(shown) - _MOST
    shown = shown[:_MOST]
    figure = Figure(figsize=(11, 1.6 + 0.95 * len(shown)), layout="constrained")
    axes: Any = figure.add_subplot()
    for at, alike in enumerate(shown):
        _draw_group(axes, alike[0], len(shown) - 1 - at)
        about = f"{name_of_run(alike)}\n{_about(alike[0])}"
        axes.text(-0.008, len(shown) - 1 - at, about, ha="right", va="center", fontsize=9)
    axes.set_xlim(0, 1.002)
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.axis("off")
    axes.set_title(
        f"{title}: each bar is the full buffer of one group"
        + (f" ({more} more kinds are not shown)" if more > 0 else ""),
        fontsize=11,
    )
    every = all(group.ranks <= _MOST_RANKS for group in groups)
    legend = [
        Patch(facecolor=_SHADES[0], edgecolor="black", label="above: a parameter"),
        Patch(
            facecolor="white",
            edgecolor="black",
            hatch=_HATCHES[1],
            label="below: its parts, by rank" if every else f"below: the part of rank {groups[0].rank}",
        ),
        Patch(facecolor="black", edgecolor="black", label="padding between parameters"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _about(group: GroupFacts) -> str:
    dtypes = "/".join(group.compute)
    return f"{bytes_text(group.whole)} {dtypes}, {group.layout}\npadding {percent(group.padding_share, 2)} of shards"


def _draw_group(axes: Any, group: GroupFacts, y: int) -> None:
    """Draws the bar of a group, from 0 to 1."""
    edge = {"edgecolor": "black", "linewidth": 0.7}
    axes.barh(y, 1, _NAMES + _OWNERS, color="black", **edge)
    above, below = y + _OWNERS / 2, y - _NAMES / 2
    for number, (param, start, width) in enumerate(_positions(group)):
        shade = _SHADES[number % len(_SHADES)]
        axes.barh(above, width, _NAMES, left=start, color=shade, **edge)
        axes.barh(below, width, _OWNERS, left=start, color="white", **edge)
        name = ".".join(param.name.split(".")[-2:])
        shape = shape_text(param.shape)
        room = width / _LETTER
        lines = [line for line in (name, shape) if len(line) <= room] if len(name) <= room else []
        axes.text(start + width / 2, above, "\n".join(lines), ha="center", va="center", fontsize=8)
        for rank, first, share in _parts(group, param):
            left, length = start + first * width, share * width
            hatch = _HATCHES[rank % len(_HATCHES) if group.ranks <= _MOST_RANKS else 1]
            axes.barh(below, length, _OWNERS, left=left, color="white", hatch=hatch, **edge)
            if group.ranks <= _MOST_RANKS and length > 4 * _LETTER:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                axes.text(left + length / 2, below, str(rank), ha="center", va="center", fontsize=8, bbox=box)


def _positions(group: GroupFacts) -> Iterator[tuple[ParameterFacts, float, float]]:
    """The parameters in the buffer, each with its start and its length as shares of the buffer."""
    total = max(1, group.starts[-1])
    itemsizes = [_itemsize(dtype) for dtype in group.compute_by_section]
    for param in sorted(group.parameters, key=lambda each: (each.section, each.offset)):
        if param.section >= 0:
            size = itemsizes[param.section]
            yield param, (group.starts[param.section] + param.offset * size) / total, param.numel * size / total


def _parts(group: GroupFacts, param: ParameterFacts) -> Iterator[tuple[int, float, float]]:
    """The parts of a parameter that a picture shows: the rank, and the part's start and length as shares."""
    for rank in range(group.ranks) if group.ranks <= _MOST_RANKS else (group.rank,):
        if group.layout == "flat":
            first, stop = (min(max(at * param.chunk - param.offset, 0), param.numel) for at in (rank, rank + 1))
            pieces, size = 1, max(1, param.numel)
        elif param.dim is None:
            first, stop, size, pieces = 0, int(rank == group.rank), 1, 1
        else:
            size, pieces = param.shape[param.dim], min(_STRIPES, math.prod(param.shape[: param.dim]))
            step = -(-size // group.ranks)
            first, stop = min(rank * step, size), min((rank + 1) * step, size)
        for piece in range(pieces) if stop > first else ():
            yield rank, (piece + first / size) / pieces, (stop - first) / size / pieces


def _itemsize(dtype: str) -> int:
    import torch

    return int(getattr(torch, dtype).itemsize)
