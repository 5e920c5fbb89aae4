"""Simulated streams and events, and the switch by which the library takes the CPU for a device that has them.

It leaves to a *model* what a stream means: :class:`~tests.simulated.checked.Checker` or
:class:`~tests.simulated.late.Late`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard.device
from fullshard import torch_private
from fullshard.buffer import slots
from fullshard.comm import collective
from fullshard.device import CPU
from fullshard.torch_private import CAN_SWAP_MEMORY, Collective, Collectives
from tests.simulated.operations import tensors_in

#: The host itself, and the stream in which the model computes.
HOST, COMPUTE = 0, 1
_LOOK_AGAIN = timedelta(seconds=1)


class Model(Protocol):
    """What streams and events mean. Actors are numbers: the host, the computation's stream and others."""

    def record(self, actor: int) -> Any:
        """The point that an actor has reached."""
        ...

    def wait(self, actor: int, point: Any) -> None:
        """Let what follows of an actor come after a point of any."""
        ...

    def call(self, actor: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of torch."""
        ...

    def collective(self, actor: int, group: Any, call: Collective, output: torch.Tensor, source: torch.Tensor) -> Any:
        """Run a collective."""
        ...

    def keep(self, actor: int, tensor: torch.Tensor) -> None:
        """The memory of a tensor serves no other before the actor has passed this point."""
        ...

    def swapped(self, one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Two storages are about to exchange their memory."""
        ...

    def emptied(self, storage: torch.UntypedStorage) -> None:
        """A storage is about to free its memory."""
        ...

    def own_host_memory(self, tensor: torch.Tensor) -> None:
        """A tensor is memory of the host."""
        ...


@dataclass(eq=False)
class Event:
    """A point in a stream."""

    streams: SimulatedStreams
    point: Any
    was_asked: bool = False

    def query(self) -> bool:
        """As if the device were done when it is asked a second time."""
        if self.was_asked or self.streams.is_capturing(CPU):
            self.synchronize(counts=False)
        before, self.was_asked = self.was_asked, True
        return before

    def synchronize(self, counts: bool = True) -> None:
        self.streams.synchronizations += counts
        self.streams.model.wait(HOST, self.point)


@dataclass(eq=False)
class Stream:
    """A stream: entered, it is the one in which operations run."""

    streams: SimulatedStreams
    stream_id: int

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self.streams.model.wait(self.stream_id, event.point)

    def record_event(self) -> Event:
        return Event(self.streams, self.streams.model.record(self.stream_id))

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def __enter__(self) -> Stream:
        self.streams.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.streams.entered.pop()


class SimulatedStreams(fullshard.device.Streams):
    """The streams of the simulated device."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.all = [Stream(self, COMPUTE)]
        self.entered = self.all[:]
        #: How often the host waited for the device.
        self.synchronizations = 0

    def make(self, device: torch.device) -> Any:
        self.all.append(Stream(self, COMPUTE + len(self.all)))
        return self.all[-1]

    def current(self, device: torch.device) -> Any:
        return self.entered[-1]

    def keep(self, tensor: torch.Tensor) -> None:
        self.model.keep(self.entered[-1].stream_id, tensor)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype, pin: bool = True) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.model.own_host_memory(tensor)
        return tensor

    def is_capturing(self, device: torch.device) -> bool:
        return getattr(self.model, "graph", None) is not None

    def synchronize(self, device: torch.device) -> None:
        self.synchronizations += 1
        for stream in self.all:
            self.model.wait(HOST, self.model.record(stream.stream_id))


class Running:
    """A collective that the device runs. If its process group is aborted, it ends with whatever its output is then, as
    one of NCCL does; gloo would wait on."""

    def __init__(self, work: dist.Work, is_aborted: Callable[[], bool]) -> None:
        self._work, self._is_aborted = work, is_aborted

    def wait(self) -> None:
        while not self._is_aborted():
            try:
                self._work.wait(_LOOK_AGAIN)
                return
            except RuntimeError:
                if self._work.is_completed():
                    raise


class _Operations(TorchDispatchMode):
    """Gives every operation of torch to the stream that is current."""

    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types or any(map(is_fake, tensors_in([*args, *(kwargs or {}).values()]))):
            return func(*args, **kwargs or {})  # without memory
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # the plain tensors of which these consist come by themselves, if there are any
        return self._streams.model.call(self._streams.entered[-1].stream_id, func, args, kwargs or {})


@contextmanager
def simulate(model: Model) -> Iterator[SimulatedStreams]:
    """Let the library take the CPU for a device with streams while this is entered."""
    streams = SimulatedStreams(model)
    swap: Callable[..., None] = torch_private.swap_memory
    resizes = torch.UntypedStorage.resize_
    aborted: list[dist.ProcessGroup] = []

    def swap_memory(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        model.swapped(one, other)
        swap(one, other)

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        if size == 0:
            model.emptied(storage)
        return resizes(storage, size)

    def over(make: Callable[..., tuple[Collective, Collectives]]) -> Callable[..., tuple[Collective, Collectives]]:
        def made(group: Any, *options: Any) -> tuple[Collective, Collectives]:
            asked, _ = make(group, *options)

            def call(output: torch.Tensor, source: torch.Tensor) -> Any:
                work = asked(output, source)
                return work and Running(work, lambda: any(each is group for each in aborted))

            def one(output: torch.Tensor, source: torch.Tensor) -> Any:
                return model.collective(streams.entered[-1].stream_id, group, call, output, source)

            def together(outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
                *others, last = map(one, outputs, sources)
                for work in others:
                    if work is not None:
                        work.wait()
                return last

            return one, together

        return made

    with ExitStack() as stack:
        for where, name, value in (
            (fullshard.device, "HOSTS", set()),
            (slots, "HOSTS", set()),
            (fullshard.device, "_streams", streams),
            (collective, "all_gather_over", over(torch_private.all_gather_over)),
            (collective, "reduce_scatter_over", over(torch_private.reduce_scatter_over)),
            (torch.UntypedStorage, "resize_", resize),
            (dist.ProcessGroup, "abort", lambda group: aborted.append(group)),
            *([(slots, "swap_memory", swap_memory)] if CAN_SWAP_MEMORY else []),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(_Operations(streams))
        yield streams
