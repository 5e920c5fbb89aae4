"""Vector clocks over every access to memory: what has no order is an error, whether or not it went well this time.

Each *actor* (a lane, or the host) has a clock that says up to which of the accesses of every actor its next one comes
after. What the host asks of a lane comes after what the host did; a lane comes after another, and the host after a
lane, only through events.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from fullshard.torch_private import Collective, storage_id
from tests.simulated import device as simulated_device
from tests.simulated.device import HOST
from tests.simulated.operations import SYNCHRONIZES, Access, accesses, extent, tensors_in

#: Calls that an error shows.
_DEPTH = 14
#: Files that it leaves out.
_OWN = {__file__, simulated_device.__file__}
Clock = Counter[int]
_NEVER: Clock = Clock()
_Stack = tuple[tuple[CodeType, int], ...]


class AccessError(AssertionError):
    """Two accesses to the same memory have no order."""


@dataclass(frozen=True)
class _Use:
    """An access that was made."""

    actor: int
    time: int
    what: str
    where: _Stack

    def __str__(self) -> str:
        lane = "the host" if self.actor == HOST else f"lane {self.actor}"
        return f"{self.what} in {lane}:\n{_text(self.where)}"


@dataclass
class _Uses:
    """The accesses to a range of bytes that matter: the last write, and the reads since by each actor."""

    written: _Use | None = None
    read: dict[int, _Use] = field(default_factory=dict)


@dataclass(eq=False)
class _Allocation:
    """A piece of memory.

    Args:
        start: its address.
        end: that after the last byte.
        actor: the lane in which it was allocated: once freed it may serve that lane at once.
        storage: refers to it weakly.
        is_host: whether it is memory of the host.
    """

    start: int
    end: int
    actor: int
    storage: weakref.ref[torch.UntypedStorage]
    is_host: bool
    uses: dict[tuple[int, int], _Uses] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)  # actors for which the allocator waits
    moves_to: torch.UntypedStorage | None = None  # while storages exchange their memory

    @property
    def is_there(self) -> bool:
        """Whether the storage still has this memory."""
        found = self.storage()
        return found is not None and found.data_ptr() == self.start


class Checker:
    """The model of a device on which everything runs at once, and every access is checked."""

    def __init__(self) -> None:
        self.clocks: dict[int, Clock] = {}
        self._starts: list[int] = []
        self._allocations: dict[int, _Allocation] = {}
        self._shared: list[_Allocation] = []  # those that others than their actor have used
        self._freed: dict[int, list[tuple[_Allocation, _Stack]]] = {}
        self.synchronized: list[_Stack] = []  # where the host waited for a value

    # -- what the simulated device asks --------------------------------------------------------------------------------

    def record(self, actor: int) -> Clock:
        self._look_for_freed()
        return self._clock(actor).copy()

    def wait(self, actor: int, point: Clock) -> None:
        self._look_for_freed()
        self.clocks[actor] = self._clock(actor) | point

    def keep(self, actor: int, tensor: torch.Tensor) -> None:
        start, end = extent(tensor)
        if end > start:
            self._allocation(Access(start, end, False, tensor), actor).kept.add(actor)

    def own_host_memory(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._register(tensor, HOST, is_host=True)

    def swapped(self, one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        found = [self._find(each.data_ptr()) for each in (one, other)]
        for allocation, old, new in zip(found, (one, other), (other, one), strict=True):
            if allocation is not None and allocation.storage() is old:
                allocation.moves_to = new
        for allocation in found:
            if allocation is not None and allocation.moves_to is not None:
                allocation.storage, allocation.moves_to = weakref.ref(allocation.moves_to), None

    def emptied(self, storage: torch.UntypedStorage) -> None:
        """What is not there any more is found."""

    def call(self, actor: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._look_for_freed()
        given = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if tensor.device.type == "cpu"]
        on_host = bool(given) and all(map(self._is_on_host, given))
        if on_host:
            actor = HOST
        use = self._use(actor, func)
        for access in accesses(func, args, kwargs):
            if access.writes and not on_host and "copy_" not in func._schema.name:
                allocation = self._allocation(access, actor)
                if allocation.is_host:  # made of a number on the host, and then moved
                    allocation.is_host, allocation.actor = False, actor
            is_scalar = not access.writes and access.tensor.ndim == 0 and self._is_on_host(access.tensor)
            if actor == HOST or not is_scalar:  # a kernel is given what a scalar of the host is when it is launched
                self._check(access, use)
        result = func(*args, **kwargs)
        name = func._schema.name
        crosses = "copy_" in name and any(map(self._is_on_host, given)) and not (args[2:] or kwargs.get("non_blocking"))
        if not on_host and (name in SYNCHRONIZES or crosses):
            self.synchronized.append(use.where)
            self.clocks[HOST] = self._clock(HOST) | self._clock(actor)
        storages = {storage_id(tensor) for tensor in given} if func._schema.name != "aten::lift_fresh" else set()
        for tensor in tensors_in(result):
            start, end = extent(tensor)
            if end == start or storage_id(tensor) in storages:
                continue
            if on_host or func._schema.name == "aten::lift_fresh":
                self._register(tensor, HOST, is_host=True)
                continue
            self._register(tensor, actor)
            # What was there before may still be used in this lane: other lanes come after the allocation.
            self._check(Access(start, end, True, tensor), use)
        return result

    def collective(self, actor: int, group: Any, call: Collective, output: torch.Tensor, source: torch.Tensor) -> Any:
        return call(output, source)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _register(self, tensor: torch.Tensor, actor: int, is_host: bool = False) -> _Allocation:
        """The memory of a tensor was allocated by an actor, and what was there before is freed."""
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        first = max(bisect.bisect_right(self._starts, start) - 1, 0)
        for each in self._starts[first : bisect.bisect_left(self._starts, end)]:
            if self._allocations[each].end > start:
                self._free(self._allocations[each])
        self._take_freed(actor)
        made = self._allocations[start] = _Allocation(start, end, actor, weakref.ref(storage), is_host)
        bisect.insort(self._starts, start)
        return made

    def _find(self, address: int) -> _Allocation | None:
        at = bisect.bisect_right(self._starts, address) - 1
        found = self._allocations[self._starts[at]] if at >= 0 else None
        return found if found is not None and address < found.end else None

    def _allocation(self, access: Access, actor: int) -> _Allocation:
        found = self._find(access.start)
        if found is not None and access.end <= found.end and found.is_there:
            return found
        return self._register(access.tensor, actor)

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        found = self._find(extent(tensor)[0])
        return found is not None and found.is_host and found.is_there

    def _look_for_freed(self) -> None:
        for allocation in [each for each in self._shared if not each.is_there]:
            self._free(allocation)

    def _free(self, allocation: _Allocation) -> None:
        """Memory goes back to the allocator."""
        del self._allocations[allocation.start]
        del self._starts[bisect.bisect_left(self._starts, allocation.start)]
        if allocation in self._shared:
            self._shared.remove(allocation)
        if not allocation.is_host:  # the allocator of pinned memory waits for the copies that use it
            self._freed.setdefault(allocation.actor, []).append((allocation, _stack()))

    def _take_freed(self, actor: int) -> None:
        """An allocation in a lane may get any memory that was freed there."""
        for allocation, where in self._freed.pop(actor, ()):
            for uses in allocation.uses.values():
                for use in (*uses.read.values(), *([uses.written] if uses.written else [])):
                    if use.actor not in allocation.kept and not self._comes_after(actor, use):
                        raise AccessError(
                            f"memory of lane {actor} serves it again while it may still be used by {use}\n"
                            f"it was freed at\n{_text(where)}"
                        )

    # -- order ---------------------------------------------------------------------------------------------------------

    def _clock(self, actor: int) -> Clock:
        """The clock of an actor; a lane comes after what the host did."""
        clock = self.clocks.setdefault(actor, Clock())
        if actor != HOST:
            for other, time in self.clocks.get(HOST, _NEVER).items():
                if clock.get(other, 0) < time:
                    clock[other] = time
        return clock

    def _use(self, actor: int, func: Any) -> _Use:
        clock = self._clock(actor)
        clock[actor] += 1
        return _Use(actor, clock[actor], str(func), _stack())

    def _comes_after(self, actor: int, use: _Use) -> bool:
        return use.actor == actor or self._clock(actor)[use.actor] >= use.time

    def _check(self, access: Access, use: _Use) -> None:
        allocation = self._allocation(access, use.actor)
        if use.actor != allocation.actor and allocation not in self._shared:
            self._shared.append(allocation)
        for (start, end), earlier in list(allocation.uses.items()):
            if start >= access.end or end <= access.start:
                continue
            before = [earlier.written] if earlier.written is not None else []
            if access.writes:
                before += earlier.read.values()
            for each in before:
                if not self._comes_after(use.actor, each):
                    raise AccessError(
                        f"{'a write' if access.writes else 'a read'} and "
                        f"{'a write' if each is earlier.written else 'a read'} of the same bytes have no order: "
                        f"{use}\nand before it {each}"
                    )
            if access.writes and access.start <= start and end <= access.end:
                del allocation.uses[start, end]  # whoever comes after this write comes after those too
        uses = allocation.uses.setdefault((access.start, access.end), _Uses())
        if access.writes:
            uses.written, uses.read = use, {}
        else:
            uses.read[use.actor] = use


def _stack() -> _Stack:
    """The calls that lead here, the innermost first, without those of torch and of this package.

    Every access has one, and few are ever read: a call is told by its code and the place in it.
    """
    calls: list[tuple[CodeType, int]] = []
    frame = sys._getframe(2)
    while frame is not None and len(calls) < _DEPTH:
        if not _is_left_out(frame.f_code.co_filename):
            calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(calls)


@functools.cache
def _is_left_out(file: str) -> bool:
    return "/torch/" in file or file in _OWN


def _text(where: _Stack) -> str:
    """A line for each call."""
    lines = []
    for code, at in where:
        line = next(itertools.islice(code.co_positions(), at // 2, None))[0]
        lines.append(f"    {code.co_filename.rpartition('/src/')[2]}:{line} in {code.co_qualname}")
    return "\n".join(lines)
