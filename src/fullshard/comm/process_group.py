"""What is asked of a process group: its backends, whether it has other ranks, and objects of Python for its ranks.

torch has calls for objects too, but they need numpy, on which this library does not depend.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from fullshard.comm.waits import waiting
from fullshard.torch_private import all_gather_single


def backend_name(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend for ``device``, such as ``"gloo"``; empty if the group has none for it.

    A process group may have several, one for each type of device.
    """
    return _backends(process_group).get(device.type, "")


def _backends(process_group: dist.ProcessGroup | None) -> dict[str, str]:
    """The name of each backend, by the type of device that it serves."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(process_group).split(","))
    return {device_type: name for device_type, _, name in pairs}


def has_peers(process_group: dist.ProcessGroup | None) -> TypeGuard[dist.ProcessGroup]:
    """Whether there are other ranks to compare with. A fake process group gathers nothing."""
    return process_group is not None and process_group.size() > 1 and dist.get_backend(process_group) != "fake"


def gather_objects(mine: Any, process_group: dist.ProcessGroup | None) -> list[Any]:
    """The objects of all ranks, in the order of ranks; every rank must call it.

    Args:
        mine: an object that can be pickled.
        process_group: the ranks; ``None`` for all.
    """
    size = dist.get_world_size(process_group)
    data = encoded(mine, process_group)
    lengths = data.new_empty(size, dtype=torch.int64)
    with waiting("a comparison with the other ranks", process_group):
        all_gather_single(lengths, lengths.new_tensor([data.numel()]), group=process_group)
        longest = int(lengths.max())
        padded, every = data.new_zeros(longest), data.new_empty(size * longest)
        padded[: data.numel()] = data
        all_gather_single(every, padded, group=process_group)
    return [decoded(said[:length]) for said, length in zip(every.split(longest), lengths.tolist(), strict=True)]


def broadcast_object(value: Any, process_group: dist.ProcessGroup | None, source: int = 0) -> Any:
    """The object of the rank ``source``; every rank must call it, and the others' ``value`` does not count."""
    data = encoded(value if dist.get_rank(process_group) == source else None, process_group)
    length = data.new_tensor([data.numel()], dtype=torch.int64)
    with waiting(f"what rank {source} of the group sends", process_group):
        dist.broadcast(length, group=process_group, group_src=source)
        if dist.get_rank(process_group) != source:
            data = data.new_empty(int(length))
        dist.broadcast(data, group=process_group, group_src=source)
    return decoded(data)


def encoded(value: Any, process_group: dist.ProcessGroup | None) -> torch.Tensor:
    """An object as bytes, on a device whose tensors the process group moves: the CPU, if it can be."""
    devices = list(_backends(process_group))
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return data.to("cpu" if "cpu" in devices else devices[0])


def decoded(data: torch.Tensor) -> Any:
    data = data.cpu().contiguous()
    return pickle.loads(ctypes.string_at(data.data_ptr(), data.numel()))
