"""Metrics of each step: its time, the time waited for communication, traffic and memory of this rank.

Made to run during a whole training. It uses only the cheapest ways to observe a step, and writes one line for each
step. On devices with streams, waits of the computation are timed by events, which are read after the device has passed
them. A line is therefore written some steps later, and nothing waits for the device.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch.distributed as dist
import torch.nn as nn

from fullshard.buffer.sections import full_bytes
from fullshard.comm.waits import Wait
from fullshard.device import Mark
from fullshard.disk.file import DiskFile
from fullshard.group.gradient_dtypes import GradientDtypes
from fullshard.group.step import Action
from fullshard.platforms import open_flags
from fullshard.report.watching import (
    Point,
    StepObserver,
    TimedMark,
    gathered_from_others,
    reduced_from_others,
    summed_from_replicas,
)
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import schedule_of


class ScalarWriter(Protocol):
    """An object that stores figures by name, such as TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int, /) -> Any: ...


def log_metrics(model: nn.Module, to: str | os.PathLike[str] | ScalarWriter, *, first_step: int = 0) -> Metrics:
    """Write metrics of this rank after each training step, from now on.

    - ``seconds``: the time of the step, from the end of the step before.
    - ``waited_seconds``: how much of that time this rank waited for other ranks and for the bytes that they send.
    - ``received_bytes``: bytes received from other ranks; where ranks of several hosts share memory, from other hosts.
    - ``disk_waited_seconds``, ``disk_read_bytes``, ``disk_written_bytes``: how long this rank waited for its disk, and
      what it read and wrote there. Only with a :class:`~fullshard.DiskOffloadPolicy`.
    - ``memory_bytes``, ``peak_memory_bytes``: the memory after the step, and the largest so far. On the CPU it is the
      resident memory of the process, or 0 on a system that does not say; on an accelerator, what torch has allocated
      there.
    - ``save_seconds``, ``save_bytes``, ``save_bytes_per_second``, ``save_blocked_seconds``: only if a save of the
      model (:func:`fullshard.checkpoint.save`) ends in the step. Its time from call to end, the bytes that this rank
      wrote, and how long training waited. If several saves end in it, they are added up.
    - ``change_agreed_seconds``, ``change_joined_seconds``, ``change_trained_seconds``: only if an elastic job
      (:class:`fullshard.elastic.Elastic`) has changed in the step. The time from when this process noticed the change
      to the agreement on the next membership, from there to the process group of its new row, and from there to the end
      of the step.

    ::

        fullshard.log_metrics(model, "metrics.jsonl")
        fullshard.log_metrics(model, SummaryWriter(), first_step=1200)  # a resumed training

    A training step ends when optimizers have updated all trained parameters. If no optimizer updates some of them, the
    step ends with the last optimizer step before the next forward, and its metrics are written at that forward.

    Args:
        model: the root, sharded by ``fully_shard`` or wrapped.
        to: a file or an object with ``add_scalar``. To a file each rank appends lines of JSON, which also have ``step``
            and ``rank``; the ranks of one host may share the file. For ``add_scalar`` the names begin with
            ``fullshard/``.
        first_step: the number of the step that begins now.

    Returns:
        an object with ``stop()``, which is also a context manager. You need not keep it. Its ``step`` is the number of
        the current step and may be set: steps that a gradient scaler skips are not counted.

    Raises:
        ValueError: ``model`` is not sharded.
        TypeError: ``to`` is neither a path nor an object with ``add_scalar``.
        OSError: the file cannot be opened.

    Ranks: each for itself.
    """
    schedule = schedule_of(model, "log_metrics")
    return Metrics(schedule, _writer(to), first_step)


def _writer(to: Any) -> Callable[[int, dict[str, float]], None]:
    """Returns a function that writes the metrics of a step."""
    if callable(getattr(to, "add_scalar", None)):

        def add(step: int, figures: dict[str, float]) -> None:
            for name, value in figures.items():
                to.add_scalar(f"fullshard/{name}", value, step)

        return add
    if not isinstance(to, str | os.PathLike):
        raise TypeError(f"log_metrics expects a path or an object with add_scalar, got {type(to).__name__}")
    file = os.open(to, os.O_WRONLY | os.O_APPEND | os.O_CREAT | open_flags(), 0o644)
    rank = dist.get_rank() if dist.is_initialized() else 0

    def append(step: int, figures: dict[str, float]) -> None:
        os.write(file, (json.dumps({"step": step, "rank": rank, **figures}) + "\n").encode())  # a line is one write

    weakref.finalize(append, os.close, file)
    return append


