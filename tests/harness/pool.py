"""A pool of rank processes, seen from the test process: starts them, sends functions, and judges what comes back.

It owns the processes, the store that their groups meet in, and the patience for silent ranks. A pool starts at its
first use, hands a failed set of ranks back to the system, and starts a fresh one at the next use.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from tests.harness.rank import Job, Outcome, Setup, exit_with_parent, serve

# What a rank says when a peer has gone: seldom the cause, so it is shown last.
_CONSEQUENCES = ("connection closed", "connection reset", "broken pipe", "connection refused", "connectfullmesh")
_PRELOADED = [
    "pytest",
    "torch",
    "torch.distributed.tensor.debug",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
]
_GRACE = 10.0
"""Seconds that the other ranks get to end by themselves once a rank has failed."""
_STARTING = 120.0
"""Seconds that ranks get to import torch; they do not count for the first test."""


class RankPool:
    """Up to `size` ranks that run functions together; `pytest_arguments` set up the rewriting of assertions in them."""

    def __init__(self, size: int, pytest_arguments: Iterable[str] = ()) -> None:
        self.size = size
        self._pytest_arguments = tuple(pytest_arguments)
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[connection.Connection] = []
        self._folder: Path | None = None
        self._store: Any = None
        self._numbers = itertools.count()
        self._group: tuple[int, float] | None = None  # size and timeout of the process group that can serve again
        self._number = -1

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        timeout: float = 60.0,
        fresh: bool = False,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Call `function(world, *args, **kwargs)` on the first `size` ranks; one outcome for each, in rank order.

        The function and its arguments are pickled: the function has to stand at the top level of a module. Ranks that
        say nothing for `timeout` seconds, or for a few seconds after another rank has failed, count as hung. A `fresh`
        process group served no other function, and serves none after.
        """
        if not 1 <= size <= self.size:
            raise ValueError(f"A pool of {self.size} ranks cannot run a world of {size}.")
        payload = _pickled(function, args, kwargs)
        self._start()
        if fresh or self._group != (size, timeout):
            self._number = next(self._numbers)
        self._group, are_worn = None, False
        try:
            self._send(size, Job(self._number, size, timeout, payload))
            outcomes = self._collect(size, timeout)
            if all(outcome.kind == "returned" for outcome in outcomes):
                self._send(size, "destroy the group")
                ends = self._collect(size, timeout)
                found = [end.value if end.kind == "returned" else (None, False) for end in ends]
                counts, are_worn = {count for count, _ in found}, any(is_worn for _, is_worn in found)
                if not fresh and None not in counts and len(counts) == 1:
                    self._group = (size, timeout)
                outcomes = [
                    outcome if end.kind == "returned" else end for outcome, end in zip(outcomes, ends, strict=True)
                ]
        except BaseException:
            self.kill()
            raise
        if are_worn:
            self.close()
        if any(outcome.kind not in ("returned", "skipped") for outcome in outcomes):
            for outcome in outcomes:
                if outcome.kind == "hung":
                    self._processes[outcome.rank].kill()
            self.close()
        return outcomes

    def close(self) -> None:
        """Ask the ranks to end, as a process ends, so that what runs at exit (coverage, for one) runs."""
        for link in self._connections:
            with contextlib.suppress(ConnectionError):
                link.send(None)
        deadline = time.monotonic() + 10
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the ranks without asking."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for link in self._connections:
            link.close()
        self._processes, self._connections, self._store = [], [], None
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.kill()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve is no reason to fail
        # Ranks are forked from a server that has imported torch and has no threads: a fresh rank costs milliseconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        for rank in range(self.size):
            here, there = context.Pipe()
            setup = Setup(rank, self._store.port, self._folder / f"{rank}.log", self._pytest_arguments)
            process = context.Process(target=serve, args=(setup, there), name=f"rank {rank}")
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        starts = self._collect(self.size, _STARTING)
        if any(start.kind != "returned" for start in starts):
            self.kill()
            raise RuntimeError(f"The ranks did not start: {failure_report(starts)}")

    def _send(self, size: int, message: object) -> None:
        for link in self._connections[:size]:
            link.send(message)

    def _collect(self, size: int, timeout: float) -> list[Outcome]:
        """Wait until each of the first `size` ranks has answered, died, or been silent for too long."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        reason = f"did not end within {timeout:g} s"
        while len(outcomes) < size:
            silent = [rank for rank in range(size) if rank not in outcomes]
            handles: dict[Any, int] = {self._connections[rank]: rank for rank in silent}
            handles.update({self._processes[rank].sentinel: rank for rank in silent})
            ready = connection.wait(list(handles), max(0.0, deadline - time.monotonic()))
            if not ready:
                outcomes.update(self._hung(silent, reason))
            for rank in {handles[handle] for handle in ready}:
                outcomes[rank] = self._answer(rank)
                if outcomes[rank].kind != "returned" and (patience := time.monotonic() + _GRACE) < deadline:
                    deadline = patience
                    reason = f"was still busy {_GRACE:g} s after rank {rank} had failed"
        return [outcomes[rank] for rank in range(size)]

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
        for rank in silent:
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)  # for the stacks to be written
        return {
            rank: Outcome(rank, "hung", summary=f"Rank {rank} {reason}.", report=self._stacks(rank)) for rank in silent
        }

    def _stacks(self, rank: int) -> str:
        assert self._folder is not None
        threads = (self._folder / f"{rank}.log").read_text(errors="replace").strip().split("\n\n")
        return "\n\n".join(thread for thread in threads if exit_with_parent.__name__ not in thread)


def failure_report(outcomes: list[Outcome]) -> str:
    """One text about all ranks that failed: the likely cause first, equal errors once, lost connections last."""
    failed = sorted((one for one in outcomes if one.kind not in ("returned", "skipped")), key=_likely_cause_first)
    groups: dict[str, list[Outcome]] = {}
    for outcome in failed:
        groups.setdefault(outcome.summary, []).append(outcome)
    lines = [f"{_headline(failed[0])} ({len(failed)} of {len(outcomes)} ranks failed)"]
    for first, *others in groups.values():
        lines += ["", f"--- {_headline(first)}", first.report or first.summary]
        if others:
            lines.append(f"--- and the same on {', '.join(f'rank {other.rank}' for other in others)}")
    return "\n".join(lines)


def _headline(outcome: Outcome) -> str:
    return f"rank {outcome.rank} {outcome.kind}: {outcome.summary.splitlines()[0]}"


def _likely_cause_first(outcome: Outcome) -> tuple[int, float]:
    if outcome.kind == "raised" and any(words in outcome.summary.lower() for words in _CONSEQUENCES):
        return 3, outcome.at
    return {"died": 0, "raised": 1, "hung": 2}[outcome.kind], outcome.at


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"{function!r} with arguments {args} {kwargs} cannot be sent to the ranks: {error}. Use functions and "
            "classes from the top level of a module and fixtures that can be pickled; make the rest on the ranks."
        ) from error
