"""A thread beside training that looks at what ranks wait for: it speaks when a wait is long, and ends a hopeless one.

Once a second each rank writes its *report* to the store of the default process group: what it does, what it waits for,
and what it communicated about in its last passes. A rank that waits reads the reports of the others::

    rank 0   waits for the gather of 'b' ──▶ reads ──▶ rank 1 was told something else ──▶ a verdict: all ranks raise
    rank 1   waits for the gather of 'a' ──▶ reads ──▶ finds the verdict of rank 0    ──▶

A verdict needs a proof: a process that has ended, the same pass with other groups, ranks that all wait for each other,
or more time than the user gave. Operations of a backend cannot be called off. So the connections between ranks are
closed, which ends them with an error; a process that hangs still is ended. Nothing of this is part of a step.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fullshard.comm.local_ranks import host_id
from fullshard.comm.process_group import has_peers
from fullshard.comm.waits import WAITS, LostRankError, Wait, checks_are_on, describe
from fullshard.torch_private import default_store, port_of

_log = logging.getLogger("fullshard")

#: Seconds between two looks; more where so many ranks would keep the store busy.
_INTERVAL, _RANKS_A_SECOND = 1.0, 1000
#: The same where the store is a file, which grows with each report.
_IN_FILE = 10.0
#: Seconds after which a rank that waits reads the reports of the others.
_READ = 2.0
#: Seconds after which ranks that all wait for each other, and for nobody else, are taken for stuck for ever.
_STUCK = 30.0
#: Seconds after which the store is taken for one that does not answer.
_ANSWER = 5.0
#: How a program ends as a rule.
_OVER = "its program is over"
#: Ranks of which each knows the process from the beginning, because the store may be gone when one is lost.
_KNOWN = 64
#: Beats in which it tries to learn of them.
_FIRST_BEATS = 60
#: Seconds for which a rank that lost another one waits for news of it, and for a wait that was ended to raise.
_NEWS, _GRACE = 3.0, 5.0


@dataclass
class Report:
    """What a rank lets the others know.

    Args:
        rank: of the default process group.
        process: its number.
        host: identifies the space of process numbers.
        beat: grows with each report.
        doing: see :class:`~fullshard.comm.waits.Position`.
        passes: the same.
        waits: what it waits for, and empty while it runs.
        waits_for: the ranks on which that depends.
        waited: seconds.
        quiet: those of them in which nothing came from any rank.
        connections: ends of its network connections, this one and the other, once something is wrong.
        ended: how its program ended; empty while it runs.
        is_first: whether it did not end because of another rank.
        verdict: why no wait will end, as this rank found out.
    """

    rank: int
    process: int
    host: str
    beat: int = 0
    doing: str = ""
    passes: dict[str, dict[str, str]] = field(default_factory=dict)
    waits: str = ""
    waits_for: list[int] = field(default_factory=list)
    waited: float = 0.0
    quiet: float = 0.0
    connections: list[list[str]] = field(default_factory=list)
    ended: str = ""
    is_first: bool = True
    verdict: str = ""

    @property
    def place(self) -> str:
        """For people."""
        return self.doing + (f", where it has waited {self.waited:.0f} s for {self.waits}" if self.waits else "")


class _Store:
    """A connection to the store that is given up when it does not answer, as where its rank is stopped."""

    def __init__(self, store: Any) -> None:
        known, self._store = {ends for _, ends in _sockets()}, store.clone()
        self.port = port_of(self._store)
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._is_silent = False
        #: Of the connections to its server, if it has one: a request to one that has gone prints the stack of C++.
        self._poll = select.poll()
        mine = [each.dup() for each, ends in _sockets() if ends not in known and ends[1].endswith(f":{self.port}")]
        self._connections = mine
        for each in self._connections:
            self._poll.register(each, getattr(select, "POLLRDHUP", 0))
        threading.Thread(target=self._serve, name="fullshard-store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> str | None:
        """The value of a key; ``None`` if there is none."""
        found = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else bytes(found).decode()

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            do, answer = asked
            try:
                answer.put(do())
            except Exception as error:
                answer.put(error)

    def close(self) -> None:
        """Ask nothing any more."""
        self._asked.put(None)
        self._is_silent = True
        for each in self._connections:
            each.close()

    def _ask(self, do: Callable[[], Any]) -> Any:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if not self._is_silent and not self._poll.poll(0):
            self._asked.put((do, answer))
            with suppress(queue.Empty):
                found = answer.get(timeout=_ANSWER)
                if isinstance(found, Exception):
                    self._is_silent = True
                    raise _NoAnswerError from found
                return found
        self._is_silent = True
        raise _NoAnswerError


class _NoAnswerError(Exception):
    """The store has gone, or does not answer."""


class Watch:
    """The watch of one process. Made by :func:`start_watch`."""

    def __init__(self, store: Any) -> None:
        self.thread = threading.Thread(target=self._run, name="fullshard-watch", daemon=True)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = _Store(store)
        self._world = weakref.ref(dist.group.WORLD)  # its connections end with it
        self._key = f"fullshard/{dist.group.WORLD.group_name}/" if dist.group.WORLD is not None else ""
        self._interval = max(_INTERVAL if self._store.port else _IN_FILE, self._size / _RANKS_A_SECOND)
        self._warn_after = float(os.environ.get("FULLSHARD_WAIT_WARNING", "10"))
        self._hang = float(os.environ.get("FULLSHARD_HANG_TIMEOUT", "inf"))
        self._ending = threading.Event()
        self.shown = _OVER, True  # how the program has ended, when it does, and whether not because of another rank
        self._lock = threading.RLock()
        self._mine = Report(self._rank, os.getpid(), host_id())
        self._seen: tuple[int, float] = (-1, 0.0)  # the number of the wait, and since when
        self._warned = 0.0  # seconds of this wait at which a line was logged
        self._judged = 0.0  # when the verdict was found
        self._beats: dict[int, tuple[int, float]] = {}  # by rank, and when it was new
        self._watched: dict[int, tuple[int, int]] = {}  # processes by rank, and what tells that one has ended
        self._known: dict[int, Report] = {}  # the last reports
        self._first = [rank for rank in range(min(self._size, _KNOWN)) if rank != self._rank]

    @property
    def is_current(self) -> bool:
        """Whether its default process group is still the one of this process."""
        return self._world() is dist.group.WORLD is not None

    def show(self, error: BaseException) -> None:
        """An error was shown to the user, which has ended the program, or a line at a prompt."""
        self.shown = f"{type(error).__name__}: {str(error)[:500]}", not isinstance(error, LostRankError)
        program = {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)} & {
            "<module>",
            "_run_module_as_main",
        }
        if not program and not sys.flags.interactive and not hasattr(sys, "ps1"):
            self.end()  # no program is left; otherwise it says so at its end

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self.is_current:
            self._look()
            if self._ending.wait(self._interval):
                return
        if self._ending.wait(_GRACE):  # a program destroys its process group, and then tells its error
            return
        self._store.close()
        for _, watched in self._watched.values():
            os.close(watched)

    def _look(self) -> None:
        wait, count, now = WAITS.current, WAITS.count, time.monotonic()
        if wait is None or count != self._seen[0]:
            self._seen, self._warned = (count, now), 0.0
        waited = now - self._seen[1]
        self._tell(wait, waited)
        if len(self._known) < len(self._first) and self._mine.beat < _FIRST_BEATS:
            self._read(rank for rank in self._first if rank not in self._known)
        if wait is None or waited < _READ:
            return
        reports = self._read(self._mine.waits_for)
        if WAITS.verdict is None:
            WAITS.verdict = self._judge(reports, waited)
            if WAITS.verdict is not None:
                self._judged = now
                self._tell(wait, waited)
        if WAITS.verdict is not None:
            self._end_wait(wait, reports, now)
        elif waited >= self._warn_after and waited >= self._warned + (60 if self._warned else 0):
            self._warned = waited
            _log.warning("Rank %d is %s. %s", self._rank, self._mine.place, self._others(reports))

    def _tell(self, wait: Wait | None, waited: float) -> None:
        """Write this rank's report."""
        mine, position = self._mine, WAITS.position()
        mine.doing, mine.waited, mine.quiet = position.doing, waited, waited
        mine.waits, mine.waits_for, mine.passes = "", [], {}
        if wait is not None:
            mine.waits = describe(wait)
            mine.waits_for = [rank for rank in dist.get_process_group_ranks(wait.process_group) if rank != self._rank]
            if waited >= _READ:
                mine.quiet = min([waited, *(_quiet(each) for each, _ in self._connections())])
                if (WAITS.current, WAITS.count) == (wait, self._seen[0]):  # else it moved on while this one looked
                    mine.passes = position.passes
        mine.verdict = WAITS.verdict or ""
        mine.connections = [[*ends] for _, ends in self._connections()] if mine.verdict else []
        self._write()

    def _connections(self) -> Iterator[tuple[socket.socket, tuple[str, str]]]:
        """The connections of this process, without those of the store."""
        return (each for each in _sockets() if not any(end.endswith(f":{self._store.port}") for end in each[1]))

    def _write(self) -> None:
        with self._lock:
            self._mine.beat += 1
            with suppress(_NoAnswerError):
                self._store.set(f"{self._key}{self._rank}", json.dumps(asdict(self._mine)))

    def _read(self, ranks: Iterable[int]) -> dict[int, Report]:
        """The reports of ranks and of those on which these depend, as far as they have made any."""
        reports: dict[int, Report] = {}
        left = [*ranks]
        while left:
            rank = left.pop()
            if rank in reports or rank == self._rank:
                continue
            with suppress(_NoAnswerError):
                if (said := self._store.get(f"{self._key}{rank}")) is not None:
                    self._known[rank] = Report(**json.loads(said))
            if rank not in self._known:
                continue
            report = reports[rank] = self._known[rank]
            if self._beats.get(rank, (-1, 0.0))[0] != report.beat:
                self._beats[rank] = report.beat, time.monotonic()
            left += report.waits_for
        return reports

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def _judge(self, reports: dict[int, Report], waited: float) -> str | None:
        """Why this rank's wait will not end; ``None`` while it may."""
        for report in reports.values():
            if report.verdict:
                return report.verdict
        needed = [reports[rank] for rank in self._mine.waits_for if rank in reports]
        if lost := self._lost(needed):
            return lost
        for report in needed:
            if parted := _parting(self._mine, report):
                return parted
        everyone = [self._mine, *reports.values()]
        needs = {rank for each in everyone for rank in each.waits_for}
        stuck = all(each.waits and each.quiet >= _STUCK and not self._silence(each) for each in everyone)
        if stuck and needs <= {each.rank for each in everyone}:
            return f"All ranks wait for each other. {self._others(reports, with_mine=True)}"
        if waited > self._hang:
            return f"Nothing came in {self._hang:.0f} s. {self._others(reports, with_mine=True)}"
        return None

    def _lost(self, reports: Iterable[Report]) -> str | None:
        """Which ranks have ended and how; those first that did not end because of others."""
        found: list[tuple[bool, str]] = []
        for report in reports:
            who = f"Rank {report.rank} (process {report.process})"
            if report.ended:
                found.append((not report.is_first, f"{who} has ended {report.doing}: {report.ended}"))
            elif self._has_ended(report):
                found.append((False, f"{who} was killed or has crashed; it was last seen {report.place}"))
        firsts = [text for is_later, text in sorted(found) if is_later == min(found)[0]]
        return ". ".join(firsts) or None

    def _has_ended(self, report: Report) -> bool:
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

    def _silence(self, report: Report) -> float:
        """For how many seconds a rank has not reported; 0 for the time that passes between two reports anyway."""
        since = self._beats.get(report.rank)
        silence = time.monotonic() - since[1] if since is not None else 0.0
        return silence if silence > 3 * self._interval else 0.0

    def _others(self, reports: dict[int, Report], with_mine: bool = False) -> str:
        """Where the ranks are, one sentence for each place."""
        places: dict[str, list[int]] = {}
        for report in [self._mine] * with_mine + [reports[rank] for rank in sorted(reports)]:
            silence = self._silence(report)
            place = report.place if not report.ended else f"has ended: {report.ended}"
            if silence:
                state = " (the process is stopped)" if self._is_stopped(report) else ""
                place = f"has said nothing for {silence:.0f} s{state}, and was {place}"
            elif not report.ended:
                place = f"is {place}" if report.waits else f"is {place}, and waits for nobody"
            places.setdefault(place, []).append(report.rank)
        missing = [rank for rank in self._mine.waits_for if rank not in reports]
        if missing:
            places["has not sharded anything yet, or has no watch"] = missing
        return ". ".join(f"Rank {', '.join(map(str, ranks))} {place}" for place, ranks in places.items())

    def _is_stopped(self, report: Report) -> bool:
        with suppress(OSError, IndexError):
            state = Path(f"/proc/{report.process}/stat").read_text().rpartition(") ")[2][:1]
            return report.host == self._mine.host and state == "T"
        return False

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end_wait(self, wait: Wait, reports: dict[int, Report], now: float) -> None:
        """Let the wait fail: close the connections between ranks; end the process if that does not help."""
        theirs = {(there, here) for report in reports.values() for here, there in report.connections}
        for connection, ends in self._connections():
            if ends in theirs:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # for whoever reads from it or writes to it
        if now - self._judged > _GRACE:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            where = "".join(traceback.format_stack(frame)) if frame is not None else ""
            message = f"rank {self._rank} waited for {describe(wait)}. {WAITS.verdict}"
            self._mine.ended, self._mine.is_first = "it could not go on", False
            with suppress(Exception):
                self._write()
            print(f"{where}{message}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def explain(self, process_group: dist.ProcessGroup | None) -> str:
        """What is known of the ranks of a process group, one of which was lost; waits for the news some seconds."""
        deadline = time.monotonic() + _NEWS
        ranks = [rank for rank in dist.get_process_group_ranks(process_group) if rank != self._rank]
        with suppress(Exception):
            self._tell(WAITS.current, 0.0)
            while True:
                reports = self._read(ranks)
                needed = [reports[rank] for rank in ranks if rank in reports]
                verdicts = [WAITS.verdict, *(each.verdict for each in needed)]
                if verdict := next(filter(None, verdicts), None):
                    return verdict
                if lost := self._lost(needed):
                    return f"{lost}. Look there for the first error"
                if time.monotonic() > deadline:
                    return f"{self._others(reports)}. Look on the others for the first error"
                time.sleep(0.05)
        return "Look on the others for the first error"

    def end(self) -> None:
        """Tell the others that this rank ends. Called when the process does."""
        if os.getpid() == self._mine.process and not self._ending.is_set():
            how, is_first = self.shown
            self._ending.set()
            self._mine.ended, self._mine.is_first, self._mine.doing = how, is_first, WAITS.position().doing
            self._mine.waits, self._mine.waits_for = "", []
            with suppress(Exception):
                self._write()
                if how != _OVER and self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                    time.sleep(_READ + self._interval)  # the store ends with this process: let the others read
            self.thread.join(2 * self._interval)


def _parting(mine: Report, other: Report) -> str | None:
    """Where two ranks went different ways in one pass."""
    for key in mine.passes.keys() & other.passes.keys():
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


def _sockets() -> Iterator[tuple[socket.socket, tuple[str, str]]]:
    """Duplicates of the connected sockets of this process, and their ends, this one and the other."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as found:
                        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                            here, there = found.getsockname()[:2], found.getpeername()[:2]
                            yield found, (f"{here[0]}:{here[1]}", f"{there[0]}:{there[1]}")


def _quiet(connection: socket.socket) -> float:
    """Seconds since something came; infinite if the system does not say."""
    with suppress(OSError, AttributeError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return float(struct.unpack_from("I", info, 52)[0]) / 1000  # tcpi_last_data_recv
    return float("inf")


#: The watch of this process over its default process group.
_watch: Watch | None = None


def start_watch() -> None:
    """Watch over the ranks of the default process group, once, unless checks are off."""
    global _watch
    if _watch is not None and _watch.is_current:
        return
    if not checks_are_on() or not dist.is_initialized() or not has_peers(dist.group.WORLD):
        return
    try:
        watch = Watch(default_store())
    except (RuntimeError, NotImplementedError) as error:  # a store of another kind
        _log.info("no watch over ranks: %s", error)
        return
    if _watch is None:
        atexit.register(_end)
        _follow_errors()
    WAITS.verdict, WAITS.explain = None, watch.explain
    _watch = watch
    watch.thread.start()


def _end() -> None:
    if _watch is not None:
        _watch.end()


def _follow_errors() -> None:
    """Let the others know the error that ends this process."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if _watch is not None:
            _watch.show(error)
        if issubclass(kind, LostRankError):  # the first error of the job is not to be buried under tracebacks
            error.__cause__, error.__suppress_context__, error.__traceback__, trace = None, True, None, None
        before(kind, error, trace)

    sys.excepthook = hook
