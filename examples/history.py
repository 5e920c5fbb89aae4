"""The history of a run: ``metrics.jsonl``, ``compare.json`` and ``curves.png`` in the directory of its checkpoints.

``metrics.jsonl`` has a line for each step, ``compare.json`` what was measured of the first steps, sharded and not. The
picture is drawn from these two files and from nothing else. A run that goes on from a checkpoint goes on with them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # drawing needs nothing of torch
    from reference import Measurement

#: Parts of the peak, and how bars show them: in black and white too.
PARTS = {
    "parameters": ("tab:blue", ""),
    "gradients": ("white", "/////"),
    "optimizer": ("lightblue", "xxxxx"),
    "activations": ("white", "....."),
    "other": ("lightgray", ""),
}
LINES = ("-", "--", "-.", ":")
MEMORY = "MiB above the process without a model"


def begin(directory: Path, done: int) -> None:
    """Prepare the files of a run of which ``done`` steps are done. Lines of later steps, which are lost, go."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [line for line in read(directory) if line["step"] <= done]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done == 0:
        (directory / "compare.json").unlink(missing_ok=True)


def add(directory: Path, **line: float | list[int]) -> None:
    """Write what is known of a step."""
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``, one dict for each step."""
    file = directory / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def compare(directory: Path, ranks: list[Measurement], unsharded: Measurement) -> None:
    """Write what was measured of the first steps, of each rank and unsharded."""
    found = {"ranks": [asdict(rank) for rank in ranks], "unsharded": asdict(unsharded)}
    (directory / "compare.json").write_text(json.dumps(found, indent=1))


def draw(directory: Path) -> Path:
    """Draw ``curves.png``, and return where it is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines, file = read(directory), directory / "compare.json"
    compared = json.loads(file.read_text()) if file.exists() else None
    figure, axes = pyplot.subplots(1, 3 if compared else 2, figsize=(15 if compared else 10, 4.2))
    _draw_losses(axes[0], lines, compared)
    _draw_memory(axes[1], lines, compared)
    if compared:
        _draw_parts(axes[2], compared)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize="small", loc="upper right", reverse=axis is axes[-1])
    for axis in axes[:2]:
        axis.xaxis.set_major_formatter("{x:.0f}")
    figure.tight_layout(w_pad=2)
    figure.savefig(directory / "curves.png", dpi=110)
    pyplot.close(figure)
    return directory / "curves.png"


def _draw_losses(axis: Any, lines: list[dict[str, Any]], compared: Any) -> None:
    steps = [line["step"] for line in lines]
    axis.plot(steps, [line["loss"] for line in lines], color="tab:blue", label="sharded")
    if compared:
        losses = compared["unsharded"]["losses"]
        label = f"unsharded, first {len(losses)} steps"
        axis.plot(range(1, len(losses) + 1), losses, "o", color="black", fillstyle="none", label=label)
    axis.set(xscale="log", xlabel="step (log scale)", ylabel="training loss (nats a byte)", title="Loss")


def _draw_memory(axis: Any, lines: list[dict[str, Any]], compared: Any) -> None:
    for rank in range(max(len(line["memory_bytes"]) for line in lines)):
        some = [line for line in lines if rank < len(line["memory_bytes"])]  # it may have gone on with other ranks
        held = [_mib(line["memory_bytes"][rank]) for line in some]
        axis.plot([line["step"] for line in some], held, LINES[rank % len(LINES)], label=f"rank {rank}")
    if compared:
        held = [_mib(size) for size in compared["unsharded"]["memory"]]
        label = f"unsharded, first {len(held)} steps"
        axis.plot(range(1, len(held) + 1), held, "o", color="black", fillstyle="none", label=label)
    axis.set(xscale="log", xlabel="step (log scale)", ylabel=MEMORY, title="Memory after a step")
    axis.set_ylim(0, 1.4 * axis.get_ylim()[1])  # room for the legend


def _draw_parts(axis: Any, compared: Any) -> None:
    activations = {"activations": compared["unsharded"]["activations"]}  # a rank keeps as much
    measured = [each | activations for each in (*compared["ranks"], compared["unsharded"])]
    names = [f"rank {rank}" for rank in range(len(measured) - 1)] + ["unsharded"]
    bottom = [0.0] * len(measured)
    for part, (color, hatch) in PARTS.items():
        sizes = [
            _mib(each[part]) if part in each else max(0.0, _mib(each["peak"]) - below)
            for each, below in zip(measured, bottom, strict=True)
        ]
        axis.bar(names, sizes, 0.6, bottom, color=color, hatch=hatch, edgecolor="black", linewidth=0.6, label=part)
        bottom = [below + size for below, size in zip(bottom, sizes, strict=True)]
    axis.set(ylabel=MEMORY, title="Peak of the first steps", xlim=(-0.5, len(names) + 0.8))  # room for the legend


def _mib(size: float) -> float:
    return size / 2**20
