"""The passes of a step: when the ranks of a host may read what they share, and whether all ranks ran the same.

A *pass* is an outermost forward or a backward. In a pass every rank reads what all of them wrote before it, and nobody
writes; between passes everybody may write its shards, and nobody reads those of others. Owns the beginnings and ends of
passes, at which ranks wait for each other that share memory.

A collective knows sizes and no names: ranks that run different groups would take each other's values for their own. So
ranks compare what they communicated about, by one all-gather of three integers over each process group. It starts when
a pass ends. Its result is looked at before the next pass begins, and at once where results may be used: after a
backward, and after a forward without gradients. On devices with streams nobody waits for it; it takes one small copy to
the device and one back, so four in a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
import torch.distributed as dist

from fullshard.comm.local_ranks import PassBarrier
from fullshard.comm.process_group import backend_name, exchange_in_store, has_peers
from fullshard.comm.waits import WAITS, checks_are_on, waiting
from fullshard.device import CPU, Done, Lane, Pending, Streams, is_capturing, streams_of
from fullshard.group.context import Clock
from fullshard.group.group import Group
from fullshard.group.verify import first_difference
from fullshard.torch_private import all_gather_single

Kind = Literal["forward", "backward"]


class Passes:
    """The passes of one tree of modules; ``clock`` tells its groups whether they are in one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.kind: Kind | None = None
        self.steps = 0  # steps of optimizers when the last pass began
        self._barriers: list[PassBarrier] = []
        self._groups: list[Group] = []  # those whose ranks share memory

    def begin(self, kind: Kind, groups: Iterable[Group]) -> None:
        """Make this rank's shards known, and wait until all ranks have. Inside another pass nothing happens."""
        if self.kind is not None:
            return
        barriers: dict[int, PassBarrier] = {}  # one for all groups that the same ranks share
        self._groups = []
        for group in groups:
            if (shared := group.memory.shared) is not None and not group.memory.is_apart:
                shared.publish(group.full.version, whatever=kind == "forward")
                barriers.setdefault(id(group.transport), shared.memory.barrier)
                self._groups.append(group)
        self.kind, self.steps = kind, self._clock.steps
        self._clock.stepped.clear()
        self._barriers = list(barriers.values())
        for barrier in self._barriers:
            barrier.enter(f"the beginning of a {kind}", 1 if kind == "backward" else 0, self.steps)
        self._clock.reading = True
        for group in self._groups:
            if not group.is_unsharded:
                group.full.let_read(True)

    def end(self, kind: Kind) -> None:
        """Wait until all ranks have read what they need."""
        if self.kind is not kind:
            return
        self._stop_reading()
        for barrier in self._barriers:
            barrier.leave(f"the end of a {kind}")

    def give_up(self) -> None:
        """End the pass that an error cut short, and wait for nobody."""
        self._stop_reading()
        for barrier in self._barriers:
            barrier.give_up()

    def _stop_reading(self) -> None:
        self.kind, self._clock.reading = None, False
        for group in self._groups:
            if not group.is_unsharded:
                group.full.let_read(False)


#: After an error, pass numbers go on at the next multiple of this: ranks may have noticed it in different passes.
_ROUND = 1 << 32
#: Ranks tell each other this many of their last calls. If two wait for each other, they parted a few calls ago.
_LAST = 50
#: A group, and the indices of its parameters that were reduced; a gather has none.
Call = tuple[Group, frozenset[int]]
NOTHING: frozenset[int] = frozenset()


