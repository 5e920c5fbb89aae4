"""What is known of the backends of process groups: what they can do, what it costs, and what their errors look like.

torch tells their names, and all else that matters here stands in :data:`BACKENDS`. A backend that is not in it does
what all backends do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class Backend(NamedTuple):
    """A backend.

    Attributes:
        name: such as ``"gloo"``; empty if a process group has none for a device.
        has_messages: whether messages between two ranks cost less than its collectives, which copy and allocate several
            times what they move. They go from the host's memory.
        sums_all: whether its reduce-scatter is an all-reduce of a copy, which sends twice what a reduce-scatter must.
        ends_processes: whether it may end a process that brings another size to a collective than other ranks.
        launches_together: whether several collectives are one launch, and none copies.
        divides: whether it may divide while it adds up, so that no other kernel has to.
        marks_errors: what each of its errors contains, if these have no class of their own.
    """

    name: str
    has_messages: bool = False
    sums_all: bool = False
    ends_processes: bool = False
    launches_together: bool = False
    divides: bool = False
    marks_errors: tuple[str, ...] = ()


BACKENDS = {
    # Its errors tell the place in its source.
    "gloo": Backend("gloo", True, True, True, marks_errors=("gloo/", "gloo\\")),
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
    marks = (mark for backend in BACKENDS.values() for mark in backend.marks_errors)
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in marks)
