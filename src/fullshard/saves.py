"""Listeners for the checkpoints of a model. A save calls them, and knows nothing else of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import units_in

#: A function that is called, in any thread, with the seconds of a save that has ended, its bytes, and the seconds for
#: which training waited.
Listener = Callable[[float, int, float], object]
_listeners: weakref.WeakKeyDictionary[Schedule, list[Listener]] = weakref.WeakKeyDictionary()


def listen(schedule: Schedule, listener: Listener) -> Callable[[], None]:
    """Tell a listener, which must not hold the schedule, of each save of its tree. Returns what ends that."""
    listeners = _listeners.setdefault(schedule, [])
    listeners.append(listener)
    return lambda: listeners.remove(listener)


def listeners_of(model: nn.Module) -> list[Listener]:
    """The listeners for a model or for parts of it."""
    schedules = dict.fromkeys(unit.schedule for unit in units_in(model) if unit.schedule is not None)
    return [each for schedule in schedules for each in _listeners.get(schedule, ())]
