"""A device that captures what it is given in a graph, and replays it: by the rules by which CUDA captures streams.

Unlike on a real device, what is captured runs at once too, and every access is checked as by
:class:`~tests.simulated.checked.Checker`. While a graph is captured it is an error if

- a stream that takes part waits for an event from before the capture, or anybody later for one of the capture,
- a stream does something that did not come to take part, by waiting for one that does, or has not come back at the end,
- the host waits for the device, or asks whether an event has passed.

The graph knows addresses, as kernels do that were launched, and keeps the memory that was allocated in the capture.
:meth:`Graph.replay` runs it again, whatever the library does meanwhile, and in any order that the events allow: with
the computation as late as it may be, or by chance. A wait that is missing then shows in the numbers.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from fullshard.torch_private import Collective, storage_id
from tests.simulated.checked import Checker, Clock
from tests.simulated.device import COMPUTE, HOST
from tests.simulated.operations import accesses, as_it_lies, extent, fills, finish, tensors_in

#: Where memory begins: its address or, if it was allocated in the capture, the number of its allocation and the offset.
Place = int | tuple[int, int]
#: Stands for a lane that all collectives share.
_COLLECTIVES = -1


class CaptureError(AssertionError):
    """What must not be in a capture."""


class Launch(NamedTuple):
    """One thing that a graph does.

    Args:
        lane: in which it does it.
        what: the operation, with the numbers that it is given.
        memory: where the memory that it uses begins, the bytes from there, and whether it writes them.
    """

    lane: int
    what: str
    memory: tuple[tuple[Place, int, bool], ...]


class Point(NamedTuple):
    """A point that an actor has reached, and the graph of which it is one."""

    clock: Clock
    graph: Graph | None
    after: frozenset[int]  # launches of the graph


@dataclass(eq=False)
class Graph:
    """What was captured.

    Attributes:
        launches: in the order in which the host asked for them.
        lanes: the streams that take part.
        needs: the launches that each comes after.
        ends: the launches that the next one of a lane comes after.
    """

    model: Graphs
    launches: list[Launch] = field(default_factory=list)
    lanes: set[int] = field(default_factory=lambda: {COMPUTE})
    needs: list[set[int]] = field(default_factory=list)
    ends: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    _runs: list[Callable[[], object]] = field(default_factory=list)
    _kept: list[torch.Tensor] = field(default_factory=list)
    _starts: list[tuple[int, int]] = field(default_factory=list)  # address and number of what was allocated

    def place(self, address: int) -> Place:
        at = bisect.bisect_right(self._starts, (address, len(self._kept))) - 1
        if at >= 0:
            start, number = self._starts[at]
            if address < start + self._kept[number].untyped_storage().nbytes():
                return number, address - start
        return address

    def allocate(self, tensor: torch.Tensor) -> None:
        """Keep memory that was allocated."""
        bisect.insort(self._starts, (tensor.untyped_storage().data_ptr(), len(self._kept)))
        self._kept.append(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))

    def add(self, lane: int, what: str, memory: Iterator[tuple[int, int, bool]], run: Callable[[], object]) -> None:
        places = tuple((self.place(start), end - start, writes) for start, end, writes in memory)
        self.needs.append(self.ends[lane])
        self.ends[lane] = {len(self.launches)}
        self.launches.append(Launch(lane, what, places))
        self._runs.append(run)

    def add_collective(self, lane: int, what: str, memory: Iterator[tuple[int, int, bool]], run: Any) -> None:
        """Collectives run in the order in which they were asked for: all ranks wait for each other in each."""
        self.ends[lane] |= self.ends[_COLLECTIVES]
        self.add(lane, what, memory, run)
        self.ends[_COLLECTIVES] = self.ends[lane].copy()

    @torch.no_grad()
    def replay(self, choose: Callable[[list[int]], int] = min) -> None:
        """Run it. ``choose`` says which of the launches that may run next does; without it the order is the host's."""
        left = dict(enumerate(map(set, self.needs)))
        self.model.is_replaying = True
        try:
            while left:
                chosen = choose([at for at, needs in left.items() if needs.isdisjoint(left)])
                del left[chosen]
                self._runs[chosen]()
        finally:
            self.model.is_replaying = False

    def computation_last(self, ready: list[int]) -> int:
        """Chooses what is not of the computation, as long as there is any."""
        return min(ready, key=lambda at: (self.launches[at].lane == COMPUTE, at))


