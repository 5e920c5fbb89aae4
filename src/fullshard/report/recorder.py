"""The recorder: notes what one rank does while steps run.

It listens to the log of the steps and to the lanes, and notes the time of what it is told. On the CPU, times are the
host's. On devices with streams, times are the device's: timing events are put into the streams and read after the last
step, so that nothing waits for the device during a step.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from fullshard.comm.waits import WAITS, Wait
from fullshard.device import Mark, Pending
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import plain_name
from fullshard.group.step import Action
from fullshard.report.rank_trace import Lane, RankTrace, Span
from fullshard.report.watching import (
    Point,
    StepObserver,
    TimedMark,
    gathered_from_others,
    reduced_from_others,
    summed_from_replicas,
)
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.states import Backward
from fullshard.torch_private import running_backward

#: Schedules that are being recorded.
RUNNING: weakref.WeakSet[Schedule] = weakref.WeakSet()
#: The parts of a change of an elastic job, in their order, by the names of their seconds.
_CHANGE = {"change_agreed_seconds": "agree", "change_joined_seconds": "form rows", "change_trained_seconds": "train"}


class _Communication:
    """One communication that is recorded: the work that a lane is given, with its start and end."""

    def __init__(self, recorder: Recorder, lane: Lane, group: str, nbytes: int) -> None:
        self._recorder, self._clock, self._is_host = recorder, recorder.clock, recorder.clock.streams is None
        number = recorder.count(lane, group)
        self.span = Span(lane, lane, group, recorder.during, recorder.step, 0, 0, number, nbytes)
        self._begin: Point = None
        self._completes: Point = None

    def run(
        self,
        run_in_lane: Callable[..., Mark],
        start: Callable[[], Pending],
        then: Callable[[], None] | None,
        after: Any,
    ) -> Mark:
        """Give a lane its work, with notes of the start and the end. ``run_in_lane`` is the lane's own ``run``."""
        span, recorder = self.span, self._recorder
        if self._is_host:
            recorder.under_way[span.lane, span.group] = span.number
        begin: Point = self._clock.now() if self._is_host else 0
        mark = run_in_lane(partial(self._start, start), partial(self._end, then), after)
        if not self._is_host:
            return TimedMark(mark, recorder, partial(recorder.note_wait, span))
        recorder.note(span._replace(lane="host", start=begin, end=self._clock.now(), nbytes=0))
        return mark

    def _start(self, start: Callable[[], Pending]) -> Pending:
        self._begin = self._clock.now()
        self._pending = start()
        return self

    def finish(self) -> None:
        """Complete the communication, as a lane asks of what is pending in it."""
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


