"""Traces of a few steps: when each rank gathered, computed, reduced and waited, and how much memory it used.

Owns what users call, and the gathering of all ranks' traces on rank 0. :mod:`fullshard.report.recorder` takes the
trace: while it runs, it listens to the log of the model's steps, to its lanes and to the waits of the process.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist
import torch.nn as nn

from fullshard.comm.process_group import gather_objects, gather_to_first
from fullshard.platforms import host_id
from fullshard.policies import local_path
from fullshard.report import chrome_trace
from fullshard.report.findings import Finding, findings, findings_text
from fullshard.report.rank_trace import RankTrace, as_rank
from fullshard.report.recorder import RUNNING, Recorder
from fullshard.schedule.unit import schedule_of

#: Exchanges that compare the clocks of two hosts.
_EXCHANGES = 16


class Trace:
    """What ranks did in a few steps. Made by :func:`profile`, or read from a file by :meth:`load`."""

    def __init__(self, ranks: list[RankTrace] | None = None) -> None:
        self._ranks = ranks or []
        self._recorder: Recorder | None = None
        self._is_gathered = ranks is not None

    @property
    def ranks(self) -> list[RankTrace]:
        """The trace of each rank. Before :meth:`gather` only this rank's; after it, on rank 0, those of all."""
        if self._recorder is not None and not self._recorder.is_running:
            self._ranks, self._recorder = [self._recorder.finish()], None
        return self._ranks

    @property
    def is_running(self) -> bool:
        """Whether steps are still recorded."""
        return self._recorder is not None and self._recorder.is_running

    def stop(self) -> None:
        """Stop recording. May be called again.

        Ranks: each for itself.
        """
        if self._recorder is not None:
            self._recorder.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def gather(self) -> None:
        """Gather the traces of all ranks on rank 0, with times of rank 0's clock.

        Ranks of one host share a clock. The clock of another host is compared with rank 0's in a few exchanges. Each
        exchange bounds the difference from both sides. The ``clock_error`` of a rank is the error that remains
        possible.

        Ranks: all alike.
        """
        self.stop()
        if self._is_gathered:
            return
        (mine,) = self.ranks
        offset, mine.clock_error = _clock_against_rank_0()
        every = _gather_to_rank_0(mine.shifted(offset))
        self._ranks, self._is_gathered = every or [mine], True

    def findings(self) -> list[Finding]:
        """What the trace shows, the most important first. After :meth:`gather`, rank 0 has the findings of all
        ranks.

        Ranks: each for itself.
        """
        return findings(self.ranks)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``trace.json`` and ``findings.txt`` into a directory, on rank 0.

        It calls :meth:`gather` first if that is still to be done. ``trace.json`` is for :meth:`load`, and for
        https://ui.perfetto.dev or chrome://tracing. ``findings.txt`` has the :meth:`findings` as text.

        Args:
            directory: is made if it does not exist.

        Ranks: all alike.
        """
        if not self._is_gathered:
            self.gather()
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        folder = local_path(directory, "the directory")
        folder.mkdir(parents=True, exist_ok=True)
        chrome_trace.write(self.ranks, folder / "trace.json")
        (folder / "findings.txt").write_text(findings_text(self.findings()), encoding="utf-8")

    @staticmethod
    def load(directory: str | os.PathLike[str]) -> Trace:
        """Read a trace. Needs no process group.

        Args:
            directory: the directory into which :meth:`save` wrote it.

        Raises:
            ValueError: ``trace.json`` is damaged, no trace of fullshard, or of a different version.
            OSError: the file is missing or cannot be read.

        Ranks: each for itself.
        """
        return Trace(chrome_trace.read(Path(directory, "trace.json")))


def profile(model: nn.Module, steps: int = 3, *, first_step: int = 0) -> Trace:
    """Record what this rank does in the next training steps.

    Call it between two steps. The first steps of a training differ from the others, so let a few pass before. The
    trace ends by itself after ``steps`` training steps, or earlier with ``stop()`` or the end of a ``with``::

        with fullshard.profile(model, steps=3, first_step=step) as trace:
            train(model)
        trace.save("trace")

    Args:
        model: the root, sharded by ``fully_shard`` or wrapped.
        steps: how many training steps to record. A step ends when optimizers have updated all trained parameters, or
            before the next forward if no optimizer updates some of them.
        first_step: the number of the first recorded step, used in the trace.

    Returns:
        the trace. On the CPU, memory is the resident memory of the process, which includes pages that ranks share.
        On accelerators it is what torch has allocated there.

    Raises:
        ValueError: ``model`` is not sharded, or ``steps`` is less than 1.
        RuntimeError: the model is being recorded already, or the model is in a forward or backward.

    Ranks: each that you want to see, for itself.
    """
    schedule = schedule_of(model, "profile")
    if steps < 1:
        raise ValueError(f"profile expects at least 1 step, got {steps}")
    if schedule in RUNNING:
        raise RuntimeError(f"{type(model).__name__} is being recorded: stop the other trace first")
    if not schedule.is_idle:
        raise RuntimeError("a trace must begin between two steps, but a forward or backward is running")
    trace = Trace()
    trace._recorder = Recorder(schedule, model, steps, first_step)
    return trace


def _clock_against_rank_0() -> tuple[int, int]:
    """How far this rank's clock is ahead of rank 0's, and the possible error of that, in nanoseconds.

    Every rank must call it. No rank leaves an all-gather before all ranks have entered it. So rank 0 entered before
    this rank left, and this rank entered before rank 0 left. Each fact bounds the difference from one side.
    """
    if not dist.is_initialized() or len(set(gather_objects(host_id(), None))) == 1:
        return 0, 0
    times: list[tuple[int, int]] = []
    entered = time.monotonic_ns()
    for _ in range(_EXCHANGES):
        gather_objects(None, None)
        left = time.monotonic_ns()
        times.append((entered, left))
        entered = left
    rank_0_times = gather_objects(times, None)[0]
    least = max(here[0] - there[1] for here, there in zip(times, rank_0_times, strict=True))
    most = min(here[1] - there[0] for here, there in zip(times, rank_0_times, strict=True))
    return (0, 0) if dist.get_rank() == 0 else ((least + most) // 2, (most - least) // 2 + 1)


def _gather_to_rank_0(mine: RankTrace) -> list[RankTrace]:
    """Returns the traces of all ranks on rank 0, and an empty list elsewhere. Every rank must call it."""
    if not dist.is_initialized():
        return [mine]
    texts = gather_to_first(zlib.compress(json.dumps(asdict(mine)).encode()), None, "the traces of all ranks")
    return [as_rank(json.loads(zlib.decompress(text))) for text in texts]
