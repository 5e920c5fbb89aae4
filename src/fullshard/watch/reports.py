"""The reports that ranks write about themselves, and what a rank knows about the others from them.

Owns a rank's report, the last reports of the others, and the other facts about a rank: its process has ended, is
stopped, or has been silent for long. :mod:`fullshard.watch.watch` draws the conclusions.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from fullshard.platforms import ready, watched
from fullshard.watch.connections import NoAnswerError, StoreConnection

#: About the time when this process began. Older reports from this host are those of an earlier attempt: a launcher has
#: restarted the processes with the same store.
_BEGUN = time.monotonic()
#: What is known about ranks that did not report their end when the process of the store has ended.
GONE = "the store in which ranks report their end has gone"
_ALIVE = "still runs"  # what is known of a rank of this host then, or when the store does not answer
#: Seconds after which a host that does not answer is considered lost. Networks may fail for shorter.
_UNREACHABLE = 60.0
#: Seconds by which hosts may differ that were lost together: probes are so far apart, and a little more.
_ALIKE = 10.0


@dataclass
class Report:
    """What a rank reports to the others."""

    rank: int  # of the default process group
    process: int
    host: str  # identifies the space of process numbers
    number: int = 1  # the number of the default process group among those of the process
    beat: int = 0  # grows with each report
    written: float = 0.0  # time of writing, in seconds since its host was started
    doing: str = ""  # see :class:`~fullshard.comm.waits.Position`
    passes: dict[str, dict[str, str]] = field(default_factory=dict)  # the same
    waits: str = ""  # what it waits for; empty while it runs
    waits_for: list[int] = field(default_factory=list)  # the ranks on which that depends
    waited: float = 0.0  # seconds of the wait
    inside: str = ""  # the function of torch in which it stays, perhaps waiting for others; a text for people
    beside: str = ""  # what other threads wait for, and for how long; a text for people
    quiet: float = 0.0  # seconds of the wait in which it received nothing from any rank
    connections: list[list[str]] = field(default_factory=list)  # recent connections: this rank's end, the other end
    gone: list[int] = field(default_factory=list)  # the ranks of its host whose process has ended
    stopped: list[int] = field(default_factory=list)  # those whose process is stopped
    ended: str = ""  # how its program ended; empty while it runs
    is_first: bool = True  # whether it ended on its own, not because of another rank
    verdict: str = ""  # why its wait will never end, if it knows
    judged: float = 0.0  # seconds since it found the verdict
    cause: str = ""  # which rank its last error is about, and how that one ended; a text for people
    host_name: str = field(default_factory=socket.gethostname)  # for people

    @classmethod
    def read(cls, data: str) -> Report | None:
        """The report that a rank has written, perhaps of another version: without the fields that this one does not
        know; ``None`` if it lacks one."""
        known = {each.name for each in fields(cls)}
        with suppress(ValueError, TypeError, AttributeError):
            return cls(**{name: value for name, value in json.loads(data).items() if name in known})
        return None

    @property
    def state(self) -> str:
        """What the rank is doing, for people."""
        inside = f", in {self.inside}, which may wait for other ranks" if self.inside else ""
        return self.doing + (f", where it has waited {self.waited:.0f} s for {self.waits}" if self.waits else inside)


class Reports:
    """The reports of all ranks in a store, by ``key`` and rank. Each rank writes a new one every ``interval`` seconds.

    The store may still have reports of an earlier process group; ``former`` has their processes and numbers. After a
    restart it may also have reports of the processes before. Then a report from another host, whose clock cannot be
    compared, counts only when a second report has followed it.
    """

    def __init__(
        self, store: StoreConnection, mine: Report, key: str, interval: float, former: Collection[tuple[int, int]] = ()
    ) -> None:
        self._store, self._mine, self._key, self._interval = store, mine, key, interval
        self._beats: dict[int, tuple[int, float]] = {}  # for each rank its last beat, and when it was read first
        self._watched: dict[int, tuple[int, int]] = {}  # for each rank its process, and a pidfd of that
        self._former, self._lock = frozenset(former), threading.RLock()
        self.known: dict[int, Report] = {}  # the last report of each rank
        self._first: dict[tuple[str, int], int] = {}  # the first beat that was read, by host and process
        self._is_used = True
        with suppress(NoAnswerError):
            self._is_used = store.get(f"{key}{mine.rank}") is not None

    def write(self) -> None:
        """Write this rank's report."""
        with self._lock, suppress(NoAnswerError):
            self._mine.beat, self._mine.written = self._mine.beat + 1, time.monotonic()
            self._store.set(f"{self._key}{self._mine.rank}", json.dumps(asdict(self._mine)))

    def read(self, ranks: Iterable[int]) -> dict[int, Report]:
        """The reports of ranks, and of the ranks on which these depend. Ranks without a report are left out."""
        reports, left = dict[int, Report](), [*ranks]
        while left:
            rank = left.pop()
            if rank in reports or rank == self._mine.rank:
                continue
            with suppress(NoAnswerError):
                data = self._store.get(f"{self._key}{rank}")
                if data is not None and (found := Report.read(data)) is not None and self._is_of_now(found):
                    self.known[rank] = found
            if rank not in self.known:
                continue
            report = reports[rank] = self.known[rank]
            if self._beats.get(rank, (-1, 0.0))[0] != report.beat:
                self._beats[rank] = report.beat, time.monotonic()
            left += report.waits_for
        return reports

    def _is_of_now(self, report: Report) -> bool:
        """Whether a report belongs to this process group and attempt, not to an earlier one."""
        if (report.process, report.number) in self._former:
            return False
        if report.host == self._mine.host:
            return report.written >= _BEGUN
        return not self._is_used or report.beat > self._first.setdefault((report.host, report.process), report.beat)

    def beside(self, ranks: Collection[int]) -> list[int]:
        """The ranks that are known to run on this host, or on those of some ``ranks``."""
        hosts = {self._mine.host, *(each.host for rank, each in self.known.copy().items() if rank in ranks)}
        return [rank for rank, each in self.known.copy().items() if each.host in hosts]

    def look_beside(self) -> bool:
        """Note which ranks of this host have ended or are stopped; returns whether there is news."""
        before, beside = (self._mine.gone, self._mine.stopped), [self.known[rank] for rank in self.beside([])]
        self._mine.gone = [each.rank for each in beside if self.has_ended(each)]
        self._mine.stopped = [each.rank for each in beside if self.is_stopped(each)]
        return before != (self._mine.gone, self._mine.stopped)

    def has_ended(self, report: Report) -> bool:
        """Whether the process of a rank has ended; of one on another host, whether a rank there has seen it."""
        if report.host != self._mine.host:
            return any(report.rank in each.gone for each in self.known.copy().values() if each.host == report.host)
        process, file = self._watched.get(report.rank, (0, -1))
        if process != report.process:
            try:
                file = watched(report.process)
            except ProcessLookupError:
                return True
            except OSError:
                return False
            self._watched[report.rank] = report.process, file
        return bool(ready([file]))

    def age(self, report: Report) -> float:
        """How many seconds ago a report was written, or read first if the clock is another host's."""
        is_here = report.host == self._mine.host
        return max(0.0, time.monotonic() - (report.written if is_here else self._beats[report.rank][1]))

    def silence(self, report: Report) -> float:
        """For how many seconds a rank has not reported; 0 if that is within the usual time between reports."""
        since = self._beats.get(report.rank)
        silence = time.monotonic() - since[1] if since is not None else 0.0
        return silence if silence > 3 * self._interval else 0.0

    def place(self, report: Report) -> str:
        """Where a rank runs, to be put after its name; empty if all that are known run on this host."""
        is_known = all(each.host == self._mine.host for each in (report, *self.known.values()))
        return "" if is_known else f" on {report.host_name}"

    def state(self, report: Report) -> tuple[int, str]:
        """What a rank does, to be put after its name, and its place in a list: ranks that wait for others come last."""
        if state := f"has ended: {report.ended}" if report.ended else self._silent_state(report):
            return (2 if state == _ALIVE else 0), f"{self.place(report)} {state}"
        idle = "" if report.waits or report.inside else ", and waits for nobody"
        beside = f"; {report.beside}" if report.beside else ""
        return (2 if report.waits else 1), f"{self.place(report)} is {report.state}{idle}{beside}"

    def _silent_state(self, report: Report) -> str:
        """What a rank did when it was last heard of, for people; empty if it reports."""
        silence, is_here = self.silence(report), report.host == self._mine.host
        if self._store.has_gone and not is_here:  # its last report may be old
            return f"may have ended: {GONE}"
        if not silence:
            return ""
        how = f"has not reported for {silence:.0f} s"
        beside = [each for each in self.known.copy().values() if each.host == report.host and not self.silence(each)]
        if self.is_stopped(report) or any(report.rank in each.stopped for each in beside):
            return f"{how} (the process is stopped), and was {report.state}"
        if is_here:
            return _ALIVE if self._store.has_gone or self._store.is_silent else f"{how}, and was {report.state}"
        if self._store.is_silent:
            return f"has not reported: the store does not answer. It was last seen {report.state}"
        why = "it may have been killed" + ("" if beside else ", or its host or network may be down")
        return f"{how}: {why}. It was last seen {report.state}"

    def unreachable(self, reports: Iterable[Report], unanswered: Mapping[tuple[str, str], float]) -> str:
        """The hosts that do not answer, and their ranks, as sentences; empty if all do. ``unanswered`` has the seconds
        of each connection, by this rank's end and the other end."""
        found, all_ranks = dict[str, float](), dict[str, list[str]]()
        for report in reports:
            seconds = max((unanswered.get((here, there), 0.0) for there, here in report.connections), default=0.0)
            if report.host != self._mine.host:
                found[report.host_name] = max(seconds, found.get(report.host_name, 0.0))
                all_ranks.setdefault(report.host_name, []).append(str(report.rank))
        longest = max(found.values(), default=0.0)
        return ". ".join(
            f"{name}, the host of rank{'s'[: len(ranks) - 1]} {', '.join(ranks)}, has not answered "
            f"{self._mine.host_name} for {found[name]:.0f} s: it is down, or the network between them is"
            for name, ranks in all_ranks.items()
            if longest >= _UNREACHABLE <= found[name] + _ALIKE
        )

    def is_stopped(self, report: Report) -> bool:
        with suppress(OSError, IndexError):
            state = Path(f"/proc/{report.process}/stat").read_text(encoding="utf-8").rpartition(") ")[2][:1]
            return report.host == self._mine.host and state == "T"
        return False

    def all_so_far(self) -> frozenset[tuple[int, int]]:
        """The processes and numbers of all reports of other ranks so far, of this process group and earlier ones."""
        return self._former | {(report.process, report.number) for report in self.known.values()}

    def close(self) -> None:
        """Close the pidfds."""
        for _, file in self._watched.values():
            os.close(file)


def parting(mine: Report, other: Report, but: Collection[str] = ()) -> str | None:
    """Where two ranks ran different things in one pass, as a sentence; ``None`` if they agree. Passes in ``but`` are
    not compared."""
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
                f"{second[1]}{before}. Every rank must run the same sharded modules in the same order, and the "
                f"same number of micro-batches per optimizer step. A rank that does not need a module calls "
                f"fullshard.skip_module(module, tensor) in its place"
            )
    return None
