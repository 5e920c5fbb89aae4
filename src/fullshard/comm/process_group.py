"""What is asked of a process group: whether it has other ranks, and what its ranks tell each other.

Whatever no transport moves, tensors and objects of Python, goes through these functions: each says for what it waits,
and raises PeerFailureError if the backend says that a rank is lost. torch has calls for objects too, but they need
numpy, on which this library does not depend.
"""

from __future__ import annotations

import ctypes
import json
import pickle
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from fullshard.comm.backends import backends_of
from fullshard.comm.waits import Wait, waiting
from fullshard.torch_private import all_gather_single, default_store, timeout_of

_SMALL, _LENGTH = 248, 8  # bytes of an object that travel with its length, and bytes of that length
_PATIENCE = 5  # seconds for which ranks wait for one another in the store


def has_peers(process_group: dist.ProcessGroup | None) -> TypeGuard[dist.ProcessGroup]:
    """Whether there are other ranks to compare with. A fake process group gathers nothing."""
    return process_group is not None and process_group.size() > 1 and dist.get_backend(process_group) != "fake"


def all_reduce(
    values: torch.Tensor, process_group: dist.ProcessGroup | None, what: str, op: Any = dist.ReduceOp.SUM
) -> None:
    """Combine the values of all ranks in place, by ``op``. ``what`` they wait for is for errors."""
    with waiting(what, process_group):
        dist.all_reduce(values, op, process_group)


def broadcast(values: torch.Tensor, process_group: dist.ProcessGroup | None, what: str, source: int = 0) -> None:
    """Write the values of the rank ``source`` of the group to those of all its ranks."""
    with waiting(what, process_group):
        dist.broadcast(values, group=process_group, group_src=source)


class StartedAllGather:
    """The tensors of all ranks, which have one shape and dtype, end to end in ``every``. It starts when it is made."""

    def __init__(self, mine: torch.Tensor, wait: Wait, every: torch.Tensor | None = None) -> None:
        self._wait, self._mine, size = wait, mine.contiguous(), dist.get_world_size(wait.process_group)
        self._every = mine.new_empty((size, *mine.shape)) if every is None else every
        every, mine = (each.view(-1).view(torch.uint8) for each in (self._every, self._mine))  # backends lack dtypes
        with waiting(*wait):
            self._work = all_gather_single(every, mine, group=wait.process_group, async_op=True)

    def finish(self) -> torch.Tensor:
        with waiting(*self._wait):
            self._work.wait()
        return self._every


def wait_for_message(work: dist.Work | None, process_group: dist.ProcessGroup | None) -> None:
    """Waits for a message within the timeout of the process group. By itself gloo takes the one with which processes
    connected, whatever was set since."""
    assert work is not None
    work.wait(timedelta(seconds=timeout_of(process_group or dist.group.WORLD)))


def gather_objects(mine: Any, process_group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank of the group (``None`` for all) brings, by rank; all of them must call it, with what pickles.
    Small objects travel in one collective. A second one brings what is left of the others."""
    said = pickle.dumps(mine)
    with waiting("a comparison with the other ranks", process_group):
        heads = list(_gather(len(said).to_bytes(_LENGTH, "little") + said[:_SMALL], _LENGTH + _SMALL, process_group))
        longest = max(int.from_bytes(head[:_LENGTH], "little") for head in heads) - _SMALL
        rests = _gather(said[_SMALL:], longest, process_group) if longest > 0 else [b""] * len(heads)
    return [pickle.loads(head[_LENGTH:] + rest) for head, rest in zip(heads, rests, strict=True)]


def _gather(mine: bytes, nbytes: int, process_group: dist.ProcessGroup | None) -> map[bytes]:
    """The bytes of each rank, padded with zeros to ``nbytes``. They are copied one by one: they may be large."""
    padded = _on_device(mine.ljust(nbytes, b"\0"), process_group)
    every = padded.new_empty(dist.get_world_size(process_group) * nbytes)
    all_gather_single(every, padded, group=process_group)
    return map(_bytes, every.cpu().split(nbytes))


def exchange_in_store(mine: Any, key: str, process_group: dist.ProcessGroup) -> dict[int, Any]:
    """What the ranks of a group have brought, by rank, as JSON knows it. They may come at different times: one that
    has not come after some seconds is left out."""
    store, keys = default_store(), {r: f"{key}/{r}" for r in dist.get_process_group_ranks(process_group)}
    store.set(keys[dist.get_rank()], json.dumps(mine))
    with waiting("the other ranks' values in the store", process_group), suppress(RuntimeError):
        store.wait([*keys.values()], timedelta(seconds=_PATIENCE))
    return {rank: json.loads(store.get(each)) for rank, each in keys.items() if store.check([each])}


def broadcast_object(value: Any, process_group: dist.ProcessGroup | None, source: int = 0) -> Any:
    """The object of the rank ``source``; every rank must call it, and the others' ``value`` does not count."""
    data = _on_device(pickle.dumps(value if dist.get_rank(process_group) == source else None), process_group)
    length = data.new_tensor([data.numel()], dtype=torch.int64)
    what = f"data from rank {source} of the group"
    broadcast(length, process_group, what, source)
    data = data if dist.get_rank(process_group) == source else data.new_empty(int(length))
    broadcast(data, process_group, what, source)
    return pickle.loads(_bytes(data))


def gather_to_first(mine: Any, process_group: dist.ProcessGroup | None, what: str) -> list[Any]:
    """The objects of all ranks, which may be large, on the first rank; none elsewhere. Every rank must call it."""
    data = _on_device(pickle.dumps(mine), process_group)
    lengths = gather_objects(data.numel(), process_group)
    padded = data.new_zeros(max(lengths))
    padded[: data.numel()] = data
    every = [torch.empty_like(padded) for _ in lengths] if dist.get_rank(process_group) == 0 else []
    with waiting(what, process_group):
        dist.gather(padded, every or None, group=process_group, group_dst=0)
    return [pickle.loads(_bytes(each[:length])) for each, length in zip(every, lengths, strict=False)]


def device_of(process_group: dist.ProcessGroup | None) -> str:
    """The type of a device whose tensors the process group moves: the CPU, if it can be."""
    devices = list(backends_of(process_group))
    return "cpu" if "cpu" in devices else devices[0]


def _on_device(data: bytes, process_group: dist.ProcessGroup | None) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device_of(process_group))


def _bytes(data: torch.Tensor) -> bytes:
    data = data.cpu().contiguous()
    return ctypes.string_at(data.data_ptr(), data.numel())
