"""The step observer, on which traces and metrics are built: clock, memory, lanes, waits and optimizer steps.

It listens to the log of a tree's steps, to its lanes, and to the waits of the process, and stops listening when it is
stopped. Nobody listens otherwise, and nothing is told.
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

from fullshard.comm.waits import WAITS, Wait
from fullshard.device import Mark, Streams, is_host, streams_of
from fullshard.disk.file import DiskWork
from fullshard.figures import listeners_for
from fullshard.group.param_group import ParamGroup
from fullshard.group.step import Action
from fullshard.platforms import linux, peak_memory
from fullshard.schedule.schedule import Schedule
from fullshard.torch_private import running_backward

#: A point in time: nanoseconds of the host's clock, or an event of a device, whose time is known later.
Point = Any


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


class StepObserver:
    """Observes the steps of a schedule until it is stopped. Subclasses override the methods that it calls.

    A training step ends when optimizers have updated all trained parameters: one optimizer, several, or one for each
    parameter in the backward. If no optimizer updates some of them, the step ends before the next forward.

    Only its schedule and its user keep it alive, so it ends with the model.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.clock, self.memory = Clock(schedule.device), Memory(schedule.device)
        #: What it listens to: lists of listeners, each with its own. Those of the process keep weak references to it.
        self._listening, self._in_process = list[_Listening](), list[_Listening]()
        self._streams: set[Any] = set()
        self._trained: set[int] = set()  # ids of parameters
        self._params = weakref.WeakKeyDictionary[Optimizer, tuple[int, set[int]]]()
        self._waiting: set[int] | None = None  # parameters not updated yet in this step; None before an optimizer steps
        self.is_running = True
        _follow_steps()
        _observers.append(weakref.ref(self, _observers.remove))
        self._listen(schedule.log.listeners, self.logged)
        weakref.finalize(self, _stop_listening, self._in_process)
        self._listen_weakly(DiskWork.listeners, self.waited_for_disk)
        self._listen_weakly(listeners_for(schedule), self.happened)
        if self.clock.streams is None:
            self._listen_weakly(WAITS.listeners, self.waited)

    def _listen(self, listeners: list[Any], listener: Callable[..., object]) -> None:
        listeners.append(listener)
        self._listening.append((listeners, listener))

    def _listen_weakly(self, listeners: list[Any], method: Callable[..., object]) -> None:
        reference = weakref.WeakMethod(method)
        listeners.append(listener := lambda *told: (method := reference()) and method(*told))
        self._in_process.append((listeners, listener))

    def stop(self) -> None:
        """Stop listening. May be called again."""
        self.is_running = False
        _stop_listening(self._listening)
        _stop_listening(self._in_process)
        _observers[:] = [each for each in _observers if each() is not self]

    def logged(self, action: Action, subject: Any, flag: bool) -> None:
        """Something happens in a step, see :class:`~fullshard.group.step.Log`."""
        if action == "begin":
            self._end_if(subject == "forward")
        elif action == "end" and subject == "backward":
            self._end_if(not self._waiting)

    def waited(self, wait: Wait, begin: int, end: int) -> None:
        """Called after each wait of the host, also after short waits of ranks that share memory. Times are in
        nanoseconds."""

    def waited_for_disk(self, begin: int, end: int) -> None:
        """Called after each wait for values that are read from a disk or written to it. Times are in nanoseconds."""

    def happened(self, figures: dict[str, float]) -> None:
        """Called, in any thread, with figures of a save or a change of an elastic job that has ended."""

    def before_step(self) -> None:
        """Called before the step of an optimizer that has parameters of the schedule."""

    def after_step(self) -> None:
        """Called after the step of such an optimizer."""

    def end_step(self) -> None:
        """Called when a training step has ended."""

    def stepped(self, params: set[int]) -> None:
        """Note that an optimizer has updated these parameters of the schedule."""
        self.after_step()
        self._waiting = (self._trained if self._waiting is None else self._waiting) - params
        if running_backward() < 0:
            self._end_if(not self._waiting)

    def _end_if(self, is_over: bool) -> None:
        if is_over and self._waiting is not None:
            self._waiting = None
            self.end_step()

    def params_of(self, optimizer: Optimizer) -> set[int]:
        """The ids of the schedule's parameters that an optimizer updates."""
        known = self._params.get(optimizer)
        if known is None or known[0] != len(optimizer.param_groups):
            ours = [param.sharded for group in self.schedule.groups for param in group.params]
            # An optimizer that steps in the backward skips parameters of which this rank has no elements.
            self._trained = {id(param) for param in ours if param.requires_grad and param.numel()}
            given = {id(param) for options in optimizer.param_groups for param in options["params"]}
            known = self._params[optimizer] = len(optimizer.param_groups), given & set(map(id, ours))
        return known[1]

    def observe_lanes(self, runner: Callable[..., Mark]) -> None:
        """Let ``runner`` run the work of all lanes: it is called with a lane's name, its ``run`` and the arguments."""
        for lanes in {id(group.comm): group.comm.lanes for group in self.schedule.groups}.values():
            for name, lane in zip(("gather", "reduce", "all-reduce"), lanes, strict=True):
                self._listen(lane.observers, partial(runner, name))
                self._streams.add(lane._stream)

    def computes_here(self) -> bool:
        """Whether the current stream of the device is none of the lanes'."""
        streams = self.clock.streams
        return streams is not None and streams.current(self.schedule.device) not in self._streams


def gathered_from_others(group: ParamGroup) -> int:
    """The bytes that this rank receives in a gather of a group. On a host whose ranks share memory, others receive the
    rest."""
    peers, ranks = group.transport.peers, group.data.shard_size
    return group.full.buffer.nbytes * (ranks - 1 if peers is None else len(peers.sources)) // ranks


def reduced_from_others(group: ParamGroup, nbytes: int) -> int:
    """The bytes that this rank receives in a reduction of gradients of ``nbytes``, or reads where all share memory."""
    peers, data = group.reduce_transport.peers, group.data
    if data.shard_size > 1:
        return nbytes * (data.shard_size - 1 if peers is None else len(peers.targets)) // data.shard_size
    both = 2 * (data.replicate_size - 1) if peers is None else len(peers.targets) + len(peers.sources)
    return nbytes * both // data.replicate_size  # sums that all get


def summed_from_replicas(group: ParamGroup, nbytes: int) -> int:
    """The same, where a reduction is followed by one over replicas, of what is ``nbytes`` on this rank."""
    data = group.data
    passes = 0 if data.shard_size == 1 else 1 if data.shards_replicas else 2
    return passes * nbytes * (data.replicate_size - 1) // data.replicate_size


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
#: A list of listeners, and the one of an observer.
_Listening = tuple[list[Any], Callable[..., object]]


def _stop_listening(listening: list[_Listening]) -> None:
    while listening:
        listeners, listener = listening.pop()
        listeners.remove(listener)


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
