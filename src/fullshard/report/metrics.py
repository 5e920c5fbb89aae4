"""A line of figures for each step: its time, the time waited for communication, bytes and memory of this rank.

Made to stay on for a whole training. Of the recorder's ways to look on it uses the cheapest, and it writes once a step.
On devices with streams the times that the computation waits are events, which are read when the device has passed them:
a line is written some steps later, and nothing waits for the device.
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
from fullshard.group.gradient_dtypes import GradientDtypes
from fullshard.group.param_group import ParamGroup
from fullshard.group.step import Action
from fullshard.report.watching import Point, TimedMark, Watch, from_others
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import schedule_of


class ScalarWriter(Protocol):
    """What takes figures by name, such as a ``SummaryWriter`` of TensorBoard."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int, /) -> Any: ...


def log_metrics(model: nn.Module, to: str | os.PathLike[str] | ScalarWriter, *, first_step: int = 0) -> Metrics:
    """Write figures of this rank after each step of training, from now on. Each rank may call it for itself.

    They are ``seconds`` of the step (from the end of the one before), ``waited_seconds`` of it for other ranks and what
    they send, ``received_bytes`` from them, and ``memory_bytes`` and ``peak_memory_bytes``, the most so far, of the
    process, or of what torch has allocated on an accelerator::

        fullshard.log_metrics(model, "metrics.jsonl")
        fullshard.log_metrics(model, SummaryWriter(), first_step=1200)  # a training that is resumed

    A step of training ends when optimizers have stepped on all parameters that are trained. If nobody steps on some of
    them, it ends with the last optimizer before the next forward, which is when its figures are written.

    Args:
        model: the root, sharded by ``fully_shard`` or wrapped.
        to: a file, to which each rank appends lines of JSON that have ``step`` and ``rank`` too; ranks of one host may
            share it. Or an object with ``add_scalar``, which is given the names with ``fullshard/`` before them.
        first_step: the number of the step that begins now.

    Returns:
        an object with ``stop()``, which is a context manager too. It need not be kept. Its ``step`` is the number of
        the step that runs, and may be set: a step that a gradient scaler leaves out is not counted.

    Raises:
        ValueError: ``model`` is not sharded.
        TypeError: ``to`` is neither a path nor has ``add_scalar``.
        OSError: the file cannot be opened.
    """
    schedule = schedule_of(model, "log_metrics")
    return Metrics(schedule, _writer(to), first_step)


def _writer(to: Any) -> Callable[[int, dict[str, float]], None]:
    """A function that writes the figures of a step."""
    if callable(getattr(to, "add_scalar", None)):

        def add(step: int, figures: dict[str, float]) -> None:
            for name, value in figures.items():
                to.add_scalar(f"fullshard/{name}", value, step)

        return add
    if not isinstance(to, str | os.PathLike):
        raise TypeError(f"log_metrics expects a path or an object with add_scalar, got {type(to).__name__}")
    file = os.open(to, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    rank = dist.get_rank() if dist.is_initialized() else 0

    def append(step: int, figures: dict[str, float]) -> None:
        os.write(file, (json.dumps({"step": step, "rank": rank, **figures}) + "\n").encode())  # a line is one write

    weakref.finalize(append, os.close, file)
    return append


class _Step:
    """A step, or the part of one until an optimizer has stepped: what was counted in it."""

    def __init__(self, begin: Point) -> None:
        self.begin, self.end = begin, begin
        self.waits: list[tuple[Point, Point]] = []
        self.received = 0
        self.number = 0
        self.memory: dict[str, int] = {}


class Metrics(Watch):
    """Figures that are written after each step, until it is stopped. Made by :func:`log_metrics`.

    Attributes:
        step: the number of the step that runs. It may be set.
    """

    def __init__(self, schedule: Schedule, write: Callable[[int, dict[str, float]], None], first_step: int) -> None:
        super().__init__(schedule)
        self._write = write
        self.step = first_step
        self._stepped: _Step | None = None  # the step that runs, until the last optimizer that has stepped
        self._now = _Step(self.clock.now())  # what came after that
        self._ended: deque[_Step] = deque()
        self._gathered: dict[int, int] = {}  # bytes that a gather receives from others, by the id of the group
        self._reduced: dict[int, int] = {}
        for group in schedule.groups():
            ranks = group.data.shard_size
            sections = GradientDtypes(group).sections([param.sharded.requires_grad for param in group.params])
            self._reduced[id(group)] = from_others(full_bytes(*sections), ranks)
            self._gathered[id(group)] = from_others(group.full.buffer.nbytes, ranks)
        if self.clock.streams is not None:
            self.watch_lanes(self._run)
        self.watch_steps()

    def stop(self) -> None:
        """Write what is left, and stop. May be called again."""
        if self.is_running:
            super().stop()
            self.end_step()
            self.clock.end()
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def logged(self, action: Action, group: ParamGroup, moves: bool) -> None:
        if action in ("gather", "reduce") and moves:
            self._now.received += (self._gathered if action == "gather" else self._reduced)[id(group)]

    def waited(self, wait: Wait | None, begin: Point, end: Point) -> None:
        self._now.waits.append((begin, end))

    def _run(self, lane: str, run: Callable[..., Mark], *arguments: Any) -> Mark:
        return TimedMark(run(*arguments), self, partial(self.waited, None))

    def after_step(self) -> None:
        part, end = self._now, self.clock.now()
        step = self._stepped = self._stepped or part
        if step is not part:
            step.waits += part.waits
            step.received += part.received
        step.end, self._now = end, _Step(end)

    def end_step(self) -> None:
        step, self._stepped = self._stepped, None
        if step is not None:
            step.number, self.step = self.step, self.step + 1
            step.memory = {"memory_bytes": self.memory.now(), "peak_memory_bytes": self.memory.peak()}
            self._ended.append(step)
            self._flush()

    def _flush(self) -> None:
        """Write the steps whose end the device has passed."""
        while self._ended and self.clock.has_passed(self._ended[0].end):
            step, between = self._ended.popleft(), self.clock.between
            waited = sum(between(begin, end) for begin, end in step.waits)
            figures = {"seconds": between(step.begin, step.end), "waited_seconds": waited}
            self._write(step.number, {**figures, "received_bytes": step.received, **step.memory})
