"""The HTML page of a trace: one file that needs no network, with findings, charts to zoom and hover, and tables.

Owns what the page shows. plotly draws the charts, and puts its JavaScript into the page. The rest of the page is the
template ``page.html.j2``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.report import palette
from fullshard.report.findings import Waited, findings, lateness, waited
from fullshard.report.rank_trace import LANES, RankTrace, Span, shares, tracks
from fullshard.report.text import bytes_text, counted, percent, seconds_text

#: The most ranks whose steps are drawn, the most ranks in other charts and tables, and the most groups in a table.
_DRAWN, _RANKS, _GROUPS = 2, 16, 10
#: Heights in pixels: of a bar, of the chart of memory, and of what is above and below the bars of a chart.
_BAR, _MEMORY, _ABOVE, _BELOW = 26, 110, 52, 90
#: The colours and dashes of the ranks whose steps are drawn.
_LINES = ((palette.BLUE, "solid"), (palette.VERMILION, "dot"))

#: The part of a chart's width that a letter of a span's name needs.
_LETTER = 0.009
_PARTS = (
    "copying: copies and sums of communication, by the host. outside: the time between passes and steps of the "
    "optimizer. exposed: communication during which nothing was computed."
)
_WAITS = (
    "A communication cannot end before the last rank has started it. Until then, the others wait for that rank; after "
    "that, they wait for the bytes."
)


class Section(NamedTuple):
    """A part of the page: a chart of plotly, a table, and a note. Each may be missing."""

    title: str
    chart: Any = None
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    note: str = ""


def write(ranks: Sequence[RankTrace], file: Path) -> None:
    """Write the page into a file.

    Raises:
        ImportError: plotly is missing.
    """
    file.write_text(render(ranks), encoding="utf-8")


def render(ranks: Sequence[RankTrace]) -> str:
    """The page as HTML."""
    import plotly.graph_objects  # noqa: F401  # before anything is made: it may be missing
    from jinja2 import Template

    sections = _sections([rank for rank in ranks if rank.steps()])
    charts = [section.chart for section in sections if section.chart]

    def html(chart: Any) -> str:
        options = {"displaylogo": False, "responsive": True}
        return str(chart.to_html(full_html=False, include_plotlyjs=chart is charts[0], config=options))

    template = Template(Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8"), autoescape=True)
    return template.render(
        ranks=counted(len(ranks), "rank"),
        summary=_summary(ranks),
        findings=findings(ranks),
        sections=sections,
        html=html,
    )


def _summary(ranks: Sequence[RankTrace]) -> str:
    hosts, steps = len({rank.host for rank in ranks}), sorted({step for rank in ranks for step in rank.steps()})
    devices = ", ".join(sorted({rank.device for rank in ranks}))
    numbers = f" ({steps[0]} to {steps[-1]})" if len(steps) > 1 else ""
    text = f"{counted(hosts, 'host')}, device {devices}, {counted(len(steps), 'step')}{numbers}."
    error = max((rank.clock_error for rank in ranks), default=0)
    if error:
        text += f" The clocks of the hosts were compared; they may still differ by {error / 1e6:.2g} ms."
    return text


def _sections(ranks: Sequence[RankTrace]) -> list[Section]:
    """The sections of ranks that have recorded whole steps."""
    if not ranks:
        return []
    waits = waited(ranks)
    first, *others = _by_interest(ranks, waits)
    some = sorted([first, *others][:_RANKS], key=lambda rank: rank.rank)
    more = f"{len(ranks) - _RANKS} more ranks are in trace.json." if len(ranks) > _RANKS else ""
    drawn, step = [first, *others[: _DRAWN - 1]], _usual_step(first)
    sections = [
        Section(
            f"Step {step}: {' and '.join(_name(rank) for rank in drawn)}", draw_step(drawn, step), note=_lanes(first)
        ),
        Section("Where the time of an average step goes", draw_shares(some), *_shares_table(some), f"{_PARTS} {more}"),
    ]
    if others:
        sections.append(Section("Who waits for whom: ms of an average step", draw_waits(some, waits), note=_WAITS))
    return [*sections, Section("Groups that were waited for longest", None, *_groups_table(ranks, waits))]


def _name(rank: RankTrace) -> str:
    return f"rank {rank.rank}"


def _by_interest(ranks: Sequence[RankTrace], waits: Sequence[Waited]) -> list[RankTrace]:
    """First the rank for which the others wait longest, then those that wait most."""
    late = lateness(ranks, waits)
    first = max(ranks, key=lambda rank: late[rank.rank])
    others = sorted((rank for rank in ranks if rank is not first), key=lambda rank: -shares(rank).waiting)
    return [first, *others]


def _usual_step(rank: RankTrace) -> int:
    """The step of median length."""
    steps = rank.steps()
    by_length = sorted(steps, key=lambda step: steps[step][1] - steps[step][0])
    return by_length[(len(by_length) - 1) // 2]


def draw_step(ranks: Sequence[RankTrace], step: int) -> Any:
    """The lanes of ranks in a step of the first one, and their memory below."""
    from plotly.subplots import make_subplots

    begin, end = ranks[0].steps()[step]
    rows = [_rows(rank, begin, end) for rank in ranks]
    heights = [_BAR * len(each) for each in rows] + [_MEMORY]
    gap = 45 / (sum(heights) + 45 * len(ranks))
    titles = [*map(_name, ranks), f"{ranks[0].memory_of}, MiB"]
    figure = make_subplots(
        len(heights), 1, shared_xaxes=True, row_heights=heights, vertical_spacing=gap, subplot_titles=titles
    )
    figure.update_annotations(x=0, xanchor="left", font_size=14)
    memory: list[float] = []
    for number, (rank, lanes) in enumerate(zip(ranks, rows, strict=True), 1):
        for row, (lane, spans) in enumerate(lanes):
            figure.add_trace(_bars(row, spans, lane, begin, end), number, 1)
        names = ["" if row and lanes[row - 1][0] == lane else lane for row, (lane, _) in enumerate(lanes)]
        figure.update_yaxes(tickvals=[*range(len(names))], ticktext=names, range=[len(names) - 0.5, -0.5], row=number)
        figure.update_yaxes(showgrid=False, row=number)
        times = [(when - begin) / 1e6 for when, _ in rank.memory if begin <= when <= end]
        sizes = [size / 2**20 for when, size in rank.memory if begin <= when <= end]
        color, dash = _LINES[number - 1]
        line = {"shape": "hv", "color": color, "dash": dash}
        figure.add_scatter(x=times, y=sizes, line=line, mode="lines", name=_name(rank), row=len(heights), col=1)
        memory += sizes
    least, most = min(memory, default=0.0), max(memory, default=1.0)
    bottom = 0 if least < most / 2 else least - max(1.0, most - least)
    figure.update_yaxes(range=[bottom, most + max(1.0, (most - least) / 4)], row=len(heights))
    figure.update_xaxes(range=[0, (end - begin) / 1e6])
    figure.update_xaxes(ticksuffix=" ms", row=len(heights))
    figure.update_yaxes(fixedrange=True)
    figure.update_layout(barmode="overlay", uniformtext={"mode": "hide", "minsize": 10})
    return _styled(figure, sum(heights) + 45 * len(ranks))


def _rows(rank: RankTrace, begin: int, end: int) -> list[tuple[str, list[Span]]]:
    """The rows of a rank's chart: each lane has as many as it has spans at the same time."""
    rows = []
    for lane in LANES:
        by_track: dict[int, list[Span]] = {}
        spans = (span for span in rank.spans if span.lane == lane and span.end > begin and span.start < end)
        for track, span in tracks(spans, nests=False):
            by_track.setdefault(track, []).append(span)
        rows += [(str(lane), found) for _, found in sorted(by_track.items())]
    return rows


