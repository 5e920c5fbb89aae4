"""Listeners for what happens to a model now and then: a save, a change of an elastic job. What happens calls them, and
knows nothing else of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import units_in

#: A function that is called, in any thread, with figures by their names.
Listener = Callable[[dict[str, float]], object]
_listeners: weakref.WeakKeyDictionary[Schedule, list[Listener]] = weakref.WeakKeyDictionary()


def listeners_for(schedule: Schedule) -> list[Listener]:
    """The list of those that are told what happens to a tree. They must not hold the schedule."""
    return _listeners.setdefault(schedule, [])


def listeners_of(model: nn.Module) -> list[Listener]:
    """The listeners for a model or for parts of it."""
    schedules = dict.fromkeys(unit.schedule for unit in units_in(model) if unit.schedule is not None)
    return [each for schedule in schedules for each in _listeners.get(schedule, ())]
