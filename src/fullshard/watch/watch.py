"""The watch: a background thread that watches what ranks wait for. It logs long waits, and ends waits that cannot end.

Once a second each rank writes its *report* to the store. A rank that waits reads the reports of the others::

    rank 0   waits for the gather of 'b' ──▶ reads ──▶ rank 1 runs something else     ──▶ a verdict: all ranks raise
    rank 1   waits for the gather of 'a' ──▶ reads ──▶ finds the verdict of rank 0    ──▶

A verdict needs a proof: a process that has ended, the same pass with different groups, ranks that all wait for each
other, a host that does not answer, or the user's time limit. Operations of a backend cannot be cancelled. So the watch
closes the connections between ranks, and the operations end with an error. A process that still hangs is ended. Nothing
here is part of a step.

The thread starts when this process first waits for other ranks (``WAITS.begin``). With several ranks that happens when
a model is sharded, because ranks then agree on names. It cannot start later: a rank that fails between sharding and its
first forward must report to the others how it ended.
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
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist

from fullshard.comm.backends import comes_from_backend
from fullshard.comm.process_group import has_peers
from fullshard.comm.waits import WAITS, PeerFailureError, Wait, checks_are_on, describe
from fullshard.platforms import host_id
from fullshard.torch_private import default_store
from fullshard.watch.connections import StoreConnection, connected_sockets, probe, quiet_seconds, unanswered_seconds
from fullshard.watch.reports import GONE, Report, Reports, parting

_log = logging.getLogger("fullshard")

#: Functions that give advice on an error, or ``None``. It is printed with an error that ends this process.
explainers: list[Callable[[BaseException], str | None]] = []

_INTERVAL, _RANKS_A_SECOND = 1.0, 1000  # seconds between two checks; longer if more ranks a second would use the store
#: Seconds between two reports if the store is a file, which grows with each; fewer at the start of a wait.
_IN_FILE = 10.0
_READ = 2.0  # seconds after which a rank that waits reads the reports of the others
#: Seconds after which ranks that wait only for each other are considered stuck.
_STUCK = 30.0
#: How a program usually ends, and how a rank may leave before that.
_OVER, _LEFT = "its program is over", "it has destroyed its process group"
#: What is advised after an error of another rank that is known, and of one that is not.
_LOOK, _FIND = ". Look there for the first error", ". Find the first error in other ranks' logs"
_FEWER = ". It reported no error. It may have had fewer batches: all ranks must run the same number of steps"
_CRASHED = "was killed or has crashed"  # what is known about a rank that did not report its end
_KNOWN = 64  # each rank learns the processes of so many ranks early, because the store may be gone when one is lost
#: The number of reports in which it tries to learn them, and the number of reports between two lists of connections.
_FIRST_BEATS, _BEATS = 60, 30
#: Seconds that a rank waits for reports about a rank that it lost, and seconds that a wait gets to raise its error.
_NEWS, _GRACE = 3.5, 5.0
#: Seconds of sleep at the end of a program: a thread of gloo aborts if the interpreter is gone when it drops a tensor.
_DROP = 0.1


@dataclass
class _Known:
    """A wait that the watch has seen."""

    wait: Wait | None
    since: float  # time when it was first seen
    warned: float = 0.0  # its age in seconds when it was last logged
    number: int = -1  # its number among the waits of training


class Watch:
    """The watch of one process over its default process group. ``before`` is the watch over an earlier one."""

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
        self.shown = _OVER, True  # how the program ends, and whether it does so on its own, not because of another rank
        number, former = (before._mine.number + 1, before._reports.all_so_far()) if before is not None else (1, ())
        self._mine: Report = Report(self._rank, os.getpid(), host_id(), number)
        key = f"fullshard/{dist.group.WORLD.group_name}/" if dist.group.WORLD is not None else ""
        self._reports: Reports = Reports(self._store, self._mine, key, self._between, former)
        self._seen = _Known(None, 0.0)  # the last wait of training
        self._beside: dict[threading.Thread, _Known] = {}  # waits of other threads
        self._judged = 0.0  # time of the last verdict
        self._announced: dict[str, dict[str, str]] = {}  # passes that were announced
        self._failed = self._announced  # passes that failed: later waits are not about them
        self._first = [rank for rank in range(min(self._size, _KNOWN)) if rank != self._rank]

    @property
    def is_current(self) -> bool:
        """Whether its default process group is still the one of this process."""
        return self._world() is dist.group.WORLD is not None

    def show(self, error: BaseException) -> None:
        """Note an error that was printed. It has ended the program, or a line at a prompt."""
        how = f"{type(error).__name__}: {str(error)[:500]}".removesuffix(": ")
        self.shown = how, _lost_in(error) is None and not _is_raw(error)
        program = {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}
        program &= {"<module>", "_run_module_as_main"}
        if not program and not sys.flags.interactive and not hasattr(sys, "ps1"):
            self.end()  # the program is over; otherwise it reports its end when it ends

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self.is_current:
            self._check_wait()
            if self._ending.wait(self._interval):
                return
        if self._ending.wait(_GRACE):  # a program may destroy its process group before its error is printed
            return
        if _watch is self:
            self._mine.ended, self._mine.waits, self._mine.waits_for = _LEFT, "", []
            self._reports.write()
        self._store.close()
        self._reports.close()

    def _check_wait(self) -> None:
        count, (thread, wait), now = WAITS.count, _current_wait(), time.monotonic()
        is_same = self._is_same()
        self._mine.inside = call_of_torch(WAITS.thread) if wait is None and is_same else ""
        if wait is None or not is_same:
            self._seen = _Known(wait, now, number=count)
        waited = now - self._seen.since
        self._check_other_threads(thread, now)
        pause = 0.0 if self._reports.look_beside() else self._between
        self._update_report(wait, waited, pause if waited < _READ else min(pause, waited / 2))
        if len(self._reports.known) < len(self._first) and self._mine.beat < _FIRST_BEATS:
            self._reports.read(rank for rank in self._first if rank not in self._reports.known)
        if wait is None or waited < _READ:
            return
        reports = self._reports.read(self._mine.waits_for)
        if self._judged < self._seen.since and (verdict := self._judge(reports, waited)) and self._is_same():
            self._judged, WAITS.judged, self._mine.cause = now, (count, verdict), verdict.removesuffix(_LOOK)
            self._announced = self._failed = self._mine.passes
            self._update_report(wait, waited)
        if self._judged >= self._seen.since:
            self._end_wait(wait, reports, now)
        elif self._is_due(self._seen, now):
            here = self._reports.place(self._mine)
            _log.warning("Rank %d%s is %s. %s", self._rank, here, self._mine.state, self._others(reports))

    def _is_same(self) -> bool:
        """Whether training is still in the wait that was seen last."""
        return WAITS.count == self._seen.number and _current_wait()[1] is self._seen.wait

    def _check_other_threads(self, awaited: threading.Thread | None, now: float) -> None:
        """Report and log long waits of other threads. They are ended only if training waits for the thread."""
        waits = {thread: wait for thread, wait in WAITS.beside.copy().items() if thread != awaited}
        known = {thread: each for thread, each in self._beside.items() if waits.get(thread) is each.wait}
        self._beside = {thread: known.get(thread) or _Known(wait, now) for thread, wait in waits.items()}
        long = [(each, waits[thread]) for thread, each in self._beside.items() if now - each.since >= _READ]
        text = "a background thread has waited {:.0f} s for {}"
        self._mine.beside = "; ".join(text.format(now - each.since, describe(wait)) for each, wait in long)
        for each, wait in long:
            if self._is_due(each, now):
                reports = self._reports.read(self._others_of(wait))
                position = f"{self._mine.state}; {self._mine.beside}"
                _log.warning("Rank %d is %s. %s", self._rank, position, self._others(reports))

    def _is_due(self, known: _Known, now: float) -> bool:
        """Whether to log a wait now. It is logged again every minute."""
        waited, before = now - known.since, known.warned
        is_due = waited >= self._warn_after and waited >= before + (60 if before else 0)
        known.warned = waited if is_due else before
        return is_due

    def _others_of(self, wait: Wait) -> list[int]:
        """The ranks on which a wait depends."""
        return [rank for rank in dist.get_process_group_ranks(wait.process_group) if rank != self._rank]

    def _update_report(self, wait: Wait | None, waited: float, pause: float = 0.0) -> None:
        """Update this rank's report, and write it unless the last one is less than about ``pause`` seconds old."""
        mine, position = self._mine, WAITS.position()
        mine.doing, mine.waited, mine.quiet = position.doing, waited, waited
        mine.waits, mine.waits_for, mine.passes = "", [], self._announced
        if wait is not None:
            mine.waits = describe(wait)
            mine.waits_for = self._others_of(wait)
            if waited >= _READ:
                theirs = {(to, at) for report in self._reports.known.values() for at, to in report.connections}
                for each, ends in self._connections():
                    if ends in theirs:  # others are the user's
                        probe(each)
                    mine.quiet = min(mine.quiet, quiet_seconds(each))
                if self._is_same():  # otherwise training went on in the meantime
                    mine.passes = position.passes
        mine.verdict, mine.judged = WAITS.verdict or "", time.monotonic() - self._judged
        if mine.verdict or (self._size <= _KNOWN and mine.beat % _BEATS < 2):  # early, in case this rank is killed
            mine.connections = [[*ends] for _, ends in self._connections()]
        if time.monotonic() - mine.written >= pause - self._interval / 2:
            self._reports.write()

    def announce(self) -> None:
        """Report at once where training is, because this process may end before its next report."""
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
        """The reason why this rank's wait will never end; ``None`` if it may end."""
        for report in reports.values():
            if report.verdict and report.judged + self._between <= waited:  # found during this rank's wait
                return report.verdict
        needed = [reports[rank] for rank in self._mine.waits_for if rank in reports]
        everyone = [self._mine, *reports.values()]
        needs = {rank for each in everyone for rank in each.waits_for}
        is_all = needs <= {each.rank for each in everyone}
        # A rank that has ended may have done its part. While others run, this rank may be waiting for them only.
        none_goes_on = is_all and all(self._is_over(each) or self._is_quiet(each, _READ) for each in everyone)
        if lost := self._lost(each for each in needed if none_goes_on or each.ended not in ("", _OVER, _LEFT)):
            return f"{lost}{self._parted(lost)}"
        unanswered = {ends: unanswered_seconds(each) for each, ends in self._connections()}
        if unreachable := self._reports.unreachable(needed, unanswered):
            return unreachable
        for report in needed:
            if parted := parting(self._mine, report, self._failed):
                return parted
        if is_all and all(self._is_quiet(each, _STUCK) for each in everyone):
            return f"All ranks wait for each other. {self._others(reports, with_mine=True)}"
        if waited > self._hang:
            late = [str(each.rank) for each in needed if not each.waits or self._reports.silence(each)]
            why = f": the others wait for rank {', '.join(late)}" if is_all and late else ""
            if self._store.is_silent:
                place = self._reports.place(self._reports.known[0]) if 0 in self._reports.known else ""
                why = f", and the store, at rank 0{place}, does not answer: look there first"
            return f"Nothing arrived in {self._hang:.0f} s{why}. {self._others(reports, with_mine=True)}"
        return None

    def _is_over(self, report: Report) -> bool:
        """Whether a rank has ended."""
        return bool(report.ended) or self._reports.has_ended(report)

    def _is_quiet(self, report: Report, seconds: float) -> bool:
        """Whether a rank waits, and has received nothing for that many seconds."""
        return bool(report.waits) and report.quiet >= seconds and not self._reports.silence(report)

    def _lost(self, reports: Iterable[Report]) -> str | None:
        """The ranks that have ended, and how. If some ended on their own, only those."""
        found: list[tuple[bool, str]] = []
        how = f"has ended ({GONE}: it has crashed, was killed, or {_OVER})" if self._store.has_gone else _CRASHED
        for report in reports:
            who = f"Rank {report.rank} (process {report.process}{self._reports.place(report)})"
            if report.ended and not report.is_first and report.cause:
                found.append((True, report.cause))
            elif report.ended:
                found.append((not report.is_first, f"{who} has ended {report.doing}: {report.ended}"))
            elif self._reports.has_ended(report):
                age = self._reports.age(report)
                found.append((False, f"{who} {how}; its last report, {age:.0f} s ago, was: {report.state}"))
        firsts = dict.fromkeys(text for is_later, text in sorted(found) if is_later == min(found)[0])
        return ". ".join(firsts) or None

    def _parted(self, lost: str) -> str:
        """Where ranks ran different things, which may be why the backend ended one, or advice: a sentence to follow."""
        found = filter(None, (parting(self._mine, report) for report in self._reports.known.values()))
        before = WAITS.position().unlike_before
        advice = (_FEWER if lost.endswith(_OVER) else _LOOK) + (f". {before}" if before else "")
        return next((f". {each}" for each in found), advice)

    def _others(self, reports: dict[int, Report], with_mine: bool = False, needed: Collection[int] = ()) -> str:
        """The states of the ranks, one sentence for each state, and first of those that do not wait. ``needed``: on
        which this rank depends, if it does not wait."""
        states: dict[tuple[int, str], list[int]] = {}
        for report in [self._mine] * with_mine + [reports[rank] for rank in sorted(reports)]:
            states.setdefault(self._reports.state(report), []).append(report.rank)
        missing = [rank for rank in needed or self._mine.waits_for if rank not in reports]
        if missing:
            nothing = f"may have ended ({GONE})" if self._store.has_gone else "has not sharded anything yet"
            nothing += ", or runs with FULLSHARD_CHECKS=0"
            if self._store.is_silent and not self._store.has_gone:
                nothing = "has not reported: the store does not answer, perhaps because its process, rank 0, is stopped"
            states[0, f" {nothing}"] = missing
        return ". ".join(
            f"{'Rank' if len(ranks) == 1 else 'Each of ranks'} {', '.join(map(str, sorted(ranks)))}{state}"
            for (_, state), ranks in sorted(states.items(), key=lambda each: each[0][0])
        )

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end_wait(self, wait: Wait, reports: dict[int, Report], now: float) -> None:
        """Make the wait fail: close the connections between ranks. End the process if that does not help."""
        remote_ends = {(there, position) for report in reports.values() for position, there in report.connections}
        for connection, ends in self._connections():
            if ends in remote_ends:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # reads and writes of all threads fail
        if now - self._judged > _GRACE and self._is_same():
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            where = "".join(traceback.format_stack(frame)) if frame is not None else ""
            message = f"rank {self._rank} waited for {describe(wait)}. {WAITS.verdict}"
            self._mine.ended, self._mine.is_first = "it could not go on", False
            with suppress(Exception):
                self._reports.write()
            print(f"{where}fullshard: {message}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def explain(self, process_group: dist.ProcessGroup | None) -> str:
        """What is known about the ranks of a process group that lost a rank. Waits a few seconds for reports."""
        why = self._find_cause(process_group)
        self._mine.cause = why.removesuffix(_LOOK).removesuffix(_FIND)
        return why

    def _find_cause(self, process_group: dist.ProcessGroup | None) -> str:
        deadline = time.monotonic() + _NEWS
        ranks = [rank for rank in dist.get_process_group_ranks(process_group) if rank != self._rank]
        with suppress(Exception):
            if threading.current_thread() is WAITS.thread:
                self._announced = self._failed = WAITS.position().passes  # this rank goes no further
                self._update_report(WAITS.current, 0.0)
            while True:
                beside = self._reports.read(self._reports.beside(ranks)).values()  # they may have seen it
                reports = self._reports.read(ranks)  # after them: ranks report their end before their process ends
                needed = [reports[rank] for rank in ranks if rank in reports]
                needed += [each for each in beside if each.rank not in ranks and each.ended and each.cause]
                verdicts = [WAITS.verdict, *(each.verdict for each in needed)]
                if verdict := next(filter(None, verdicts), None):
                    return verdict
                if lost := self._lost(needed):
                    silent = sorted({*ranks}.difference(reports)) if self._store.has_gone else []
                    others = f". Nothing is known of ranks {silent}, which may have ended first" if silent else ""
                    return f"{lost}{others}{self._parted(lost)}"
                no_news = self._store.has_gone and all(each.host != self._mine.host for each in needed)
                if no_news or time.monotonic() > deadline:
                    return f"{self._others(reports, needed=ranks)}{_FIND}"
                time.sleep(0.05)
        return _FIND.removeprefix(". ")

    def end(self) -> None:
        """Report that this rank ends. Called when the process ends."""
        if os.getpid() == self._mine.process and not self._ending.is_set():
            how, is_first = self.shown
            self._ending.set()
            self._mine.ended, self._mine.is_first, self._mine.doing = how, is_first, WAITS.position().doing
            self._mine.waits, self._mine.waits_for = "", []
            with suppress(Exception):
                self._reports.write()
                if how != _OVER and self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                    self._wait_until_read()
            self.thread.join(2 * self._interval)

    def _wait_until_read(self) -> None:
        """Wait until the other ranks have ended, so that they can read this rank's report: the store is in this
        process."""
        deadline = time.monotonic() + _READ + self._interval
        while time.monotonic() < deadline:
            others = self._reports.read(self._first).values()
            if all(each.ended or self._reports.has_ended(each) for each in others) and len(others) == self._size - 1:
                return
            time.sleep(0.1)


_watch: Watch | None = None  # the watch of this process over its default process group
_awaited: threading.Thread | None = None  # another thread, for which training waits


def start_watch() -> None:
    """Watch over the ranks of the default process group, unless checks are off."""
    global _watch
    world = dist.group.WORLD
    if world is None or not has_peers(world):
        return
    _register_end()
    if not checks_are_on():
        return
    WAITS.watched = weakref.ref(world)
    try:
        watch = Watch(default_store(), _watch)
    except (RuntimeError, NotImplementedError) as error:  # an unsupported kind of store
        _log.info("this rank cannot watch the other ranks: %s", error)
        return
    if _watch is None:
        _follow_errors()
    WAITS.explain, WAITS.announce = watch.explain, watch.announce
    _watch = watch
    watch.thread.start()


WAITS.begin = start_watch


@contextmanager
def waiting_for_thread(thread: threading.Thread) -> Iterator[None]:
    """A context in which training waits for another thread of this process, and so for that thread's waits."""
    global _awaited
    _awaited = thread
    try:
        yield
    finally:
        _awaited = None


def _current_wait() -> tuple[threading.Thread | None, Wait | None]:
    """The wait that blocks training, and the thread that waits (``None``: the training thread itself). A program that
    is over waits for all of its threads."""
    if (wait := WAITS.current) is not None:
        return None, wait
    beside, is_over = WAITS.beside.copy().items(), not WAITS.thread.is_alive()
    return next((each for each in beside if is_over or each[0] is _awaited), (None, None))


def call_of_torch(thread: threading.Thread) -> str:
    """The function of torch that a thread is in, and where it was called, if torch.distributed is involved. A text for
    people."""
    frame, name, is_distributed = sys._current_frames().get(thread.ident or 0), "", False
    while frame is not None:
        module, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_qualname
        package = module.partition(".")[0]
        if package != "torch" and package not in sys.stdlib_module_names:  # the caller
            where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return f"{name} (called in {where})" if is_distributed else ""
        is_distributed |= module.startswith("torch.distributed.")
        if package == "torch" and "<locals>" not in function:  # skip functions of decorators
            name = f"{module}.{function}"
        frame = frame.f_back
    return ""


@cache
def _register_end() -> None:
    atexit.register(_end)


def _end() -> None:
    if _watch is not None:
        _watch.end()
    time.sleep(_DROP)


def _lost_in(error: BaseException | None) -> PeerFailureError | None:
    """The PeerFailureError among an error and its causes, if any."""
    while error is not None and not isinstance(error, PeerFailureError):
        error = error.__cause__
    return error


def _is_raw(error: BaseException) -> bool:
    """Whether a backend raised an error in a call that is not ours: that another rank was lost, as a rule."""
    return isinstance(error, RuntimeError) and not isinstance(error, PeerFailureError) and comes_from_backend(error)


#: Nothing of ours was waiting, so that the error itself cannot say more.
explainers.append(lambda error: WAITS.explain(dist.group.WORLD) if _is_raw(error) else None)


def _shorten(error: PeerFailureError) -> None:
    """Remove the tracebacks of a lost rank: they would hide the first error of the job. An error that the user raised
    from it, or was handling when it was raised, keeps its traceback."""
    last: BaseException = error
    while last.__cause__ is not None:
        last = last.__cause__
    error.__cause__, error.__context__, error.__traceback__ = None, last.__context__, None
    error.__suppress_context__ = False


def _follow_errors() -> None:
    """Report the error that ends this process to the other ranks."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if _watch is not None:
            _watch.show(error)
        if (lost := _lost_in(error)) is not None:
            _shorten(lost)
        with suppress(Exception):  # the error itself is what matters
            for note in filter(None, (explain(error) for explain in explainers)):
                error.add_note(f"fullshard: {note}")
        rank = dist.get_rank() if dist.is_initialized() else 0
        if (shown_by := getattr(error, "shown_by_rank", rank)) != rank:
            print(f"fullshard: rank {rank} ends with the error of rank {shown_by}: {error}", file=sys.stderr)
            return
        before(kind, error, None if lost is error else trace)

    sys.excepthook = hook
