"""A pool of rank processes, seen from the test process: starts them, sends functions, and judges what comes back.

Owns the processes, the store of their rendezvous, and how long a silent rank is waited for. A rank starts when a
function first needs it and serves all that follow; the ranks of a failed function are ended, and fresh ones start.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

import fullshard_rank_server
from fullshard.testing.rank import STACKS, CleanUp, Kind, Outcome, RankJob, Setup, exit_with_parent, serve

# What a rank says when a peer has gone: seldom the cause, so it is shown last.
_CONSEQUENCES = ("connection closed", "connection reset", "broken pipe", "connection refused", "connectfullmesh")
_GRACE = 10.0
"""Seconds that the other ranks get to end by themselves once a rank has failed."""
_STARTING = 120.0
"""Seconds that ranks get to import torch; they do not count for the first test."""
_DEBUGGING = 24 * 3600.0
"""Seconds that ranks wait for somebody who debugs one of them."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Under which conditions ranks run a function; the mark ``ranks`` has the same options.

    Attributes:
        timeout: Seconds for which a rank may be silent before it is taken for hung.
        device: The type of the ranks' devices. The ranks share a machine's accelerators, over gloo.
        hosts: On how many hosts the ranks believe to be, which share no memory; the same number of ranks on each.
        env: Environment variables of the ranks, beside those of the test process.
        ends: Ranks that are expected not to return: they should have ``"died"`` or ``"hung"``.
        fresh: Whether the process group served no other function, and serves none after.
        init: Whether there is a default process group. Without one, the environment has what
            ``init_process_group()`` reads.
        seed: The seed of torch, numpy and random on every rank.
        debug: The rank that enters pdb at ``breakpoint()`` and where it raises an error, on this process's terminal.
    """

    timeout: float = 60.0
    device: str = "cpu"
    hosts: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[int, Kind] = field(default_factory=dict)
    fresh: bool = False
    init: bool = True
    seed: int = 0
    debug: int | None = None


class RankPool:
    """Processes that run functions together, each as one rank: for tests of distributed code on one machine.

    Use it as a context manager, or call :meth:`close`.

    Args:
        session: How ranks start pytest, to run tests of it; without it they run functions only.
        preload: Names of modules that the ranks have imported before they start, so that each costs its import once
            and not once for each rank. Modules that start threads do not survive it.

    Example::

        with RankPool() as pool:
            outcomes = pool.run(function, 2, argument, keyword=3)      # function(world, argument, keyword=3)
    """

    def __init__(self, *, session: Mapping[str, Any] | None = None, preload: Sequence[str] = ()) -> None:
        self._session = session
        self._preload = preload
        self._processes: list[BaseProcess] = []
        self._connections: list[connection.Connection] = []
        self._folder: Path | None = None
        self._store: Any = None
        self._numbers = itertools.count()
        self._group: tuple[Any, ...] | None = None  # size and conditions of the process group that can serve again
        self._number = -1

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        /,
        *args: Any,
        conditions: Conditions | None = None,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Call ``function(world, *args, **kwargs)`` on ``size`` ranks; one outcome for each, in rank order.

        The function and its arguments are pickled: the function has to stand at the top level of a module. Ranks that
        say nothing for so long as the conditions allow, or for a few seconds after another rank has failed, count as
        hung. Fields of :class:`Conditions` may be given as keywords of their own: ``timeout=10``.

        Ranks: the process that owns the pool.

        Raises:
            TypeError: if the function or its arguments cannot be pickled.
            RuntimeError: if the ranks cannot start.
        """
        names = Conditions.__dataclass_fields__.keys() & kwargs.keys()
        conditions = replace(conditions or Conditions(), **{name: kwargs.pop(name) for name in names})
        payload = _pickled(function, args, kwargs)
        self._start(size)
        key = (size, conditions.timeout, conditions.device)
        if conditions.fresh or not conditions.init or self._group != key:
            self._number = next(self._numbers)
        self._group = None
        store = None if conditions.init else _store()  # of its own: keys of an earlier default group would be found
        job = self._job(size, payload, conditions, (store or self._store).port)
        try:
            self._send(size, job)
            if conditions.debug is not None:
                self._lend_terminal(conditions.debug)
            outcomes = self._collect(size, job.timeout, conditions.ends)
            if all(outcome.kind == "returned" for outcome in outcomes):
                outcomes = self._clean_up(outcomes, key if conditions.init and not conditions.fresh else None)
        except BaseException:
            self.kill()
            raise
        if any(outcome.kind not in ("returned", "skipped") for outcome in outcomes):
            for outcome in outcomes:
                if outcome.kind == "hung":
                    self._processes[outcome.rank].kill()
            self.close()
        return outcomes

    def _job(self, size: int, payload: bytes, conditions: Conditions, port: int) -> RankJob:
        asked = {name: getattr(conditions, name) for name in ("device", "hosts", "init", "seed")}
        timeout = conditions.timeout if conditions.debug is None else _DEBUGGING
        environment = {**fullshard_rank_server.ENVIRONMENT, **os.environ, **conditions.env}
        return RankJob(self._number, size, timeout, payload, environment, port, debugged=conditions.debug, **asked)

    def _clean_up(self, outcomes: list[Outcome], key: tuple[Any, ...] | None) -> list[Outcome]:
        """Let the ranks clean up, and keep their process group for functions with the same key if all of them can."""
        self._send(len(outcomes), "clean up")
        ends = self._collect(len(outcomes), _STARTING)
        if any(end.kind != "returned" for end in ends):
            return [one if end.kind == "returned" else end for one, end in zip(outcomes, ends, strict=True)]
        found: list[CleanUp] = [end.value for end in ends]
        counts = {each.collectives for each in found}
        if any(each.is_worn for each in found):
            self.close()
        elif None not in counts and len(counts) == 1:
            self._group = key
        return [replace(one, left=each.left) for one, each in zip(outcomes, found, strict=True)]

    def close(self) -> None:
        """Ask the ranks to end, as a process ends, so that what runs at exit (coverage, for one) runs.

        Ranks: the process that owns the pool.
        """
        for link in self._connections:
            with contextlib.suppress(OSError):
                link.send(None)
        deadline = time.monotonic() + 10
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the ranks without asking.

        Ranks: the process that owns the pool.
        """
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for link in self._connections:
            link.close()
        self._processes, self._connections, self._store, self._group = [], [], None, None
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _start(self, size: int) -> None:
        """Let there be ``size`` ranks at least."""
        if not all(process.is_alive() for process in self._processes):
            self.kill()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
            self._store = _store()
        if (known := len(self._processes)) >= size:
            return
        # Ranks are forked from a server that has imported torch and has no threads: a fresh one costs milliseconds.
        context = fullshard_rank_server.start(self._preload)
        with fullshard_rank_server.environment():
            for rank in range(known, size):
                here, there = context.Pipe()
                setup = Setup(rank, self._store.port, self._folder / f"{rank}.log", self._session)
                process = context.Process(target=serve, args=(setup, there), name=f"rank {rank}")
                process.start()
                there.close()
                self._processes.append(process)
                self._connections.append(here)
        starts = self._collect(size, _STARTING, first=known)
        if any(start.kind != "returned" for start in starts):
            self.kill()
            raise RuntimeError(f"The ranks did not start: {failure_report(starts)}")

    def _send(self, size: int, message: object) -> None:
        for link in self._connections[:size]:
            link.send(message)

    def _lend_terminal(self, rank: int) -> None:
        send: Callable[..., None] = vars(reduction)["send_handle"]
        for number in (sys.__stdin__, sys.__stdout__):
            assert number is not None
            send(self._connections[rank], number.fileno(), self._processes[rank].pid)

    def _collect(
        self, size: int, timeout: float, ends: Mapping[int, Kind] | None = None, first: int = 0
    ) -> list[Outcome]:
        """Wait until each rank from ``first`` on has answered, died, or been silent for too long.

        A rank that is expected to hang is not waited for when all others have answered.
        """
        outcomes: dict[int, Outcome] = {}
        ends = ends or {}
        deadline = time.monotonic() + timeout
        reason = f"did not end within {timeout:g} s"
        while silent := [rank for rank in range(first, size) if rank not in outcomes]:
            if all(ends.get(rank) == "hung" for rank in silent):
                deadline = min(deadline, time.monotonic() + 0.1)
            handles: dict[Any, int] = {self._connections[rank]: rank for rank in silent}
            handles.update({self._processes[rank].sentinel: rank for rank in silent})
            ready = connection.wait(list(handles), max(0.0, deadline - time.monotonic()))
            if not ready:
                outcomes.update(self._hung(silent, reason))
            for rank in {handles[handle] for handle in ready}:
                outcomes[rank] = self._answer(rank)
                is_expected = outcomes[rank].kind in ("returned", ends.get(rank))
                if not is_expected and (patience := time.monotonic() + _GRACE) < deadline:
                    deadline = patience
                    reason = f"was still busy {_GRACE:g} s after rank {rank} had failed"
        return [outcomes[rank] for rank in range(first, size)]

    def _answer(self, rank: int) -> Outcome:
        try:
            if self._connections[rank].poll():
                answer: Outcome = self._connections[rank].recv()
                return answer
        except (EOFError, ConnectionError):
            pass
        process = self._processes[rank]
        process.join()
        code = process.exitcode
        assert code is not None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Outcome(rank, "died", summary=f"The process of rank {rank} {how}.", report=self._stacks(rank))

    def _hung(self, silent: list[int], reason: str) -> dict[int, Outcome]:
        if STACKS is not None:
            for rank in silent:
                os.kill(self._processes[rank].pid or 0, STACKS)
            time.sleep(0.5)  # for the stacks to be written
        return {
            rank: Outcome(rank, "hung", summary=f"Rank {rank} {reason}.", report=self._stacks(rank)) for rank in silent
        }

    def _stacks(self, rank: int) -> str:
        assert self._folder is not None
        threads = (self._folder / f"{rank}.log").read_text(errors="replace").strip().split("\n\n")
        return "\n\n".join(_without_runner(thread) for thread in threads if exit_with_parent.__name__ not in thread)


def _without_runner(stack: str) -> str:
    """A thread's stack, most recent call first, without the frames of pytest and of this package below the test."""
    lines = stack.splitlines()
    of_runner = (f"{os.sep}_pytest{os.sep}", __file__.removesuffix("pool.py"))
    return "\n".join(itertools.takewhile(lambda line: not any(each in line for each in of_runner), lines))


