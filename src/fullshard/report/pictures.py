"""Pictures of groups: where each parameter is in its group's buffer, which rank owns which part, and the padding.

One bar is drawn for each group, or for several groups that are alike. Its upper half has the parameters in the order of
their memory, by their names inside of the group's module; frozen ones are grey. Names that do not fit stand below the
bar. The lower half shows the owners: all ranks if they are few, or else one rank. Padding is black. Parts that are too
narrow for outlines have none, so that they do not look like padding.

The colours of all pictures are those of Okabe and Ito, which colour-blind people can tell apart. Each comes with a
hatch, so that pictures stay readable in grey. Matplotlib draws the lines of a hatch closer if its letter is repeated.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any, NamedTuple

from fullshard.report.facts import GroupFacts, ParameterFacts
from fullshard.report.tables import name_of_run, runs
from fullshard.text import bytes_text, percent, shape_text

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, WHITE = "#DDDDDD", "#FFFFFF"


class Look(NamedTuple):
    """The fill of a bar."""

    color: str
    hatch: str = ""

    @property
    def bar(self) -> dict[str, Any]:
        """The arguments of matplotlib's ``bar``, ``barh`` and patches."""
        return {"facecolor": self.color, "hatch": 4 * self.hatch, "edgecolor": "black", "linewidth": 0.6}

    @property
    def plain(self) -> dict[str, Any]:
        """The same without an outline and a hatch, which would blacken a narrow bar."""
        return {"facecolor": self.color, "linewidth": 0}


#: The states of a group in a step.
STATES = {"gathered": Look(SKY, "/"), "whole": Look(GREEN), "reduced": Look(ORANGE, ".")}
#: The parts of a rank's memory.
MEMORY = {
    "parameters": Look(SKY),
    "gradients": Look(ORANGE, "/"),
    "optimizer": Look(GREEN, "x"),
    "activations": Look(PURPLE, "."),
    "other": Look(GREY),
}
#: Ranks, in turn.
RANKS = (
    Look(SKY),
    Look(ORANGE, "/"),
    Look(GREEN, "."),
    Look(YELLOW, "x"),
    Look(PURPLE, "\\"),
    Look(BLUE, "-"),
    Look(VERMILION, "|"),
    Look(GREY, "+"),
)


_TRAINED, _FROZEN = Look("#DCEBF7"), Look("#D0D0D0", "\\")
_PADDING = Look(BLACK)
#: The most groups and ranks that a picture shows.
_MOST, _MOST_RANKS = 24, len(RANKS)
#: The most stripes that are drawn for a parameter that is cut along another dimension than the first.
_STRIPES = 32
#: The part of a bar's width that a letter needs. Below: the height of the upper and the lower half of a bar.
_LETTER = 0.0084
_NAMES, _OWNERS = 0.36, 0.2
#: The lines that fit into the upper half of a bar, and the letters in a line below a bar.
_LINES, _BELOW = 3, 105