class Consistency:
    """The comparisons of one tree of modules on ``device``.

    Attributes:
        calls: what this rank has started to communicate about in this pass, in order.
        unlike_before: where this pass has left the order of the one before, if calls are announced; for people.
    """

    def __init__(self, device: torch.device, passes: Passes) -> None:
        self._device, self._passes = device, passes
        self._process_groups: list[dist.ProcessGroup] = []
        self._under_way: list[_Comparison] = []
        self._number = 0  # of the pass, the same on all ranks
        self.calls: list[Call] = []
        self.unlike_before = ""
        #: The call that followed each call, by the kind of the pass, in the last passes.
        self._followers: dict[tuple[Kind | None, Call | None], Call | None] = {}

    def compare_over(self, process_groups: list[dist.ProcessGroup]) -> None:
        """Compare with the ranks of these groups, over which the tree communicates."""
        self._process_groups = list(filter(has_peers, process_groups)) if checks_are_on() else []

    def announce(self, group: Group | None, reduced: frozenset[int]) -> None:
        """Note a call, or the end of a pass (``None``), that is about to start.

        If it did not follow the same call before, let the other ranks know: the backend may end this process for it.
        """
        followers, key = self._followers, (self._passes.kind, self.calls[-1] if self.calls else None)
        call = None if group is None else (group, reduced)
        if call is not None:
            self.calls.append(call)
        if key in followers and followers[key] == call:
            return
        if key in followers and not self.unlike_before:
            here, there = (_told(each) if each else "the end of the pass" for each in (call, followers[key]))
            self.unlike_before = (
                f"In this pass rank {dist.get_rank()} has {here} where it had {there} in the one before. If the "
                f"other ranks had that again, the backend may have ended one of them: gloo ends processes in which "
                f"the sizes of what they exchange differ"
            )
        followers[key] = call
        WAITS.announce()

    @cached_property
    def _lane(self) -> Lane:
        """A lane of their own: nothing waits for them, and they for nothing."""
        return Lane(self._device)

    def start(self, kind: Kind, steps: int) -> None:
        """Start to compare a pass that began after so many steps of optimizers. All ranks must call it."""
        started = [one for one in self._comparisons(kind, steps) if one.calls and not is_capturing(self._device)]
        self._under_way += started
        if self._followers:
            self.announce(None, NOTHING)
        for comparison in started:
            comparison.start(self._device, self._lane)
        self.calls.clear()
        self.unlike_before = ""
        self._number += 1

    def _comparisons(self, kind: Kind, steps: int) -> list[_Comparison]:
        """What the ranks of each process group have to compare of the calls so far."""
        calls = [*self.calls]
        return [
            _Comparison(
                [call for call in calls if _is_compared(*call, process_group)], kind, steps, process_group, self._number
            )
            for process_group in self._process_groups
        ]

    def passes(self, kind: Kind | None, steps: int, tree: int) -> dict[str, dict[str, str]]:
        """The last calls of this rank by their number in the pass, for each process group and pass. The passes are the
        one that runs, of a ``kind`` (``None``: none runs), and those whose comparison has not ended.

        ``tree`` identifies the tree on all ranks. Another thread calls it.
        """
        ended, running = [*self._under_way], [] if kind is None else self._comparisons(kind, steps)
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
            finally:  # not before: other ranks see in :meth:`passes` where they parted
                self._under_way.pop(0)

    def forget(self) -> None:
        """Forget a pass that an error cut short."""
        self.calls.clear()
        self.unlike_before = ""
        self._under_way.clear()
        self._number = (self._number // _ROUND + 1) * _ROUND


def _is_compared(group: Group, reduced: frozenset[int], process_group: dist.ProcessGroup) -> bool:
    """Whether ranks of a process group take part in a call that they do not compare in shared memory anyway."""
    if process_group is group.data.replicate_group:
        return bool(reduced) and group.options.all_reduce_gradients
    in_memory = group.memory.shared is not None and (not reduced or group.reduce_transport.compares_reductions)
    return process_group is group.data.shard_group and not in_memory


def may_end_processes(group: Group) -> bool:
    """Whether the backend may end processes, without an error, if ranks disagree on a group."""
    by_collectives = group.transport.ends_processes or group.reduce_transport.ends_processes
    used = (group.data.shard_group if by_collectives else None, group.data.replicate_group)
    return checks_are_on() and any(has_peers(each) and backend_name(each, group.device) == "gloo" for each in used)


@dataclass(eq=False)
class _Comparison:
    """What the ranks of a process group communicated about in one pass."""

    calls: list[Call]
    kind: Kind
    steps: int
    process_group: dist.ProcessGroup
    number: int  # of the pass

    def described(self) -> list[str]:
        """A pass and what was communicated about in it, for people."""
        return [f"a {self.kind} after {self.steps} steps of optimizers", *map(_told, self.calls)]

    def start(self, device: torch.device, lane: Lane) -> None:
        said = self.steps, len(self.kind), hash(tuple([(group.tag, reduced) for group, reduced in self.calls]))
        mine = torch.tensor(said, dtype=torch.int64, device=CPU)
        self._every = torch.empty(self.process_group.size() * len(said), dtype=torch.int64, device=CPU)
        self._event: torch.Event | None = None
        streams = streams_of(device)
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
        # Not by a collective: on a device each rank notices at a time of its own, between others of the next pass.
        key = f"fullshard/parted/{self.process_group.group_name}/{hash(tuple(said.flatten().tolist()))}"
        told = exchange_in_store(self.described(), key, self.process_group)
        where = "some ranks have not told what they have"
        if any(each != told[dist.get_rank()] for each in told.values()):
            where = "rank {} has {} where rank {} has {}".format(*first_difference(told))
        raise RuntimeError(
            f"the ranks did not run the same: {where}. What they computed in this {self.kind} is wrong. Every rank "
            f"must run the same sharded modules in the same order, and take as many micro-batches for each step of an "
            f"optimizer that has their parameters; where ranks use different parameters of a module, call "
            f"set_reduce_scatter_unused_params(True), and where some leave a module out, they call "
            f"fullshard.leave_out(module, tensor) in its place"
        )


def _told(call: Call) -> str:
    group, reduced = call
    names = [group.params[index].name for index in sorted(reduced)]
    return f"the reduction of {names} in {group.title}" if names else f"the gather of {group.title}"
