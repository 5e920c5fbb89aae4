"""What takes a recording on one rank: points in time, memory, and functions in the places of a schedule's methods.

Owns what is noted while steps run. On the CPU times are those of the host. On devices with streams they are those of
the device: timing events are put into the streams, and read after the last step, so that nothing waits for the device
in a step.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullshard.comm.waits import Wait
from fullshard.device import Mark, Pending, Streams, is_host, streams_of
from fullshard.group.group import Group
from fullshard.group.owners import owner_of
from fullshard.group.parameter import plain_name
from fullshard.report.recording import Lane, RankRecording, Span
from fullshard.report.watching import Overrides, listen_to_waits, watch_lanes
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import Phase, Unit
from fullshard.torch_private import running_backward

#: A point in time: nanoseconds of the host's clock, or an event of a device that says it later.
Point = Any

#: Schedules that are being recorded.
RUNNING: weakref.WeakSet[Schedule] = weakref.WeakSet()
#: What is called after each step of an optimizer. A recording that ends in such a call takes itself out.
_after_step: list[Callable[[Optimizer, Any, Any], None]] = []


@cache
def _follow_steps() -> None:
    """Keep one hook for all recordings from now on: torch goes through its hooks, and none may be removed meanwhile."""

    def tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for after in [*_after_step]:
            after(optimizer, args, kwargs)

    register_optimizer_step_post_hook(tell)


class Clock:
    """Where times come from: the host, or events in the streams of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.streams: Streams | None = streams_of(device)
        self._begin, self._event = 0, None
        if self.streams is not None:
            self.streams.synchronize(device)
            self._begin, self._event = time.monotonic_ns(), self._record()

    def now(self) -> Point:
        """The point that the current stream, or the host, has reached."""
        return time.monotonic_ns() if self.streams is None else self._record()

    def _record(self) -> Any:
        assert self.streams is not None
        return self.streams.current(self._device).record_event(torch.Event(self._device, enable_timing=True))

    def end(self) -> None:
        """Wait until the device has reached all points."""
        if self.streams is not None:
            self.streams.synchronize(self._device)

    def has_passed(self, point: Point) -> bool:
        """Whether the device has reached a point."""
        return isinstance(point, int) or bool(point.query())

    def between(self, begin: Point, end: Point) -> float:
        """Seconds from one point to another."""
        return (end - begin) / 1e9 if isinstance(begin, int) else begin.elapsed_time(end) / 1e3

    def time_of(self, point: Point) -> int:
        """The time of a point, in nanoseconds of the host's clock."""
        if isinstance(point, int):
            return point
        assert self._event is not None
        return self._begin + int(1e6 * self._event.elapsed_time(point))


class Memory:
    """How much memory this process uses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = "resident memory of the process" if is_host(device) else f"allocated on {device}"
        self._file, self._page = -1, os.sysconf("SC_PAGE_SIZE")
        if is_host(device) and os.path.exists("/proc/self/statm"):
            self._file = os.open("/proc/self/statm", os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)

    def now(self) -> int:
        """In bytes; 0 where it is unknown."""
        if self._file >= 0:
            return int(os.pread(self._file, 64, 0).split()[1]) * self._page
        return 0 if is_host(self._device) else torch.accelerator.memory_allocated(self._device)


class _Communication:
    """One communication that is watched: what a lane is given to do, and its beginning and end."""

    def __init__(self, recorder: Recorder, lane: Lane, group: str, nbytes: int) -> None:
        self._recorder, self._clock, self._is_host = recorder, recorder.clock, recorder.clock.streams is None
        number = recorder.count(lane, group)
        self.span = Span(lane, lane, group, recorder.during, recorder.step, 0, 0, number, nbytes)
        self._begin: Point = None
        self._completes: Point = None

    def run(
        self, do: Callable[..., Mark], start: Callable[[], Pending], then: Callable[[], None] | None, after: Any
    ) -> Mark:
        """Let a lane do its work: ``do`` is its ``run``."""
        span, recorder = self.span, self._recorder
        if self._is_host:
            recorder.under_way[span.lane, span.group] = span.number
        begin: Point = self._clock.now() if self._is_host else 0
        mark = do(partial(self._start, start), partial(self._end, then), after)
        if not self._is_host:
            return _WatchedMark(mark, recorder, span)
        recorder.note(span._replace(lane="host", start=begin, end=self._clock.now(), nbytes=0))
        return mark

    def _start(self, start: Callable[[], Pending]) -> Pending:
        self._begin = self._clock.now()
        self._pending = start()
        return self

    def finish(self) -> None:
        """Complete it, as what is pending in a lane is asked to."""
        if self._is_host:
            self._completes = self._clock.now()
        self._pending.finish()

    def _end(self, then: Callable[[], None] | None) -> None:
        end = self._clock.now()
        self._recorder.note(self.span._replace(start=self._begin, end=end))
        if then is not None:
            then()
        if self._is_host:
            now = self._clock.now()
            self._recorder.note(self.span._replace(lane="host", start=self._completes, end=now, nbytes=0))


class _WatchedMark:
    """A mark of a device's lane: how long the computation waits for it is noted."""

    def __init__(self, mark: Mark, recorder: Recorder, span: Span) -> None:
        self._mark, self._span = mark, span
        self._recorder: Recorder | None = recorder

    def wait(self) -> None:
        recorder = self._recorder
        if recorder is None or not recorder.is_running or not recorder.computes_here():
            self._mark.wait()
            return
        begin = recorder.clock.now()
        self._mark.wait()
        self._recorder = None
        recorder.note(self._span._replace(lane="wait", during=recorder.during, start=begin, end=recorder.clock.now()))


