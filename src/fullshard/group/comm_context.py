"""What groups that communicate in turn share: lanes, memory, and the limit on reductions under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property

import torch

from fullshard.buffer.slots import LARGE, SHARED, SlotPool
from fullshard.comm.transport import Transport
from fullshard.device import PASSED, HoldingMark, Lane, Lanes, Mark, is_capturing, is_host
from fullshard.torch_private import CAN_SWAP_MEMORY


class Reductions:
    """The reductions that are under way, the oldest first."""

    def __init__(self) -> None:
        self._scatters = deque[Mark]()  # reduce-scatters, each of which reads a gradient buffer
        self._sums = deque[Mark]()  # the all-reduces that follow some of them
        self.add: Callable[[Mark], None] = self._scatters.append
        self.add_sum: Callable[[Mark], None] = self._sums.append
        self.drops = 0  # how often reductions under way were dropped
        #: Gradients on their way to the CPU, the oldest first: the event of their arrival, and what hands them over.
        self.arriving = deque[tuple[torch.Event, Callable[[], None]]]()

    def wait_for_oldest(self, keep: int = 0, keep_sums: int = 0) -> None:
        """Wait until at most ``keep`` reduce-scatters read a gradient buffer, and ``keep_sums`` all-reduces run."""
        while len(self._scatters) > keep:
            self._scatters.popleft().wait()
        while self._sums and len(self._sums) > keep_sums:
            self._sums.popleft().wait()
        if self.arriving:
            self.hand_over_arrived(wait=False)

    def forget_marks(self) -> None:
        """Let no reduction that is under way be waited for: what follows comes after all of them."""
        for mark in (*self._scatters, *self._sums):
            if isinstance(mark, HoldingMark):
                mark.mark = PASSED

    def hand_over_arrived(self, wait: bool = True) -> None:
        """Hand over the gradients that are on the CPU; with ``wait``, all. An optimizer may run in a backward."""
        while self.arriving and (wait or self.arriving[0][0].query()):
            arrived, hand_over = self.arriving.popleft()
            arrived.synchronize()
            hand_over()

    def drop(self) -> None:
        """Wait for all reductions, and drop their results."""
        self.drops += 1
        for marks in (self._scatters, self._sums):
            while marks:
                with suppress(Exception):  # an error ended the step: its reductions are lost anyway
                    marks.popleft().wait()
        while self.arriving:
            self.arriving.popleft()[0].synchronize()


class CommContext:
    """The context of groups that communicate in turn. Several trees may share one (``share_comm_ctx``).

    It has a pool of slots for each kind of buffer and transport. Each tree has its own pools, because all ranks must
    agree on which slots still have their values, and one rank may have models that other ranks lack.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reductions = Reductions()
        self.pools: dict[tuple[str, int], SlotPool] = {}
        self.staging = SHARED  # of the transports
        self._was_captured = False
        self._is_in_graph = False  # whether a graph knows addresses of slots

    @cached_property
    def lanes(self) -> Lanes:
        """The lanes, made at their first use: on a device they are streams."""
        return Lanes(Lane(self._device), Lane(self._device), Lane(self._device))

    def pool(self, kind: str, transport: Transport) -> SlotPool:
        """The pool of buffers of a kind that ``transport`` transfers."""
        key = (kind, id(transport))
        if key not in self.pools:
            self.pools[key] = transport.pool(kind, self._device)
            self.pools[key].gives_back &= not self._is_in_graph
        return self.pools[key]

    def forget_marks_at_capture(self) -> bool:
        """Forget earlier marks when a capture of a graph begins or has ended: nothing may wait across its edge, and
        what follows runs after these marks anyway. Called when a forward begins; returns whether it forgot them."""
        before, self._was_captured = self._was_captured, is_capturing(self._device)
        if not (before or self._was_captured):
            return False
        self._keep_memory()
        if before is not self._was_captured:
            self.reductions.forget_marks()
        for pool in self.pools.values():
            pool.forget_marks()
            if not CAN_SWAP_MEMORY:
                pool.drop()  # a graph and what runs outside of it would free the memory of each other
        return True

    def give_back_memory(self) -> None:
        """Give large memory of a device that is not in use to its allocator, unless a captured graph knows it."""
        if is_capturing(self._device):
            self._keep_memory()
        for pool in self.pools.values():
            if pool.gives_back:  # as on all ranks, which must agree on what is still in slots
                pool.drop(LARGE)
        if not (is_host(self._device) or self.staging.is_in_graph):
            self.staging.drop(LARGE)

    def _keep_memory(self) -> None:
        """Keep all memory from now on: a graph knows addresses in it."""
        self._is_in_graph = SHARED.is_in_graph = True
        for pool in self.pools.values():
            pool.gives_back = False
