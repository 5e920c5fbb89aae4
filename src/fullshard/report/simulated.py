"""The ranks of a job that is not there: a simulated world, on so many hosts, with the transports that it would have.

Owns the choice of these transports. They have properties and peers, and neither memory nor counters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.hosts import HostsTransport, peers_of
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.select import simulated_transport
from fullshard.comm.shm import ShmTransport
from fullshard.comm.transport import Transport
from fullshard.device import default_device_type, planned_for
from fullshard.torch_private import simulated_world


@dataclass(frozen=True)
class _Places:
    """Where the ranks of a process group would be, as in :class:`~fullshard.comm.local_ranks.LocalRanks`."""

    hosts: Sequence[Sequence[int]]
    members: Sequence[int]
    rank: int

    @property
    def size(self) -> int:
        return len(self.members)


class _Shm(ShmTransport):
    def __init__(self, messages: PointToPointTransport) -> None:
        self._private, self._slots = messages, {}


class _SimulatedHosts(HostsTransport):
    def __init__(self, hosts: Sequence[Sequence[int]], rank: int, messages: PointToPointTransport) -> None:
        self._private, self._slots, self.host_slots = messages, {}, {}  # type: ignore[assignment]
        here = next(host for host in hosts if rank in host)
        self.local_ranks = _Places(hosts, here, here.index(rank))  # type: ignore[assignment]
        self.peers, self.why = peers_of(hosts, rank), f"{len(hosts)} hosts, on each of which {len(here)} share memory"


@contextmanager
def simulated_job(
    ranks: int, rank: int, hosts: int | None, planned: torch.device | None = None, sizes: Sequence[int] | None = None
) -> Iterator[DeviceMesh | None]:
    """A context in which this process is one rank of a job on so many hosts, with the same number of ranks on each. If
    ``hosts`` is ``None``, it communicates by collectives. ``planned`` is the device for which to plan, if it is not the
    one that is here. Yields a mesh with these ``sizes``, if given: to shard, or to replicate and to shard."""
    device_type = planned.type if planned else default_device_type()
    make = None if device_type != "cpu" or hosts is None else _transports(ranks, hosts)
    with planned_for(planned), simulated_world(ranks, rank), simulated_transport(make):
        names = ("replicate", "shard")[-len(sizes) :] if sizes else ()
        yield init_device_mesh(device_type, tuple(sizes), mesh_dim_names=names) if sizes else None


def _transports(ranks: int, hosts: int) -> Callable[[dist.ProcessGroup], Transport] | None:
    asked = os.environ.get("FULLSHARD_TRANSPORT", "")
    if asked == CollectiveTransport.name:
        return None
    messages = PointToPointTransport()
    shared = _Shm(messages)

    @cache
    def transport(process_group: dist.ProcessGroup) -> Transport:
        places: dict[int, list[int]] = {}
        for number, each in enumerate(dist.get_process_group_ranks(process_group)):
            places.setdefault(each * hosts // ranks, []).append(number)
        if asked == PointToPointTransport.name or len(places) == process_group.size():
            return messages
        if len(places) == 1 and asked != HostsTransport.name:
            return shared
        return _SimulatedHosts([*places.values()], process_group.rank(), messages)

    return transport
