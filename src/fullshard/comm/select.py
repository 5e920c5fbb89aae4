"""Which transport moves a group's buffers: chosen from facts, or by name with ``FULLSHARD_TRANSPORT``.

Owns the choice and the instances. Groups share them, so that their staging exists once.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist

from fullshard.comm.backends import backend_of
from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.hosts import HostsTransport, shared_transport
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.shm import ShmTransport
from fullshard.comm.transport import Transport
from fullshard.device import is_host

_log = logging.getLogger("fullshard")
_told: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # of which a line says how they communicate
_simulated: Callable[[dist.ProcessGroup], Transport] | None = None  # the transport of a group in a simulated world
_has_shown = False  # whether this process has shown such a line
_point_to_point = cache(PointToPointTransport)
_collective = cache(CollectiveTransport)
_between_hosts = cache(lambda: PointToPointTransport(native=_collective()))

#: The names that ``FULLSHARD_TRANSPORT`` may have.
NAMES = (ShmTransport.name, HostsTransport.name, PointToPointTransport.name, CollectiveTransport.name)


def select_transport(process_group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The transport for buffers on ``device`` that move among the ranks of ``process_group``, all of which call it.

    On gloo and the CPU shared memory if all ranks are on one host, and messages between pairs of ranks otherwise, as
    collectives copy and allocate several times what they move; the native collectives everywhere else. Raises
    ValueError if ``FULLSHARD_TRANSPORT`` names no transport, or one that cannot serve this group."""
    global _has_shown
    transport, why = choose_transport(process_group, device)
    if process_group in _told:
        return transport
    size, every, name = process_group.size(), dist.get_world_size(), transport.name
    line = f"{size if size == every else f'{size} of {every}'} ranks use the transport '{name}': {why}"
    if os.environ.get("FULLSHARD_TRANSPORT"):
        line += ". Unset it for the default"
    elif size > 1 and name != CollectiveTransport.name:
        line += f". FULLSHARD_TRANSPORT={' or '.join(each for each in NAMES[2:] if each != name)} chooses another"
    _told.add(process_group)
    # The job's first rank shows its first line even if logging is not configured, unless our logger has a level.
    is_quiet = _log.level != logging.NOTSET or _log.hasHandlers() or dist.get_backend() == "fake"
    if size > 1 and dist.get_rank() == 0 and not _has_shown and not is_quiet:
        _has_shown = True
        print(f"fullshard: {line}", file=sys.stderr, flush=True)
    else:
        _log.info(line)
    return transport


@contextmanager
def simulated_transport(make: Callable[[dist.ProcessGroup], Transport] | None) -> Iterator[None]:
    """A context in which process groups of a simulated world have transports that ``make`` returns."""
    global _simulated
    before, _simulated = _simulated, make
    try:
        yield
    finally:
        _simulated = before


def choose_transport(process_group: dist.ProcessGroup, device: torch.device) -> tuple[Transport, str]:
    """A transport, and why it is this one."""
    wanted = os.environ.get("FULLSHARD_TRANSPORT", "")
    if wanted not in ("", *NAMES):
        raise ValueError(f"FULLSHARD_TRANSPORT={wanted!r} is not a transport: use one of {', '.join(NAMES)}")
    backend = backend_of(process_group, device)
    if backend.name == "fake" and _simulated is not None:
        return _simulated(process_group), "simulated"
    fits = is_host(device) and backend.has_messages
    asked = f"FULLSHARD_TRANSPORT={wanted}"
    if wanted == CollectiveTransport.name or (not wanted and not fits):
        return _collective(), asked if wanted else f"the collectives of its backend, {backend.name or 'unknown'}"
    if not fits:
        raise ValueError(
            f"FULLSHARD_TRANSPORT={wanted!r} needs buffers on the CPU and a process group with gloo, but this group "
            f"uses {backend.name or 'no backend'!r} for buffers on {device}: unset it or use 'collective'"
        )
    if wanted == PointToPointTransport.name or process_group.size() == 1:
        return _point_to_point(), asked if wanted else "there is one rank"
    shared = shared_transport(process_group, _point_to_point(), wanted)
    if isinstance(shared, ShmTransport):
        return shared, asked if wanted else shared.why
    if wanted:
        raise ValueError(f"FULLSHARD_TRANSPORT={wanted!r} cannot be used for this process group: {shared}; unset it")
    return _between_hosts(), shared