class Graphs(Checker):
    """The model of a device that can capture."""

    def __init__(self) -> None:
        super().__init__()
        self.graph: Graph | None = None  # while it is captured
        self.is_replaying = False
        self._in_collective = False

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Capture what is done inside, beginning with the computation's stream."""
        self.graph = graph = Graph(self)
        try:
            yield graph
            for lane in graph.lanes:
                if self._clock(COMPUTE)[lane] < self._clock(lane)[lane]:
                    raise CaptureError(f"the computation has not waited for lane {lane} at the end of the capture")
        finally:
            self.graph = None

    def record(self, actor: int) -> Point:
        graph = self.graph if self.graph is not None and actor in self.graph.lanes else None
        after = frozenset(graph.ends[actor]) if graph is not None else frozenset[int]()
        return Point(super().record(actor), graph, after)

    def wait(self, actor: int, point: Any) -> None:
        graph = self.graph
        if graph is not None and actor == HOST:
            raise CaptureError("the host waits for an event, or asks for it, in a capture")
        if point.graph is not graph:
            if point.graph is not None:
                raise CaptureError(f"lane {actor} waits for an event that another graph has")
            if graph is not None and actor in graph.lanes:
                raise CaptureError(f"lane {actor} waits in a capture for an event from before it")
        elif graph is not None:
            graph.lanes.add(actor)
            graph.ends[actor] |= point.after
        super().wait(actor, point.clock)

    def call(self, actor: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graph = self.graph
        if self.is_replaying:
            return func(*args, **kwargs)
        if graph is None or self._in_collective:
            return super().call(actor, func, args, kwargs)
        used = [(start, end, writes) for start, end, writes, _ in accesses(func, args, kwargs)]
        late_args, late_kwargs = tree_map_only(torch.Tensor, as_it_lies, (args, kwargs))
        given = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if tensor.device.type == "cpu"]
        waits = len(self.synchronized)
        result = super().call(actor, func, args, kwargs)
        if len(self.synchronized) > waits:
            raise CaptureError(f"the host waits in a capture for what {func} gives")
        if given and all(map(self._is_on_host, given)):
            return result
        storages = set(map(storage_id, given))
        made = [tensor for tensor in tensors_in(result) if extent(tensor)[1] and storage_id(tensor) not in storages]
        for tensor in made:
            graph.allocate(tensor)
        if not used and not made:
            return result  # a view, or metadata
        if actor not in graph.lanes:
            raise CaptureError(f"{func} runs in lane {actor}, which does not take part in the capture")
        used += [(*extent(tensor), fills(func)) for tensor in made]
        numbers = [value for value in tree_leaves((args, kwargs)) if isinstance(value, (bool, int, float))]
        targets = list(map(as_it_lies, made))

        is_collective = func._schema.name.startswith("c10d::")

        def run() -> None:
            again = func(*late_args, **late_kwargs)
            if is_collective:
                finish(dist.Work.unbox(again[-1] if isinstance(again, tuple) else again))
            elif fills(func):
                fresh = [tensor for tensor in tensors_in(again) if extent(tensor)[1]]
                for target, tensor in zip(targets, fresh if targets else (), strict=True):
                    target.copy_(tensor)

        add = graph.add_collective if is_collective else graph.add
        add(actor, f"{func} {numbers}", iter(used), run)
        return result

    def collective(self, actor: int, group: Any, call: Collective, output: torch.Tensor, source: torch.Tensor) -> Any:
        graph = self.graph
        if graph is None:
            return call(output, source)
        if actor not in graph.lanes:
            raise CaptureError(f"a collective runs in lane {actor}, which does not take part in the capture")
        memory = (*extent(source), False), (*extent(output), True)
        late_output, late_source = as_it_lies(output), as_it_lies(source)
        graph.add_collective(actor, "a collective", iter(memory), lambda: finish(call(late_output, late_source)))
        self._in_collective = True  # what the backend does inside is its own
        try:
            finish(call(output, source))
        finally:
            self._in_collective = False
