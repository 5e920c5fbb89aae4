"""Devices, lanes and marks: how work runs beside other work, and waits for it, on any device.

A :class:`Lane` is a stream on devices that have streams and, on the CPU, the fact that communication runs by itself.
A *mark* is a point in a lane that can be waited for. The CPU is the *host*, which has no streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.torch_private import CAN_SWAP_MEMORY, foreach_copy, set_data

CPU = torch.device("cpu")  # to compare with: the type of a device is a new string whenever it is asked for
META = torch.device("meta")
#: Stands for a GPU that is not here, to plan for it: it has streams, and tensors on it have no memory.
PLANNED = torch.device("meta", 0)


class Pending(Protocol):
    """Communication that was started."""

    def finish(self) -> None:
        """Complete it and the local work that follows (copies, sums). Called exactly once. On devices with streams, the
        call comes at once, on the lane's stream, and enqueues work. On the CPU, it comes when the result is needed, and
        blocks."""


class Done:
    """Communication with nothing left to do."""

    def finish(self) -> None:
        return


class Started(NamedTuple):
    """Communication that one function completes."""

    finish: Callable[[], None]


class Mark(Protocol):
    """A point that work has to reach."""

    def wait(self) -> None:
        """Let work that follows on the current lane (CPU: in this thread) run after the mark. May be called again."""


@dataclass(slots=True, eq=False)
class HostMark:
    """Steps by which the host completes communication. They are taken once, when the mark is first waited for."""

    steps: tuple[Callable[[], None], ...]

    def wait(self) -> None:
        steps, self.steps = self.steps, ()
        for step in steps:
            step()


PASSED: Mark = HostMark(())  # a mark that has passed already


@dataclass(slots=True, eq=False)
class HoldingMark:
    """A mark that keeps memory of another lane until it was waited for. Memory that does not come from the allocator is
    then returned by ``give_back``."""

    mark: Mark
    memory: object
    give_back: Callable[[Mark], None] = lambda mark: None

    def wait(self) -> None:
        self.mark.wait()
        self.memory = None
        self.give_back(self.mark)


class Streams:
    """The streams of accelerators. The tests replace them by simulated ones."""

    def make(self, device: torch.device) -> torch.Stream:
        """A stream whose copies do not queue behind the computation's kernels: its priority is high."""
        return torch.Stream(device=device, priority=-1)

    def current(self, device: torch.device) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor from being used for another before the current stream has passed this point."""
        tensor.record_stream(self.current(tensor.device))

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype, pin: bool = True) -> torch.Tensor:
        """An uninitialised tensor on the host. If it is pinned, copies from and to a device do not block the host."""
        return torch.empty(tuple(shape), dtype=dtype, device=CPU, pin_memory=pin)

    def is_capturing(self, device: torch.device) -> bool:
        """Whether a graph captures the current stream."""
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def synchronize(self, device: torch.device) -> None:
        """Let the host wait until the device has done all enqueued work."""
        torch.accelerator.synchronize(device)


HOSTS = {CPU, META}  # devices without streams: the host itself completes what it started
_streams = Streams()


def is_host(device: torch.device) -> bool:
    """Whether a device has no streams."""
    return device in HOSTS


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; ``None`` for the host."""
    return None if device in HOSTS else _streams


def is_capturing(device: torch.device) -> bool:
    """Whether a graph captures the current stream of a device."""
    return device not in HOSTS and _streams.is_capturing(device)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin: bool = True) -> torch.Tensor:
    """An uninitialised tensor on the host for copies from and to ``device``. ``pin`` matters only with streams."""
    if device in HOSTS:
        return torch.empty(tuple(shape), dtype=dtype, device=CPU)
    return _streams.host_memory(shape, dtype, pin)


def copy_to_host(
    tensors: Sequence[torch.Tensor], device: torch.device, pin: bool
) -> tuple[list[torch.Tensor], torch.Event]:
    """Start to copy tensors from a device with streams to the host. The copies are complete after the event."""
    copies = [host_memory(tensor.shape, tensor.dtype, device, pin) for tensor in tensors]
    foreach_copy(copies, list(tensors))
    return copies, current_stream(device).record_event()


def current_stream(device: torch.device) -> torch.Stream:
    """The stream to which work on a device is added now. The host has none."""
    return _streams.current(device)


@contextmanager
def beside(stream: torch.Stream | None, device: torch.device) -> Iterator[None]:
    """A context whose work runs on ``stream``, if given: after the work that the current stream has, and before what
    follows there."""
    if stream is None:
        yield
        return
    stream.wait_stream(current_stream(device))
    with stream:
        yield
    current_stream(device).wait_stream(stream)


