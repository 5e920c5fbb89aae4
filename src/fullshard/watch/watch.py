"""A thread beside training that looks at what ranks wait for: it speaks when a wait is long, and ends a hopeless one.

Once a second each rank writes its *report* to the store. A rank that waits reads the reports of the others::

    rank 0   waits for the gather of 'b' ──▶ reads ──▶ rank 1 was told something else ──▶ a verdict: all ranks raise
    rank 1   waits for the gather of 'a' ──▶ reads ──▶ finds the verdict of rank 0    ──▶

A verdict needs a proof: a process that has ended, the same pass with other groups, ranks that all wait for each other,
or more time than the user gave. Operations of a backend cannot be called off. So the connections between ranks are
closed, which ends them with an error; a process that hangs still is ended. Nothing of this is part of a step.

Nothing runs before this process first waits for other ranks (``WAITS.begin``). A model of several ranks does so when it
is sharded, as they agree on names. It cannot be later: a rank that fails between sharding and its first forward has to
tell the others how it ended.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist

from fullshard.comm.local_ranks import host_id
from fullshard.comm.process_group import has_peers
from fullshard.comm.waits import WAITS, LostRankError, Wait, checks_are_on, describe
from fullshard.torch_private import default_store
from fullshard.watch.connections import StoreConnection, connected_sockets, quiet_seconds
from fullshard.watch.reports import Report, Reports, parting

_log = logging.getLogger("fullshard")

_INTERVAL, _RANKS_A_SECOND = 1.0, 1000  # seconds between two looks; more where so many ranks would keep the store busy
_IN_FILE = 10.0  # seconds between two reports where the store is a file, which grows with each; fewer in a new wait
_READ = 2.0  # seconds after which a rank that waits reads the reports of the others
#: Seconds after which ranks that all wait for each other, and for nobody else, are taken for stuck for ever.
_STUCK = 30.0
#: How a program ends as a rule, and how a rank may leave before.
_OVER, _LEFT = "its program is over", "it has destroyed its process group"
#: What is known of a rank that told nothing of its end. Once the store has gone, none can tell.
_CRASHED, _GONE = "was killed or has crashed", "the store has gone in which ranks tell how they end"
_KNOWN = 64  # ranks of which each knows the process from the beginning, because the store may be gone when one is lost
#: Beats in which it tries to learn of them, and after which each tells its connections again.
_FIRST_BEATS, _BEATS = 60, 30
#: Seconds for which a rank that lost another one waits for news of it, and for a wait that was ended to raise.
_NEWS, _GRACE = 3.0, 5.0
#: Seconds at the end of a program: a thread of gloo needs the interpreter to drop the last tensor, and aborts without.
_DROP = 0.1


@dataclass
class _Known:
    """A wait as the watch knows it."""

    wait: Wait | None
    since: float  # when it was seen first
    warned: float = 0.0  # its age in seconds when a line was logged
    number: int = -1  # among the waits of training


class Watch:
    """The watch of one process over its default process group, after that over one ``before``."""

    def __init__(self, store: Any, before: Watch | None = None) -> None:
        self.thread = threading.Thread(target=self._run, name="fullshard-watch", daemon=True)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = StoreConnection(store, self._rank)
        self._world = weakref.ref(dist.group.WORLD)  # its connections end with it
        self._interval = max(_INTERVAL, self._size / _RANKS_A_SECOND)
        self._between = self._interval if self._store.port else max(self._interval, _IN_FILE)  # two reports
        self._warn_after = float(os.environ.get("FULLSHARD_WAIT_WARNING", "10"))
        self._hang = float(os.environ.get("FULLSHARD_HANG_TIMEOUT", "inf"))
        self._ending = threading.Event()
        self.shown = _OVER, True  # how the program has ended, when it does, and whether not because of another rank
        number, former = (before._mine.number + 1, before._reports.all_so_far()) if before is not None else (1, ())
        self._mine: Report = Report(self._rank, os.getpid(), host_id(), number)
        key = f"fullshard/{dist.group.WORLD.group_name}/" if dist.group.WORLD is not None else ""
        self._reports: Reports = Reports(self._store, self._mine, key, self._between, former)
        self._seen = _Known(None, 0.0)  # the last wait of training
        self._beside: dict[threading.Thread, _Known] = {}  # the waits of threads beside it
        self._judged = 0.0  # when the last verdict was found
        self._announced: dict[str, dict[str, str]] = {}  # the passes that were told at once
        self._failed = self._announced  # those that failed: later waits are not about them
        self._first = [rank for rank in range(min(self._size, _KNOWN)) if rank != self._rank]

    @property
    def is_current(self) -> bool:
        """Whether its default process group is still the one of this process."""
        return self._world() is dist.group.WORLD is not None

    def show(self, error: BaseException) -> None:
        """Note an error that was shown to the user. It has ended the program, or one line at a prompt."""
        how = f"{type(error).__name__}: {str(error)[:500]}".removesuffix(": ")
        self.shown = how, _lost_in(error) is None
        program = {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}
        program &= {"<module>", "_run_module_as_main"}
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
        if _watch is self:
            self._mine.ended, self._mine.waits, self._mine.waits_for = _LEFT, "", []
            self._reports.write()
        self._store.close()
        self._reports.close()

    def _look(self) -> None:
        count, (thread, wait), now = WAITS.count, _holding(), time.monotonic()
        is_same = self._is_same()
        self._mine.inside = call_of_torch(WAITS.thread) if wait is None and is_same else ""
        if wait is None or not is_same:
            self._seen = _Known(wait, now, number=count)
        waited = now - self._seen.since
        self._look_beside(thread, now)
        self._tell(wait, waited, self._between if waited < _READ else min(self._between, waited / 2))
        if len(self._reports.known) < len(self._first) and self._mine.beat < _FIRST_BEATS:
            self._reports.read(rank for rank in self._first if rank not in self._reports.known)
        if wait is None or waited < _READ:
            return
        reports = self._reports.read(self._mine.waits_for)
        if self._judged < self._seen.since and (verdict := self._judge(reports, waited)) and self._is_same():
            self._judged, WAITS.judged = now, (count, verdict)
            self._announced = self._failed = self._mine.passes
            self._tell(wait, waited)
        if self._judged >= self._seen.since:
            self._end_wait(wait, reports, now)
        elif self._is_due(self._seen, now):
            _log.warning("Rank %d is %s. %s", self._rank, self._mine.place, self._others(reports))

    def _is_same(self) -> bool:
        """Whether the training still waits for what was seen last."""
        return WAITS.count == self._seen.number and _holding()[1] is self._seen.wait

    def _look_beside(self, joined: threading.Thread | None, now: float) -> None:
        """Speak of long waits of threads beside training. They end training only when it waits for them."""
        waits = {thread: wait for thread, wait in WAITS.beside.copy().items() if thread != joined}
        known = {thread: each for thread, each in self._beside.items() if waits.get(thread) is each.wait}
        self._beside = {thread: known.get(thread) or _Known(wait, now) for thread, wait in waits.items()}
        long = [(each, waits[thread]) for thread, each in self._beside.items() if now - each.since >= _READ]
        told = "a thread beside training has waited {:.0f} s for {}"
        self._mine.beside = "; ".join(told.format(now - each.since, describe(wait)) for each, wait in long)
        for each, wait in long:
            if self._is_due(each, now):
                reports = self._reports.read(self._others_of(wait))
                here = f"{self._mine.place}; {self._mine.beside}"
                _log.warning("Rank %d is %s. %s", self._rank, here, self._others(reports))

    def _is_due(self, known: _Known, now: float) -> bool:
        """Whether to log a line for a wait now, and again only a minute later."""
        waited, before = now - known.since, known.warned
        is_due = waited >= self._warn_after and waited >= before + (60 if before else 0)
        known.warned = waited if is_due else before
        return is_due

    def _others_of(self, wait: Wait) -> list[int]:
        """The ranks on which a wait depends."""
        return [rank for rank in dist.get_process_group_ranks(wait.process_group) if rank != self._rank]

    def _tell(self, wait: Wait | None, waited: float, pause: float = 0.0) -> None:
        """Write this rank's report, unless the last one was written less than ``pause`` seconds ago, about."""
        mine, position = self._mine, WAITS.position()
        mine.doing, mine.waited, mine.quiet = position.doing, waited, waited
        mine.waits, mine.waits_for, mine.passes = "", [], self._announced
        if wait is not None:
            mine.waits = describe(wait)
            mine.waits_for = self._others_of(wait)
            if waited >= _READ:
                mine.quiet = min([waited, *(quiet_seconds(each) for each, _ in self._connections())])
                if self._is_same():  # else it moved on while this one looked
                    mine.passes = position.passes
        mine.verdict, mine.judged = WAITS.verdict or "", time.monotonic() - self._judged
        if mine.verdict or (self._size <= _KNOWN and mine.beat % _BEATS < 2):  # of a rank that is killed, too
            mine.connections = [[*ends] for _, ends in self._connections()]
        if time.monotonic() - mine.written >= pause - self._interval / 2:
            self._reports.write()

    def announce(self) -> None:
        """Let the others know at once where the training is: this process may not live to tell."""
        position = WAITS.position()
        self._announced = self._mine.passes = position.passes
        self._mine.doing = position.doing
        self._reports.write()

    def _connections(self) -> Iterator[tuple[socket.socket, tuple[str, str]]]:
        """The connections of this process, without those of the store."""
        port = f":{self._store.port}"
        return (each for each in connected_sockets() if not any(end.endswith(port) for end in each[1]))

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def _judge(self, reports: dict[int, Report], waited: float) -> str | None:
        """Why this rank's wait will not end; ``None`` while it may."""
        for report in reports.values():
            if report.verdict and report.judged + self._between <= waited:  # found while this rank waited already
                return report.verdict
        needed = [reports[rank] for rank in self._mine.waits_for if rank in reports]
        everyone = [self._mine, *reports.values()]
        needs = {rank for each in everyone for rank in each.waits_for}
        is_all = needs <= {each.rank for each in everyone}
        # A rank that is over may have done its part: what this one waits for comes from those that go on, if any do.
        none_goes_on = is_all and all(self._is_over(each) or self._is_quiet(each, _READ) for each in everyone)
        if lost := self._lost(each for each in needed if none_goes_on or each.ended not in ("", _OVER, _LEFT)):
            return f"{lost}. {self._parted()}"
        for report in needed:
            if parted := parting(self._mine, report, self._failed):
                return parted
        if is_all and all(self._is_quiet(each, _STUCK) for each in everyone):
            return f"All ranks wait for each other. {self._others(reports, with_mine=True)}"
        if waited > self._hang:
            return f"Nothing came in {self._hang:.0f} s. {self._others(reports, with_mine=True)}"
        return None

    def _is_over(self, report: Report) -> bool:
        """Whether a rank does nothing any more."""
        return bool(report.ended) or self._reports.has_ended(report)

    def _is_quiet(self, report: Report, seconds: float) -> bool:
        """Whether a rank waits, and nothing has come to it for so long."""
        return bool(report.waits) and report.quiet >= seconds and not self._reports.silence(report)

    def _lost(self, reports: Iterable[Report]) -> str | None:
        """Which ranks have ended and how; those first that did not end because of others."""
        found: list[tuple[bool, str]] = []
        how = f"has ended ({_GONE}: it has crashed, was killed, or {_OVER})" if self._store.has_gone else _CRASHED
        for report in reports:
            who = f"Rank {report.rank} (process {report.process})"
            if report.ended:
                found.append((not report.is_first, f"{who} has ended {report.doing}: {report.ended}"))
            elif self._reports.has_ended(report):
                found.append(
                    (False, f"{who} {how}; it was last seen {report.place}, up to {self._between:.0f} s before")
                )
        firsts = [text for is_later, text in sorted(found) if is_later == min(found)[0]]
        return ". ".join(firsts) or None

    def _parted(self) -> str:
        """Where ranks went different ways: the backend may have ended one of them for it. Otherwise, advice."""
        found = filter(None, (parting(self._mine, report) for report in self._reports.known.values()))
        return next(found, f"Look there for the first error. {WAITS.position().unlike_before}".rstrip(". "))

    def _others(self, reports: dict[int, Report], with_mine: bool = False) -> str:
        """Where the ranks are, one sentence for each place."""
        places: dict[str, list[int]] = {}
        for report in [self._mine] * with_mine + [reports[rank] for rank in sorted(reports)]:
            silence = self._reports.silence(report)
            place = report.place if not report.ended else f"has ended: {report.ended}"
            if silence:
                state = " (the process is stopped)" if self._reports.is_stopped(report) else ""
                place = f"has said nothing for {silence:.0f} s{state}, and was {place}"
            elif not report.ended:
                place = f"is {place}" if report.waits or report.inside else f"is {place}, and waits for nobody"
                place += f"; {report.beside}" if report.beside else ""
            places.setdefault(place, []).append(report.rank)
        missing = [rank for rank in self._mine.waits_for if rank not in reports]
        if missing:
            nothing = f"may have ended ({_GONE})" if self._store.has_gone else "has not sharded anything yet"
            nothing += ", or has no watch"
            if self._store.is_silent and not self._store.has_gone:
                nothing = "has told nothing: the store does not answer, as where rank 0, which has it, is stopped"
            places[nothing] = missing
        return ". ".join(
            f"{'Rank' if len(ranks) == 1 else 'Each of ranks'} {', '.join(map(str, ranks))} {place}"
            for place, ranks in places.items()
        )

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end_wait(self, wait: Wait, reports: dict[int, Report], now: float) -> None:
        """Let the wait fail: close the connections between ranks; end the process if that does not help."""
        theirs = {(there, here) for report in reports.values() for here, there in report.connections}
        for connection, ends in self._connections():
            if ends in theirs:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # for whoever reads from it or writes to it
        if now - self._judged > _GRACE and self._is_same():
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            where = "".join(traceback.format_stack(frame)) if frame is not None else ""
            message = f"rank {self._rank} waited for {describe(wait)}. {WAITS.verdict}"
            self._mine.ended, self._mine.is_first = "it could not go on", False
            with suppress(Exception):
                self._reports.write()
            print(f"{where}{message}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def explain(self, process_group: dist.ProcessGroup | None) -> str:
        """What is known of the ranks of a process group, one of which was lost; waits for the news some seconds."""
        deadline = time.monotonic() + _NEWS
        ranks = [rank for rank in dist.get_process_group_ranks(process_group) if rank != self._rank]
        with suppress(Exception):
            if threading.current_thread() is WAITS.thread:
                self._announced = self._failed = WAITS.position().passes  # this rank goes no further
                self._tell(WAITS.current, 0.0)
            while True:
                reports = self._reports.read(ranks)
                needed = [reports[rank] for rank in ranks if rank in reports]
                verdicts = [WAITS.verdict, *(each.verdict for each in needed)]
                if verdict := next(filter(None, verdicts), None):
                    return verdict
                if lost := self._lost(needed):
                    silent = sorted({*ranks}.difference(reports)) if self._store.has_gone else []
                    others = f"Nothing is known of ranks {silent}, which may have ended first. " if silent else ""
                    return f"{lost}. {others}{self._parted()}"
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
                self._reports.write()
                if how != _OVER and self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                    self._let_read()
            self.thread.join(2 * self._interval)

    def _let_read(self) -> None:
        """Give the others the time to read how this rank ended: the store ends with this process."""
        deadline = time.monotonic() + _READ + self._interval
        while time.monotonic() < deadline:
            others = self._reports.read(self._first).values()
            if all(each.ended or self._reports.has_ended(each) for each in others) and len(others) == self._size - 1:
                return
            time.sleep(0.1)


_watch: Watch | None = None  # the watch of this process over its default process group
_refused: weakref.ref[dist.ProcessGroup] | None = None  # a default process group that cannot have a watch
_joined: threading.Thread | None = None  # the thread beside training for which the training waits


def start_watch() -> None:
    """Watch over the ranks of the default process group, once, unless checks are off."""
    global _watch, _refused
    if _watch is not None and _watch.is_current:
        return
    world = dist.group.WORLD
    if not has_peers(world) or (_refused is not None and _refused() is world):
        return
    _heed_end()
    if not checks_are_on():
        return
    try:
        watch = Watch(default_store(), _watch)
    except (RuntimeError, NotImplementedError) as error:  # a store of another kind
        _refused = weakref.ref(world)
        _log.info("no watch over ranks: %s", error)
        return
    if _watch is None:
        _follow_errors()
    WAITS.explain, WAITS.announce = watch.explain, watch.announce
    _watch = watch
    watch.thread.start()


WAITS.begin = start_watch


@contextmanager
def joining(thread: threading.Thread) -> Iterator[None]:
    """A context in which the training waits for another thread of this process, and so for that thread's waits."""
    global _joined
    _joined = thread
    try:
        yield
    finally:
        _joined = None


def _holding() -> tuple[threading.Thread | None, Wait | None]:
    """The wait that holds the training up, after the thread that waits: ``None`` for the training itself. A program
    that has trained ends after its threads, so that it waits for any of them."""
    if (wait := WAITS.current) is not None:
        return None, wait
    beside, is_over = WAITS.beside.copy().items(), not WAITS.thread.is_alive()
    return next((each for each in beside if is_over or each[0] is _joined), (None, None))


def call_of_torch(thread: threading.Thread) -> str:
    """The function of torch that a thread has called, if it came to torch.distributed, and from where; for people."""
    frame, name, is_distributed = sys._current_frames().get(thread.ident or 0), "", False
    while frame is not None:
        module, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_qualname
        package = module.partition(".")[0]
        if package != "torch" and package not in sys.stdlib_module_names:  # who has called it
            where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return f"{name} (called in {where})" if is_distributed else ""
        is_distributed |= module.startswith("torch.distributed.")
        if package == "torch" and "<locals>" not in function:  # not that of a decorator
            name = f"{module}.{function}"
        frame = frame.f_back
    return ""


@cache
def _heed_end() -> None:
    atexit.register(_end)


def _end() -> None:
    if _watch is not None:
        _watch.end()
    time.sleep(_DROP)


def _lost_in(error: BaseException | None) -> LostRankError | None:
    """The error that says that another rank was lost: this one, or that from which it was raised."""
    while error is not None and not isinstance(error, LostRankError):
        error = error.__cause__
    return error


def _shorten(error: LostRankError) -> None:
    """Leave only the message: tracebacks would bury the first error of the job. What the user raised from it, or was
    handling when it came, keeps its traceback."""
    last: BaseException = error
    while last.__cause__ is not None:
        last = last.__cause__
    error.__cause__, error.__context__, error.__traceback__ = None, last.__context__, None
    error.__suppress_context__ = False


def _follow_errors() -> None:
    """Let the others know the error that ends this process."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if _watch is not None:
            _watch.show(error)
        if (lost := _lost_in(error)) is not None:
            _shorten(lost)
        before(kind, error, None if lost is error else trace)

    sys.excepthook = hook
