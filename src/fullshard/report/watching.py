"""The step observer, on which traces and metrics are built: clock, memory, lanes, waits and optimizer steps.

It overrides methods of single objects, and removes the overrides when it stops. Classes do not change. The
exceptions are the class of :data:`WAITS`, because code that waits assigns an attribute there and calls no method, and
the function that is called after a wait for a disk.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullshard.comm.shm import ShmTransport
from fullshard.comm.waits import WAITS, Wait, Waits
from fullshard.device import Mark, Streams, is_host, streams_of
from fullshard.disk.file import DiskWork
from fullshard.group.param_group import ParamGroup
from fullshard.group.step import Action
from fullshard.platforms import linux, peak_memory
from fullshard.schedule.schedule import Schedule
from fullshard.torch_private import running_backward

#: A point in time: nanoseconds of the host's clock, or an event of a device, whose time is known later.
Point = Any
_NOTHING = object()


class Clock:
    """The source of times: the host's clock, or events in the streams of a device."""

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
        event = torch.Event(self._device, enable_timing=True)  # streams of other devices refuse subclasses
        event.record(self.streams.current(self._device))
        return event

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

    def total(self, intervals: Iterable[tuple[Point, Point]]) -> float:
        """Seconds of intervals together."""
        if self.streams is None:  # without a call for each
            return sum([end - begin for begin, end in intervals]) / 1e9
        return sum(self.between(begin, end) for begin, end in intervals)

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
        self._file, self._status, self._page = -1, -1, mmap.PAGESIZE
        if is_host(device) and hasattr(os, "pread") and os.path.exists("/proc/self/statm"):
            self._file, self._status = (os.open(f"/proc/self/{name}", os.O_RDONLY) for name in ("statm", "status"))
            for file in (self._file, self._status):
                weakref.finalize(self, os.close, file)

    def now(self) -> int:
        """The memory in use, in bytes; 0 if it is unknown."""
        if self._file >= 0:
            return int(linux.pread(self._file, 64, 0).split()[1]) * self._page
        return 0 if is_host(self._device) else torch.accelerator.memory_allocated(self._device)

    def peak(self) -> int:
        """The largest memory in use so far, in bytes; 0 if it is unknown."""
        if not is_host(self._device):
            return torch.accelerator.max_memory_allocated(self._device)
        if self._status < 0:
            return peak_memory()
        status = linux.pread(self._status, 4096, 0).partition(b"VmHWM:")[2]  # getrusage starts from the parent's peak
        return max(int(status.partition(b"kB")[0] or 0) * 1024, self.now())  # the kernel's count lags behind


class _Stack:
    """The functions that override a method of one object, the innermost first. The override has the stack as an
    attribute."""

    def __init__(self, owner: Any, name: str) -> None:
        self._attributes, self._name = vars(owner), name
        self._method, self._before = getattr(owner, name), self._attributes.get(name, _NOTHING)
        self.functions: list[Callable[..., Any]] = []

    def show(self) -> None:
        shown = self._method
        for function in self.functions:
            shown = partial(function, shown)
            vars(shown)["stack"] = self
        if self.functions:
            self._attributes[self._name] = shown
        elif self._before is _NOTHING:
            del self._attributes[self._name]
        else:
            self._attributes[self._name] = self._before


