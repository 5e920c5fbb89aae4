"""The ways in which programs save and load the state of a model and of its optimizer, in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from fullshard import FullyShardedDataParallel, StateDictType
from tests.fuzz.sharding import plain_name

COMPOSABLE = ("plain", "dcp", "dcp full")
WRAPPED = ("full", "sharded", "local", "dcp", "dcp full")
_TYPES = {
    "full": StateDictType.FULL_STATE_DICT,
    "sharded": StateDictType.SHARDED_STATE_DICT,
    "local": StateDictType.LOCAL_STATE_DICT,
}


def cloned(value: Any) -> Any:
    """A state dict that shares nothing with the model."""
    if isinstance(value, Tensor):
        return value.detach().to(value.dtype, copy=True)  # quantized state has no clone()
    if isinstance(value, dict):
        return type(value)((key, cloned(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(cloned(each) for each in value)
    return copy.deepcopy(value)


def save(model: Any, optimizer: torch.optim.Optimizer, kind: str) -> Any:
    """The state of both."""
    if kind == "plain":
        return cloned(model.state_dict()), cloned(optimizer.state_dict())
    if kind in _TYPES:
        with FullyShardedDataParallel.state_dict_type(model, _TYPES[kind]):
            state = cloned(model.state_dict())
            if kind == "local":
                return state, cloned(optimizer.state_dict())
            return state, cloned(FullyShardedDataParallel.optim_state_dict(model, optimizer))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True) if kind == "dcp full" else None
    return cloned(get_state_dict(model, optimizer, options=options))


def load(
    model: Any,
    optimizer: torch.optim.Optimizer,
    kind: str,
    saved: Any,
    assign: bool,
    build: Callable[[Any], torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Load both; returns the optimizer, which is a new one if parameters were replaced."""
    model_state, optimizer_state = saved
    if kind == "plain":
        model.load_state_dict(model_state, assign=assign)
        if assign:
            optimizer = build(model.parameters())
        optimizer.load_state_dict(optimizer_state)
    elif kind in _TYPES:
        with FullyShardedDataParallel.state_dict_type(model, _TYPES[kind]):
            model.load_state_dict(model_state)
            if kind == "local":
                optimizer.load_state_dict(optimizer_state)
            else:
                found = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, optimizer_state)
                optimizer.load_state_dict(found)
    elif kind == "dcp full":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, model_state, options=options)
        _refuse_missing(model, model_state, optimizer_state)
        set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    else:
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return optimizer


def _refuse_missing(model: nn.Module, model_state: Any, optimizer_state: Any) -> None:
    """Raise on every rank where torch's function would raise on rank 0 alone, which has the states, and let the others
    wait for what it does not send."""
    states = optimizer_state.get("state", {})
    every: dict[nn.Parameter, list[str]] = {}  # a tied parameter has one state, under any of its names
    for name, each in model.named_parameters(remove_duplicate=False):
        every.setdefault(each, []).append(plain_name(name))
    trained = [names for each, names in every.items() if each.requires_grad and names[0] in model_state]
    told = [[names[0] for names in trained if states and states.keys().isdisjoint(names)]]
    dist.broadcast_object_list(told, src=0)
    if told[0]:
        raise RuntimeError(f"{told[0]}: requires gradients but has no saved optimizer state")
