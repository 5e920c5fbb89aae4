"""What is known of the backends of process groups: what they can do, what it costs, and what their errors look like.

torch tells their names, and all else that matters here stands in :data:`BACKENDS`. A backend that is not in it does
what all backends do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class Backend(NamedTuple):
    """A backend, and what it can do."""

    name: str  # empty: a process group has none for a device
    has_messages: bool = False  # messages, from the host's memory, cost less than its collectives, which copy much
    sums_all: bool = False  # its reduce-scatter is an all-reduce of a copy, and sends twice what it must
    ends_processes: bool = False  # it may end a process that brings another size to a collective than the other ranks
    launches_together: bool = False  # several collectives are one launch
    divides: bool = False  # it can divide while it adds up
    marks: tuple[str, ...] = ()  # each of its errors contains one of them, if errors have no class of their own


BACKENDS = {
    # An error names a place in gloo's source, unless an earlier call has run out of time.
    "gloo": Backend("gloo", True, True, True, marks=("gloo/", "gloo\\", "Application timeout caused pair closure")),
    "nccl": Backend("nccl", launches_together=True, divides=True),
}


def backends_of(process_group: dist.ProcessGroup | None) -> dict[str, Backend]:
    """The backend for each type of device."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(process_group).split(","))
    return {device_type: BACKENDS.get(name) or Backend(name) for device_type, _, name in pairs}


def backend_of(process_group: dist.ProcessGroup, device: torch.device) -> Backend:
    """The backend for a device."""
    return backends_of(process_group).get(device.type) or Backend("")


def comes_from_backend(error: RuntimeError) -> bool:
    """Whether a backend raised an error, and not what else runs in a wait, such as a function of the user."""
    marks = (mark for backend in BACKENDS.values() for mark in backend.marks)
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in marks)
