"""A device whose lanes run as late as their events allow: a wait that is missing shows in the numbers.

What the computation's stream is given runs at once. What another lane is given is written down, with the addresses that
its tensors have now, as a kernel that was launched knows them. It runs when somebody waits for it: the computation, or
the host. Collectives of a process group run in the order in which they were asked for, as those of NCCL do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fullshard.torch_private import CAN_SWAP_MEMORY, Collective, swap_memory
from tests.simulated.device import COMPUTE, HOST
from tests.simulated.operations import as_it_lies, fills, finish

#: A lane, and how many of its entries.
Point = tuple[int, int]


@dataclass
class _Lane:
    """What a lane was given and has not run."""

    entries: list[Callable[[], object]] = field(default_factory=list)
    done: int = 0


class Late:
    """The model of a device whose lanes are late."""

    def __init__(self) -> None:
        self._lanes: defaultdict[int, _Lane] = defaultdict(_Lane)
        self._collectives: dict[Any, Point] = {}  # the last one of each process group
        self._freed: list[torch.UntypedStorage] = []
        self._is_running = False
        self.deferred = 0

    def record(self, actor: int) -> Point:
        return actor, len(self._lanes[actor].entries)

    def wait(self, actor: int, point: Point) -> None:
        if actor in (HOST, COMPUTE):
            self._run(point)
        else:
            self._lanes[actor].entries.append(lambda: self._run(point))

    def keep(self, actor: int, tensor: torch.Tensor) -> None:
        """Nothing is freed while an entry uses it."""

    def swapped(self, one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Entries know addresses."""

    def emptied(self, storage: torch.UntypedStorage) -> None:
        """The memory stays for the entries that use it, as an allocator gives it to nobody before these have run."""
        if any(lane.done < len(lane.entries) for lane in self._lanes.values()):
            if CAN_SWAP_MEMORY:
                self._freed.append(torch.UntypedStorage(0))
                swap_memory(storage, self._freed[-1])
                return
            for lane in [*self._lanes]:
                self._run(self.record(lane))

    def own_host_memory(self, tensor: torch.Tensor) -> None:
        """All memory is alike."""

    def call(self, actor: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = NotImplemented if actor == COMPUTE or self._is_running else _made_by(func, args)
        if made is NotImplemented:
            if func._schema.name.startswith("c10d::") and not self._is_running:
                for before in self._collectives.values():  # in the order in which they were asked for
                    self._run(before)
            if actor != COMPUTE and not self._is_running and fills(func):
                self._run(self.record(actor))  # it makes something new, or is a collective that the host waits for
            return func(*args, **kwargs)
        late_args, late_kwargs = tree_map_only(torch.Tensor, as_it_lies, (args, kwargs))
        is_inference = torch.is_inference_mode_enabled()

        def entry() -> None:
            with torch.inference_mode(is_inference):  # as when it was enqueued
                func(*late_args, **late_kwargs)

        self._lanes[actor].entries.append(entry)
        self.deferred += 1
        return made

    def collective(self, actor: int, group: Any, call: Collective, output: torch.Tensor, source: torch.Tensor) -> Any:
        if before := self._collectives.get(group.group_name):
            self.wait(actor, before)
        output, source = as_it_lies(output), as_it_lies(source)
        self._lanes[actor].entries.append(lambda: finish(call(output, source)))
        self._collectives[group.group_name] = self.record(actor)
        if actor == COMPUTE:
            self._run(self.record(actor))

    def _run(self, point: Point) -> None:
        """Run a lane up to a point, and what it waits for."""
        lane, before, self._is_running = self._lanes[point[0]], self._is_running, True
        try:
            while lane.done < point[1]:
                lane.done += 1
                entry, lane.entries[lane.done - 1] = lane.entries[lane.done - 1], _nothing
                entry()
        finally:
            self._is_running = before


def _nothing() -> None:
    return


def _made_by(func: Any, args: tuple[Any, ...]) -> Any:
    """What an operation in place returns; ``NotImplemented`` if it makes something new, or is none that can wait."""
    schema = func._schema
    if not fills(func):
        return NotImplemented
    if schema.name.startswith("c10d::"):
        return NotImplemented
    written = [
        args[position]
        for position, argument in enumerate(schema.arguments[: len(args)])
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if len(written) != max(len(schema.returns), 1):
        return NotImplemented
    return written[0] if schema.returns else None