def _bars(row: int, spans: Sequence[Span], lane: str, begin: int, end: int) -> Any:
    """The spans of a row, between two times."""
    from plotly.graph_objects import Bar

    texts, hovers, starts, lengths = [], [], [], []
    for span in spans:
        name = span.what if lane in ("pass", "wait") else span.group or "root"
        length = min(span.end, end) - max(span.start, begin)
        texts.append(name if len(name) * _LETTER < length / (end - begin) else name.rpartition(".")[2])
        size = f", {bytes_text(span.nbytes)}" if span.nbytes else ""
        about = f"{span.what} {span.group}".strip()
        hovers.append(f"{lane}: {about}<br>{seconds_text(span.length / 1e9)}{size}")
        starts.append((max(span.start, begin) - begin) / 1e6)
        lengths.append(length / 1e6)
    return Bar(
        x=lengths,
        base=starts,
        y=[row] * len(spans),
        orientation="h",
        width=0.8,
        showlegend=False,
        marker=palette.LANES[lane].marker,
        text=texts if lane not in ("host", "wait") else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont_color="black",
        hovertext=hovers,
        hoverinfo="text",
    )


def _styled(figure: Any, height: float) -> Any:
    """The chart in the style of the page. ``height`` is that of its bars."""
    legend = {"orientation": "h", "yanchor": "top", "y": -30 / height, "x": 0, "traceorder": "normal"}
    margins = {"l": 90, "r": 10, "t": _ABOVE, "b": _BELOW}
    return figure.update_layout(
        template="plotly_white", height=height + _ABOVE + _BELOW, margin=margins, legend=legend, font_color="black"
    )


