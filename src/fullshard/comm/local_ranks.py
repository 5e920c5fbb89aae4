"""The ranks of a process group that share this host.

Owns their rendezvous, the making of shared segments, waits that are bounded and notice a rank that has ended, and
the barrier between passes. Others decide what is shared.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import torch.distributed as dist

from fullshard.buffer.shared_memory import PRIVATE, Address, Counters, Segment, forget_copies, missing
from fullshard.comm.process_group import gather_objects
from fullshard.comm.waits import WAITS, PeerFailureError, Wait, describe_with_position
from fullshard.platforms import host_id, linux, ready, watched
from fullshard.torch_private import timeout_of

_log = logging.getLogger("fullshard")
#: Seconds for which a wait spins, and then yields the processor between two looks, before it sleeps. To spin so long
#: costs about as much as a wake-up; ranks that wait for longer leave their core to threads that compute.
_LOOK, _YIELD = 20e-6, 2e-3
#: A wait sleeps for a fiftieth of the time that it has taken, within these limits in seconds.
_SLEEP, _LONGEST_SLEEP = 100e-6, 5e-3
_ALIVE = 0.05  # seconds between two looks at whether the other ranks still live


class LocalRanks:
    """The ranks of a process group that are on this host, and their processes. Made by :func:`find_local_ranks`.

    Attributes:
        hosts: the ranks of the process group that are on each host; ``members`` are those on this one.
        rank: the position of this rank among them, of ``size``; ``pids`` and ``global_ranks`` are in this order too.
    """

    def __init__(self, process_group: dist.ProcessGroup, pids: Sequence[int], hosts: Sequence[Sequence[int]]) -> None:
        self.process_group = weakref.ref(process_group)  # which knows this object as long as it lives
        self.hosts = tuple(map(tuple, hosts))
        self.members = next(host for host in self.hosts if process_group.rank() in host)
        every = dist.get_process_group_ranks(process_group)
        self.global_ranks, self.pids = [every[rank] for rank in self.members], [pids[rank] for rank in self.members]
        self.rank, self.size = self.members.index(process_group.rank()), len(self.members)
        self._looks = _LOOK if self.size <= (os.cpu_count() or 1) else 0.0
        self._timeout = timeout_of(process_group)
        self._rank_of: dict[int, int] = {}
        self._has_told = False  # that something could not be shared
        for rank, pid in enumerate(self.pids):
            if rank != self.rank:
                self._rank_of[file := watched(pid)] = rank
                weakref.finalize(self, os.close, file)

    def map_together(self, segment: Segment | None, view: Segment | None = None) -> bool:
        """Replace the memory that each rank has reserved by one piece of memory, which all ranks of the host map.

        All ranks must call it, those of a host with the same size. Afterwards all ranks see what a rank had in its own
        parts of ``segment``. They see it through ``view`` too, but only this rank sees what it writes there. A rank
        that has reserved nothing passes ``None``. Returns whether all ranks could map it; if not, nothing has changed.
        """
        common, look, why = None, None, ""
        nbytes, process_group = segment.address.nbytes if segment is not None else 0, self.process_group()
        try:
            common = Segment.create(nbytes) if self.rank == 0 and nbytes else None
        except OSError as error:
            why = str(error)
        mine = nbytes, common.address if common is not None else None
        said: list[tuple[int, Address | None]] = gather_objects(mine, process_group)
        first, address = said[self.members[0]]
        for rank, (other, _) in zip(self.global_ranks, (said[member] for member in self.members), strict=True):
            if other != first:
                raise ValueError(
                    f"rank {rank} needs {other} bytes of shared memory where rank "
                    f"{self.global_ranks[0]} needs {first}: build the same model on all ranks, on the meta device "
                    f"on all or none of them, or set FULLSHARD_TRANSPORT=p2p"
                )
        try:
            if address is not None:
                common = common or Segment.open(address)
                look = Segment.open(address, PRIVATE)
        except OSError as error:
            why = str(error)
        every: list[str] = gather_objects(why, process_group)
        if failed := [(rank, each) for rank, each in enumerate(every) if each]:
            self._tell(nbytes, *failed[0])
        if segment is None or common is None or look is None or failed:
            return False
        segment.become(common)
        if view is not None:
            view.become(look)
        return True

    def _tell(self, nbytes: int, rank: int, why: str) -> None:
        """Say once what cannot be shared."""
        if not self._has_told and dist.get_rank() == 0:
            _log.warning(
                f"rank {rank} has no {nbytes} bytes of shared memory for parameters ({why}): parameters that find no "
                f"shared memory travel as messages, as with FULLSHARD_TRANSPORT=p2p"
            )
        self._has_told = True

    def wait(self, counters: Counters, value: int, doing: str, tag: int = -1) -> None:
        """Return when all the others have come to ``value``; ``doing`` and the ``tag`` of the exchange are for errors.
        Raises PeerFailureError if a rank ended before, the wait cannot end, or the timeout of the group has passed."""
        begin_ns = WAITS.clock() if WAITS.listeners else 0
        if counters.reached(value) and not begin_ns:
            return
        begin, before = time.monotonic(), WAITS.current
        look_alive = begin + _ALIVE
        try:
            while not counters.reached(value):
                now = time.monotonic()
                if now - begin < _YIELD:
                    if now - begin >= self._looks:
                        linux.sched_yield()
                    continue
                if WAITS.current is None:
                    WAITS.current = Wait(doing, self.process_group(), tag)
                    WAITS.count += 1
                time.sleep(min(max(_SLEEP, (now - begin) / 50), _LONGEST_SLEEP))
                if now > look_alive:
                    look_alive = now + _ALIVE
                    self._check_peers(counters, value, WAITS.current, now - begin)
        finally:
            WAITS.current = before
            if begin_ns:
                WAITS.tell(Wait(doing, None, tag), begin_ns)

    def _check_peers(self, counters: Counters, value: int, wait: Wait, waited: float) -> None:
        ended = [self._rank_of[file] for file in ready(self._rank_of)]  # before the look at where they are
        missing = [rank for rank in range(self.size) if rank != self.rank and counters.of(rank) < value]
        here = f"rank {self.global_ranks[self.rank]} waited in {describe_with_position(wait)}"
        if lost := ", ".join(self.name(rank) for rank in missing if rank in ended):
            why = WAITS.explain(self.process_group())
            raise PeerFailureError(f"{here}, for rank {lost}, which has ended. {why}")
        if missing and WAITS.verdict is not None:
            raise PeerFailureError(f"{here}. {WAITS.verdict}")
        if missing and waited > self._timeout:
            raise PeerFailureError(
                f"{here}, for rank {', '.join(map(self.name, missing))} for {self._timeout:.0f} s, the timeout of its "
                f"process group: that rank was slow, failed, or runs something else. All ranks must run the same "
                f"forwards and backwards"
            )

    def name(self, rank: int) -> str:
        return f"{self.global_ranks[rank]} (process {self.pids[rank]})"


class PassBarrier:
    """Keeps apart reading and writing of shared memory, in which each rank writes its own part.

    Between :meth:`enter` and :meth:`leave` every rank may read all of it; at other times a rank may write its own part.
    Ranks number their passes. So they agree again in the next pass if an error cut one short on some ranks. A rank says
    ``8 * pass + 4 * has_left + 2 * kind_before + kind``, by a number at the beginning of ``segment``.
    """

    def __init__(self, local_ranks: LocalRanks, segment: Segment) -> None:
        self._local_ranks = local_ranks
        self._counters = Counters(segment, 0, local_ranks.rank, local_ranks.size)

    def enter(self, doing: str, kind: Literal[0, 1] = 0, steps: int = 0) -> None:
        """Wait until all ranks enter, for a forward or a backward (``kind`` 1), after ``steps`` steps of optimizers.
        Raises RuntimeError if a rank enters another pass, has ended or is late, or if this process was forked."""
        counters, local_ranks, mine = self._counters, self._local_ranks, self._local_ranks.rank
        if os.getpid() != local_ranks.pids[mine]:
            raise RuntimeError(
                f"process {os.getpid()} was forked from rank {local_ranks.name(mine)} and is at {doing}: it has a "
                f"copy of the parameters from then, and only the ranks themselves can run forwards and backwards"
            )
        forget_copies()
        number = counters.value // 8 + 1
        counters.note(2 * steps + number % 2)
        counters.set(8 * number + 2 * (counters.value % 2) + kind)
        local_ranks.wait(counters, 8 * number, doing)
        for rank in range(local_ranks.size):
            said = counters.of(rank)  # perhaps a pass ahead, if it has noticed and was reset
            is_other = (said >> (said // 8 - number)) & 1 != kind
            here, there = local_ranks.global_ranks[mine], local_ranks.global_ranks[rank]
            if is_other:
                raise RuntimeError(
                    f"rank {here} is at {doing} and rank {there} is not: one of them has left out a forward or a "
                    f"backward. All ranks must run the same ones, the same number of times, also in an evaluation"
                )
            theirs, of_number = divmod(counters.noted(rank), 2)  # of this pass, or also of the next one
            if of_number == number % 2 and theirs != steps:
                raise RuntimeError(
                    f"rank {here} is at {doing} after {steps} optimizer steps and rank {there} after "
                    f"{theirs}: one of them has left out a micro-batch or a step, or steps different "
                    f"parameters. All ranks must run the same number of micro-batches per optimizer step"
                )

    def leave(self, doing: str) -> None:
        """Wait until all ranks leave."""
        if self.give_up():
            self._local_ranks.wait(self._counters, self._counters.value // 4 * 4, doing)

    def give_up(self) -> bool:
        """Leave and wait for nobody; returns whether a pass had been entered."""
        counters = self._counters
        if counters.value < 8 or counters.value & 4:
            return False
        counters.set(counters.value + 4)
        return True


def find_local_ranks(process_group: dist.ProcessGroup) -> LocalRanks | str:
    """The ranks of a process group that share this host, or why none can share memory. All ranks must call it."""
    every: list[tuple[int, str, str]] = gather_objects((os.getpid(), host_id(), missing()), process_group)
    hosts: dict[str, list[int]] = {}
    for rank, (_, host, lacks) in enumerate(every):
        if lacks:
            return f"rank {rank} runs on a system without the shared memory that this transport needs: it lacks {lacks}"
        hosts.setdefault(host, []).append(rank)
    local_ranks: LocalRanks | None = None
    with suppress(OSError):
        local_ranks = LocalRanks(process_group, [pid for pid, _, _ in every], [*hosts.values()])
    found: list[bool] = gather_objects(local_ranks is not None, process_group)
    if local_ranks is None or not all(found):
        return f"rank {found.index(False)} cannot see the processes of the others"
    return local_ranks
