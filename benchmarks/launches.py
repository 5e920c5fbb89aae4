"""What sharding asks of a device in a step, in counts: launches, copies, allocations, waits of the host, collectives.

Nothing is measured on a device. One process simulates a rank of many, with tensors of the CPU. fullshard takes
them for those of a device with streams (``tests/simulated``) and for NCCL's; torch's FSDP2 has no such place,
but calls the same operations on the CPU as on a device. A chain of blocks is run forward and backward, what the same
chain does without sharding is subtracted, and the rest is divided by the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self
from unittest import mock

import torch
from tests.simulated.device import SimulatedStreams, simulate
from tests.simulated.operations import SYNCHRONIZES, accesses, fills, tensors_in
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.contenders import ALONE, FSDP2, Contender
from benchmarks.models import Block, Chain
from benchmarks.ranks import run_simulated
from benchmarks.traffic import Traffic, nbytes
from fullshard import torch_private
from fullshard.comm import collective
from fullshard.comm.backends import BACKENDS

#: Steps before the one that is counted.
_WARM_UP = 3
OURS = Contender("fullshard", "fullshard", "collective", forced=True)
#: Operations that write one value everywhere.
_FILLS = {
    "aten::fill_",
    "aten::zero_",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::_foreach_zero_",
}
#: Chains of blocks of a transformer, 8 parameters of 6 shapes, beside those of equal small parameters; their widths.
TRANSFORMER, LARGE_TRANSFORMER = "transformer", "large transformer"
_WIDTHS = {TRANSFORMER: 64, LARGE_TRANSFORMER: 1024}


@dataclass
class Cost:
    """Costs for each group in a step, less those of the model itself. U: bytes of a group.

    Args:
        launches: operations that look at elements, collectives apart; one of many tensors counts once.
        kernels: the same, but one of many tensors counts for each of them where they do not lie alike in memory,
            because torch then launches a kernel for each.
        copied: U read and written by operations that only copy, and written by those that fill.
        allocated: U of new memory that is freed again in the step, so that the reduced gradients do not count.
        synchronizations: how often the host waits for the device.
        collectives: how many there are.
        sent: U that a rank has to send for them.
        events: how many points in streams are recorded; ``stream_waits``: how often a stream waits for one. Known only
            where the streams are simulated.
    """

    launches: float = 0
    kernels: float = 0
    copied: float = 0
    allocated: float = 0
    synchronizations: float = 0
    collectives: float = 0
    sent: float = 0
    events: float = 0
    stream_waits: float = 0


def measure_launches(world_size: int, counts: list[int | str], groups: int, casts: bool = False) -> dict[str, Any]:
    """For each number of parameters in a group (or the name of a chain), and each contender, its :class:`Cost`. With
    ``casts`` it computes in bf16 and reduces in fp32."""
    return {"ranks": world_size, "counts": run_simulated(_measure, world_size, counts, groups, casts)}


def _measure(counts: list[int | str], groups: int, casts: bool) -> dict[int | str, dict[str, Any]]:
    return {count: _measure_count(count, groups, casts) for count in counts}


def _measure_count(count: int | str, groups: int, casts: bool) -> dict[str, Any]:
    found = {}
    for contender in (OURS, FSDP2, ALONE):
        model, blocks, x = _build(count, groups)
        unit = sum(param.nbytes for param in blocks[0].parameters())
        points = _Unordered()
        with simulated_device(points) if contender is OURS else nullcontext(SimulatedStreams(points)) as streams:
            model = contender.wrap(model, blocks, casts=casts)
            for _ in range(_WARM_UP):
                _run(model, x)
                _drop_gradients(model)
            counts = Counts()
            before, events, waits = streams.synchronizations, points.events, points.waits
            with counts:
                _run(model, x)
            counts.cost.synchronizations += streams.synchronizations - before
            counts.cost.events = points.events - events
            counts.cost.stream_waits = points.waits - waits
            if contender is not ALONE:  # its gradients are those of autograd, which sharding reduces and frees
                counts.cost.allocated -= _drop_gradients(model)
        assert not counts.unknown, counts.unknown
        found[contender.name] = vars(counts.cost)
        for what in ("copied", "allocated", "sent"):
            found[contender.name][what] /= unit
    alone = found.pop(ALONE.name)
    return {
        name: {what: round((value - alone[what]) / groups, 4) for what, value in each.items()}
        for name, each in found.items()
    }


def _build(count: int | str, groups: int) -> tuple[nn.Module, list[nn.Module], torch.Tensor]:
    """A model, its blocks, and what it is given."""
    if isinstance(count, int):
        chain = Chain(groups, count)
        return chain, list(chain.blocks), torch.ones(1024, requires_grad=True)
    blocks = nn.Sequential(*(Block(_WIDTHS[count]) for _ in range(groups)))
    return blocks, list(blocks), torch.ones(1, 4, _WIDTHS[count], requires_grad=True)


def _run(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    x.grad = None


def _drop_gradients(model: nn.Module) -> int:
    """The bytes of the gradients that a step left."""
    found = 0
    for param in model.parameters():
        if param.grad is not None:
            found += nbytes(param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad)
        param.grad = None
    return found


@dataclass
class _Unordered:
    """A device of which only counts are asked: operations run at once, in whatever stream."""

    events: int = 0
    waits: int = 0

    def record(self, actor: int) -> None:
        self.events += 1

    def wait(self, actor: int, point: Any) -> None:
        self.waits += 1

    def keep(self, actor: int, tensor: torch.Tensor) -> None: ...

    def swapped(self, one: torch.UntypedStorage, other: torch.UntypedStorage) -> None: ...

    def emptied(self, storage: torch.UntypedStorage) -> None: ...

    def own_host_memory(self, tensor: torch.Tensor) -> None: ...

    def call(self, actor: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def collective(self, actor: int, group: Any, call: Any, output: torch.Tensor, source: torch.Tensor) -> Any:
        return call(output, source)


@contextmanager
def simulated_device(points: _Unordered | None = None) -> Iterator[SimulatedStreams]:
    """The CPU as a device with streams, whose collectives are those of NCCL."""
    with simulate(points or _Unordered()) as streams, ExitStack() as stack:
        for name, value in (
            ("backend_of", lambda *_: BACKENDS["nccl"]),
            ("all_gather_over", torch_private.all_gather_over),
            ("reduce_scatter_over", torch_private.reduce_scatter_over),
        ):
            stack.enter_context(mock.patch.object(collective, name, value))
        yield streams


class Counts(Traffic):
    """Counts while it is entered; bytes are bytes here."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            self.cost.allocated += size
            return resize(storage, size)

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patch.stop()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # what a DTensor asks for comes by itself
        kwargs, asked, copied = kwargs or {}, self.asked, self.copied
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name, cost = func._schema.name, self.cost
        cost.sent += self.asked - asked
        moved = self.copied - copied
        cost.copied += 2 * moved + (nbytes(result) if name in _FILLS else 0)
        if name.startswith("c10d::"):
            cost.collectives += 1
            return result
        given = {_place(tensor) for tensor in tensors_in([*args, *kwargs.values()])}
        made = {_place(tensor): tensor for tensor in tensors_in(result) if _place(tensor) not in given}
        cost.allocated += sum(
            tensor.untyped_storage().nbytes() for tensor in made.values() if tensor.device.type == "cpu"
        )
        writes = [access.tensor for access in accesses(func, args, kwargs) if access.writes]
        if name.startswith("profiler::") or not fills(func) or not (made or writes or moved or name in SYNCHRONIZES):
            return result  # it looks at nothing, or makes a view
        cost.launches += 1
        cost.kernels += len(args[0]) if name.startswith("aten::_foreach") and not _lie_alike(args) else 1
        cost.synchronizations += name in SYNCHRONIZES
        return result


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _lie_alike(args: tuple[Any, ...]) -> bool:
    """Whether torch runs an operation on lists as one kernel: each tensor is dense, and strided as its partners."""
    lists = [each for each in args if isinstance(each, (list, tuple)) and isinstance(each[0], torch.Tensor)]
    return all(
        all(each.stride() == partners[0].stride() and _is_dense(each) for each in partners)
        for partners in zip(*lists, strict=True)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