def draw_shares(some: Sequence[RankTrace]) -> Any:
    """A bar for each rank, with the parts of its step."""
    from plotly.graph_objects import Bar, Figure

    figure = Figure()
    of, parts = [shares(rank) for rank in some], _parts_of(some)
    for part, look in ((part, palette.TIME[part]) for part in parts):
        widths = [getattr(each, part) / 1e6 for each in of]
        texts = [percent(getattr(each, part) / each.step) for each in of]
        figure.add_trace(
            Bar(
                x=widths,
                y=[_name(rank) for rank in some],
                orientation="h",
                name=part,
                marker=look.marker,
                text=texts,
                textposition="inside",
                textangle=0,
                textfont_color="black",
                hovertemplate=f"{part}: %{{x:.1f}} ms, %{{text}}<extra>%{{y}}</extra>",
            )
        )
    figure.update_layout(barmode="stack", uniformtext={"mode": "hide", "minsize": 10})
    figure.update_xaxes(ticksuffix=" ms")
    figure.update_yaxes(autorange="reversed", fixedrange=True)
    return _styled(figure, _BAR * len(some))


def draw_waits(ranks: Sequence[RankTrace], waits: Sequence[Waited]) -> Any:
    """A matrix of how long each rank waits for each other rank."""
    from plotly.graph_objects import Figure, Heatmap

    some = [rank.rank for rank in ranks]
    totals = Counter[tuple[int, int | None]]()
    for wait in waits:
        totals[wait.rank, wait.by] += wait.length / 1e6  # type: ignore[assignment]
    columns: list[int | None] = [*some, None]
    figure = Figure(
        Heatmap(
            z=[[totals[here, there] or None for there in columns] for here in some],
            x=[f"for rank {there}" if there is not None else "for the bytes" for there in columns],
            y=[f"rank {here} waits" for here in some],
            texttemplate="%{z:.3g}",
            textfont_color="black",
            hovertemplate="%{y} %{x}: %{z:.3g} ms of a step<extra></extra>",
            colorscale=[[0, palette.WHITE], [1, palette.VERMILION]],
            showscale=False,
            zmin=0,
            xgap=2,
            ygap=2,
        )
    )
    figure.update_xaxes(side="top", fixedrange=True, showgrid=False)
    figure.update_yaxes(autorange="reversed", fixedrange=True, showgrid=False)
    return _styled(figure, _BAR * len(some)).update_layout(margin_b=0)


def _lanes(rank: RankTrace) -> str:
    words = (
        "Drag over a part to zoom into it; a double click shows all again. pass: forward, backward and step of the "
        "optimizer. computation: units, with those inside them. gather, reduce: from the start of a communication to "
        "its end. "
    )
    if rank.device == "cpu":
        words += (
            "On the CPU, communication runs in the background; its bar ends when training completes it, at the latest "
            "when its result is needed. host: the training thread starts and completes communication, with copies and "
            "sums. wait: the training thread waits."
        )
    else:
        words += "wait: the stream that computes waits for a communication."
    return words


def _parts_of(some: Sequence[RankTrace]) -> list[str]:
    """The parts of a step that are shown."""
    return [
        part
        for part in palette.TIME
        if part != "disk" or any(span.lane == part for rank in some for span in rank.spans)
    ]


def _shares_table(some: Sequence[RankTrace]) -> tuple[list[str], list[list[str]]]:
    rows, shown = [], _parts_of(some)
    for rank in some:
        of, peak = shares(rank), max((sizes for _, sizes in rank.memory), default=0)
        parts = [percent(getattr(of, part) / of.step) for part in (*shown, "exposed")]
        rows.append([_name(rank), seconds_text(of.step / 1e9), *parts, bytes_text(peak)])
    return ["", "step", *shown, "exposed", "most memory"], rows


def _groups_table(ranks: Sequence[RankTrace], waits: Sequence[Waited]) -> tuple[list[str], list[list[str]]]:
    """The groups for which ranks waited longest: because a rank was late, and because bytes were missing."""
    totals: dict[tuple[str, str], list[float]] = {}
    for wait in waits:
        sums = totals.setdefault((wait.group, wait.what), [0.0, 0.0])
        sums[wait.by is None] += wait.length / 1e9 / len(ranks)
    most = sorted(totals.items(), key=lambda item: -sum(item[1]))[:_GROUPS]
    sizes = {name: bytes_text(nbytes) for rank in ranks for name, nbytes in rank.groups.items()}
    rows = [
        [group or "all groups", what, sizes.get(group, ""), *map(seconds_text, times)] for (group, what), times in most
    ]
    return ["group", "waited for", "whole", "for a late rank, in a step", "for the bytes, in a step"], rows
