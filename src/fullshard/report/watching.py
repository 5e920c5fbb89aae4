"""How a recording or a count looks on: functions of its own in the places of methods, lanes that tell, and waits.

Everything here is put into single objects and taken out again. Classes stay as they are, but that of :data:`WAITS`,
whose attribute is written without a call by who waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from fullshard.comm.local_ranks import LocalRanks
from fullshard.comm.waits import WAITS, Wait, Waits
from fullshard.device import Lane, Lanes, Mark, Pending
from fullshard.group.context import CommContext
from fullshard.group.group import Group

#: Is told of a wait that has ended, with its times in nanoseconds (``time.monotonic_ns``).
WaitListener = Callable[[Wait, int, int], None]
#: Runs something in a lane: is given the lane's own ``run`` and what that is to be given.
Runner = Callable[..., Mark]

_NOTHING = object()


class Overrides:
    """What stands in attributes of objects until it is removed."""

    def __init__(self) -> None:
        self._put: list[tuple[dict[str, Any], str, object]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Let an attribute of an object be ``value``."""
        self._put.append((vars(owner), name, vars(owner).get(name, _NOTHING)))
        vars(owner)[name] = value

    def around(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let ``function`` be called in place of a method, with the method before the arguments."""
        self.put(owner, name, partial(function, getattr(owner, name)))

    def remove(self) -> None:
        """Put everything back, the last first."""
        while self._put:
            attributes, name, before = self._put.pop()
            if before is _NOTHING:
                attributes.pop(name, None)
            else:
                attributes[name] = before


class _WatchedLane(Lane):
    """The same lane, which has its work run by somebody who looks on."""

    def __init__(self, lane: Lane, runner: Runner) -> None:
        vars(self).update(vars(lane))
        self._runner = runner

    def run(self, start: Callable[[], Pending], then: Callable[[], None] | None = None, after: Any = None) -> Mark:
        return self._runner(super().run, start, then, after)


def watch_lanes(overrides: Overrides, context: CommContext, runner: Callable[..., Mark]) -> list[Any]:
    """Have ``runner`` called for what is run in the lanes of a context, with the name of the lane first; returns their
    streams, ``None`` for those of the host."""
    lanes = context.lanes
    names = ("gather", "reduce", "all-reduce")
    watched = (_WatchedLane(lane, partial(runner, name)) for name, lane in zip(names, lanes, strict=True))
    overrides.put(context, "lanes", Lanes(*watched))
    return [lane._stream for lane in lanes]


class _ToldWaits(Waits):
    """The waits of this process, while somebody listens."""

    @property
    def current(self) -> Wait | None:
        return vars(self)["current"]

    @current.setter
    def current(self, wait: Wait | None) -> None:
        before, vars(self)["current"] = vars(self)["current"], wait
        if wait is before or _inside:
            return
        now = time.monotonic_ns()
        if before is not None:
            for listener in _listeners:
                listener(before, _begin[0], now)
        _begin[0] = now


_listeners: list[WaitListener] = []
_begin = [0]
#: Waits of ranks that share memory and are under way. They tell :data:`WAITS` only if they last.
_inside: list[str] = []


def listen_to_waits(groups: Iterable[Group], listener: WaitListener) -> Callable[[], None]:
    """Call ``listener`` for each wait of the training that ends, also for short ones of ranks that share memory.

    Returns:
        a function that ends it.
    """
    overrides = Overrides()
    transports = {id(each): each for group in groups for each in (group.transport, group.reduce_transport)}
    local_ranks = {id(each): each for t in transports.values() if (each := getattr(t, "local_ranks", None)) is not None}
    for ranks in local_ranks.values():
        overrides.around(ranks, "wait", partial(_wait, listener, ranks))
    _listeners.append(listener)
    WAITS.__class__ = _ToldWaits

    def stop() -> None:
        overrides.remove()
        _listeners.remove(listener)
        if not _listeners:
            WAITS.__class__ = Waits

    return stop


def _wait(
    listener: WaitListener,
    ranks: LocalRanks,
    wait: Callable[..., None],
    counters: Any,
    value: int,
    doing: str,
    tag: int = -1,
) -> None:
    begin = time.monotonic_ns()
    _inside.append(doing)
    try:
        wait(counters, value, doing, tag)
    finally:
        _inside.pop()
        listener(Wait(doing, None, tag), begin, time.monotonic_ns())