class Recorder(StepObserver):
    """Takes the trace of one rank."""

    def __init__(self, schedule: Schedule, model: nn.Module, steps: int, first_step: int) -> None:
        super().__init__(schedule)
        self._last_step = first_step + steps - 1
        self._spans: list[Span] = []
        self._memory_samples: list[tuple[Point, int]] = []
        self.step, self.during = first_step, ""
        self._step_of_pass = first_step  # the step of the last pass
        self._begun: Point = None  # start of the running pass
        self._begun_to_step: Point = None  # start of the running optimizer step
        self._counts: Counter[tuple[int, str, str]] = Counter()
        #: On the CPU, the number of the last communication that was started, by lane and group.
        self.under_way: dict[tuple[str, str], int] = {}
        self._computing: dict[tuple[str, str], list[Point]] = {}
        self._gathering = ""
        self._groups = list(schedule.groups)
        self._names = _names_of(self._groups)
        self._by_tag = {group.tag: self._names[id(group)] for group in self._groups}
        self._received = {self._names[id(group)]: gathered_from_others(group) for group in self._groups}
        #: The process groups of groups that hosts exchange by messages, by tag; these messages, by group and start.
        self._of_hosts = {each.tag: each.data.shard_group for each in self._groups if each.transport.peers is not None}
        self._network: dict[tuple[str, int], Span] = {}
        self.observe_lanes(self._run)
        self._hooks: list[RemovableHandle] = []
        self._units: dict[Any, str] = {}
        names = {module: plain_name(name) or "root" for name, module in model.named_modules()}
        for unit in schedule.units:
            name = self._units[unit] = ", ".join(names.get(module, "?") for module in unit.modules)
            # No other hook runs where a recomputation stops early.
            stops = torch.compiler.disable(partial(self._computed, "recomputation", name))
            self._hooks += [module.register_forward_hook(stops, always_call=True) for module in unit.modules]
        RUNNING.add(schedule)

    def stop(self) -> None:
        super().stop()
        RUNNING.discard(self.schedule)
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> RankTrace:
        """Return what was recorded, with times of this host's clock."""
        self.clock.end()
        time_of = self.clock.time_of
        every = [*self._spans, *self._network.values()]
        spans = [span._replace(start=time_of(span.start), end=time_of(span.end)) for span in every]
        return RankTrace(
            dist.get_rank() if dist.is_initialized() else 0,
            socket.gethostname(),
            self.schedule.device.type,
            self.memory.name,
            spans=sorted(spans, key=lambda span: (span.start, -span.end)),
            memory=[(time_of(when), nbytes) for when, nbytes in self._memory_samples],
            groups={self._names[id(group)]: group.full.buffer.nbytes for group in self._groups},
        )

    def note(self, span: Span) -> None:
        """Add a span that has ended. Its times may be events."""
        self._spans.append(span)

    def note_wait(self, span: Span, begin: Point, end: Point) -> None:
        """Add a wait of a device's computation for a communication."""
        self.note(span._replace(lane="wait", during=self.during, start=begin, end=end))

    def count(self, what: str, group: str) -> int:
        """Return how many with the same name and group began earlier in this step, and count this one."""
        key = self.step, what, group
        self._counts[key] += 1
        return self._counts[key] - 1

    def _sample_memory(self, when: Point) -> None:
        self._memory_samples.append((when, self.memory.now()))

    # Communication

    def _run(
        self, lane: Lane, run: Callable[..., Mark], start: Callable[[], Pending], then: Any = None, after: Any = None
    ) -> Mark:
        """Run the work of a lane. For a gather the group is the one that is being unsharded; otherwise ``start`` is a
        method of the group's reduction."""
        if lane == "gather":
            name, nbytes = self._gathering, self._received.get(self._gathering, 0)
        else:
            reduction = start.__self__  # type: ignore[attr-defined]
            group = reduction._of.group
            name = self._names.get(id(group), "?")
            if lane == "reduce":
                nbytes = reduced_from_others(group, sum(part.full.nbytes for part in reduction._plan.parts))
            else:
                nbytes = summed_from_replicas(group, sum(each.nbytes for each in reduction._outputs))
        return _Communication(self, lane, name, nbytes).run(run, start, then, after)

    def waited(self, wait: Wait, begin: int, end: int) -> None:
        group, what, number = "", wait.what, 0
        if wait.tag >= 0:
            group = self._by_tag.get(wait.tag, "?")
            what = "gather" if wait.gathers or "gather" in wait.what else "reduce"
            number = self.under_way.get((what, group), 0)
            if wait.process_group is not None and self._of_hosts.get(wait.tag) is wait.process_group:
                start = WAITS.begun.get((wait.tag, wait.gathers), begin)  # not known of those before the first step
                span = Span("network", what, group, self.during, self.step, start, end, number)
                self._network[f"{what} {group}", start] = span  # up to its last round
        else:
            number = self.count(what, group)
        self.note(Span("wait", what, group, self.during, self.step, begin, end, number))

    def waited_for_disk(self, begin: int, end: int) -> None:
        self.note(Span("disk", "disk", "", self.during, self.step, begin, end, self.count("disk", "")))

    def happened(self, figures: dict[str, float]) -> None:
        end = time.monotonic_ns()  # of the last part
        for name, what in reversed(_CHANGE.items()):
            begin = end - int(1e9 * figures.get(name, 0.0))
            if name in figures:
                self.note(Span("change", what, "", "", self._step_of_pass, begin, end, self.count(what, "")))
            end = begin

    # Passes and steps

    def logged(self, action: Action, subject: Any, flag: bool) -> None:
        if action == "gather":
            self._gathering = self._names[id(subject)]
        elif action == "end" and self.during == subject:
            self._end(subject, self._begun)
        super().logged(action, subject, flag)  # where the step ends
        if action == "begin" and self.is_running:
            self.during, self._begun = subject, self.clock.now()
            self._computing.clear()
            self._sample_memory(self._begun)
        elif action in ("forward", "backward") and subject in self._units:
            recomputes = running_backward() >= 0 or (flag and isinstance(subject.state, Backward))
            what = "recomputation" if action == "forward" and recomputes else action
            (self._compute if flag else self._computed)(what, self._units[subject])

    def _end(self, what: str, begun: Point) -> None:
        now = self.clock.now()
        self._step_of_pass = self.step
        self.note(Span("pass", what, "", self.during, self.step, begun, now, self.count("pass", what)))
        self._sample_memory(now)
        if self.during == what:
            self.during = ""

    def before_step(self) -> None:
        self.during, self._begun_to_step = self.during or "optimizer", self.clock.now()

    def after_step(self) -> None:
        self._end("optimizer", self._begun_to_step)

    def end_step(self) -> None:
        if self.step == self._last_step:
            self.stop()
        self.step += 1

    def _compute(self, what: str, name: str) -> None:
        now = self.clock.now()
        self._computing.setdefault((what, name), []).append(now)
        self._sample_memory(now)

    def _computed(self, what: str, name: str, *args: Any) -> None:
        begun = self._computing.get((what, name))
        if begun:
            now = self.clock.now()
            number = self.count(what, name)
            self.note(Span("computation", what, name, self.during, self.step, begun.pop(), now, number))
            self._sample_memory(now)


def _names_of(groups: Sequence[ParamGroup]) -> dict[int, str]:
    """The names of groups, by id. If a unit has several groups, their names have numbers."""
    found: dict[int, str] = {}
    for group in groups:
        name = group.name or "root"
        taken = [*found.values()].count(name)
        found[id(group)] = f"{name} ({taken + 1})" if taken else name
    return found
