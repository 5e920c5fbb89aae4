"""Results for readers: tables, a plot, and the raw numbers.

Every table says in one line what its columns are. A ratio is a median over rounds, of pairs within a round, followed by
its quartiles.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.figures import Spread, middle, ratio, spread
from benchmarks.goals import judge
from benchmarks.optimizer import PLAIN, spread_of_steps

Results = dict[str, Any]


def save(results: Results, folder: Path) -> str:
    """Write ``results.json``, ``results.md`` and ``results.png`` to ``folder``; returns the text of the second."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {"machine": machine(), **results}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    text = "\n".join(_sections(results))
    (folder / "results.md").write_text(text)
    _plot(results, folder / "results.png")
    return text


def machine() -> dict[str, Any]:
    """What has to be known of the machine to read absolute numbers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": os.getloadavg()[0],
    }


def _sections(results: Results) -> Iterator[str]:
    facts = results["machine"]
    yield "# fullshard beside DDP and torch's FSDP\n"
    yield (
        f"Python {facts['python']}, torch {facts['torch']}, {facts['system']}, {facts['cores']} cores, load "
        f"{facts['load']:.1f} at the end of the run. fp32, SGD, gloo, one thread a rank. P: bytes of all parameters; "
        f"U: bytes of one group; W: ranks; n: parameters in a group.\n"
    )
    if results.get("quick"):
        yield "**A quick run, at sizes at which no number means anything.**\n"
    verdicts = [] if results.get("quick") else list(judge(results))
    if verdicts:
        yield "## Goals\n"
        rows = [
            [goal.what, _number(value, goal.unit), f"≤ {_number(goal.limit, goal.unit)}", _verdict(value, goal.limit)]
            for goal, value in verdicts
        ]
        yield _table(rows, ["what", "fullshard", "goal", ""])
    for name, found in results.items():
        if name.startswith(("communication", "compute", "tiny")):
            yield from _steps(name, found)
    if "group" in results:
        yield from _group(results["group"])
    if "host" in results:
        yield from _host(results["host"])
    if "memory" in results:
        yield from _memory(results["memory"])
    if "optimizer" in results:
        yield from _optimizer(results["optimizer"])
    if "padding" in results:
        yield from _padding(results["padding"])
    if "startup" in results:
        yield from _startup(results["startup"])


def _steps(name: str, found: Any) -> Iterator[str]:
    contenders = found["contenders"]
    chosen = contenders["fullshard"]["transport"]
    yield f"## A step: {name}, {found['model_bytes'] / 2**20:.0f} MiB of parameters\n"
    yield (
        f"`fullshard` chose the transport `{chosen}`. Wall time is of the slowest rank, CPU time the mean of the "
        f"ranks. A ratio is the median of the rounds, with its quartiles. "
        f"*wire* is what the loopback device carried a rank, *asked* what the calls of the library have to send, "
        f"*copied* what it copies within a rank, all in P. Every contender sees the same batches.\n"
    )
    rows = []
    for contender, values in contenders.items():
        row = [contender, f"{1e3 * middle(values['wall']):.0f}"]
        row += [_ratio(ratio(contenders, "wall", contender, base)) for base in ("DDP", "torch FSDP2")]
        row += [f"{1e3 * middle(values['cpu']):.0f}"]
        row += [_ratio(ratio(contenders, "cpu", contender, base)) for base in ("DDP", "torch FSDP2")]
        row += [f"{middle(values['wire']):.2f}", f"{values['asked']:.2f}", f"{values['copied']:.2f}"]
        rows.append(row)
    headers = ["", "wall, ms", "/ DDP", "/ FSDP2", "CPU, ms", "/ DDP", "/ FSDP2", "wire", "asked", "copied"]
    yield _table(rows, headers)
    unknown = sorted({name for values in contenders.values() for name in values["unknown"]})
    if unknown:
        yield f"*asked* is too low by these operators, which are not understood: {', '.join(unknown)}.\n"


def _group(found: Any) -> Iterator[str]:
    yield f"## One group of {found['group_bytes'] / 2**20:.0f} MiB, W={found['ranks']}: CPU\n"
    yield "Milliseconds of CPU of a rank, median (quartiles), less those of a module that is not sharded.\n"
    names = list(dict.fromkeys([*found["gather"], *found["reduce"]]))
    rows = [
        [name, *(_milliseconds(found[what][name]) if name in found[what] else "" for what in ("gather", "reduce"))]
        for name in names
    ]
    rows.append(["one copy of it (memcpy)", _milliseconds(found["copy"]["memcpy"]), ""])
    yield _table(rows, ["", "gather", "reduction"])


def _host(found: Any) -> Iterator[str]:
    yield "## What the host does for a group in a step, where communication is free\n"
    yield "Microseconds of CPU (and calls of Python and C functions), less those of modules that are not sharded.\n"
    counts = list(found[0]["counts"])
    rows = []
    for each in found:
        for name in each["counts"][counts[0]]:
            cells = [each["counts"][count][name] for count in counts]
            rows.append([each["ranks"], name, *(f"{1e6 * c['seconds'][0]:.0f} ({c['calls']:.0f})" for c in cells)])
    yield _table(rows, ["W", "", *(f"n={count}" for count in counts)])


def _memory(found: Any) -> Iterator[str]:
    yield f"## Memory and page faults of a rank, W={found['ranks']}\n"
    yield (
        f"In U = {found['group_bytes'] / 2**20:.0f} MiB; P is {found['model_bytes'] / found['group_bytes']:.2f} U. "
        f"*state*: the parameters a rank has to keep. Above it: *forward* at its peak, less the activations; "
        f"*backward* at its peak, less as many bytes of gradients; *rest*, kept between steps after `zero_grad()`; "
        f"*wrap*, above the whole model while it is sharded or replicated. *resident* is the peak of the process since "
        f"its start, gloo's own buffers and the whole model included. Each contender has a process of its own.\n"
    )
    unit, contenders = found["group_bytes"], found["contenders"]
    alone = contenders["no communication"]
    activations = alone["forward_peak"] - alone["state"]
    rows = []
    for name, values in contenders.items():
        state = values["state"]
        above = (
            values["forward_peak"] - state - activations,
            values["backward_peak"] - 2 * state,
            values["rest"] - state,
            values["wrap_peak"],
            values["resident_peak"],
        )
        rows.append([name, *(f"{value / unit:.2f}" for value in (state, *above)), f"{values['faults']:,.0f}"])
    yield _table(rows, ["", "state", "forward", "backward", "rest", "wrap", "resident", "page faults a step"])


def _optimizer(found: Any) -> Iterator[str]:
    yield f"## A step of an optimizer, {found['count']} parameters of {found['width']} x {found['width']}, W=2: CPU\n"
    yield "Milliseconds on plain tensors, and multiples of these. Nothing: torch cannot do it on DTensors.\n"
    rows = [
        [
            kind,
            _milliseconds(values[PLAIN], 2),
            *(_ratio(spread_of_steps(values, name)) if values[name] else "" for name in ("fullshard", "torch FSDP2")),
        ]
        for kind, values in found["kinds"].items()
    ]
    yield _table(rows, ["", PLAIN, "fullshard", "torch FSDP2"])


def _padding(found: Any) -> Iterator[str]:
    sizes = found["world_sizes"]
    yield "## Padding: what a gather of a 3 x 4096 parameter delivers, in multiples of its bytes\n"
    names = next(iter(sizes.values()))
    rows = [[name, *(f"{values[name]:.1f}" for values in sizes.values())] for name in names]
    yield _table(rows, ["", *(f"W={size}" for size in sizes)])


def _startup(found: Any) -> Iterator[str]:
    yield f"## Beginning and ending, {found['model_bytes'] / 2**20:.0f} MiB of parameters, W={found['ranks']}\n"
    yield "Milliseconds of the slowest rank, median (quartiles). Save and load are DCP's, of the parameters.\n"
    parts = list(next(iter(found["contenders"].values())))
    rows = [[name, *(_milliseconds(values[p], 0) for p in parts)] for name, values in found["contenders"].items()]
    yield _table(rows, ["", *parts])


def _table(rows: list[list[Any]], headers: list[str]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True) + "\n"


def _ratio(value: Spread) -> str:
    return "{:.2f} ({:.2f}-{:.2f})".format(*value)


def _milliseconds(values: list[float], digits: int = 1) -> str:
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(*(1e3 * value for value in spread(values)), d=digits)


def _number(value: float, unit: str) -> str:
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return f"{text} {unit}".strip()


def _verdict(value: float, limit: float) -> str:
    return "met" if value <= limit else "missed"


def _plot(results: Results, file: Path) -> None:
    """One picture: steps against DDP, memory above the state, and host time by parameters in a group."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = {name: found for name, found in results.items() if name.startswith(("communication", "compute", "tiny"))}
    panels = len(steps) + ("memory" in results) + ("host" in results)
    if panels == 0:
        return
    figure, axes = pyplot.subplots(1, panels, figsize=(4.8 * panels, 3.6), layout="constrained", squeeze=False)
    free = iter(axes[0])
    for name, found in steps.items():
        ratios = {each: ratio(found["contenders"], "wall", each, "DDP") for each in found["contenders"]}
        _bars(next(free), f"step, {name}: wall time / DDP's", ratios)
    if "memory" in results:
        memory = results["memory"]
        above = {
            name: (values["backward_peak"] - 2 * values["state"]) / memory["group_bytes"]
            for name, values in memory["contenders"].items()
        }
        _bars(next(free), "backward peak above state and gradients, U", {name: (v, v, v) for name, v in above.items()})
    if "host" in results:
        axis, counts = next(free), results["host"][0]["counts"]
        for name in next(iter(counts.values())):
            axis.plot(list(counts), [1e6 * each[name]["seconds"][0] for each in counts.values()], "o-", label=name)
        axis.set(title="host time a group a step, µs", xlabel="parameters in the group", ylim=(0, None))
        axis.legend(frameon=False)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _bars(axis: Any, title: str, values: dict[str, Spread]) -> None:
    names = list(values)
    middles = [values[name][0] for name in names]
    errors = [[m - values[n][1] for m, n in zip(middles, names, strict=True)]]
    errors += [[values[n][2] - m for m, n in zip(middles, names, strict=True)]]
    colors = ["tab:orange" if name.startswith("fullshard") else "tab:gray" for name in names]
    axis.barh(names, middles, xerr=errors, color=colors)
    axis.invert_yaxis()
    axis.set_title(title, fontsize="medium")
    axis.spines[["top", "right"]].set_visible(False)
