"""One picture of a run: times of steps, memory, host time and what begins and ends a run, for each contender."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.figures import Spread, exact, middle, ratio
from benchmarks.goals import excess
from fullshard.report.pictures import BLACK, BLUE, ORANGE, SKY, VERMILION, WHITE, Look

Results = dict[str, Any]
T = TypeVar("T")

_COLUMNS = 3
#: By the beginning of a contender's name: its bars, and its lines.
_LOOKS = {
    "fullshard, ": Look(VERMILION, "\\"),
    "fullshard": Look(ORANGE),
    "torch FSDP2": Look(BLUE, "/"),
    "torch FSDP1": Look(SKY, "x"),
    "DDP": Look("#999999", "."),
}
_MARKERS = {"fullshard, ": "v--", "fullshard": "o-", "torch FSDP2": "s--", "torch FSDP1": "^-.", "DDP": "d:"}


def draw(results: Results, file: Path) -> None:
    """Write the picture to ``file``; nothing if the results have nothing to show."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = _panels(results)
    if not panels:
        return
    rows = -(-len(panels) // _COLUMNS)
    figure, axes = pyplot.subplots(
        rows, min(len(panels), _COLUMNS), figsize=(5.2 * min(len(panels), _COLUMNS), 3.4 * rows), squeeze=False
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        panel(axis)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle("fullshard beside torch's FSDP and DDP on the same work; smaller is better everywhere")
    figure.tight_layout(w_pad=2, h_pad=2, rect=(0, 0, 1, 0.985))
    with matplotlib.rc_context({"hatch.linewidth": 0.5}):
        figure.savefig(file, dpi=120)
    pyplot.close(figure)


def draw_decision(results: Results, file: Path) -> None:
    """Write the picture of what decides: time of a step and bytes between hosts, and how a job survives a kill."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    hosts, course = results.get("hosts", {}).get("ranks"), results.get("elastic", {}).get("course")
    if not hosts or not course:
        return
    figure, (times, sent, steps) = pyplot.subplots(1, 3, figsize=(13, 3.4))
    alone = results["communication W=2"]["contenders"]
    found = {"1 host\n2 ranks": {name: ratio(alone, "wall", name, "DDP")[0] for name in ("torch FSDP2", "fullshard")}}
    for count, each in hosts.items():
        found[f"2 hosts\n{2 * count} ranks"] = {
            own: ratio(each, "wall", name, "DDP")[0]
            for own, name in (("torch FSDP2", "FSDP2"), ("fullshard", "zero_stage=3"))
        }
    for number, name in enumerate(("torch FSDP2", "fullshard")):
        look, places = _of(name, _LOOKS, Look(WHITE)), [at + 0.4 * number - 0.2 for at in range(len(found))]
        bars = times.bar(places, [each[name] for each in found.values()], 0.38, label=name, **look.bar)
        for label in times.bar_label(bars, fmt="%.2f", fontsize=8, padding=2):
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    times.axhline(1, color=BLACK, linestyle=":", linewidth=1)
    times.text(len(found) - 0.45, 1.03, "DDP", ha="right", fontsize=8)
    times.set_xticks(range(len(found)), list(found), fontsize=8)
    times.set(title="Time of a step / DDP's", ylim=(0, None))
    times.legend(frameon=False, fontsize=8)
    for name, own in (("FSDP2", "torch FSDP2"), ("DDP", "DDP"), ("zero_stage=3", "fullshard")):
        look, line = _of(own, _LOOKS, Look(WHITE)), _of(own, _MARKERS, "o-")
        values = [each[name]["sent"] for each in hosts.values()]
        sent.plot([*hosts], values, line, label=own, color=look.color, markeredgecolor=BLACK, linewidth=2)
    sent.set(title="Bytes a host's card sends in a step, 2 hosts", xlabel="ranks on each host")
    sent.set(ylabel="bytes / those of all parameters", ylim=(0, None), xticks=[*hosts])
    sent.legend(frameon=False, fontsize=8)
    killed = min(course, key=lambda process: max(course[process]))
    for process, ends in course.items():
        steps.plot(ends, [process] * len(ends), "|", color=VERMILION if process == killed else BLUE, markersize=16)
    steps.plot([0], [killed], "x", color=VERMILION, markersize=10, markeredgewidth=3)
    steps.annotate("killed", (0, killed), xytext=(9, -3), textcoords="offset points")
    steps.set(title="Steps of four processes, one is killed", xlabel="seconds from the kill")
    steps.set(
        xlim=(-0.6, 1.0),
        ylim=(-0.5, len(course) - 0.5),
        yticks=[*course],
        yticklabels=[f"process {process}" for process in course],
    )
    steps.invert_yaxis()
    for axis in (times, sent, steps):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(w_pad=2)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _panels(results: Results) -> list[Callable[[Any], None]]:
    panels: list[Callable[[Any], None]] = []
    for name, found in results.items():
        if name.startswith(("communication", "compute", "realistic")):
            ratios = {each: ratio(found["contenders"], "wall", each, "DDP") for each in found["contenders"]}
            panels.append(_bars(f"a step, {name.replace(' W', '-bound, W')}", "wall time / DDP's", ratios, 1.0))
    if "memory" in results:
        memory = results["memory"]
        for phase in ("forward", "backward"):
            above = {name: exact(excess(memory, name, phase)) for name in memory["contenders"]}
            what = "shards and gradients" if phase == "backward" else "shards"
            panels.append(
                _bars(f"memory in {phase}, W={memory['ranks']}", f"peak above a rank's {what}, in groups", above)
            )
    if "host" in results:
        panels.append(_lines(results["host"][0]))
    for name, keys in (("initialisation", ("cpu", "meta")), ("checkpoint", ("save", "load"))):
        for key in keys:
            if name in results:
                seconds = {
                    each: exact(1e3 * middle(values[f"{key} seconds"]))
                    for each, values in results[name]["contenders"].items()
                }
                seconds = {each: value for each, value in seconds.items() if not math.isnan(value[0])}
                title = f"sharding a model, from {key}" if name == "initialisation" else f"checkpoint, {key}"
                panels.append(_bars(f"{title}, W={results[name]['ranks']}", "milliseconds", seconds))
    return panels


def _bars(title: str, unit: str, values: dict[str, Spread], line: float | None = None) -> Callable[[Any], None]:
    def draw_bars(axis: Any) -> None:
        names = list(values)
        middles = [values[name][0] for name in names]
        errors = [[m - values[n][1] for m, n in zip(middles, names, strict=True)]]
        errors += [[values[n][2] - m for m, n in zip(middles, names, strict=True)]]
        xerr = errors if any(map(any, errors)) else None
        bars = axis.barh(names, middles, xerr=xerr, capsize=2)
        for bar, name in zip(bars, names, strict=True):
            bar.set(**_of(name, _LOOKS, Look(WHITE)).bar)
        for row, name in enumerate(names):
            axis.annotate(
                f"{values[name][0]:.{0 if values[name][0] >= 100 else 2}f}",
                (max(values[name][2], 0.0), row),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize="small",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
        axis.invert_yaxis()
        axis.margins(x=0.16)
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel(unit, fontsize="small")
        axis.tick_params(labelsize="small")
        if line is not None:
            axis.axvline(line, color="black", linewidth=0.6, linestyle=":")

    return draw_bars


def _lines(found: Any) -> Callable[[Any], None]:
    def draw_lines(axis: Any) -> None:
        counts = found["counts"]
        for name in next(iter(counts.values())):
            times = [1e6 * each[name]["seconds"][0] for each in counts.values()]
            look = _of(name, _LOOKS, Look(BLACK))
            axis.plot(
                list(counts), times, _of(name, _MARKERS, "o-"), label=name, color=look.color, markeredgecolor="black"
            )
        axis.set_ylim(0, None)
        axis.set_xticks(list(counts))
        axis.set_title(f"host time, communication free, W={found['ranks']}", fontsize="medium")
        axis.set_xlabel("parameters in a group", fontsize="small")
        axis.set_ylabel("µs a group a step", fontsize="small")
        axis.tick_params(labelsize="small")
        axis.legend(frameon=False, fontsize="small")

    return draw_lines


def _of(name: str, known: dict[str, T], default: T) -> T:
    """What is known of the contender with which ``name`` begins."""
    return next((value for start, value in known.items() if name.startswith(start)), default)