@dataclass(slots=True, eq=False)
class EventMark:
    """A point in a stream, for which each other stream waits once."""

    event: torch.Event
    device: torch.device
    _waited: set[int] = field(default_factory=set)

    def wait(self) -> None:
        stream = current_stream(self.device)
        if stream.stream_id not in self._waited:
            stream.wait_event(self.event)
            self._waited.add(stream.stream_id)


@dataclass(slots=True, eq=False)
class EndMark:
    """The end of what a stream holds once another one waits for it. It needs no event until then."""

    stream: torch.Stream
    device: torch.device

    def wait(self) -> None:
        if (stream := current_stream(self.device)).stream_id != self.stream.stream_id:
            stream.wait_stream(self.stream)


class Lane:
    """Where one kind of work runs: all-gather with its copies, reduce-scatter, all-reduce."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device in HOSTS else _streams.make(device)
        self.is_host = self._stream is None  # communication runs by itself there
        #: Are called in turn with :meth:`run`, to be called, and its arguments. They return the mark.
        self.observers: list[Callable[..., Mark]] = []

    def run(
        self,
        start: Callable[[], Pending],
        then: Callable[[], None] | None = None,
        after: Sequence[Mark] | None = None,
        observed: int = 0,
    ) -> Mark:
        """Start communication and what follows it, after the marks ``after`` (all that the current lane holds so far).
        On a stream everything is enqueued at once; on the CPU ``then`` runs when the mark is first waited for.
        ``observed`` is the number of observers that were called."""
        if self.observers and observed < len(self.observers):
            return self.observers[observed](partial(self.run, observed=observed + 1), start, then, after)
        if self._stream is None:
            finish = start().finish
            return HostMark((finish,) if then is None else (finish, then))
        if after is None:
            self._stream.wait_stream(current_stream(self._device))
        try:
            with self._stream:
                for mark in after or ():
                    mark.wait()
                start().finish()
                if then is not None:
                    then()
                return EventMark(self._stream.record_event(), self._device, {self._stream.stream_id})
        except BaseException:  # the memory that it took is freed in the current lane
            with suppress(Exception):
                current_stream(self._device).wait_stream(self._stream)
            raise


class Lanes(NamedTuple):
    """The lanes of one tree of modules; several trees may share them."""

    gather: Lane
    reduce: Lane
    all_reduce: Lane


def mark_now(device: torch.device) -> Mark:
    """A mark at the end of what the current lane holds."""
    if device in HOSTS:
        return PASSED
    stream = current_stream(device)
    return EventMark(stream.record_event(), device, {stream.stream_id})


def mark_end(device: torch.device) -> Mark:
    """A mark at the end of what the current lane will hold when another one waits for it."""
    return PASSED if device in HOSTS else EndMark(current_stream(device), device)


#: The mark of memory that is given back. Where storages exchange none, it is taken in the lane that gave it back.
mark_released = mark_now if CAN_SWAP_MEMORY else mark_end

_planned: torch.device | None = None  # the device for which models are sharded meanwhile, whatever is here


@contextmanager
def planned_for(device: torch.device | None) -> Iterator[None]:
    """A context in which models are sharded for ``device``, if given, whatever devices are here."""
    global _planned
    before, _planned = _planned, device
    try:
        yield
    finally:
        _planned = before


def compute_device(device_type: str) -> torch.device:
    """The current device of a type, or the one that is planned for."""
    if _planned is not None:
        return _planned
    return CPU if device_type == "cpu" else torch.device(device_type, torch.accelerator.current_device_index())


def default_device_type() -> str:
    """The type of the accelerator if there is one that has streams (MPS has none, and no backend), otherwise
    ``"cpu"``."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device.type if device is not None and hasattr(torch.get_device_module(device), "Stream") else "cpu"


def move_to_device(
    params: Iterable[nn.Parameter],
    modules: Iterable[nn.Module],
    device: torch.device,
    buffer_dtype: torch.dtype | None = None,
) -> None:
    """Move parameters and the modules' own buffers to a device, except those on meta; cast buffers to a dtype too."""
    for param in params:
        if param.device == device or param.is_meta or isinstance(param, DTensor):
            continue
        grad, param.grad = param.grad, None
        set_data(param, param.to(device))
        param.grad = None if grad is None else grad.to(device)
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                target = buffer.device if buffer.is_meta or isinstance(buffer, DTensor) else device
                dtype = buffer_dtype if buffer.is_floating_point() else None
                module._buffers[name] = buffer.to(device=target, dtype=dtype or buffer.dtype)
