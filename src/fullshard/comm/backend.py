"""Which backend of a process group serves a device: the fact on which transports and their arithmetic are chosen."""

from __future__ import annotations

import torch
import torch.distributed as dist


def backend_name(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend for ``device``, such as ``"gloo"``; empty if the group has none for it.

    A process group may have several, one for each type of device.
    """
    return _backends(process_group).get(device.type, "")


def device_types(process_group: dist.ProcessGroup | None) -> list[str]:
    """The types of devices whose tensors a process group moves."""
    return list(_backends(process_group))


def _backends(process_group: dist.ProcessGroup | None) -> dict[str, str]:
    """The name of each backend, by the type of device that it serves."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(process_group).split(","))
    return {device_type: name for device_type, _, name in pairs}