class Recorder:
    """Takes the recording of one rank."""

    def __init__(self, schedule: Schedule, model: nn.Module, steps: int) -> None:
        self._schedule, self._steps = schedule, steps
        self.clock, self._memory = Clock(schedule.device), Memory(schedule.device)
        self._spans: list[Span] = []
        self._held: list[tuple[Point, int]] = []
        self.is_running = True
        self.step, self.during = 0, ""
        self._has_stepped = False  # since the last pass
        self._begun: Point = None  # of the pass or the step of an optimizer that runs
        self._counts: dict[tuple[int, str, str], int] = {}
        #: Communications of the CPU that are under way, by lane and group: the number of the last.
        self.under_way: dict[tuple[str, str], int] = {}
        self._computing: dict[tuple[str, str], list[Point]] = {}
        self._gathering = ""
        groups = schedule.groups()
        self._groups = list(groups)
        self._names = _names_of(groups)
        self._by_tag = {group.tag: self._names[id(group)] for group in groups}
        shares = [(group, group.data.shard_size) for group in groups]
        self._received = {self._names[id(g)]: g.full.buffer.nbytes * (size - 1) // size for g, size in shares}
        self._overrides = Overrides()
        self._streams: set[Any] = set()
        for context in {id(group.comm): group.comm for group in groups}.values():
            self._streams.update(watch_lanes(self._overrides, context, self._run))
        for group in groups:
            self._overrides.around(group, "unshard", partial(self._unshard, self._names[id(group)]))
        self._watch_passes()
        self._undo: list[Callable[[], None]] = [self._overrides.remove]
        names = {module: plain_name(name) or "root" for name, module in model.named_modules()}
        for unit in (unit for unit in schedule.units if isinstance(unit, Unit)):
            self._watch_unit(unit, ", ".join(names.get(module, "?") for module in unit.modules))
        self._undo.append(register_optimizer_step_pre_hook(self._begin_optimizer).remove)
        _follow_steps()
        _after_step.append(self._end_optimizer)
        self._undo.append(partial(_after_step.remove, self._end_optimizer))
        if self.clock.streams is None:
            self._undo.append(listen_to_waits(groups, self._waited))
        RUNNING.add(schedule)

    def stop(self) -> None:
        """Put everything back."""
        if self.is_running:
            self.is_running = False
            for undo in self._undo:
                undo()
            RUNNING.discard(self._schedule)

    def finish(self) -> RankRecording:
        """What was recorded, with the times of this host's clock."""
        self.clock.end()
        time_of = self.clock.time_of
        spans = [span._replace(start=time_of(span.start), end=time_of(span.end)) for span in self._spans]
        return RankRecording(
            dist.get_rank() if dist.is_initialized() else 0,
            socket.gethostname(),
            self._schedule.device.type,
            self._memory.name,
            spans=sorted(spans, key=lambda span: (span.start, -span.end)),
            memory=[(time_of(when), held) for when, held in self._held],
            groups={self._names[id(group)]: group.full.buffer.nbytes for group in self._groups},
        )

    def note(self, span: Span) -> None:
        """Take down what has ended. Its times may be events."""
        self._spans.append(span)

    def count(self, what: str, group: str) -> int:
        """How many like it began before in this step."""
        key = self.step, what, group
        self._counts[key] = number = self._counts.get(key, -1) + 1
        return number

    def computes_here(self) -> bool:
        """Whether the current stream of the device is none of the lanes'."""
        streams = self.clock.streams
        return streams is not None and streams.current(self._schedule.device) not in self._streams

    def _look_at_memory(self, when: Point) -> None:
        self._held.append((when, self._memory.now()))

    # Communication

    def _unshard(self, name: str, unshard: Callable[[], bool]) -> bool:
        self._gathering = name
        return unshard()

    def _run(self, lane: Lane, run: Callable[..., Mark], start: Callable[[], Pending], then: Any, after: Any) -> Mark:
        """Runs what a lane is given, for which group the caller has said or the function's owner knows."""
        group, nbytes = self._gathering, 0
        if lane == "gather":
            nbytes = self._received.get(group, 0)
        else:
            reduction = start.__self__  # type: ignore[attr-defined]
            group, nbytes = self._names.get(id(reduction._group), "?"), _received(reduction, lane)
        return _Communication(self, lane, group, nbytes).run(run, start, then, after)

    def _waited(self, wait: Wait, begin: int, end: int) -> None:
        """Takes down a wait of the host."""
        group, what, number = "", wait.what, 0
        if wait.tag >= 0:
            group = self._by_tag.get(wait.tag // 2, "?")
            what = "reduce" if wait.tag % 2 else "gather"
            number = self.under_way.get((what, group), 0)
        else:
            number = self.count(what, group)
        self.note(Span("wait", what, group, self.during, self.step, begin, end, number))

    # Passes and steps

    def _watch_passes(self) -> None:
        schedule, around = self._schedule, self._overrides.around
        around(schedule, "begin_forward", self._begin_forward)
        around(schedule, "end_forward", partial(self._end_pass, "forward"))
        around(schedule.passes, "begin", self._begin_backward)
        around(schedule, "end_backward", partial(self._end_pass, "backward"))

    def _begin_pass(self, kind: str) -> None:
        if self._has_stepped:
            self.step, self._has_stepped = self.step + 1, False
        self.during, self._begun = kind, self.clock.now()
        self._computing.clear()
        self._look_at_memory(self._begun)

    def _begin_forward(self, begin: Callable[..., bool], unit: Any) -> bool:
        if self._schedule.is_idle:
            self._begin_pass("forward")
        return begin(unit)

    def _begin_backward(self, begin: Callable[..., None], kind: str, groups: Any) -> None:
        if kind == "backward" and self._schedule.passes.kind is None:
            self._begin_pass(kind)
        begin(kind, groups)

    def _end_pass(self, kind: str, end: Callable[..., None], *args: Any) -> None:
        end(*args)
        if self.during == kind:
            self._end(kind)

    def _end(self, what: str) -> None:
        now = self.clock.now()
        self.note(Span("pass", what, "", what, self.step, self._begun, now, self.count("pass", what)))
        self._look_at_memory(now)
        self.during = ""

    def _is_ours(self, optimizer: Optimizer) -> bool:
        params = (param for options in optimizer.param_groups for param in options["params"])
        return any((owner := owner_of(param)) is not None and id(owner[0]) in self._names for param in params)

    def _begin_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.during and self._is_ours(optimizer):
            self.during, self._begun = "optimizer", self.clock.now()

    def _end_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.during == "optimizer" and self._is_ours(optimizer):
            self._end("optimizer")
            self._has_stepped = True
            if self.step + 1 >= self._steps:
                self.stop()

    # Units

    def _watch_unit(self, unit: Unit, name: str) -> None:
        around = self._overrides.around
        around(unit, "pre_forward", partial(self._before_forward, unit, name))
        around(unit, "post_forward", partial(self._after_forward, name))
        around(unit, "begin_backward", partial(self._before_backward, unit, name))
        around(unit, "finish_backward", partial(self._after_backward, name))
        stops = torch.compiler.disable(partial(self._after_recomputation, name))
        for module in unit.modules:
            self._undo.append(module.register_forward_hook(stops, always_call=True).remove)

    def _before_forward(self, unit: Unit, name: str, before: Callable[..., Any], *args: Any) -> Any:
        given = before(*args)
        self._compute("recomputation" if running_backward() >= 0 or unit.phase is Phase.BACKWARD else "forward", name)
        return given

    def _after_forward(self, name: str, after: Callable[..., Any], *args: Any) -> Any:
        self._computed("recomputation" if running_backward() >= 0 else "forward", name)
        return after(*args)

    def _after_recomputation(self, name: str, *args: Any) -> None:
        """Runs also where a recomputation stops early, which no other hook sees."""
        self._computed("recomputation", name)

    def _before_backward(self, unit: Unit, name: str, begin: Callable[..., None], schedule: Schedule) -> None:
        is_first = unit.phase is not Phase.BACKWARD
        begin(schedule)
        if is_first:
            self._compute("backward", name)

    def _after_backward(self, name: str, finish: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._computed("backward", name)
        finish(*args, **kwargs)

    def _compute(self, what: str, name: str) -> None:
        now = self.clock.now()
        self._computing.setdefault((what, name), []).append(now)
        self._look_at_memory(now)

    def _computed(self, what: str, name: str) -> None:
        begun = self._computing.get((what, name))
        if begun:
            now = self.clock.now()
            number = self.count(what, name)
            self.note(Span("computation", what, name, self.during, self.step, begun.pop(), now, number))
            self._look_at_memory(now)


def _names_of(groups: Sequence[Group]) -> dict[int, str]:
    """The names of groups, by id; where a unit has several, with a number."""
    found: dict[int, str] = {}
    for group in groups:
        name = group.name or "root"
        taken = [*found.values()].count(name)
        found[id(group)] = f"{name} ({taken + 1})" if taken else name
    return found


def _received(reduction: Any, lane: Lane) -> int:
    """How many bytes a rank gets from the others when gradients are reduced over shards, or over replicas."""
    data = reduction._group.data
    if lane == "reduce":
        return sum(part.full.nbytes for part in reduction._plan.parts) * (data.shard_size - 1) // data.shard_size
    return 2 * sum(each.nbytes for each in reduction._outputs) * (data.replicate_size - 1) // data.replicate_size