def failure_report(outcomes: Sequence[Outcome], ends: Mapping[int, Kind] | None = None) -> str:
    """One text about all ranks that did not end as expected: the likely cause first, equal errors once, lost
    connections last.

    Ranks: the process that owns the pool.

    Args:
        outcomes: What :meth:`RankPool.run` returned.
        ends: Ranks that were expected to have ``"died"`` or ``"hung"``.
    """
    failed = failures(outcomes, ends)
    groups: dict[str, list[Outcome]] = {}
    for outcome in failed:
        groups.setdefault(outcome.summary, []).append(outcome)
    lines = [f"{_headline(failed[0])} ({len(failed)} of {len(outcomes)} ranks failed)"]
    for first, *others in groups.values():
        lines += ["", f"--- {_headline(first)}", first.report or first.summary]
        if others:
            lines.append(f"--- and the same on {', '.join(f'rank {other.rank}' for other in others)}")
    return "\n".join(lines)


def failures(outcomes: Sequence[Outcome], ends: Mapping[int, Kind] | None = None) -> list[Outcome]:
    """The outcomes of ranks that did not end as expected, the likely cause first."""
    failed = []
    for outcome in outcomes:
        expected = (ends or {}).get(outcome.rank)
        if expected is None and outcome.kind not in ("returned", "skipped", "xfailed"):
            failed.append(outcome)
        elif expected is not None and outcome.kind != expected:
            said = f"{outcome.summary or 'It ' + outcome.kind + '.'} The test expects that it {expected}."
            failed.append(replace(outcome, summary=said))
    return sorted(failed, key=_likely_cause_first)


def _headline(outcome: Outcome) -> str:
    return f"rank {outcome.rank} {outcome.kind}: {outcome.summary.splitlines()[0]}"


def _likely_cause_first(outcome: Outcome) -> tuple[int, float]:
    if outcome.kind == "raised" and any(words in outcome.summary.lower() for words in _CONSEQUENCES):
        return 3, outcome.at
    return {"died": 0, "raised": 1, "hung": 2}.get(outcome.kind, 1), outcome.at


def _store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"{function!r} with arguments {args} {kwargs} cannot be sent to the ranks: {error}. Use functions and "
            "classes from the top level of a module, and arguments that can be pickled; make the rest on the ranks."
        ) from error
