"""How a recording or a count looks on at the steps of a model: clock and memory, lanes that tell, waits, optimizers.

Everything here is put into single objects and taken out again. Classes stay as they are, but that of :data:`WAITS`,
whose attribute is written without a call by who waits.
"""

from __future__ import annotations

import os
import resource
import time
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullshard.comm.host import HostTransport
from fullshard.comm.waits import WAITS, Wait, Waits
from fullshard.device import Mark, Streams, is_host, streams_of
from fullshard.group.param_group import ParamGroup
from fullshard.group.step import Action
from fullshard.schedule.schedule import Schedule
from fullshard.torch_private import running_backward

#: A point in time: nanoseconds of the host's clock, or an event of a device that says it later.
Point = Any
_NOTHING = object()


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
        event = torch.Event(
            self._device, enable_timing=True
        )  # of a subclass on devices of others, which streams refuse
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
        self._file, self._status, self._page = -1, -1, os.sysconf("SC_PAGE_SIZE")
        if is_host(device) and os.path.exists("/proc/self/statm"):
            self._file, self._status = (os.open(f"/proc/self/{name}", os.O_RDONLY) for name in ("statm", "status"))
            for file in (self._file, self._status):
                weakref.finalize(self, os.close, file)

    def now(self) -> int:
        """In bytes; 0 where it is unknown."""
        if self._file >= 0:
            return int(os.pread(self._file, 64, 0).split()[1]) * self._page
        return 0 if is_host(self._device) else torch.accelerator.memory_allocated(self._device)

    def peak(self) -> int:
        """The most that it has used so far, in bytes."""
        if not is_host(self._device):
            return torch.accelerator.max_memory_allocated(self._device)
        if self._status < 0:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        told = os.pread(self._status, 4096, 0).partition(b"VmHWM:")[2]  # what getrusage says begins at the parent's
        return max(int(told.partition(b"kB")[0] or 0) * 1024, self.now())  # the kernel's count lags behind


