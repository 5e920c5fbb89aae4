"""How many bytes move: between ranks as asked for, through the loopback device, and between places of one rank.

A :class:`Traffic` watches every operator that runs inside of it, on all contenders in the same way. What the device
carried is read from the kernel's counters, and says what really travelled, headers and detours included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators that only move values, and where what they write is: an argument, or the result.
_COPIES: dict[str, int | str] = {
    "aten::copy_": 0,
    "aten::_foreach_copy_": 0,
    "aten::cat": "result",
    "aten::stack": "result",
    "aten::clone": "result",
    "aten::_to_copy": "result",
    "aten::_chunk_cat": "result",
    "aten::split_with_sizes_copy": "result",
    "fsdp::all_gather_copy_in": 0,  # what it reads, a part of what the second argument can hold
    "fsdp::split_with_sizes_copy": "out",
    "fsdp::chunk_cat": "out",
}


def _all_to_all(args: list[Any], world: int) -> float:
    """With parts of given sizes, all but this rank's own."""
    _, tensor, group, _, sizes, *_ = args
    if not sizes:
        return nbytes(tensor) * (world - 1) / world
    return nbytes(tensor) * (1 - sizes[dist.ProcessGroup.unbox(group).rank()] / max(1, sum(sizes)))


#: Bytes that a rank has to send, from the bytes of the operator's tensors, and the number of ranks.
_COLLECTIVES: dict[str, Callable[[list[Any], int], float]] = {
    "c10d::allreduce_": lambda args, world: 2 * nbytes(args[0]) * (world - 1) / world,
    "c10d::_allgather_base_": lambda args, world: nbytes(args[1]) * (world - 1),
    "c10d::allgather_": lambda args, world: nbytes(args[1]) * (world - 1),
    "c10d::allgather_into_tensor_coalesced_": lambda args, world: nbytes(args[1]) * (world - 1),
    "c10d::_reduce_scatter_base_": lambda args, world: nbytes(args[0]) * (world - 1),
    "c10d::reduce_scatter_": lambda args, world: nbytes(args[0]) * (world - 1),
    "c10d::reduce_scatter_tensor_coalesced_": lambda args, world: nbytes(args[0]) * (world - 1),
    "c10d::alltoall_base_": _all_to_all,
    "c10d::alltoall_": lambda args, world: nbytes(args[1]) * (world - 1) / world,
    "c10d::broadcast_": lambda args, world: nbytes(args[0]) * (world - 1) / world,
    "c10d::send": lambda args, world: nbytes(args[0]),
    "c10d::recv_": lambda args, world: 0,
    "c10d::barrier": lambda args, world: 0,
}
_GATHERS = {"c10d::_allgather_base_", "c10d::allgather_", "c10d::allgather_into_tensor_coalesced_"}


class Traffic(TorchDispatchMode):
    """Counts bytes while it is entered.

    Attributes:
        copied: bytes written by operators that do nothing but copy; copies that also compute do not count.
        asked: bytes that this rank has to send for the communication it asked for, with the best known algorithm.
        gathered: bytes that all-gathers wrote, padding included.
        unknown: communication that is not understood, and so not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied = 0
        self.asked = 0.0
        self.gathered = 0
        self.unknown: set[str] = set()

    def __enter__(self) -> Self:
        owner, send = threading.get_ident(), dist.ProcessGroup.send

        def count(group: Any, tensors: Any, *rest: Any) -> Any:
            if threading.get_ident() != owner:  # which no mode of this thread sees
                self.asked += nbytes(tensors)
            return send(group, tensors, *rest)

        self._restore = partial(setattr, dist.ProcessGroup, "send", dist.ProcessGroup.__dict__["send"])
        setattr(dist.ProcessGroup, "send", count)  # noqa: B010
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._restore()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if name in _COPIES:
            self.copied += _written(_COPIES[name], args, kwargs, result)
        elif name in _COLLECTIVES:
            self.asked += _COLLECTIVES[name](list(args), _ranks_of(args))
            if name in _GATHERS:
                self.gathered += nbytes(args[0])
        elif name.startswith("c10d::"):
            self.unknown.add(name)
        return result


def _ranks_of(args: Iterable[Any]) -> int:
    """The size of the process group among the arguments of a collective."""
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    return dist.ProcessGroup.unbox(boxed).size()


def _written(where: int | str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if isinstance(where, int):
        return nbytes(args[where])
    return nbytes(kwargs.get("out", result))


def nbytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))


def device_bytes(name: str = "lo") -> int | None:
    """Bytes that a network device of this machine has sent so far, by default the loopback device; ``None`` where the
    kernel does not tell."""
    counters = Path("/proc/net/dev")
    if not counters.exists():
        return None
    for line in counters.read_text().splitlines():
        device, _, values = line.partition(":")
        if device.strip() == name:
            return int(values.split()[8])
    return None
