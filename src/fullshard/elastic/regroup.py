"""How a model goes on over another process group: that of the row in which its process is now.

Owns what a group of parameters must be for that, how processes of a row find each other, and what the engine uses of a
process group.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fullshard.comm.hosts import HostsTransport
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.select import select_transport
from fullshard.group.param_group import ParamGroup
from fullshard.schedule.schedule import Schedule
from fullshard.wire_policy import EXACT


class RowStore(dist.Store):  # type: ignore[name-defined]
    """The store of a row: values travel over the connections of the job, so that no wait outlives a process."""

    def __init__(self, set_value: Callable[[str, bytes], None], get_value: Callable[[str], bytes]) -> None:
        super().__init__()
        self._set_value, self._get_value = set_value, get_value

    def set(self, key: str, value: bytes | str) -> None:
        self._set_value(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._get_value(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._get_value(key)


def problem_of(group: ParamGroup) -> str:
    """Why a group cannot be trained by an elastic job; empty if it can."""
    options = group.options
    if group.data.replicate_size > 1:
        return (
            "its parameters are on several ranks. Shard without a mesh, with zero_stage 1 to 3: `replicas` replicates"
        )
    if {options.wire, options.outer_wire} != {EXACT}:
        return "its wire_policy encodes messages between hosts only, and bits would depend on the hosts of a row"
    if options.post_forward_mesh is not None:
        return "reshard_after_forward is a number of ranks, whose process group is not made anew"
    return "its parameters are on a disk" if group.offloaded.disk is not None else ""


def use_process_group(schedule: Schedule, process_group: Any, step: int, is_first: bool) -> None:
    """Lets the model shard over another process group of the same size."""
    checks = schedule.checks if is_first else []
    for group in schedule.groups:
        transport = select_transport(process_group, group.device)
        if isinstance(transport, HostsTransport):  # it adds up inside of hosts first, in an order of its own
            transport = PointToPointTransport()
        if group.data.shard_group is not None:
            group.data.shard_group = group.reduce_process_group = process_group
        else:  # of one process
            group.data.replicate_group = process_group
        group.may_share = True
        group.first_values = group.first_values if is_first else None
        group.reduce_transport = transport
        group.use_transport(transport)
    schedule.begin_over(process_group, step)
    schedule.checks = checks
