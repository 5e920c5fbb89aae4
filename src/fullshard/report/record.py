"""Recordings of some steps of a model: when each rank gathered, computed, reduced and waited, and its memory meanwhile.

While a recording runs, functions of its own stand in the places of some methods of the model's schedule, units and
lanes (of these objects, not of their classes): :mod:`fullshard.report.recorder`. Without a recording nothing is there,
so that it costs nothing. Owns what users call, and the meeting of what ranks recorded.
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

import torch
import torch.distributed as dist
import torch.nn as nn

from fullshard.comm.local_ranks import host_id
from fullshard.comm.process_group import decoded, encoded, gather_objects
from fullshard.comm.waits import waiting
from fullshard.report import page, trace
from fullshard.report.findings import Finding, findings
from fullshard.report.recorder import RUNNING, Recorder
from fullshard.report.recording import RankRecording, as_rank, read, write
from fullshard.schedule.unit import schedule_of

#: Exchanges by which the clocks of two hosts are compared.
_EXCHANGES = 16


class Recording:
    """What ranks did in some steps. Made by :func:`record`, or read from a file by :meth:`load`.

    Attributes:
        ranks: what each rank did: this rank's alone until it was gathered, then on rank 0 that of all.
    """

    def __init__(self, ranks: list[RankRecording] | None = None) -> None:
        self._ranks = ranks or []
        self._recorder: Recorder | None = None
        self._is_gathered = ranks is not None

    @property
    def ranks(self) -> list[RankRecording]:
        """What each rank did: this rank's alone until it was gathered, then on rank 0 that of all."""
        if self._recorder is not None and not self._recorder.is_running:
            self._ranks, self._recorder = [self._recorder.finish()], None
        return self._ranks

    @property
    def is_running(self) -> bool:
        """Whether it still records."""
        return self._recorder is not None and self._recorder.is_running

    def stop(self) -> None:
        """Stop to record. May be called again. Each rank may do so for itself."""
        if self._recorder is not None:
            self._recorder.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def gather(self) -> None:
        """Bring what all ranks recorded to rank 0, with the times of its host's clock. Every rank must call it.

        Ranks of one host share a clock. The clock of another host is compared with rank 0's in a few exchanges; each
        bounds the difference from both sides, and ``clock_error`` of a rank says how far it may still be off.
        """
        self.stop()
        if self._is_gathered:
            return
        (mine,) = self.ranks
        offset, mine.clock_error = _clock_against_rank_0()
        every = _gather_to_rank_0(mine.moved(offset))
        self._ranks, self._is_gathered = every or [mine], True

    def findings(self) -> list[Finding]:
        """What the recording shows, the most important first; of all ranks on rank 0, once it was gathered."""
        return findings(self.ranks)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``recording.json``, ``trace.json`` and ``report.html`` into a directory, on rank 0.

        Every rank must call it: what ranks recorded is gathered before, if that was not done. ``trace.json`` is for
        https://ui.perfetto.dev or chrome://tracing; ``report.html`` is one file that needs no network. Its pictures
        are made by matplotlib; without it the page has the tables alone.
        """
        if not self._is_gathered:
            self.gather()
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        write(self.ranks, folder / "recording.json")
        trace.write(self.ranks, folder / "trace.json")
        page.write(self.ranks, folder / "report.html")

    @staticmethod
    def load(directory: str | os.PathLike[str]) -> Recording:
        """Read what :meth:`save` wrote into a directory. No ranks need to be there.

        Raises:
            FileNotFoundError: the directory has no ``recording.json``.
            ValueError: it is of another version.
        """
        return Recording(read(Path(directory, "recording.json")))


def record(model: nn.Module, steps: int = 3, *, first_step: int = 0) -> Recording:
    """Record what really happens in the next steps of training. Each rank that is to be seen must call it.

    Call it between two steps, as a rule after some, because the first ones are unlike the others. It ends by itself
    after so many steps of training, and earlier with ``stop()`` or the end of a ``with``::

        with fullshard.record(model, steps=3, first_step=step) as recording:
            train(model)
        recording.save("recording")

    Args:
        model: the root, sharded by ``fully_shard`` or wrapped.
        steps: of training. A step ends when optimizers have stepped on all parameters that are trained, or before the
            next forward if nobody steps on some of them.
        first_step: the number of the first of them; findings, trace and page count from it.

    Returns:
        the recording. On the CPU memory is what is resident of the process, pages that ranks share included; on
        accelerators it is what torch has allocated there.

    Raises:
        ValueError: ``model`` is not sharded, or ``steps`` is less than 1.
        RuntimeError: the model is being recorded, or is in a forward or backward.
    """
    schedule = schedule_of(model, "record")
    if steps < 1:
        raise ValueError(f"record expects at least 1 step, got {steps}")
    if schedule in RUNNING:
        raise RuntimeError(f"{type(model).__name__} is being recorded: stop the other recording first")
    if not schedule.is_idle:
        raise RuntimeError("a recording begins between two steps, and a forward or backward runs")
    recording = Recording()
    recording._recorder = Recorder(schedule, model, steps, first_step)
    return recording


def _clock_against_rank_0() -> tuple[int, int]:
    """How much this rank's clock is ahead of rank 0's, and by how much that may be wrong, in nanoseconds.

    Every rank must call it. Nobody leaves an all-gather before all have entered it. So rank 0 entered before this rank
    left, and this rank entered before rank 0 left: each bounds the difference from one side.
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
    theirs = gather_objects(times, None)[0]
    least = max(here[0] - there[1] for here, there in zip(times, theirs, strict=True))
    most = min(here[1] - there[0] for here, there in zip(times, theirs, strict=True))
    return (0, 0) if dist.get_rank() == 0 else ((least + most) // 2, (most - least) // 2 + 1)


def _gather_to_rank_0(mine: RankRecording) -> list[RankRecording]:
    """What all ranks recorded, on rank 0; nothing on the others. Every rank must call it."""
    if not dist.is_initialized():
        return [mine]
    data = encoded(zlib.compress(json.dumps(asdict(mine)).encode()), None)
    lengths = gather_objects(data.numel(), None)
    padded = data.new_zeros(max(lengths))
    padded[: data.numel()] = data
    received = [torch.empty_like(padded) for _ in lengths] if dist.get_rank() == 0 else None
    with waiting("the recordings of all ranks", None):
        dist.gather(padded, received, dst=0)
    texts = (decoded(said[:length]) for said, length in zip(received or (), lengths, strict=False))
    return [as_rank(json.loads(zlib.decompress(text))) for text in texts]
