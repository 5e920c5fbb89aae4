"""Which transport moves a group's buffers: chosen from facts, unless the user says otherwise.

Owns the choice and the process-wide instances, which every group shares so that what transports keep exists once.
``FULLSHARD_TRANSPORT`` overrides the choice with the name of a transport.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist

from fullshard.comm.backend import backend_name
from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.transport import Transport

_point_to_point = cache(PointToPointTransport)
_collective = cache(CollectiveTransport)

_BY_NAME: dict[str, Callable[[], Transport]] = {
    PointToPointTransport.name: _point_to_point,
    CollectiveTransport.name: _collective,
}


def select_transport(process_group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The transport for buffers on ``device`` that move among the ranks of ``process_group``.

    Messages between pairs of ranks on gloo and the CPU, where collectives copy and allocate several times what they
    move; the native collectives everywhere else.

    Raises:
        ValueError: ``FULLSHARD_TRANSPORT`` names no transport, or one that cannot serve this group.
    """
    wanted = os.environ.get("FULLSHARD_TRANSPORT", "")
    fits = device.type == "cpu" and backend_name(process_group, device) == "gloo"
    if not wanted:
        return _point_to_point() if fits else _collective()
    if wanted not in _BY_NAME:
        raise ValueError(f"FULLSHARD_TRANSPORT={wanted!r} names no transport: use one of {', '.join(_BY_NAME)}")
    if wanted == PointToPointTransport.name and not fits:
        raise ValueError(
            f"FULLSHARD_TRANSPORT={wanted!r} needs buffers on the CPU and a process group with gloo, but this group "
            f"uses {backend_name(process_group, device) or 'no backend'!r} for buffers on {device}: "
            f"unset it or use {CollectiveTransport.name!r}"
        )
    return _BY_NAME[wanted]()
