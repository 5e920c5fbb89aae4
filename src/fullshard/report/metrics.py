"""A line of figures for each step: its time, the time waited for communication, bytes and memory of this rank.

Made to stay on for a whole training. Of the recorder's ways to look on it uses the cheapest, and it writes once a step.
On devices with streams the times that the computation waits are events, which are read when the device has passed them:
a line is written some steps later, and nothing waits for the device.
"""

from __future__ import annotations

import json
import os
import resource
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fullshard.comm.waits import Wait
from fullshard.device import Mark, is_host
from fullshard.group.group import Group
from fullshard.group.owners import owner_of
from fullshard.report.recorder import Clock, Memory, Point
from fullshard.report.watching import Overrides, listen_to_waits, watch_lanes
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import unit_of


class ScalarWriter(Protocol):
    """What takes figures by name, such as a ``SummaryWriter`` of TensorBoard."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int, /) -> Any: ...


def log_metrics(model: nn.Module, to: str | os.PathLike[str] | ScalarWriter) -> Metrics:
    """Write figures of this rank after each step of the optimizer, from now on. Each rank may call it for itself.

    They are ``seconds`` of the step (from the end of the one before), ``waited_seconds`` of it for other ranks and what
    they send, ``received_bytes`` from them, ``memory_bytes`` and ``peak_memory_bytes`` of the process, or of what torch
    has allocated on an accelerator::

        fullshard.log_metrics(model, "metrics.jsonl")
        fullshard.log_metrics(model, SummaryWriter())

    Args:
        model: the root, sharded by ``fully_shard`` or wrapped.
        to: a file, to which each rank appends lines of JSON that have ``step`` and ``rank`` too; ranks of one host may
            share it. Or an object with ``add_scalar``, which is given the names with ``fullshard/`` before them.

    Returns:
        an object with ``stop()``, which is a context manager too. It need not be kept.

    Raises:
        ValueError: ``model`` is not sharded.
        TypeError: ``to`` is neither a path nor has ``add_scalar``.
        OSError: the file cannot be opened.
    """
    unit = unit_of(model)
    if unit is None:
        raise ValueError(
            f"log_metrics expects a root that was sharded or wrapped, got {type(model).__name__}: call it after "
            f"fully_shard"
        )
    write = _writer(to)
    return Metrics(unit.schedule or unit.start(), write)


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
    """A step on its way: what was counted in it."""

    def __init__(self, begin: Point) -> None:
        self.begin, self.end = begin, begin
        self.waits: list[tuple[Point, Point]] = []
        self.received = 0
        self.memory: dict[str, int] = {}


class Metrics:
    """Figures that are written after each step, until it is stopped. Made by :func:`log_metrics`."""

    def __init__(self, schedule: Schedule, write: Callable[[int, dict[str, float]], None]) -> None:
        self._write = write
        self._clock, self._memory = Clock(schedule.device), Memory(schedule.device)
        self._groups = {id(group) for group in schedule.groups()}
        self._device = schedule.device
        self._now = _Step(self._clock.now())
        self._ended: deque[_Step] = deque()
        self._number = 0
        overrides = Overrides()
        self._undo: list[Callable[[], None]] = [overrides.remove]
        groups = schedule.groups()
        for group in groups:
            if group.data.shard_group is not None:
                overrides.around(group, "unshard", partial(self._unshard, group, _others(group, reduced=False)))
        self._reduced = {id(group): _others(group, reduced=True) for group in groups}
        overrides.around(schedule, "reduce", self._reduce)
        if self._clock.streams is None:
            self._undo.append(listen_to_waits(groups, self._waited))
        else:
            self._streams: set[Any] = set()
            for context in {id(group.comm): group.comm for group in groups}.values():
                self._streams.update(watch_lanes(overrides, context, self._run))
        self._undo.append(register_optimizer_step_post_hook(self._end_step).remove)

    def stop(self) -> None:
        """Write what is left, and stop. May be called again."""
        undo, self._undo = self._undo, []
        for each in undo:
            each()
        if undo:
            self._clock.end()
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _unshard(self, group: Group, nbytes: int, unshard: Callable[[], bool]) -> bool:
        started = unshard()
        if started and group.memory.shared is None:
            self._now.received += nbytes
        return started

    def _reduce(self, reduce: Callable[[Group], None], group: Group) -> None:
        if group.gradients.pending:
            self._now.received += self._reduced[id(group)]
        reduce(group)

    def _waited(self, wait: Wait, begin: int, end: int) -> None:
        self._now.waits.append((begin, end))

    def _run(self, lane: str, run: Callable[..., Mark], *arguments: Any) -> Mark:
        return _TimedMark(run(*arguments), self)

    def wait(self, mark: Mark) -> None:
        """Wait for a mark of a device, and note for how long the stream that computes does."""
        assert self._clock.streams is not None
        if not self._undo or self._clock.streams.current(self._device) in self._streams:
            mark.wait()
            return
        begin = self._clock.now()
        mark.wait()
        self._now.waits.append((begin, self._clock.now()))

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = (param for options in optimizer.param_groups for param in options["params"])
        if not any((owner := owner_of(param)) is not None and id(owner[0]) in self._groups for param in params):
            return
        step, end = self._now, self._clock.now()
        step.end, self._now = end, _Step(end)
        now = self._memory.now()
        step.memory = {"memory_bytes": now, "peak_memory_bytes": max(now, self._peak())}  # the kernel's lags behind
        self._ended.append(step)
        self._flush()

    def _peak(self) -> int:
        if is_host(self._device):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return torch.accelerator.max_memory_allocated(self._device)

    def _flush(self) -> None:
        """Write the steps whose end the device has passed."""
        while self._ended and self._clock.has_passed(self._ended[0].end):
            step, between = self._ended.popleft(), self._clock.between
            waited = sum(between(begin, end) for begin, end in step.waits)
            figures = {"seconds": between(step.begin, step.end), "waited_seconds": waited}
            self._write(self._number, {**figures, "received_bytes": step.received, **step.memory})
            self._number += 1


class _TimedMark:
    """A mark of a device's lane, of which the first wait is noted."""

    def __init__(self, mark: Mark, metrics: Metrics) -> None:
        self._mark = mark
        self._metrics: Metrics | None = metrics

    def wait(self) -> None:
        metrics, self._metrics = self._metrics, None
        if metrics is None:
            self._mark.wait()
        else:
            metrics.wait(self._mark)


def _others(group: Group, reduced: bool) -> int:
    """Bytes of a group that a rank gets from the others: its values, or its gradients in their dtype."""
    size, policy, nbytes = group.data.shard_size, group.options.mp_policy, group.full.buffer.nbytes
    if reduced and policy.reduce_dtype is not None and group.compute_dtypes:
        nbytes = nbytes // group.compute_dtypes[0].itemsize * policy.reduce_dtype.itemsize
    return nbytes * (size - 1) // size
