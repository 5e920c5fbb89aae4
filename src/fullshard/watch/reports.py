"""What the ranks let each other know of themselves, and what this rank knows of the others from that.

Owns a rank's report, the last reports of the others, and what can be told of a rank besides: its process has ended, is
stopped, or has said nothing for long. It leaves to :mod:`fullshard.watch.watch` what follows from that.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fullshard.watch.connections import NoAnswerError, StoreConnection

#: When this process began, about. Reports on this host from before it are those of processes that a launcher has
#: started anew since, over the same store.
_BEGUN = time.monotonic()


@dataclass
class Report:
    """What a rank lets the others know."""

    rank: int  # of the default process group
    process: int
    host: str  # identifies the space of process numbers
    number: int = 1  # of the default process group among those that the process has had
    beat: int = 0  # grows with each report
    written: float = 0.0  # when, in seconds since its host was started
    doing: str = ""  # see :class:`~fullshard.comm.waits.Position`
    passes: dict[str, dict[str, str]] = field(default_factory=dict)  # the same
    waits: str = ""  # what it waits for, and empty while it runs
    waits_for: list[int] = field(default_factory=list)  # the ranks on which that depends
    waited: float = 0.0  # seconds
    inside: str = ""  # a function of torch in which it has not moved, perhaps as it waits for others; for people
    beside: str = ""  # what threads beside training wait for, and for how long, for people
    quiet: float = 0.0  # seconds of the wait in which nothing came from any rank
    connections: list[list[str]] = field(default_factory=list)  # their two ends, this one first, as they were lately
    ended: str = ""  # how its program ended; empty while it runs
    is_first: bool = True  # whether it did not end because of another rank
    verdict: str = ""  # why its wait will not end, as this rank found out
    judged: float = 0.0  # for how many seconds it has known that

    @property
    def place(self) -> str:
        """For people."""
        inside = f", in {self.inside}, which may wait for other ranks" if self.inside else ""
        return self.doing + (f", where it has waited {self.waited:.0f} s for {self.waits}" if self.waits else inside)


class Reports:
    """The reports of all ranks, in a store, under ``key`` and their rank: a new one every ``interval`` seconds.

    The store may still have those of an earlier process group, of which ``former`` has the processes and numbers, and,
    if it had one of this rank already, those of processes before a restart. Clocks of hosts differ: a report from
    another host is then read once a second one has followed it.
    """

    def __init__(
        self, store: StoreConnection, mine: Report, key: str, interval: float, former: Collection[tuple[int, int]] = ()
    ) -> None:
        self._store, self._mine, self._key, self._interval = store, mine, key, interval
        self._beats: dict[int, tuple[int, float]] = {}  # by rank, and when it was new
        self._watched: dict[int, tuple[int, int]] = {}  # processes by rank, and what tells that one has ended
        self._former, self._lock = frozenset(former), threading.RLock()
        self.known: dict[int, Report] = {}  # the last ones
        self._first: dict[tuple[str, int], int] = {}  # the number of the first report of a process that was found
        self._is_used = True
        with suppress(NoAnswerError):
            self._is_used = store.get(f"{key}{mine.rank}") is not None

    def write(self) -> None:
        """Let the others know of this rank."""
        with self._lock, suppress(NoAnswerError):
            self._mine.beat, self._mine.written = self._mine.beat + 1, time.monotonic()
            self._store.set(f"{self._key}{self._mine.rank}", json.dumps(asdict(self._mine)))

    def read(self, ranks: Iterable[int]) -> dict[int, Report]:
        """The reports of ranks and of those on which these depend, as far as they have made any."""
        reports, left = dict[int, Report](), [*ranks]
        while left:
            rank = left.pop()
            if rank in reports or rank == self._mine.rank:
                continue
            with suppress(NoAnswerError):
                if (said := self._store.get(f"{self._key}{rank}")) is not None:
                    report = Report(**json.loads(said))
                    if self._is_of_now(report):
                        self.known[rank] = report
            if rank not in self.known:
                continue
            report = reports[rank] = self.known[rank]
            if self._beats.get(rank, (-1, 0.0))[0] != report.beat:
                self._beats[rank] = report.beat, time.monotonic()
            left += report.waits_for
        return reports

    def _is_of_now(self, report: Report) -> bool:
        """Whether a report was not left in the store by another process group or attempt."""
        if (report.process, report.number) in self._former:
            return False
        if report.host == self._mine.host:
            return report.written >= _BEGUN
        return not self._is_used or report.beat > self._first.setdefault((report.host, report.process), report.beat)

    def has_ended(self, report: Report) -> bool:
        """Whether the process of a rank on this host is gone."""
        if report.host != self._mine.host:
            return False
        process, watched = self._watched.get(report.rank, (0, -1))
        if process != report.process:
            try:
                watched = os.pidfd_open(report.process)
            except ProcessLookupError:
                return True
            except (OSError, AttributeError):
                return False
            self._watched[report.rank] = report.process, watched
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        return bool(poll.poll(0))

    def silence(self, report: Report) -> float:
        """For how many seconds a rank has not reported; 0 for the time that passes between two reports anyway."""
        since = self._beats.get(report.rank)
        silence = time.monotonic() - since[1] if since is not None else 0.0
        return silence if silence > 3 * self._interval else 0.0

    def is_stopped(self, report: Report) -> bool:
        with suppress(OSError, IndexError):
            state = Path(f"/proc/{report.process}/stat").read_text().rpartition(") ")[2][:1]
            return report.host == self._mine.host and state == "T"
        return False

    def all_so_far(self) -> frozenset[tuple[int, int]]:
        """Processes and numbers of the reports of others, of this process group and those before it."""
        return self._former | {(report.process, report.number) for report in self.known.values()}

    def close(self) -> None:
        """Know of no process any more."""
        for _, watched in self._watched.values():
            os.close(watched)


def parting(mine: Report, other: Report, but: Collection[str] = ()) -> str | None:
    """Where two ranks went different ways in one pass, of all ``but`` some."""
    for key in (mine.passes.keys() & other.passes.keys()).difference(but):
        here, there = mine.passes[key], other.passes[key]
        for at in sorted(map(int, here.keys() & there.keys())):
            if here[str(at)] == there[str(at)]:
                continue
            first, second = sorted(((mine.rank, here[str(at)]), (other.rank, there[str(at)])))
            where = f"in {here['0']}, rank" if at else "rank"
            before = f", both after {here[str(at - 1)]}" if at > 1 and str(at - 1) in here else ""
            return (
                f"The ranks do not run the same: {where} {first[0]} has {first[1]} where rank {second[0]} has "
                f"{second[1]}{before}. Every rank must run the same sharded modules in the same order, and take as "
                f"many micro-batches for each step of the optimizer. A rank that does not need a module calls "
                f"fullshard.leave_out(module, tensor) in its place"
            )
    return None
