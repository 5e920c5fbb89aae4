"""What a new process gets from one that has the same shard: parameters, optimizer state, and the user's own state.

Owns how these are packed and loaded again. Only tensors and plain values travel: nothing that is loaded can run code
(``torch.load`` with ``weights_only=True``).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.elastic.packed import Packed, pack, unpack
from fullshard.group.parameter import local_tensor
from fullshard.tree import map_tensors


class PackedState(NamedTuple):
    """A packed state: its tensors, and everything else by ``torch.save``, with meta tensors in their places."""

    tensors: Packed
    devices: tuple[str, ...]  # the device type of each
    others: bytes


def pack_state(model: nn.Module, optimizer: Optimizer, more: Mapping[str, Any]) -> PackedState:
    """What this process has of a model and its optimizer, and the state dicts of ``more``. Called between steps."""
    state = {
        "parameters": [_detached(param) for param in model.parameters()],
        "buffers": [*model.buffers()],
        "optimizer": state_of(optimizer),
        "more": {name: each.state_dict() for name, each in more.items()},
    }
    tensors, devices, others = list[torch.Tensor](), list[str](), io.BytesIO()

    def leave_out(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_plain(tensor):
            return tensor
        devices.append(tensor.device.type)
        tensors.append(torch.empty(0) if tensor.is_meta else tensor)
        return torch.empty_like(tensor, device="meta")

    torch.save(map_tensors(leave_out, state), others)
    return PackedState(pack(tensors), tuple(devices), others.getvalue())


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and not (tensor.is_quantized or tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


@torch.no_grad()
def load_state(data: PackedState, model: nn.Module, optimizer: Optimizer, more: Mapping[str, Any]) -> None:
    """Loads what :func:`pack_state` has packed, in place."""
    left_out = zip(unpack(data.tensors), data.devices, strict=True)

    def put_back(tensor: torch.Tensor) -> torch.Tensor:
        if not (_is_plain(tensor) and tensor.is_meta):
            return tensor
        value, device = next(left_out)
        return tensor if device == "meta" else value.to(device, copy=True)

    packed = map_tensors(put_back, torch.load(io.BytesIO(data.others), weights_only=True))
    for param, values in zip(model.parameters(), packed["parameters"], strict=True):
        local_tensor(param).copy_(values)
    for buffer, values in zip(model.buffers(), packed["buffers"], strict=True):
        buffer.copy_(values)
    load_state_of(optimizer, packed["optimizer"])
    for name, each in more.items():
        each.load_state_dict(packed["more"][name])


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """What this process has of the state of an optimizer, in tensors and plain values."""
    of_optimizer = optimizer.state_dict()
    state = {
        number: {name: (isinstance(value, DTensor), _detached(value)) for name, value in values.items()}
        for number, values in of_optimizer["state"].items()
    }
    return {"state": state, "groups": of_optimizer["param_groups"]}


def load_state_of(optimizer: Optimizer, packed: Mapping[str, Any]) -> None:
    """Loads what :func:`state_of` returned."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = {
        number: {name: _like(params[number], *value) for name, value in values.items()}
        for number, values in packed["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": packed["groups"]})


def _detached(value: Any) -> Any:
    return local_tensor(value).detach() if isinstance(value, torch.Tensor) else value


def _like(param: nn.Parameter, is_sharded: bool, value: Any) -> Any:
    """A value of the state of a parameter; sharded like that, if it was."""
    if not is_sharded:
        return value
    made = torch.empty_like(param, dtype=value.dtype)
    local_tensor(made).copy_(value)
    return made
