"""Which backend of a process group serves a device: the fact on which transports and their arithmetic are chosen."""

from __future__ import annotations

import torch
import torch.distributed as dist


def backend_name(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend for ``device``, such as ``"gloo"``; empty if the group has none for it.

    A process group may have several, one for each type of device.
    """
    pairs = (pair.split(":") for pair in dist.get_backend_config(process_group).split(","))
    return next((name for device_type, name in pairs if device_type == device.type), "")
