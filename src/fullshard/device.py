"""Devices, lanes and marks: how work is put beside other work, and how one waits for the other, on any device.

A :class:`Lane` is a stream on devices that have streams and, on the CPU, the fact that communication runs by itself.
A *mark* is a point in a lane that can be waited for. The CPU is the *host*, which has no streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.torch_private import foreach_copy, set_data

CPU = torch.device("cpu")  # to compare with: the type of a device is a new string whenever it is asked for
META = torch.device("meta")


class Pending(Protocol):
    """Communication that was started."""

    def finish(self) -> None:
        """Complete it and what follows it locally (copies, sums). Called exactly once: on devices with streams at once,
        on the lane's stream, to enqueue work; on the CPU when the result is needed, and blocks."""


class Done:
    """Communication with nothing left to do."""

    def finish(self) -> None:
        return


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
    """A mark, and memory of another lane that is used until then: it stays until the mark was waited for, once, and
    what is not the allocator's is then given back by ``give_back``."""

    mark: Mark
    memory: object
    give_back: Callable[[Mark], None] = lambda mark: None

    def wait(self) -> None:
        self.mark.wait()
        self.memory = None
        self.give_back(self.mark)


class Streams:
    """The streams of accelerators. The tests have others, which only pretend."""

    def make(self, device: torch.device) -> torch.Stream:
        """A stream whose copies do not queue behind the computation's kernels: its priority is high."""
        return torch.Stream(device=device, priority=-1)

    def current(self, device: torch.device) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def keep(self, tensor: torch.Tensor) -> None:
        """Let the memory of a tensor serve no other before the current stream has passed this point."""
        tensor.record_stream(self.current(tensor.device))

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype, pin: bool = True) -> torch.Tensor:
        """An uninitialised tensor on the host; if it is pinned, copies between it and a device need no host."""
        return torch.empty(tuple(shape), dtype=dtype, device=CPU, pin_memory=pin)

    def is_capturing(self, device: torch.device) -> bool:
        """Whether a graph captures what the current stream is given."""
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def synchronize(self, device: torch.device) -> None:
        """Wait on the host until the device has done all that was asked of it."""
        torch.accelerator.synchronize(device)


HOSTS = {CPU, META}  # devices without streams: the host completes itself what it started there
_streams = Streams()


def is_host(device: torch.device) -> bool:
    """Whether a device has no streams."""
    return device in HOSTS


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; ``None`` for the host."""
    return None if device in HOSTS else _streams


def is_capturing(device: torch.device) -> bool:
    """Whether a graph of the device captures what it is given."""
    return device not in HOSTS and _streams.is_capturing(device)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin: bool = True) -> torch.Tensor:
    """An uninitialised tensor on the host for what is copied from and to ``device``, pinned if that makes sense."""
    if device in HOSTS:
        return torch.empty(tuple(shape), dtype=dtype, device=CPU)
    return _streams.host_memory(shape, dtype, pin)


def copy_to_host(
    tensors: Sequence[torch.Tensor], device: torch.device, pin: bool
) -> tuple[list[torch.Tensor], torch.Event]:
    """Start to copy tensors of a device with streams to the host, where they are once the event has passed."""
    copies = [host_memory(tensor.shape, tensor.dtype, device, pin) for tensor in tensors]
    foreach_copy(copies, list(tensors))
    return copies, current_stream(device).record_event()


def current_stream(device: torch.device) -> torch.Stream:
    """The stream in which work on a device is put now; not for the host."""
    return _streams.current(device)


@contextmanager
def beside(stream: torch.Stream | None, device: torch.device) -> Iterator[None]:
    """Run what is inside on ``stream``, if there is one, between what the current one holds and what follows there."""
    if stream is None:
        yield
        return
    stream.wait_stream(current_stream(device))
    with stream:
        yield
    current_stream(device).wait_stream(stream)


@dataclass(slots=True, eq=False)
class EventMark:
    """A point in a stream."""

    event: torch.Event
    device: torch.device

    def wait(self) -> None:
        current_stream(self.device).wait_event(self.event)


class Lane:
    """Where one kind of work runs: all-gather with its copies, reduce-scatter, all-reduce."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device in HOSTS else _streams.make(device)
        self.is_host = self._stream is None  # communication runs by itself there

    def run(
        self, start: Callable[[], Pending], then: Callable[[], None] | None = None, after: Sequence[Mark] | None = None
    ) -> Mark:
        """Start communication and what follows it, after the marks ``after`` (all that the current lane holds so far).
        On a stream everything is enqueued at once; on the CPU ``then`` runs when the mark is first waited for."""
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
                return EventMark(self._stream.record_event(), self._device)
        except BaseException:  # what it took is given back in the current lane
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
    return PASSED if device in HOSTS else EventMark(current_stream(device).record_event(), device)


def compute_device(device_type: str) -> torch.device:
    """The device of this process among those of a type: the current one."""
    return CPU if device_type == "cpu" else torch.device(device_type, torch.accelerator.current_device_index())


def default_device_type() -> str:
    """The type of the accelerator if there is one, otherwise that of the CPU."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device.type if device is not None else "cpu"


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
