"""The HTML page of a trace: one file that needs no network. Its pictures are readable without colours.

Owns what is drawn and how. The pictures are SVG inside of the page, made by matplotlib. Without matplotlib the page has
only tables.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from fullshard.report.findings import Waited, findings, lateness, waited
from fullshard.report.rank_trace import LANES, RankTrace, Span, shares, tracks
from fullshard.report.text import counted, percent

#: The most ranks that a picture or a table shows. Ranks that stand out come first.
_RANKS = 16
#: The most groups in the table.
_GROUPS = 10
#: The part of a picture's width that a letter of a span's name needs.
_ROOM_FOR_NAME = 0.012

#: How each lane is drawn.
_STYLES: dict[str, dict[str, Any]] = {
    "pass": {"color": "0.92"},
    "computation": {"color": "0.75"},
    "gather": {"color": "white", "hatch": "/////"},
    "reduce": {"color": "white", "hatch": "....."},
    "all-reduce": {"color": "white", "hatch": "xxxxx"},
    "host": {"color": "0.55"},
    "wait": {"color": "black"},
}
_PARTS = {
    "computing": ("computing", {"color": "0.75"}),
    "optimizer": ("optimizer", {"color": "white", "hatch": "....."}),
    "copying": ("copies and sums of communication", {"color": "white", "hatch": "/////"}),
    "waiting": ("waiting", {"color": "black"}),
    "outside": ("outside of passes", {"color": "white"}),
}

_CSS = """
body { font: 16px/1.45 sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #111; background: #fff }
h1 { font-size: 1.6em } h2 { font-size: 1.2em; margin-top: 2em }
table { border-collapse: collapse; font-size: 0.93em }
th, td { padding: 0.25em 0.8em; border-bottom: 1px solid #bbb; text-align: right }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
li { margin: 0.6em 0 } .advice { color: #333; display: block }
svg { max-width: 100%; height: auto } .note { color: #444; font-size: 0.9em }
"""


def write(ranks: Sequence[RankTrace], file: Path) -> None:
    """Write the page into a file."""
    file.write_text(render(ranks))


def render(ranks: Sequence[RankTrace]) -> str:
    """The page as HTML."""
    whole = [rank for rank in ranks if rank.steps()]
    parts = [
        f"<h1>Trace of {counted(len(ranks), 'rank')}</h1>",
        _summary(ranks),
        "<h2>What was found</h2>",
        "<ul>",
    ]
    for finding in findings(ranks):
        advice = f'<span class="advice">To try: {escape(finding.advice)}</span>' if finding.advice else ""
        parts.append(f"<li><b>{escape(finding.kind)}</b>: {escape(finding.text)} {advice}</li>")
    parts.append("</ul>")
    if whole:
        waits = waited(whole)
        first, *others = _shown(whole, waits)
        some = sorted([first, *others][:_RANKS], key=lambda rank: rank.rank)
        parts += ["<h2>Where the time of a step goes</h2>", _picture(lambda: draw_shares(some)), _shares_table(some)]
        parts += [_note(f"{len(whole) - _RANKS} more ranks are in recording.json.")] * (len(whole) > _RANKS)
        usual = _usual_step(first)
        for rank in [first, *others[:1]]:
            step = usual if usual in rank.steps() else _usual_step(rank)
            parts += [f"<h2>Step {step} of rank {rank.rank}</h2>", _picture(partial(draw_step, rank, step))]
        parts.append(_note(_lanes_in_words(first)))
        if others:
            parts += ["<h2>Who waits for whom</h2>", _picture(lambda: draw_waits(some, waits)), _note(_WAITS)]
        parts += ["<h2>Groups that were waited for longest</h2>", _groups_table(whole, waits)]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>fullshard: trace</title><style>{_CSS}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _summary(ranks: Sequence[RankTrace]) -> str:
    hosts, steps = len({rank.host for rank in ranks}), sorted({step for rank in ranks for step in rank.steps()})
    devices = ", ".join(sorted({rank.device for rank in ranks}))
    numbers = f" ({steps[0]} to {steps[-1]})" if len(steps) > 1 else ""
    text = f"{counted(hosts, 'host')}, device {devices}, {counted(len(steps), 'step')}{numbers}."
    error = max((rank.clock_error for rank in ranks), default=0)
    if error:
        text += f" The clocks of the hosts were compared; they may still differ by {error / 1e6:.2g} ms."
    return _note(escape(text))


def _note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def _shown(ranks: Sequence[RankTrace], waits: Sequence[Waited]) -> list[RankTrace]:
    """The ranks, the interesting ones first: first the rank for which the others wait longest, then those that wait
    most."""
    late = lateness(ranks, waits)
    first = max(ranks, key=lambda rank: late[rank.rank])
    others = sorted((rank for rank in ranks if rank is not first), key=lambda rank: -shares(rank).waiting)
    return [first, *others]


def _usual_step(rank: RankTrace) -> int:
    """The step of median length."""
    steps = rank.steps()
    by_length = sorted(steps, key=lambda step: steps[step][1] - steps[step][0])
    return by_length[(len(by_length) - 1) // 2]


def _picture(draw: Callable[[], Any]) -> str:
    """The figure that ``draw`` returns, as SVG for a page."""
    try:
        import matplotlib
    except ImportError:
        return _note("The pictures are made by matplotlib, which is not installed.")
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "hatch.linewidth": 0.6}):
        figure = draw()
        text = io.StringIO()
        figure.savefig(text, format="svg")
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _figure(height: float, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure without a window, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.subplots(rows, 1, **options)
    for axis in axes if rows > 1 else [axes]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_step(rank: RankTrace, step: int) -> Any:
    """The lanes of a rank over a step, with its memory below."""
    begin, end = rank.steps()[step]
    spans = [span for span in rank.spans if span.end > begin and span.start < end]
    rows: list[tuple[str, list[Span]]] = []
    for lane in LANES:
        by_track: dict[int, list[Span]] = {}
        for track, span in tracks((span for span in spans if span.lane == lane), nests=False):
            by_track.setdefault(track, []).append(span)
        rows += [(lane if not track else "", found) for track, found in sorted(by_track.items())]
    figure, (above, below) = _figure(
        1.6 + 0.42 * len(rows), 2, sharex=True, gridspec_kw={"height_ratios": [max(2, len(rows)), 2]}
    )
    for row, (_, found) in enumerate(rows):
        for span in found:
            _bar(above, row, span, begin, end)
    above.set_yticks(range(len(rows)), [name for name, _ in rows])
    above.set_ylim(len(rows) - 0.4, -0.6)
    above.tick_params(axis="y", length=0)
    times = [(when - begin) / 1e6 for when, _ in rank.memory if begin <= when <= end]
    sizes = [size / 2**20 for when, size in rank.memory if begin <= when <= end]
    below.step(times, sizes, color="black", where="post")
    below.set(xlabel="time (ms)", ylabel="MiB", title=f"memory: {rank.memory_of}", xlim=(0, (end - begin) / 1e6))
    least, most = min(sizes, default=0.0), max(sizes, default=1.0)
    below.set_ylim(0 if least < most / 2 else least - max(1.0, most - least), most + max(1.0, (most - least) / 4))
    below.title.set_fontsize("medium")
    return figure


def _bar(axis: Any, row: int, span: Span, begin: int, end: int) -> None:
    start, stop = max(span.start, begin), min(span.end, end)
    axis.barh(
        row, (stop - start) / 1e6, 0.7, (start - begin) / 1e6, edgecolor="black", linewidth=0.4, **_STYLES[span.lane]
    )
    name = span.what if span.lane in ("pass", "wait") else span.group
    width = (stop - start) / (end - begin)
    short = name if len(name) * _ROOM_FOR_NAME < width else name.rpartition(".")[2]
    if span.lane in ("pass", "computation", "gather", "reduce") and len(short) * _ROOM_FOR_NAME < width:
        middle = ((start + stop) / 2 - begin) / 1e6
        style = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
        box = {} if span.lane in ("pass", "computation") else {"bbox": style}
        axis.text(middle, row, short, ha="center", va="center", fontsize="small", **box)


def draw_shares(some: Sequence[RankTrace]) -> Any:
    """A bar for each rank, with the parts of its step."""
    figure, axis = _figure(1.3 + 0.34 * len(some))
    left = [0.0] * len(some)
    for part, (label, style) in _PARTS.items():
        widths = [getattr(shares(rank), part) / 1e6 for rank in some]
        axis.barh(range(len(some)), widths, 0.7, left, label=label, edgecolor="black", linewidth=0.6, **style)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(some)), [f"rank {rank.rank}" for rank in some])
    axis.invert_yaxis()
    axis.set_xlabel("ms of a step, on average")
    figure.legend(loc="outside upper center", ncols=len(_PARTS), frameon=False, fontsize="small")
    return figure


def draw_waits(ranks: Sequence[RankTrace], waits: Sequence[Waited]) -> Any:
    """A table of circles that show how long each rank waits for each other rank."""
    some = [rank.rank for rank in ranks]
    totals = Counter[tuple[int, int | None]]()
    for wait in waits:
        totals[wait.rank, wait.by] += wait.length / 1e6  # type: ignore[assignment]
    columns: list[int | None] = [*some, None]
    most = max((totals[here, there] for here in some for there in columns), default=0.0) or 1.0
    figure, axis = _figure(1.3 + 0.5 * len(some))
    for row, here in enumerate(some):
        for column, there in enumerate(columns):
            size = totals[here, there]
            if size > most / 100:
                axis.scatter(column, row, s=900 * size / most, facecolor="0.8", edgecolor="black", linewidth=0.6)
                box = None if size > most / 4 else {"boxstyle": "square,pad=0.1", "facecolor": "white", "linewidth": 0}
                text = f"{size:.0f}" if size >= 10 else f"{size:.1f}"
                axis.text(column, row, text, ha="center", va="center", fontsize="small", bbox=box)
    labels = [f"rank {there}" if there is not None else "the bytes" for there in columns]
    axis.set_xticks(range(len(columns)), labels)
    axis.set_yticks(range(len(some)), [f"rank {here} waits" for here in some])
    axis.set(xlim=(-0.6, len(columns) - 0.4), ylim=(len(some) - 0.4, -0.6), title="for ... (ms of a step)")
    axis.title.set_fontsize("medium")
    return figure


_WAITS = (
    "A communication cannot end before the last rank has started it. Until then, the others wait for that rank; after "
    "that, they wait for the bytes. Waits shorter than a hundredth of the longest one are left out."
)


def _lanes_in_words(rank: RankTrace) -> str:
    words = (
        "<b>pass</b>: forward, backward and step of the optimizer. <b>computation</b>: units, with those inside them. "
        "<b>gather</b>, <b>reduce</b>: from the start of a communication to its end. "
    )
    if rank.device == "cpu":
        words += (
            "On the CPU, communication runs in the background; its bar ends when training completes it, at the latest "
            "when its result is needed. <b>host</b>: the training thread starts and completes communication, with "
            "copies and sums. <b>wait</b>: the training thread waits."
        )
    else:
        words += "<b>wait</b>: the stream that computes waits for a communication."
    return words


def _shares_table(some: Sequence[RankTrace]) -> str:
    rows = []
    for rank in some:
        of, peak = shares(rank), max((sizes for _, sizes in rank.memory), default=0)
        parts = [percent(getattr(of, part) / of.step) for part in (*_PARTS, "exposed")]
        rows.append([f"rank {rank.rank}", f"{of.step / 1e6:.1f}", *parts, f"{peak / 2**20:.0f}"])
    heads = ["", "step, ms", *(label for label, _ in _PARTS.values()), "exposed communication", "most memory, MiB"]
    return _table(heads, rows)


def _groups_table(ranks: Sequence[RankTrace], waits: Sequence[Waited]) -> str:
    """The groups for which ranks waited longest: because a rank was late, and because bytes were missing."""
    totals: dict[tuple[str, str], list[float]] = {}
    for wait in waits:
        sums = totals.setdefault((wait.group, wait.what), [0.0, 0.0])
        sums[wait.by is None] += wait.length / 1e6 / len(ranks)
    most = sorted(totals.items(), key=lambda item: -sum(item[1]))[:_GROUPS]
    if not most:
        return "<p>No rank waited.</p>"
    sizes = {name: nbytes for rank in ranks for name, nbytes in rank.groups.items()}
    rows = [
        [
            group or "all groups",
            what,
            f"{sizes[group] / 2**20:.1f}" if group in sizes else "",
            *(f"{part:.2f}" for part in (late, bytes_)),
        ]
        for (group, what), (late, bytes_) in most
    ]
    return _table(["group", "waited for", "whole, MiB", "for a late rank, ms a step", "for the bytes, ms a step"], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>\n" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"
