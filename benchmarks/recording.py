"""Pictures of a recording of two ranks, of which one is slow; and what it costs to look on.

    python benchmarks/recording.py docs          # docs/recording-step.png, docs/recording-waits.png
    python benchmarks/recording.py --cost        # a step with log_metrics and with record, over one without

Two ranks train a small transformer and exchange messages (``p2p``), as ranks on different hosts do. For the pictures
rank 1 sleeps in the forward of a block. The cost is that of short runs of steps which take turns, in processor time of
a rank, which other programs disturb less than its wall time; the low quartile of the runs counts. Calls of functions
in a step, of Python and C, repeat.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from benchmarks.models import Work
from benchmarks.ranks import run_ranks
from fullshard.report import page

WORK = Work("recording", blocks=4, width=512, sequence=128)
_SLEEP = 0.15
#: A step of some 50 ms on a processor, with many groups.
LOOKED_AT = Work("looked at", blocks=12, width=256, sequence=128)
#: Runs of each kind, and steps of a run.
_TURNS, _STEPS = 6, 3


def record(work: Work) -> fullshard.Recording:
    """Record three steps of two ranks; on rank 0 the recording has both."""
    model, train = _trained(work)
    if dist.get_rank() == 1:
        model.blocks[2].register_forward_pre_hook(lambda *_: time.sleep(_SLEEP))
    train(3)
    recording = fullshard.record(model, steps=3)
    train(3)
    recording.gather()
    return recording


def draw(recording: fullshard.Recording, folder: Path) -> None:
    """Write the pictures that docs/record.md shows."""
    rank = recording.ranks[0]
    steps = rank.steps()
    shortest = min(steps, key=lambda step: steps[step][1] - steps[step][0])
    page.draw_step(rank, shortest).savefig(folder / "recording-step.png", dpi=100)
    page.draw_waits(recording.ranks).savefig(folder / "recording-waits.png", dpi=100)


def cost(work: Work) -> dict[str, tuple[float, int]]:
    """Processor seconds of a step of this rank, by what looks on, the low quartile; and calls of functions in it."""
    model, train = _trained(work)
    train(3)
    nowhere: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "log_metrics": lambda: fullshard.log_metrics(model, os.devnull),
        "record": lambda: fullshard.record(model, steps=_STEPS + 1),
    }
    found: dict[str, list[float]] = {name: [] for name in nowhere}
    for _ in range(_TURNS):
        for name, begin in nowhere.items():
            looking = begin()
            before = time.process_time()
            train(_STEPS)
            found[name].append((time.process_time() - before) / _STEPS)
            if looking is not None:
                looking.stop()
    calls = dict.fromkeys(nowhere, 0)

    for name, begin in nowhere.items():
        looking = begin()
        train(1)
        calls[name] = _calls(train)
        if looking is not None:
            looking.stop()
    return {name: (sorted(times)[len(times) // 4], calls[name]) for name, times in found.items()}


def _calls(train: Callable[[int], None]) -> int:
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    train(1)
    sys.setprofile(None)
    return count


def _trained(work: Work) -> tuple[Any, Callable[[int], None]]:
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    model: nn.Module = work.build()
    fullshard.fully_shard_blocks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(steps: int) -> None:
        for number in range(steps):
            model(work.batch(dist.get_rank(), number)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return model, train


def main() -> None:
    """Draw, or measure."""
    if "--cost" in sys.argv:
        times = run_ranks(cost, 2, LOOKED_AT)[0]
        plain, fewest = times["nothing"]
        groups = LOOKED_AT.blocks + 1
        for name, (seconds, calls) in times.items():
            print(
                f"{name:<12} {1e3 * seconds:8.2f} ms of a processor a step ({seconds / plain:.3f}), "
                f"{(calls - fewest) / groups:.0f} more calls a group"
            )
        return
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    recording = run_ranks(_recorded, 2, WORK)[0]
    draw(fullshard.Recording(recording), folder)
    for finding in fullshard.Recording(recording).findings():
        print(f"{finding.kind}: {finding.text} {finding.advice}")


def _recorded(work: Work) -> Any:
    return record(work).ranks


if __name__ == "__main__":
    main()
