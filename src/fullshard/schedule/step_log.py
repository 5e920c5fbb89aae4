"""The log of a step: everything that happens in it is logged here, once, where it starts.

From it come the events of observers, traces and metrics, the ranges of the profiler, the position of a rank in errors
and reports, and the comparison of the ranks.

A collective knows sizes, not names: ranks that run different groups would mix up their values. So ranks compare what
they communicated about, by one all-gather of three integers over each process group. It starts when a pass ends. Its
result is checked before the next pass begins, or at once if results may be used: after a backward, and after a forward
without gradients. On devices with streams nobody waits for it; it takes one small copy to the device and one back, so
four in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.backends import backend_of
from fullshard.comm.process_group import exchange_in_store, has_peers
from fullshard.comm.waits import WAITS, checks_are_on, waiting
from fullshard.device import CPU, Done, Lane, Pending, Streams, is_capturing, streams_of
from fullshard.group.param_group import ParamGroup
from fullshard.group.step import NOTHING, Action, Kind, Log, Step
from fullshard.group.verify import first_difference, verify_next
from fullshard.torch_private import all_gather_single, profiler_listens, running_backward

#: The labels of what starts communication, as traces of torch's own FSDP have them.
_LABELS = {"gather": "all_gather", "reduce": "post_backward_reduce"}


@dataclass(frozen=True)
class StepEvent:
    """One thing that happened to one group.

    Args:
        action: ``gather`` (communication starts), ``reuse`` (the values of an earlier use are still there), ``unshard``
            (the modules show the values), ``reshard``, ``rest`` (resharded to a smaller mesh), ``reduce`` (the
            reduction of its gradients starts).
        group: fully qualified name of the group's module, ``""`` for the root.
        during: the pass.
        step: counts forwards of the root.
        moves: whether bytes move; a gather moves none where ranks share the memory of the values.
    """

    action: Action
    group: str
    during: Kind
    step: int
    moves: bool = True


#: Called on this rank only, in the order of its events. Without observers there is no cost.
Observer = Callable[[StepEvent], None]
#: After an error, pass numbers go on at the next multiple of this: ranks may have noticed it in different passes.
_ROUND = 1 << 32
#: How many of their last calls ranks tell each other. If two wait for each other, they diverged a few calls ago.
_LAST = 50
#: A group, and the indices of its parameters that were reduced; a gather has none.
Call = tuple[ParamGroup, frozenset[int]]


class StepLog(Log):
    """The log of one tree of modules on ``device``, whose groups share ``step`` and use ``process_groups``.

    Attributes:
        calls: the communication that this rank has started in this pass, in order.
        latest: the group that was gathered or reduced last in this pass, in memory that ranks share too.
        unlike_before: where the order of this pass differs from the last one, if calls are announced; for messages.
    """

    def __init__(self, device: torch.device, step: Step, process_groups: Iterable[dist.ProcessGroup] = ()) -> None:
        super().__init__()
        self._device, self._step = device, step
        self.calls: list[Call] = []
        self.latest: ParamGroup | None = None
        self.unlike_before = ""
        self._announces = False  # whether calls are announced to the other ranks
        self._compares_each = dist.get_debug_level() != dist.DebugLevel.OFF  # type: ignore[attr-defined]
        #: The process groups whose ranks compare what they did.
        self._process_groups = list(filter(has_peers, process_groups)) if checks_are_on() else []
        self._under_way: list[_Comparison] = []
        self._number = 0  # of the pass, the same on all ranks
        #: The call that followed each call, by the kind of the pass, in the last passes.
        self._followers: dict[tuple[Kind, Call | None], Call | None] = {}

    def __call__(
        self, action: Action, group: Any, parameters: frozenset[int] = NOTHING, moves: bool = True
    ) -> AbstractContextManager[object] | None:
        if self._compares_each and action in ("gather", "reuse") and group.data.shard_group is not None:
            verify_next(group.name, group.tag, group.data.shard_group)
        for listener in [*self.listeners]:  # one may remove itself
            listener(action, group, moves)
        if action not in _LABELS:
            return None
        self.latest = group
        if moves:
            self.calls.append((group, parameters))
            if self._announces:
                self._announce((group, parameters), self.kind)
        if profiler_listens():
            return torch.profiler.record_function(f"FSDP::{_LABELS[action]} ({group.name})")
        return None

    def add_observer(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` with each event; returns a function that removes it."""

        def listener(action: Action, group: object, moves: bool) -> None:
            if isinstance(group, ParamGroup):
                observer(StepEvent(action, group.name, self.kind, self._step.forwards, moves))

        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    @property
    def kind(self) -> Kind:
        """The pass that runs, the innermost one."""
        return "backward" if running_backward() >= 0 or self._step.now.has_backward else "forward"

    def announce_calls(self, groups: Sequence[ParamGroup]) -> None:
        """Announce calls from now on, if a backend may end processes that disagree on one of ``groups``."""
        self._announces = any(map(may_end_processes, groups))

    def _announce(self, call: Call | None, kind: Kind) -> None:
        """Tell the other ranks of a call that is about to start, or of the end of a pass (``None``), if it does not
        follow the same call as before: the backend may end this process because of it."""
        before = self.calls[:-1] if call else self.calls
        followers, key = self._followers, (kind, before[-1] if before else None)
        if key in followers and followers[key] == call:
            return
        if key in followers and not self.unlike_before:
            here, there = (_describe(each) if each else "the end of the pass" for each in (call, followers[key]))
            self.unlike_before = (
                f"In this pass rank {dist.get_rank()} has {here} where it had {there} in the previous one. If the "
                f"other ranks repeated the previous pass, the backend may have ended one of them: gloo ends processes "
                f"whose messages differ in size"
            )
        followers[key] = call
        WAITS.announce()

    @cached_property
    def _lane(self) -> Lane:
        """The lane of comparisons: nothing waits for it, and it waits for nothing."""
        return Lane(self._device)

    def end_pass(self, kind: Kind) -> None:
        """Start to compare a pass. All ranks must call it."""
        started = [one for one in self._comparisons(kind) if one.calls and not is_capturing(self._device)]
        self._under_way += started
        if self._followers:
            self._announce(None, kind)
        for comparison in started:
            comparison.start(self._device, self._lane)
        self.calls.clear()
        self.latest, self.unlike_before, self._number = None, "", self._number + 1

    def _comparisons(self, kind: Kind) -> list[_Comparison]:
        """What the ranks of each process group have to compare of the calls so far."""
        calls, pass_of = [*self.calls], partial(_Comparison, kind, self._step.steps_before, self._number)
        return [pass_of(over, [call for call in calls if _is_compared(*call, over)]) for over in self._process_groups]

    def passes(self, kind: Kind | None, tree: int) -> dict[str, dict[str, str]]:
        """The last calls of this rank by their number in the pass, for each process group and pass. The passes are the
        one that runs, of a ``kind`` (``None``: none runs), and those whose comparison has not ended.

        ``tree`` identifies the tree on all ranks. Another thread calls it.
        """
        ended, running = [*self._under_way], [] if kind is None else self._comparisons(kind)
        return {
            f"{one.process_group.group_name} {tree} {one.number}": {
                str(at): text
                for at, text in enumerate([*one.described(), *[f"the end of the {one.kind}"] * (one in ended)])
                if at == 0 or at > len(one.calls) - _LAST
            }
            for one in (*ended, *running)
        }

    def check(self) -> None:
        """Raise RuntimeError on every rank if the ranks differed in the passes that have ended, and name both."""
        while self._under_way and not is_capturing(self._device) and self._under_way[0].is_there():
            try:
                self._under_way[0].check()
            finally:  # not before: other ranks see in :meth:`passes` where the ranks diverged
                self._under_way.pop(0)

    def forget(self) -> None:
        """Forget a pass that an error cut short."""
        self.calls.clear()
        self.latest, self.unlike_before = None, ""
        self._under_way.clear()
        self._number = (self._number // _ROUND + 1) * _ROUND


def _is_compared(group: ParamGroup, reduced: frozenset[int], process_group: dist.ProcessGroup) -> bool:
    """Whether ranks of a process group compare a call here: they take part in it, and no shared memory compares it."""
    if process_group is group.data.replicate_group:
        return group.options.strategy.all_reduces if reduced else group.data.shards_replicas
    in_memory = group.shard.shared is not None and reduced and group.reduce_transport.compares_reductions
    return process_group is group.data.shard_group and not in_memory


def may_end_processes(group: ParamGroup) -> bool:
    """Whether the backend may end processes, without an error, if ranks disagree on a group."""
    by_collectives = group.transport.ends_processes or group.reduce_transport.ends_processes
    used = (group.data.shard_group if by_collectives else None, group.data.replicate_group)
    return checks_are_on() and any(has_peers(each) and backend_of(each, group.device).ends_processes for each in used)


@dataclass(eq=False)
class _Comparison:
    """What the ranks of a process group communicated about in one pass."""

    kind: Kind
    steps: int
    number: int  # of the pass
    process_group: dist.ProcessGroup
    calls: list[Call]

    def described(self) -> list[str]:
        """A pass and its communication, as text for messages."""
        return [f"a {self.kind} after {self.steps} optimizer steps", *map(_describe, self.calls)]

    def start(self, device: torch.device, lane: Lane) -> None:
        said = self.steps, len(self.kind), hash(tuple([(group.tag, reduced) for group, reduced in self.calls]))
        mine = torch.tensor(said, dtype=torch.int64, device=CPU)
        self._every = torch.empty(self.process_group.size() * len(said), dtype=torch.int64, device=CPU)
        self._event: torch.Event | None = None
        streams = streams_of(device)
        with waiting(f"the comparison after a {self.kind}", self.process_group):
            if streams is None:
                self._work = all_gather_single(self._every, mine, group=self.process_group, async_op=True)
            else:
                lane.run(partial(self._start_on, device, streams, mine), after=())

    def _start_on(self, device: torch.device, streams: Streams, mine: torch.Tensor) -> Pending:
        """Compare on a device, in the current stream."""
        pinned = streams.host_memory(mine.shape, mine.dtype).copy_(mine)
        every = torch.empty_like(self._every, device=device)
        there = torch.empty_like(pinned, device=device).copy_(pinned, non_blocking=True)
        all_gather_single(every, there, group=self.process_group)
        self._every = streams.host_memory(every.shape, every.dtype)
        self._every.copy_(every, non_blocking=True)
        self._event = streams.current(device).record_event()
        return Done()

    def is_there(self) -> bool:
        if self._event is not None:
            return self._event.query()
        with waiting(f"the comparison after a {self.kind}", self.process_group):
            self._work.wait()
        return True

    def check(self) -> None:
        said = self._every.view(self.process_group.size(), -1)
        if bool((said == said[0]).all()):
            return
        # Not by a collective: on a device ranks notice at different times, between collectives of the next pass.
        key = f"fullshard/parted/{self.process_group.group_name}/{hash(tuple(said.flatten().tolist()))}"
        told = exchange_in_store(self.described(), key, self.process_group)
        where = "some ranks have not reported what they ran"
        if any(each != told[dist.get_rank()] for each in told.values()):
            where = "rank {} has {} where rank {} has {}".format(*first_difference(told))
        raise RuntimeError(
            f"the ranks did not run the same: {where}. What they computed in this {self.kind} is wrong. Every rank "
            f"must run the same sharded modules in the same order, and the same number of micro-batches per "
            f"optimizer step; where ranks use different parameters of a module, call "
            f"set_reduce_scatter_unused_params(True), and a rank that leaves a module out calls "
            f"fullshard.skip_module(module, tensor) in its place"
        )


def _describe(call: Call) -> str:
    group, reduced = call
    names = [group.params[index].name for index in sorted(reduced)]
    return f"the reduction of {names} in {group.title}" if names else f"the gather of {group.title}"
