"""The same training unsharded, in one process: a master that is stepped, and a whole copy of it for each rank.

Each copy computes with the batches of its rank, with buffers of its own, as the ranks of data-parallel training do.
After each backward the mean of the copies' gradients is added to the master's; before each forward the copies take the
master's values. So whatever is written to the parameters of a copy in a forward is thrown away, as it is in a sharded
model, and low precision is a copy in another dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.layout import Layout
from tests.fuzz.models import Plain
from tests.fuzz.sharding import Sharding, dtype_of, groups_of, own_dtype_of_scalars


class Reference:
    """Unsharded training of a model for all ranks.

    Args:
        model: the master; it is not copied.
        sharding: the dtypes, and which parameters get zeros because others of their unit have a gradient.
        size: of the world.
        rank: whose copy `mine` is.
    """

    def __init__(self, model: nn.Module, sharding: Sharding, layout: Layout, size: int, rank: int) -> None:
        self.master = model
        self.sharding = sharding
        self.layout = layout
        self.rank = rank
        self.divisor = float(size)
        self.fills_units = sharding.wraps or ("set_reduce_scatter_unused_params", True) in sharding.settings
        self.copies = [self._worker() for _ in range(size)]
        self.optimizer: Any

    @property
    def mine(self) -> nn.Module:
        """The copy of this rank."""
        return self.copies[self.rank]

    def _worker(self) -> nn.Module:
        model = copy.deepcopy(self.master)
        dtype = dtype_of(self.sharding.param_dtype)
        if dtype is not None:
            for parameter in model.parameters():
                keeps = self.sharding.override and own_dtype_of_scalars(parameter)
                if parameter.is_floating_point() and not keeps:
                    parameter.data = parameter.data.to(dtype)
        paths = [path for group in groups_of(model, self.sharding) for path in group.paths]
        if dtype is not None:
            for path in paths if self.sharding.cast_inputs else paths[-1:] if self.sharding.wraps else []:
                model.get_submodule(path).register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
        output_dtype = dtype_of(self.sharding.output_dtype)
        if output_dtype is not None:
            for path in paths:
                model.get_submodule(path).register_forward_hook(partial(_cast_output, output_dtype))
        return model

    def refresh(self) -> None:
        """Give all copies the values of the master."""
        for worker in self.copies:
            for own, parameter in zip(worker.parameters(), self.master.parameters(), strict=True):
                own.data.copy_(parameter.data)
                if own.requires_grad != parameter.requires_grad:
                    own.requires_grad_(parameter.requires_grad)

    def collect(self) -> bool:
        """Add the mean of the copies' gradients to those of the master; returns whether there were any."""
        names = [name for name, _ in self.master.named_parameters()]
        sums: dict[str, Tensor] = {}
        for worker in self.copies:
            for name, own in zip(names, worker.parameters(), strict=True):
                if own.grad is not None:
                    travels = own.grad.to(dtype_of(self.sharding.reduce_dtype) or own.grad.dtype)
                    wide = torch.promote_types(travels.dtype, torch.float64)
                    sums[name] = sums.get(name, 0) + travels.to(wide)
                    own.grad = None
        parameters = dict(self.master.named_parameters())
        if self.fills_units:
            for unit in self.layout.units:
                if any(name in sums for name in unit.names):
                    for name in unit.names:
                        if name not in sums and parameters[name].requires_grad:
                            sums[name] = torch.zeros_like(parameters[name])
        for name, total in sums.items():
            parameter, mean = parameters[name], total / self.divisor
            if self.sharding.reduce_dtype or self.sharding.param_dtype:
                mean = mean.to(dtype_of(self.sharding.reduce_dtype or self.sharding.param_dtype))
            mean = mean.to(parameter.dtype)
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        return bool(sums)

    def drop_gradients(self) -> None:
        """Forget gradients that did not come home."""
        for worker in self.copies:
            for parameter in worker.parameters():
                parameter.grad = None

    def share_buffers(self, of: int) -> None:
        """Let all copies have the buffers of one, as loading what one rank sends does."""
        for worker in self.copies:
            persistent = set(worker.state_dict(keep_vars=True))
            for name, buffer in worker.named_buffers():
                if name in persistent:
                    buffer.copy_(self.copies[of].get_buffer(name))

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self.master.named_parameters()}

    def parameters(self) -> dict[str, Tensor | None]:
        return {name: parameter.detach() for name, parameter in self.master.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        """The state dict of the plain model, with the buffers of this rank."""
        own = self.mine.state_dict()
        buffers = {name for name, _ in self.mine.named_buffers(remove_duplicate=False)}
        state = self.master.state_dict()
        return {name: (own if name in buffers else state)[name].detach().clone() for name in state}


def _map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A nested value with other tensors, through the containers that models return."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(change, each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_map_tensors(change, each) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        tensors = {field.name: _map_tensors(change, getattr(value, field.name)) for field in fields(value)}
        return replace(value, **tensors)
    assert not isinstance(value, Plain), "what stands in a plain object is not cast"
    return value


def _to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    return _map_tensors(partial(_to, dtype), args), _map_tensors(partial(_to, dtype), kwargs)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _map_tensors(partial(_to, dtype), output)
