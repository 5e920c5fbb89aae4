"""What a run shows: its progress, a table with bars, and the files ``metrics.jsonl`` and ``curves.png``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rich.bar import Bar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from memory import Usage

# Colours of Okabe and Ito, which colour-blind readers tell apart; markers and hatches tell them apart in grey.
BLUE, ORANGE = "#0072B2", "#E69F00"
SHOWN = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "peak": "peak of the process",
}
MIB = 2**20


class RunLog:
    """Shows the progress of a run, and writes a line for each step to ``metrics.jsonl``. Only rank 0 makes one.

    In a terminal progress is a bar; elsewhere it is a line after each tenth of the steps. A run that resumes keeps the
    lines of the steps that it has done.
    """

    def __init__(self, directory: Path, done: int, steps: int) -> None:
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._steps = steps
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "metrics.jsonl"
        lines = [line for line in read(directory) if line["step"] <= done]
        self._file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._bar = Progress(
            BarColumn(40, complete_style=BLUE, finished_style=BLUE),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def add(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Write and show what is known of a step; the first is step 1."""
        line = {"step": step, "loss": loss, "tokens_per_second": tokens_per_second}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        text = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, description=text)
        tenths = step * 10 // self._steps
        if not self.console.is_terminal and (step == 1 or tenths > (step - 1) * 10 // self._steps):
            self.console.print(f"step {step:4d}/{self._steps}  {text}")


def read(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``, one dict for each step."""
    file = directory / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def memory_table(sharded: Usage, unsharded: Usage, ranks: int) -> Table:
    """Show the memory of the rank that has the highest peak beside that of an unsharded process, as bars."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("memory of one process", no_wrap=True)
    for title in ("unsharded", f"sharded over {ranks}"):
        table.add_column(title)
        table.add_column("MiB", justify="right")
    table.add_column("ratio", justify="right")
    largest = max(unsharded.peak, sharded.peak)
    for field, name in SHOWN.items():
        whole, part = getattr(unsharded, field), getattr(sharded, field)
        table.add_row(
            name,
            Bar(largest, 0, whole, width=18, color=ORANGE),
            f"{whole / MIB:,.0f}",
            Bar(largest, 0, part, width=18, color=BLUE),
            f"{part / MIB:,.0f}",
            f"{part / whole:.2f}",
        )
    return table


def draw(directory: Path, comparison: Mapping[str, Any] | None = None) -> Path:
    """Draw ``curves.png``: the losses of ``metrics.jsonl`` and, beside them, the comparison with unsharded training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read(directory)
    figure, axes = pyplot.subplots(1, 2 if comparison else 1, figsize=(11 if comparison else 6.4, 4.2), squeeze=False)
    loss = axes[0][0]
    loss.plot([line["step"] for line in lines], [line["loss"] for line in lines], color=BLUE, label="training loss")
    if comparison:
        first = comparison["unsharded"]["losses"]
        label = f"unsharded, first {len(first)} steps"
        loss.plot(range(1, len(first) + 1), first, "s", color=ORANGE, markeredgecolor="black", label=label)
        _draw_memory(axes[0][1], comparison)
    loss.set(xlabel="step", ylabel="loss (nats a byte)", title="Loss")
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.tight_layout(w_pad=3)
    figure.savefig(directory / "curves.png", dpi=110)
    pyplot.close(figure)
    return directory / "curves.png"


def _draw_memory(axis: Any, comparison: Mapping[str, Any]) -> None:
    ranks = comparison["ranks"]
    shown = [
        ("unsharded", comparison["unsharded"]["usage"], ORANGE, ""),
        (f"sharded over {len(ranks)}", max(ranks, key=lambda usage: usage["peak"]), BLUE, "///"),
    ]
    for number, (label, usage, color, hatch) in enumerate(shown):
        places = [place + 0.4 * number for place in range(len(SHOWN))]
        sizes = [usage[field] / MIB for field in SHOWN]
        bars = axis.bar(places, sizes, 0.38, color=color, hatch=hatch, edgecolor="black", linewidth=0.7, label=label)
        axis.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize="small")
    axis.set_xticks(
        [place + 0.2 for place in range(len(SHOWN))], [name.replace(" ", "\n", 1) for name in SHOWN.values()]
    )
    axis.set(ylabel="MiB", title="Memory of one process")
