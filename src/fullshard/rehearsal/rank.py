"""The process that trains as one rank of many: runs a program over a simulated network, and measures its steps.

A step ends when the first optimizer that has stepped steps again. After some steps without measurement come those that
are timed, and after these a few that are looked at more closely. Then the program is ended.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import fullshard
from fullshard.device import is_host
from fullshard.rehearsal.command import ASKED
from fullshard.rehearsal.network import Network, RehearsalError, connect
from fullshard.report.findings import waited
from fullshard.report.profile import Trace, profile
from fullshard.report.watching import Clock, Memory
from fullshard.schedule.hooks import when_sharded
from fullshard.schedule.unit import Unit

#: Steps before those that are timed, and steps of which the waits are recorded.
_WARM_UP, _RECORDED = 2, 2
#: A stream that does nothing for so many microseconds waits.
_GAP = 20.0


class _Enough(BaseException):
    """Ends the program: all steps are measured."""


class Observer:
    """Measures the steps of the program that runs in this process."""

    def __init__(self, network: Network, steps: int) -> None:
        self._network, self._steps = network, steps
        self._first: int | None = None  # id of the optimizer whose steps are counted
        self.steps_done = 0
        self._points = list[Any]()
        self._clock: Clock | None = None
        self._memory: Memory | None = None
        self._begun = 0.0
        self._trace: Trace | None = None
        self._profiler: Any = None
        self._next_forward: Any = None  # the handle of a hook that runs before the next forward
        self._units = list[Unit]()
        self._before: tuple[Any, float] = ({}, 0.0)
        self.found: dict[str, Any] = {}
        register_optimizer_step_post_hook(self._stepped)
        when_sharded(self._units.append)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._first in (None, id(optimizer)):
            self._first = id(optimizer)
            self.steps_done += 1
            self._end_step(next(param for group in optimizer.param_groups for param in group["params"]).device)

    def _end_step(self, device: torch.device) -> None:
        at = self.steps_done - _WARM_UP
        if at == 0:
            self._clock, self._memory = Clock(device), Memory(device)
            if not is_host(device):
                torch.accelerator.reset_peak_memory_stats(device)
            self._before = self._network.totals(), self._network.waited()
        if self._clock is None or self._memory is None:
            return
        if at <= self._steps:
            self._points.append(self._clock.now())
        if at == 1:
            self._next_forward = register_module_forward_pre_hook(self._note_memory)
        if at == self._steps:
            self._clock.end()
            self._summarize(device)
        if at >= self._steps:
            self._look_closer(at - self._steps, device)

    def _note_memory(self, *_: Any) -> None:
        """Notes the memory before a forward, when gradients and activations are freed as a rule."""
        self._next_forward.remove()
        assert self._memory is not None
        self.found["memory between steps, bytes"] = self._memory.now()

    def _summarize(self, device: torch.device) -> None:
        """What the timed steps have shown."""
        assert self._clock is not None
        assert self._memory is not None
        times = [self._clock.between(*each) for each in zip(self._points, self._points[1:], strict=False)]
        totals, waited_before = self._before
        each = {}
        for kind, now in self._network.totals().items():
            then = totals.get(kind)
            count, nbytes, seconds = now.count, now.bytes, now.seconds
            if then is not None:
                count, nbytes, seconds = count - then.count, nbytes - then.bytes, seconds - then.seconds
            if count:
                values = (count / len(times), nbytes / len(times), seconds / len(times))
                each[kind] = dict(zip(("count", "bytes", "seconds"), values, strict=True))
        self.found |= {"device": str(device), "step, seconds": statistics.median(times), "collectives": each}
        self.found |= {"collectives, seconds": sum(kind["seconds"] for kind in each.values())}
        self.found |= {"memory at the peak, bytes": self._memory.peak()}
        if is_host(device):
            self.found["waited, seconds"] = (self._network.waited() - waited_before) / len(times)
        else:
            self.found["memory reserved, bytes"] = torch.cuda.memory_reserved(device)

    def _look_closer(self, at: int, device: torch.device) -> None:
        """Further steps: one for the host's time, one for the streams, and some for what is waited for."""
        assert self._clock is not None
        if not is_host(device):
            asked = time.perf_counter() - self._begun
            self._clock.end()
            if at == 1:
                self.found["host, seconds"] = asked
                self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self._profiler.start()
            elif at == 2:
                self._profiler.stop()
                self.found["streams"] = _streams(self._profiler)
            self._begun = time.perf_counter()
            at -= 2
        if at == 0 and self._units:
            self._next_forward = register_module_forward_pre_hook(self._record)  # a trace registers hooks of its own
        elif at >= 0 and not (self._trace is not None and self._trace.is_running):
            self.found["waits"] = [] if self._trace is None else _waits(self._trace)
            raise _Enough

    def _record(self, *_: Any) -> None:
        """Begins the trace of the sharded model before its next forward."""
        self._next_forward.remove()
        root = max((module for unit in self._units for module in unit.modules), key=lambda m: len([*m.modules()]))
        self._trace = profile(root, _RECORDED)