def draw_groups(title: str, groups: Sequence[GroupFacts], path: str | PathLike[str]) -> None:
    """Draws groups into a file. Its name selects PNG, SVG or PDF.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = runs(groups)
    more = len(shown) - _MOST
    shown = shown[:_MOST]
    figure = Figure(figsize=(9, 1.1 + 0.95 * len(shown)), layout="constrained")
    axes: Any = figure.add_subplot()
    for at, alike in enumerate(shown):
        _draw_group(axes, alike[0], len(shown) - 1 - at)
        about = f"{name_of_run(alike)}\n{alike[0].module}, {_about(alike[0])}"
        axes.text(-0.008, len(shown) - 1 - at, about, ha="right", va="center", fontsize=9)
    axes.set_xlim(0, 1.002)
    axes.set_ylim(-0.6, len(shown) - 0.65)
    axes.axis("off")
    figure.suptitle(
        f"{title}: each bar is the full buffer of one group"
        + (f" ({more} more kinds are not shown)" if more > 0 else ""),
        fontsize=11,
    )
    drawn = [alike[0] for alike in shown]
    params = [param for group in drawn for param in group.parameters]
    legend = [Patch(**_TRAINED.bar, label="trained")] if any(param.is_trainable for param in params) else []
    legend += [] if all(param.is_trainable for param in params) else [Patch(**_FROZEN.bar, label="frozen")]
    if all(group.ranks <= _MOST_RANKS for group in drawn):
        ranks = max((group.ranks for group in drawn), default=0)
        legend += [Patch(**RANKS[rank].bar, label=f"part of rank {rank}") for rank in range(ranks)]
    else:
        legend.append(Patch(**RANKS[0].bar, label=f"part of rank {drawn[0].rank}"))
    legend += [Patch(**_PADDING.bar, label="padding")] if any(group.padding_share for group in drawn) else []
    columns = -(-len(legend) // -(-len(legend) // 6))  # at most 6, and rows of the same length
    figure.legend(handles=legend, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    with matplotlib.rc_context({"hatch.linewidth": 0.5}):
        figure.savefig(path, dpi=150)


def _about(group: GroupFacts) -> str:
    dtypes = "/".join(group.compute)
    return f"{bytes_text(group.whole)} {dtypes}\n{group.layout}, padding {percent(group.padding_share, 2)}"


def _draw_group(axes: Any, group: GroupFacts, y: int) -> None:
    """Draws the bar of a group, from 0 to 1."""
    axes.barh(y, 1, _NAMES + _OWNERS, **_PADDING.bar)
    above, below = y + _OWNERS / 2, y - _NAMES / 2
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    unnamed = []
    for param, start, width in _positions(group):
        look = _TRAINED if param.is_trainable else _FROZEN
        axes.barh(above, width, _NAMES, left=start, **look.bar)
        axes.barh(below, width, _OWNERS, left=start, **Look(WHITE).bar)
        name = param.name.removeprefix(f"{group.name}." if group.name else "")
        label = _label(name, shape_text(param.shape), round(width / _LETTER))
        if not label:
            unnamed.append(f"{name} ({shape_text(param.shape)}{'' if param.is_trainable else ', frozen'})")
        back = {} if param.is_trainable or not label else {"bbox": box}
        axes.text(start + width / 2, above, label, ha="center", va="center", fontsize=8, linespacing=1.1, **back)
        for rank, first, share in _parts(group, param):
            left, length = start + first * width, share * width
            look = RANKS[rank if group.ranks <= _MOST_RANKS else 0]
            axes.barh(below, length, _OWNERS, left=left, **(look.bar if length > _LETTER else look.plain))
            if group.ranks <= _MOST_RANKS and length > 2 * _LETTER:
                axes.text(left + length / 2, below, str(rank), ha="center", va="center", fontsize=8, bbox=box)
    if unnamed:
        text = textwrap.shorten(f"too narrow for a name: {', '.join(unnamed)}", _BELOW, placeholder=" ...")
        axes.text(0, y - _NAMES / 2 - _OWNERS / 2 - 0.03, text, ha="left", va="top", fontsize=7.5)


def _label(name: str, shape: str, room: int) -> str:
    """The name and the shape of a parameter in lines of at most ``room`` letters; empty if they do not fit."""
    broken = textwrap.wrap(name.replace(".", ". "), max(1, room), break_long_words=False)  # after dots
    lines = [line.replace(". ", ".") for line in broken]
    if len(lines) > _LINES or max(map(len, lines)) > room:
        return ""
    return "\n".join([*lines, shape] if len(lines) < _LINES and len(shape) <= room else lines)


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
            first, stop = param.cuts[rank : rank + 2] or (min(rank * step, size), min((rank + 1) * step, size))
        for piece in range(pieces) if stop > first else ():
            yield rank, (piece + first / size) / pieces, (stop - first) / size / pieces


def _itemsize(dtype: str) -> int:
    import torch

    return int(getattr(torch, dtype).itemsize)
