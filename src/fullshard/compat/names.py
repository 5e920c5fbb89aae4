"""Attributes that frameworks and torch read on a sharded model, in addition to the public ones. Each says who reads it.

They are attributes of torch's FSDP, mostly private ones. Owns their values; the engine does not use them. Importing
this file puts them on the modules that ``fully_shard`` makes, and sharding on wrappers, modules and parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn

from fullshard.members import managed_modules
from fullshard.module import FSDPModule
from fullshard.schedule.hooks import when_sharded
from fullshard.schedule.unit import Unit, unit_of

#: The unit of a sharded module. (Other modules do not have these attributes.)
_unit: Callable[[nn.Module], Unit] = unit_of  # type: ignore[assignment]


class _FlatView:
    """A substitute for the flat parameter, for wrappers with ``use_orig_params``: this rank's elements,
    concatenated."""

    def __init__(self, unit: Unit) -> None:
        params = [param for group in unit.groups for param in group.params]
        self._shown = [param.sharded for param in params]
        self._fqns = [param.name for param in params]
        self.dtype, self.device = self._shown[0].dtype, self._shown[0].device
        self.requires_grad = any(shown.requires_grad for shown in self._shown)

    @property
    def data(self) -> torch.Tensor:
        return torch.cat([shown.data.reshape(-1) for shown in self._shown])

    @data.setter
    def data(self, flat: torch.Tensor) -> None:
        parts = flat.split([shown.numel() for shown in self._shown])
        for shown, part in zip(self._shown, parts, strict=True):
            shown.data = part.view(shown.shape)


def _flat_param(wrapper: Any) -> Any:
    if not _unit(wrapper).groups:
        return None
    return _FlatView(_unit(wrapper)) if wrapper._use_orig_params else wrapper.module.get_parameter("_flat_param")


def _handle(wrapper: Any) -> SimpleNamespace | None:
    """A substitute for torch's handle. Programs may set its attributes, such as ``_orig_param_dtype``. The engine
    ignores them, because it reads the parameters' own dtypes."""
    flat = _flat_param(wrapper)
    return None if flat is None else SimpleNamespace(flat_param=flat, _orig_param_dtype=flat.dtype)


def _is_root(module: nn.Module) -> bool | None:
    """``None`` before the first forward, which makes a module the root or part of another one's tree."""
    unit = _unit(module)
    return None if unit.schedule is None else unit.schedule.root is unit


def _set_unshard_async_op(module: nn.Module, async_op: bool) -> None:
    """Nothing to set: a gather is always started ahead, and waits for no more than its buffers."""


def _refuse_tracker(module: nn.Module) -> NoReturn:
    raise RuntimeError(
        "torch's FSDPMemTracker counts the memory of torch's FSDP, and the model was sharded by fullshard: "
        "fullshard.explain(model, batch) predicts its memory, and fullshard.profile() records it"
    )


_ON_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "rank": lambda wrapper: wrapper.process_group.rank() if wrapper.process_group else 0,  # programs that log
    "world_size": lambda wrapper: wrapper.process_group.size() if wrapper.process_group else 1,  # the same
    "compute_device": lambda wrapper: _unit(wrapper).device,  # Lightning, programs that move batches
    "_has_params": lambda wrapper: bool(_unit(wrapper).groups),  # accelerate, where it casts parameters up
    "_flat_param": _flat_param,  # the same
    "_handle": _handle,  # the same
    "_is_root": _is_root,  # programs that clip or save on the root only
    "_state_dict_type": lambda each: each.get_state_dict_type(each).state_dict_type,  # programs that save as it is set
}

FSDPModule._set_unshard_async_op = _set_unshard_async_op  # type: ignore[attr-defined]
FSDPModule._get_fsdp_state = _refuse_tracker  # type: ignore[attr-defined]  # FSDPMemTracker


@when_sharded
def _mark(unit: Unit) -> None:
    """Mark what was sharded. ``_is_fsdp_managed_module`` tells transformers to generate in step with the other ranks,
    and Dynamo not to guard parameters; Dynamo wants ``_fsdp_use_orig_params`` beside it. ``_fsdp_flattened`` on the
    parameters of a wrapper tells Lightning that the optimizer was made after wrapping."""
    if unit.is_wrapper:
        wrapper = next(each for each in type(unit.modules[0]).__mro__ if each.__name__ == "FullyShardedDataParallel")
        for name, read in _ON_WRAPPERS.items() if "_has_params" not in vars(wrapper) else ():
            setattr(wrapper, name, property(read))
    for module in managed_modules(unit.modules):
        module._is_fsdp_managed_module = module._fsdp_use_orig_params = True  # type: ignore[assignment]
    if unit.is_wrapper and unit.groups:
        for param in unit.modules[0].parameters():
            param._fsdp_flattened = id(param) not in unit.ignored  # type: ignore[attr-defined]
