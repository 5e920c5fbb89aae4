"""The context that the groups of a tree share: lanes, memory, the reductions under way, and the count of passes.

Owns the pools from which passing buffers come, and the bound on reductions. Several trees may share a
:class:`CommContext` (``share_comm_ctx``); each has a :class:`Clock` of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from fullshard.buffer.slots import SlotPool
from fullshard.comm.transport import Transport
from fullshard.device import PASSED, Lanes, Mark


@dataclass
class Clock:
    """The clock of a tree of modules: values gathered in an earlier epoch may have been written since."""

    epoch: int = 0
    #: Is called when a backward reaches any of its groups.
    begin_backward: Callable[[], None] = lambda: None
    #: The optimizer's writes, for gathers that start before the current lane would have come to them.
    written: Mark = PASSED
    #: Whether ranks that share memory read it now: in a forward or backward.
    reading: bool = False
    #: Steps of optimizers on the groups of the tree.
    steps: int = 0


class Reductions:
    """The reductions that are under way, the oldest first."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque()
        self.drops = 0  # how often reductions that were under way were lost

    def add(self, mark: Mark) -> None:
        self._marks.append(mark)

    def keep_at_most(self, count: int) -> None:
        """Wait for the oldest until no more than ``count`` are under way."""
        while len(self._marks) > count:
            self._marks.popleft().wait()

    def drop(self) -> None:
        """Wait for all, and lose what they reduce."""
        self.drops += 1
        while self._marks:
            try:
                self._marks.popleft().wait()
            except RuntimeError:  # an error is being recovered from: what was under way is lost anyway
                continue


class Pools:
    """The slots of one tree of modules, in a pool for each kind of buffer and transport.

    A tree has its own: whether values are still in a slot depends on what else used the pool, and every rank must come
    to the same answer, whatever other models it holds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[tuple[str, int], SlotPool] = {}

    def pool(self, kind: str, transport: Transport) -> SlotPool:
        """The pool of buffers of a kind that ``transport`` moves."""
        key = (kind, id(transport))
        if key not in self._pools:
            self._pools[key] = SlotPool(self._device, transport.allocate)
        return self._pools[key]

    def drop(self) -> int:
        """Give what is not in use back to the system; returns the bytes."""
        return sum(pool.drop() for pool in self._pools.values())

    def __iter__(self) -> Iterator[SlotPool]:
        return iter(self._pools.values())


class CommContext:
    """The context that groups share which communicate in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reductions = Reductions()
        self.pools = Pools(device)

    @cached_property
    def lanes(self) -> Lanes:
        """Made when something runs in them: on a device they are streams."""
        return Lanes(self._device)
