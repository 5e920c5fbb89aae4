"""A picture of one step: which group is gathered, whole and reduced when, and the memory meanwhile.

    python benchmarks/timeline.py docs/pictures/step.png

Two ranks train a small transformer, and exchange messages (``p2p``), as ranks on different hosts do. An observer of
rank 0 writes down what happens to each group. A thread reads how much memory the process has; freed memory goes back
to the kernel at once, so that it is seen to go. Of some steps the fastest is drawn: other programs disturbed it least.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import resident
from benchmarks.models import Work
from benchmarks.ranks import run_ranks
from fullshard import fully_shard_blocks
from fullshard.report.pictures import BLUE, STATES, VERMILION
from fullshard.schedule.step_log import StepEvent

WORK = Work("timeline", blocks=4, width=768, sequence=192)
_STEPS = 8
_MIB = 2**20


@dataclass
class Step:
    """What one rank saw of a step. Times are in seconds from its beginning, memory is in bytes.

    Args:
        events: times, actions and names of groups; beside those of an observer ``reduced``: the gradients are there.
        memory: times, and what the process had then above what it had before the step, when it had no buffers.
        ends: when forward, backward and the whole step ended.
    """

    events: list[tuple[float, str, str]] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Bar:
    """A time in which a group was in a state."""

    group: str
    state: str
    begin: float
    end: float


def record(work: Work, steps: int) -> tuple[Step, dict[str, int]]:
    """Train on this rank, and return the fastest of ``steps`` steps, and the bytes of each group when it is whole."""
    resident.return_what_is_freed()
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    model = work.build()
    sizes = {f"blocks.{number}": work.block_bytes for number in range(work.blocks)}
    sizes[""] = work.model_bytes - sum(sizes.values())
    fully_shard_blocks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank = dist.get_rank()
    for number in range(2):
        _train(model, optimizer, work.batch(rank, number), lambda: None)
    found = [_record_step(model, optimizer, work.batch(rank, number)) for number in range(steps)]
    return min(found, key=lambda step: step.ends[-1]), sizes


def bars(step: Step) -> list[Bar]:
    """Turn events into times: a group is gathered, whole, and its gradients are reduced."""
    opens = {"gather": "gathered", "unshard": "whole", "reuse": "whole", "reduce": "reduced"}
    closes = {"unshard": "gathered", "reshard": "whole", "reduced": "reduced"}
    found: list[Bar] = []
    since: dict[tuple[str, str], float] = {}
    for when, action, group in step.events:
        if (closed := (group, closes.get(action, ""))) in since:
            found.append(Bar(closed[0], closed[1], since.pop(closed), when))
        if action in opens:
            since.setdefault((group, opens[action]), when)
    return found + [Bar(group, state, begin, step.ends[-1]) for (group, state), begin in since.items()]


def draw(step: Step, sizes: dict[str, int], file: Path) -> None:
    """Write the picture to ``file``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(10, 6), sharex=True, gridspec_kw={"height_ratios": [3, 2]}, layout="constrained"
    )
    rows = sorted(sizes)
    lanes = {"gathered": 0.28, "whole": 0.0, "reduced": -0.28}
    for bar in bars(step):
        middle = rows.index(bar.group) - lanes[bar.state]
        above.barh(
            middle,
            1e3 * (bar.end - bar.begin),
            0.26,
            1e3 * bar.begin,
            **STATES[bar.state].bar,
        )
    labels = {
        "gathered": "gathered: from its start to its use",
        "whole": "whole: it may compute",
        "reduced": "gradients reduced: until they are there",
    }
    for state, look in STATES.items():
        above.barh([0], [0], label=labels[state], **look.bar)
    above.set_yticks(range(len(rows)), [name or "root" for name in rows])
    above.invert_yaxis()
    above.set_title("One step of two ranks that exchange messages, seen by rank 0", pad=20)

    times, held = zip(*step.memory, strict=True)
    below.plot(
        [1e3 * when for when in times], [size / _MIB for size in held], "-", color=VERMILION, label="of the process"
    )
    changes, whole = _whole(step, sizes)
    below.step(changes, whole, ":", color=BLUE, where="post", label="of groups that are gathered or whole")
    below.set(xlabel="time (ms)", ylabel="memory above\nthe shards (MiB)")
    below.set_ylim(0, 1.3 * max(held) / _MIB)  # room for the legend
    for name, begin, end in zip(("forward", "backward", "optimizer"), (0.0, *step.ends), step.ends, strict=False):
        for axis in (above, below):
            axis.axvline(1e3 * end, color="black", linewidth=0.8, linestyle="--")
        above.annotate(
            name, (1e3 * (begin + end) / 2, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom"
        )
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    above.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False, fontsize="small")
    below.legend(loc="upper left", frameon=False, fontsize="small", ncols=2)
    with matplotlib.rc_context({"hatch.linewidth": 0.5}):
        figure.savefig(file, dpi=100)
    pyplot.close(figure)


def main() -> None:
    """Record and draw."""
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "step.png")
    step, sizes = run_ranks(record, 2, WORK, _STEPS)[0]
    draw(step, sizes, file)
    print(file)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, ended: Callable[[], None]) -> None:
    loss = model(tokens)
    ended()
    loss.backward()
    ended()
    optimizer.step()
    optimizer.zero_grad()
    ended()


def _record_step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Step:
    step = Step()
    model.free_buffers()
    resident.settle()
    start, before = time.perf_counter(), _memory()

    def see(event: StepEvent) -> None:
        step.events.append((time.perf_counter() - start, event.action, event.group))

    def see_gradient(name: str) -> Callable[[torch.Tensor], None]:
        group = ".".join(name.split(".")[:2]) if name.startswith("blocks") else ""
        return lambda _: step.events.append((time.perf_counter() - start, "reduced", group))

    def watch() -> None:
        while not stop.wait(0.0005):
            step.memory.append((time.perf_counter() - start, _memory() - before))

    hooks = [
        parameter.register_post_accumulate_grad_hook(see_gradient(name)) for name, parameter in model.named_parameters()
    ]
    hooks_end = model.add_observer(see)
    stop = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    _train(model, optimizer, tokens, lambda: step.ends.append(time.perf_counter() - start))
    stop.set()
    watcher.join()
    hooks_end()
    for hook in hooks:
        hook.remove()
    return step


def _memory() -> float:
    """Bytes of this process, less files and what it shares."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def _whole(step: Step, sizes: dict[str, int]) -> tuple[list[float], list[float]]:
    """When the bytes of groups that are gathered or whole change, in ms, and to what, in MiB."""
    changes = [(0.0, 0)]
    for bar in bars(step):
        if bar.state != "reduced":
            changes += [(bar.begin, sizes[bar.group]), (bar.end, -sizes[bar.group])]
    times, whole, now = [], [], 0.0
    for when, change in sorted(changes):
        now += change / _MIB
        times.append(1e3 * when)
        whole.append(now)
    return [*times, 1e3 * step.ends[-1]], [*whole, now]


if __name__ == "__main__":
    main()