class _Stack:
    """The functions in the place of a method of one object, the first innermost. What is shown there knows it."""

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
    """What stands in the places of methods until it is removed. Others may come and go meanwhile."""

    def __init__(self) -> None:
        self._put: list[tuple[_Stack, Callable[..., Any]]] = []

    def around(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let ``function`` be called in place of a method of an object, with the method before the arguments."""
        stack = getattr(vars(owner).get(name), "stack", None) or _Stack(owner, name)
        stack.functions.append(function)
        stack.show()
        self._put.append((stack, function))

    def remove(self) -> None:
        """Put everything back, the last first."""
        while self._put:
            stack, function = self._put.pop()
            stack.functions.remove(function)
            stack.show()


class Watch:
    """Looks on at the steps of a schedule, until it is stopped. Who derives from it says what becomes of what it sees.

    A step of training ends when optimizers have stepped on all parameters that are trained: one optimizer, several, or
    one for each parameter in the backward. Where nobody steps on some of them, it ends before the next forward.

    Nothing but its schedule and its user keep it alive, so that it ends with the model.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.clock, self.memory = Clock(schedule.device), Memory(schedule.device)
        self.overrides, self._elsewhere = Overrides(), Overrides()
        self._streams: set[Any] = set()
        self._trained: set[int] = set()  # parameters, by id
        self._params = weakref.WeakKeyDictionary[Optimizer, tuple[int, set[int]]]()
        self._waiting: set[int] | None = None  # parameters that nobody has stepped on yet; None before the first step
        self.is_running = True
        schedule.log.listeners.append(self.logged)
        _follow_steps()
        _watches.append(weakref.ref(self, _watches.remove))
        if self.clock.streams is None:
            self._listen_to_waits()

    def stop(self) -> None:
        """Put everything back. May be called again."""
        self.is_running = False
        if self.logged in self.schedule.log.listeners:
            self.schedule.log.listeners.remove(self.logged)
        self.overrides.remove()
        self._elsewhere.remove()
        _watches[:] = [each for each in _watches if each() is not self]
        if not _watches:
            WAITS.__class__ = Waits

    def logged(self, action: Action, group: ParamGroup, moves: bool) -> None:
        """Something happens to a group, see :class:`~fullshard.schedule.step_log.StepLog`."""

    def waited(self, wait: Wait, begin: int, end: int) -> None:
        """A wait of the host has ended, also a short one of ranks that share memory; times are in nanoseconds."""

    def before_step(self) -> None:
        """An optimizer with parameters of the schedule begins its step."""

    def after_step(self) -> None:
        """Its step has ended."""

    def end_step(self) -> None:
        """A step of training has ended."""

    def watch_steps(self) -> None:
        """Have :meth:`end_step` called from now on. What else looks on at passes was told to before."""
        self.overrides.around(self.schedule.passes, "begin", self._begin_pass)
        self.overrides.around(self.schedule, "end_backward", self._end_backward)

    def stepped(self, params: set[int]) -> None:
        """An optimizer with these parameters of the schedule has ended its step."""
        self.after_step()
        self._waiting = (self._trained if self._waiting is None else self._waiting) - params
        if running_backward() < 0:
            self._end_if(not self._waiting)

    def _end_backward(self, end: Callable[[], None]) -> None:
        end()
        self._end_if(not self._waiting)

    def _begin_pass(self, begin: Callable[..., None], kind: str, groups: Any) -> None:
        self._end_if(kind == "forward" and self.schedule.is_idle)
        begin(kind, groups)

    def _end_if(self, is_over: bool) -> None:
        if is_over and self._waiting is not None:
            self._waiting = None
            self.end_step()

    def params_of(self, optimizer: Optimizer) -> set[int]:
        """The parameters of the schedule that an optimizer steps on, by id."""
        known = self._params.get(optimizer)
        if known is None or known[0] != len(optimizer.param_groups):
            ours = [param.sharded for group in self.schedule.groups() for param in group.params]
            # An optimizer that steps in the backward does not step on a parameter of which this rank has nothing.
            self._trained = {id(param) for param in ours if param.requires_grad and param.numel()}
            given = {id(param) for options in optimizer.param_groups for param in options["params"]}
            known = self._params[optimizer] = len(optimizer.param_groups), given & set(map(id, ours))
        return known[1]

    def watch_lanes(self, runner: Callable[..., Mark]) -> None:
        """Have ``runner`` called for what is run in a lane: with its name, its own ``run``, and what that is given."""
        for lanes in {id(group.comm): group.comm.lanes for group in self.schedule.groups()}.values():
            for name, lane in zip(("gather", "reduce", "all-reduce"), lanes, strict=True):
                self.overrides.around(lane, "run", partial(runner, name))
                self._streams.add(lane._stream)

    def computes_here(self) -> bool:
        """Whether the current stream of the device is none of the lanes'."""
        streams = self.clock.streams
        return streams is not None and streams.current(self.schedule.device) not in self._streams

    def _listen_to_waits(self) -> None:
        """Other models may share the ranks of a host: these know the watch by a weak reference alone."""
        transports = {each for g in self.schedule.groups() for each in (g.transport, g.reduce_transport)}
        for ranks in {each.local_ranks for each in transports if isinstance(each, HostTransport)}:
            self._elsewhere.around(ranks, "wait", partial(_wait, weakref.ref(self)))
        weakref.finalize(self, self._elsewhere.remove)
        WAITS.__class__ = _ToldWaits


def from_others(nbytes: int, ranks: int) -> int:
    """How many bytes of what is ``nbytes`` whole a rank gets from the others."""
    return nbytes * (ranks - 1) // ranks


class TimedMark:
    """A mark of a device's lane: ``tell`` is given the times between which the computation first waits for it."""

    def __init__(self, mark: Mark, watch: Watch, tell: Callable[[Point, Point], None]) -> None:
        self._mark, self._watch = mark, watch
        self._tell: Callable[[Point, Point], None] | None = tell

    def wait(self) -> None:
        watch = self._watch
        if self._tell is None or not watch.is_running or not watch.computes_here():
            self._mark.wait()
            return
        tell, self._tell = self._tell, None
        begin = watch.clock.now()
        self._mark.wait()
        tell(begin, watch.clock.now())


#: Those that run.
_watches: list[weakref.ref[Watch]] = []


@cache
def _follow_steps() -> None:
    """Keep one hook for all from now on: torch goes through its hooks, and none may be removed meanwhile."""

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for watch in [reference() for reference in _watches]:
            if watch is not None and watch.params_of(optimizer):
                watch.before_step()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for watch in [reference() for reference in _watches]:
            if watch is not None and (params := watch.params_of(optimizer)):
                watch.stepped(params)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


class _ToldWaits(Waits):
    """The waits of this process, while somebody listens."""

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
            for reference in _watches:
                if (watch := reference()) is not None:
                    watch.waited(before, _begin[0], now)


_begin = [0]
#: Waits of ranks that share memory and are under way. They tell :data:`WAITS` only if they last.
_inside: list[str] = []


def _wait(
    watch: weakref.ref[Watch], wait: Callable[..., None], counters: Any, value: int, doing: str, tag: int = -1
) -> None:
    begin = time.monotonic_ns()
    _inside.append(doing)
    try:
        wait(counters, value, doing, tag)
    finally:
        _inside.pop()
        if (listener := watch()) is not None:
            listener.waited(Wait(doing, None, tag), begin, time.monotonic_ns())