class Overrides:
    """Overrides of methods, until they are removed. Others may override the same methods at the same time."""

    def __init__(self) -> None:
        self._overridden: list[tuple[_Stack, Callable[..., Any]]] = []

    def around(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Override a method of an object: ``function`` is called with the method, and then the method's arguments."""
        stack = getattr(vars(owner).get(name), "stack", None) or _Stack(owner, name)
        stack.functions.append(function)
        stack.show()
        self._overridden.append((stack, function))

    def remove(self) -> None:
        """Remove all overrides, the last one first."""
        while self._overridden:
            stack, function = self._overridden.pop()
            stack.functions.remove(function)
            stack.show()


class StepObserver:
    """Observes the steps of a schedule until it is stopped. Subclasses override the methods that it calls.

    A training step ends when optimizers have updated all trained parameters: one optimizer, several, or one for each
    parameter in the backward. If no optimizer updates some of them, the step ends before the next forward.

    Only its schedule and its user keep it alive, so it ends with the model.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.clock, self.memory = Clock(schedule.device), Memory(schedule.device)
        self.overrides, self._elsewhere = Overrides(), Overrides()
        self._streams: set[Any] = set()
        self._trained: set[int] = set()  # ids of parameters
        self._params = weakref.WeakKeyDictionary[Optimizer, tuple[int, set[int]]]()
        self._waiting: set[int] | None = None  # parameters not updated yet in this step; None before an optimizer steps
        self.is_running = True
        schedule.log.listeners.append(self.logged)
        _follow_steps()
        _observers.append(weakref.ref(self, _observers.remove))
        DiskWork.on_wait = _waited_for_disk
        if self.clock.streams is None:
            self._observe_waits()

    def stop(self) -> None:
        """Stop, and remove all overrides. May be called again."""
        self.is_running = False
        if self.logged in self.schedule.log.listeners:
            self.schedule.log.listeners.remove(self.logged)
        self.overrides.remove()
        self._elsewhere.remove()
        _observers[:] = [each for each in _observers if each() is not self]
        if not _observers:
            WAITS.__class__ = Waits
            DiskWork.on_wait = _ignored

    def logged(self, action: Action, group: ParamGroup, moves: bool) -> None:
        """Something happens to a group, see :class:`~fullshard.schedule.step_log.StepLog`."""

    def waited(self, wait: Wait, begin: int, end: int) -> None:
        """Called after each wait of the host, also after short waits of ranks that share memory. Times are in
        nanoseconds."""

    def waited_for_disk(self, begin: int, end: int) -> None:
        """Called after each wait for values that are read from a disk or written to it. Times are in nanoseconds."""

    def before_step(self) -> None:
        """Called before the step of an optimizer that has parameters of the schedule."""

    def after_step(self) -> None:
        """Called after the step of such an optimizer."""

    def end_step(self) -> None:
        """Called when a training step has ended."""

    def observe_steps(self) -> None:
        """Call :meth:`end_step` from now on. Other overrides of the same methods must be in place before."""
        self.overrides.around(self.schedule, "begin_pass", self._begin_pass)
        self.overrides.around(self.schedule, "end_backward", self._end_backward)

    def stepped(self, params: set[int]) -> None:
        """Note that an optimizer has updated these parameters of the schedule."""
        self.after_step()
        self._waiting = (self._trained if self._waiting is None else self._waiting) - params
        if running_backward() < 0:
            self._end_if(not self._waiting)

    def _end_backward(self, end: Callable[[], None]) -> None:
        end()
        self._end_if(not self._waiting)

    def _begin_pass(self, begin: Callable[..., None], kind: str) -> None:
        self._end_if(kind == "forward" and self.schedule.is_idle)
        begin(kind)

    def _end_if(self, is_over: bool) -> None:
        if is_over and self._waiting is not None:
            self._waiting = None
            self.end_step()

    def params_of(self, optimizer: Optimizer) -> set[int]:
        """The ids of the schedule's parameters that an optimizer updates."""
        known = self._params.get(optimizer)
        if known is None or known[0] != len(optimizer.param_groups):
            ours = [param.sharded for group in self.schedule.groups() for param in group.params]
            # An optimizer that steps in the backward skips parameters of which this rank has no elements.
            self._trained = {id(param) for param in ours if param.requires_grad and param.numel()}
            given = {id(param) for options in optimizer.param_groups for param in options["params"]}
            known = self._params[optimizer] = len(optimizer.param_groups), given & set(map(id, ours))
        return known[1]

    def observe_lanes(self, runner: Callable[..., Mark]) -> None:
        """Override ``run`` of all lanes: ``runner`` is called with the lane's name, its ``run``, and the arguments."""
        for lanes in {id(group.comm): group.comm.lanes for group in self.schedule.groups()}.values():
            for name, lane in zip(("gather", "reduce", "all-reduce"), lanes, strict=True):
                self.overrides.around(lane, "run", partial(runner, name))
                self._streams.add(lane._stream)

    def computes_here(self) -> bool:
        """Whether the current stream of the device is none of the lanes'."""
        streams = self.clock.streams
        return streams is not None and streams.current(self.schedule.device) not in self._streams

    def _observe_waits(self) -> None:
        """Observe all waits of this process. Several models may share one object for the ranks of a host, so that
        object keeps only a weak reference to the observer."""
        transports = {each for g in self.schedule.groups() for each in (g.transport, g.reduce_transport)}
        for ranks in {each.local_ranks for each in transports if isinstance(each, ShmTransport)}:
            self._elsewhere.around(ranks, "wait", partial(_observed_wait, weakref.ref(self)))
        weakref.finalize(self, self._elsewhere.remove)
        WAITS.__class__ = _ObservedWaits


def from_others(nbytes: int, ranks: int) -> int:
    """The bytes that a rank receives from other ranks when it gathers ``nbytes``."""
    return nbytes * (ranks - 1) // ranks


class TimedMark:
    """A mark of a device's lane that is timed: ``report`` is called with the start and end of the first wait of the
    computation for it."""

    def __init__(self, mark: Mark, observer: StepObserver, report: Callable[[Point, Point], None]) -> None:
        self._mark, self._observer = mark, observer
        self._report: Callable[[Point, Point], None] | None = report

    def wait(self) -> None:
        observer = self._observer
        if self._report is None or not observer.is_running or not observer.computes_here():
            self._mark.wait()
            return
        report, self._report = self._report, None
        begin = observer.clock.now()
        self._mark.wait()
        report(begin, observer.clock.now())


#: The observers that run.
_observers: list[weakref.ref[StepObserver]] = []
_ignored = DiskWork.on_wait


def _waited_for_disk(begin: int, end: int) -> None:
    for observer in [reference() for reference in _observers]:
        if observer is not None:
            observer.waited_for_disk(begin, end)


@cache
def _follow_steps() -> None:
    """Register one hook for all observers, for good: a hook must not be removed while torch iterates over its hooks."""

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for observer in [reference() for reference in _observers]:
            if observer is not None and observer.params_of(optimizer):
                observer.before_step()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for observer in [reference() for reference in _observers]:
            if observer is not None and (params := observer.params_of(optimizer)):
                observer.stepped(params)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


class _ObservedWaits(Waits):
    """The class of :data:`WAITS` while an observer runs."""

    @property
    def current(self) -> Wait | None:
        return vars(self)["current"]

    @current.setter
    def current(self, wait: Wait | None) -> None:
        attributes = self.__dict__
        before, attributes["current"] = attributes["current"], wait
        if before is None:
            _begin[0] = time.monotonic_ns()
        elif wait is None and not _inside:
            now = time.monotonic_ns()
            for reference in _observers:
                if (observer := reference()) is not None:
                    observer.waited(before, _begin[0], now)


_begin = [0]
#: Waits of ranks that share memory and are under way. Only long ones appear in :data:`WAITS`.
_inside: list[str] = []


def _observed_wait(
    observer: weakref.ref[StepObserver], wait: Callable[..., None], counters: Any, value: int, doing: str, tag: int = -1
) -> None:
    begin = time.monotonic_ns()
    _inside.append(doing)
    try:
        wait(counters, value, doing, tag)
    finally:
        _inside.pop()
        if (running := observer()) is not None:
            running.waited(Wait(doing, None, tag), begin, time.monotonic_ns())