def streams_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The streams of a device in a trace of torch's profiler, that of the computation first: the number of kernels,
    seconds in which they run, seconds from the first to the last, and the longest gaps with the kernel after them."""
    lanes = defaultdict[int, list[tuple[float, float, str]]](list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            lanes[event["args"]["stream"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    found = []
    for stream, spans in sorted(lanes.items(), key=lambda lane: -sum("spin" not in each[2] for each in lane[1])):
        spans.sort()
        until, busy, gaps = spans[0][0], 0.0, list[tuple[float, str]]()
        for begin, end, name in spans:
            if begin - until > _GAP:
                gaps.append((begin - until, name))
            busy += max(0.0, end - max(begin, until))
            until = max(until, end)
        longest = [{"seconds": gap / 1e6, "before": name[:80]} for gap, name in sorted(gaps, reverse=True)[:5]]
        waits = sum(gap for gap, _ in gaps) / 1e6
        asleep = sum(end - begin for begin, end, name in spans if "spin" in name) / 1e6
        found.append(
            {"stream": stream, "kernels": len(spans), "busy, seconds": busy / 1e6, "waits, seconds": waits}
            | {"network, seconds": asleep, "span, seconds": (until - spans[0][0]) / 1e6, "longest waits": longest}
        )
    return found


def _streams(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(file := Path(folder, "trace.json")))
        return streams_of(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])


def _waits(trace: Trace) -> list[dict[str, Any]]:
    """What the rank waited for in a step, the longest first."""
    seconds = defaultdict[tuple[str, str], float](float)
    trace.stop()
    for each in waited(trace.ranks):
        seconds[each.what, each.group] += each.length / 1e9
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return [{"what": what, "group": group, "seconds": length} for (what, group), length in ordered]


def _use_torch() -> None:
    """Gives names of fullshard to torch's FSDP, for programs that import them, and refuses what torch lacks."""
    theirs = importlib.import_module("torch.distributed.fsdp")
    for name in fullshard.__all__:
        if hasattr(theirs, name):
            setattr(fullshard, name, getattr(theirs, name))

    def refuse(unit: Unit) -> None:
        raise RehearsalError("the program shards in a way that torch's FSDP lacks: leave --against torch out")

    when_sharded(refuse)


def main() -> int:
    """Runs the program that :data:`ASKED` names, and writes what was found into a file."""
    asked = json.loads(os.environ.pop(ASKED))
    network = connect(asked["rank"], asked["ranks"], asked["latency"], asked["bandwidth"])
    if asked["library"] == "torch":
        _use_torch()
    else:
        fullshard.patch()
    observer = Observer(network, asked["steps"])
    program = asked["program"]
    sys.argv = [program, *asked["arguments"]]
    try:
        if asked["is_module"]:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program).resolve().parent))
            runpy.run_path(program, run_name="__main__")
    except _Enough:
        how = {"network in Python": network.why, "seconds of a call": network.seconds_of_a_call()}
        Path(asked["results"]).write_text(json.dumps(observer.found | how), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads and workers of the program need not end
    raise RehearsalError(
        f"{program} ended after {observer.steps_done} steps of its first optimizer, and {asked['steps'] + _WARM_UP} or "
        f"more are needed: let it train longer, or give fewer --steps"
    )


if __name__ == "__main__":
    raise SystemExit(main())