class _StepCounts:
    """The counts of a step, or of the part of a step up to the last optimizer step."""

    def __init__(self, begin: Point) -> None:
        self.begin, self.end = begin, begin
        self.waits: list[tuple[Point, Point]] = []
        self.received = 0
        self.disk_waited = 0  # nanoseconds
        self.number = 0
        self.figures: dict[str, float] = {}  # what is known at its end


class Metrics(StepObserver):
    """Writes metrics after each step, until it is stopped. Made by :func:`log_metrics`.

    Attributes:
        step: the number of the current step. It may be set.

    Ranks: each for itself.
    """

    def __init__(self, schedule: Schedule, write: Callable[[int, dict[str, float]], None], first_step: int) -> None:
        super().__init__(schedule)
        self._added: deque[dict[str, float]] = deque()  # figures of what happened in this step
        self._write = write
        self.step = first_step
        self._stepped: _StepCounts | None = None  # the current step, up to its last optimizer step
        self._now = _StepCounts(self.clock.now())  # counts since that optimizer step
        self._ended: deque[_StepCounts] = deque()
        self._gathered: dict[int, int] = {}  # bytes that a gather receives from others, by the id of the group
        self._reduced: dict[int, int] = {}
        for group in schedule.groups:
            sections = GradientDtypes(group).sections([param.sharded.requires_grad for param in group.params])
            nbytes = full_bytes(*sections)
            over_replicas = summed_from_replicas(group, nbytes // group.data.shard_size)
            self._reduced[id(group)] = reduced_from_others(group, nbytes) + over_replicas
            self._gathered[id(group)] = gathered_from_others(group)
        if self.clock.streams is not None:
            self.observe_lanes(self._run)
        self._transferred = DiskFile.transferred()  # up to the last step
        self._uses_disk = any(group.offloaded.disk is not None for group in schedule.groups)

    def stop(self) -> None:
        """Write the metrics that are not written yet, and stop. Saves since the last step get a line of their own. May
        be called again."""
        if self.is_running:
            super().stop()
            self.end_step()
            self.clock.end()
            self._flush()
            if figures := self._take_added():
                self._write(self.step, figures)

    def happened(self, figures: dict[str, float]) -> None:
        self._added.append(figures)

    def _figures_of_disk(self, step: _StepCounts) -> dict[str, float]:
        if not self._uses_disk:
            return {}
        before, self._transferred = self._transferred, DiskFile.transferred()
        read, written = (now - then for now, then in zip(self._transferred, before, strict=True))
        seconds = step.disk_waited / 1e9
        return {"disk_waited_seconds": seconds, "disk_read_bytes": read, "disk_written_bytes": written}

    def _take_added(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for _ in range(len(self._added)):
            figures |= {name: figures.get(name, 0) + value for name, value in self._added.popleft().items()}
        if "save_bytes" in figures:
            figures["save_bytes_per_second"] = figures["save_bytes"] / figures["save_seconds"]
        return figures

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def logged(self, action: Action, subject: Any, flag: bool) -> None:
        super().logged(action, subject, flag)
        if action in ("gather", "reduce") and flag:
            self._now.received += (self._gathered if action == "gather" else self._reduced)[id(subject)]

    def waited(self, wait: Wait | None, begin: Point, end: Point) -> None:
        self._now.waits.append((begin, end))

    def waited_for_disk(self, begin: int, end: int) -> None:
        self._now.disk_waited += end - begin

    def _run(self, lane: str, run: Callable[..., Mark], *arguments: Any) -> Mark:
        return TimedMark(run(*arguments), self, partial(self.waited, None))

    def after_step(self) -> None:
        part, end = self._now, self.clock.now()
        step = self._stepped = self._stepped or part
        if step is not part:
            step.waits += part.waits
            step.received += part.received
            step.disk_waited += part.disk_waited
        step.end, self._now = end, _StepCounts(end)

    def end_step(self) -> None:
        step, self._stepped = self._stepped, None
        if step is not None:
            step.number, self.step = self.step, self.step + 1
            memory = {"memory_bytes": self.memory.now(), "peak_memory_bytes": self.memory.peak()}
            step.figures = {**memory, **self._figures_of_disk(step), **self._take_added()}
            self._ended.append(step)
            self._flush()

    def _flush(self) -> None:
        """Write the metrics of the steps whose end the device has passed."""
        while self._ended and self.clock.has_passed(self._ended[0].end):
            step = self._ended.popleft()
            seconds = {
                "seconds": self.clock.between(step.begin, step.end),
                "waited_seconds": self.clock.total(step.waits),
            }
            self._write(step.number, {**seconds, "received_bytes": step.received, **step.figures})
