"""Collectives of several ranks on one accelerator, over gloo, which moves a device's tensors by way of the host.

torch's functional collectives (``DTensor.full_tensor()`` calls them) end the process when gloo gets a device's tensor
from them. So they are given copies on the CPU, and their results are copied back.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fullshard.torch_private import FUNCTIONAL_COLLECTIVES, pytree, written_by

_routed: dict[str, torch.library.Library] = {}
_OPERATORS = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
)


def route_by_host(kind: str) -> None:
    """Let functional collectives of this process move tensors of a type of device by way of the CPU, from now on."""
    if kind in _routed:
        return
    library = _routed[kind] = torch.library.Library("_c10d_functional", "IMPL")
    key = {"cuda": "CUDA", "xpu": "XPU"}.get(kind, "PrivateUse1")
    for name in _OPERATORS:
        if hasattr(FUNCTIONAL_COLLECTIVES, name):
            library.impl(name, functools.partial(by_host, getattr(FUNCTIONAL_COLLECTIVES, name).default), key)


def by_host(operator: Any, *args: Any) -> Any:
    """Call an operator with copies of its tensors on the CPU; copy back what it returns, and what it writes."""
    devices: list[torch.device] = []

    def to_host(tensor: Tensor) -> Tensor:
        devices.append(tensor.device)
        return tensor.to("cpu", copy=True)

    copies = pytree.tree_map_only(Tensor, to_host, args)
    found = operator(*copies)
    pytree.tree_map_only(Tensor, FUNCTIONAL_COLLECTIVES.wait_tensor, found)
    written = written_by(operator)
    for at in written:
        there, here = ([each] if isinstance(each, Tensor) else each for each in (args[at], copies[at]))
        for target, source in zip(there, here, strict=True):
            target.copy_(source)
    if written:
        return args[written[0]]
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(devices[0]), found)
