"""What it costs to look on: a step with log_metrics and with profile, over one without.

    python benchmarks/recording.py

Two ranks train a small transformer and exchange messages (``p2p``), as ranks on different hosts do. The cost is the
time in the functions that look on, measured in them, over the processor time of the thread that trains, without its
waits, in a step without them. Of each the lower quartile counts. What the measurement takes itself counts for them.
Calls of functions in a step, of Python and C, repeat.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from benchmarks.models import Work
from benchmarks.ranks import run_ranks
from fullshard.comm.waits import Waits
from fullshard.report import watching

#: Many groups, each with little to compute.
LOOKED_AT = Work("looked at", blocks=12, width=256, sequence=128)
#: Steps that are measured.
_STEPS = 20


@dataclass
class Cost:
    """What looks on in a step.

    Args:
        seconds: in its functions, without what they stand in for.
        step: seconds of processor time of the thread that trains, without waits.
        calls: of functions of Python and C.
    """

    seconds: float
    step: float
    calls: int


def cost(work: Work) -> dict[str, Cost]:
    """What a step takes on this rank, by what looks on."""
    model, train = _trained(work)
    train(3)
    nowhere: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "log_metrics": lambda: fullshard.log_metrics(model, os.devnull),
        "profile": lambda: fullshard.profile(model, steps=_STEPS + 2),
    }
    found: dict[str, Cost] = {}
    for name, begin in nowhere.items():
        looking = begin()
        train(1)
        calls = _calls(train)
        if looking is not None:
            looking.stop()
        with _timed() as spent:
            looking, steps = begin(), list[float]()
            for _ in range(_STEPS):
                before = time.thread_time()
                train(1)
                steps.append(time.thread_time() - before)
            if looking is not None:
                looking.stop()
        seconds = sum(len(times) / _STEPS * _quarter(times) for times in spent.values())
        found[name] = Cost(seconds, _quarter(steps), calls)
    return found


def _quarter(times: list[float]) -> float:
    """The lower quartile, which other programs disturb little."""
    return sorted(times)[len(times) // 4]


@contextmanager
def _timed() -> Iterator[dict[str, list[float]]]:
    """Measure the functions that look on: those that listen, those that run the work of lanes, and ends of steps."""
    spent: defaultdict[str, list[float]] = defaultdict(list)
    params_of, listen, now = watching.StepObserver.params_of, watching.StepObserver._listen, time.perf_counter

    def in_place(function: Callable[..., Any], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        below = 0.0

        def timed_method(*args: Any, **kwargs: Any) -> Any:
            nonlocal below
            begin = now()
            try:
                return method(*args, **kwargs)
            finally:
                below += now() - begin

        begin = now()
        try:
            return function(timed_method, *args, **kwargs)
        finally:
            spent["lanes"].append(now() - begin - below)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = now()
            result = function(*args)
            spent[name].append(now() - begin)
            return result

        return call

    def listen_timed(self: Any, listeners: list[Any], listener: Callable[..., Any]) -> None:
        is_log = listeners is self.schedule.log.listeners
        listen(self, listeners, timed("log", listener) if is_log else partial(in_place, listener))

    with ExitStack() as puts:
        put = mock.patch.object
        puts.enter_context(put(watching.StepObserver, "_listen", listen_timed))
        puts.enter_context(put(Waits, "tell", timed("wait", Waits.tell)))
        puts.enter_context(put(watching.StepObserver, "params_of", timed("optimizer", params_of)))
        puts.enter_context(put(watching.StepObserver, "stepped", timed("end", watching.StepObserver.stepped)))
        yield spent


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
    """Measure."""
    found = run_ranks(cost, 2, LOOKED_AT)[0]
    plain, groups = found.pop("nothing"), LOOKED_AT.blocks + 1
    for name, each in found.items():
        print(
            f"{name:<12} {1e6 * each.seconds:8.0f} us of a step of {1e3 * plain.step:.1f} ms "
            f"({each.seconds / plain.step:.2%}), {(each.calls - plain.calls) / groups:.0f} more calls a group"
        )


if __name__ == "__main__":
    main()
