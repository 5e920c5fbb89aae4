"""What is asked of a process group: its backends, waits that say what was lost, and objects of Python for its ranks.

torch has calls for objects too, but they need numpy, on which this library does not depend.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist

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


def lost_in(what: str, error: RuntimeError) -> RuntimeError:
    """What to raise from the ``error`` of a wait for a collective: backends say that a rank was lost, not where."""
    return RuntimeError(
        f"rank {dist.get_rank()} lost another rank in {what}, look on the others for the first error: {error}"
    )


def gather_objects(mine: Any, process_group: dist.ProcessGroup | None) -> list[Any]:
    """The objects of all ranks, in the order of ranks; every rank must call it.

    Args:
        mine: an object that can be pickled.
        process_group: the ranks; ``None`` for all.
    """
    size = dist.get_world_size(process_group)
    data = _encoded(mine, process_group)
    lengths = data.new_empty(size, dtype=torch.int64)
    all_gather_single(lengths, lengths.new_tensor([data.numel()]), group=process_group)
    longest = int(lengths.max())
    padded, every = data.new_zeros(longest), data.new_empty(size * longest)
    padded[: data.numel()] = data
    all_gather_single(every, padded, group=process_group)
    return [_decoded(said[:length]) for said, length in zip(every.split(longest), lengths.tolist(), strict=True)]


def broadcast_object(value: Any, process_group: dist.ProcessGroup | None) -> Any:
    """The object of the first rank; every rank must call it, and the others' ``value`` does not count."""
    data = _encoded(value if dist.get_rank(process_group) == 0 else None, process_group)
    length = data.new_tensor([data.numel()], dtype=torch.int64)
    dist.broadcast(length, group=process_group, group_src=0)
    if dist.get_rank(process_group) != 0:
        data = data.new_empty(int(length))
    dist.broadcast(data, group=process_group, group_src=0)
    return _decoded(data)


def _encoded(value: Any, process_group: dist.ProcessGroup | None) -> torch.Tensor:
    """On a device whose tensors the process group moves: the CPU, if it can be."""
    devices = list(_backends(process_group))
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return data.to("cpu" if "cpu" in devices else devices[0])


def _decoded(data: torch.Tensor) -> Any:
    data = data.cpu().contiguous()
    return pickle.loads(ctypes.string_at(data.data_ptr(), data.numel()))
