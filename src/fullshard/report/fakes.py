"""Tensors without memory in place of a model's own, and of those of a batch.

Owns the mode in which they are made, and knows which of them are alive.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard import tree
from fullshard.group.context import GroupContext
from fullshard.group.owners import owner_of
from fullshard.group.parameter import ShardedParameter
from fullshard.schedule.unit import units_in
from fullshard.torch_private import FakeTensor, FakeTensorMode


class Fakes:
    """Makes fake tensors on ``device``: one for each tensor, so that tied tensors stay tied.

    Attributes:
        device: where they are.
        made: by the id of what they stand for, which is there too, so that its id stays its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.made: dict[int, tuple[object, torch.Tensor]] = {}
        self.device = device
        self._alive: dict[int, weakref.ref[torch.Tensor]] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor."""

        def make() -> torch.Tensor:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, tensor.requires_grad)
            return fake.requires_grad_(tensor.requires_grad)

        fake: torch.Tensor = self._made(tensor, make)
        return fake

    def whole(self, group: GroupContext, param: ShardedParameter) -> nn.Parameter:
        """The fake of an unsharded parameter, in the dtype in which it is computed."""

        def make() -> nn.Parameter:
            shape = [param.shape[at] for at in param.order]
            flat = torch.empty(math.prod(shape), dtype=group.compute_dtype(param), device=self.device)
            fake = nn.Parameter(param.as_before(param.view(flat, shape)), param.sharded.requires_grad)
            vars(fake).update(param.attributes)
            return fake

        fake: nn.Parameter = self._made(param, make)
        return fake

    def _made(self, original: object, make: Callable[[], Any]) -> Any:
        if id(original) not in self.made:
            with self.mode, torch.no_grad():
                self.made[id(original)] = original, make()
            self.note(self.made[id(original)][1])
        return self.made[id(original)][1]

    def note(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was made in this mode."""
        self._alive[id(tensor)] = weakref.ref(tensor, partial(self._forget, id(tensor)))

    def _forget(self, key: int, ref: weakref.ref[torch.Tensor]) -> None:
        if self._alive.get(key) is ref:
            del self._alive[key]

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made in this mode."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode

    def left(self) -> torch.Tensor | None:
        """A tensor that is still alive, if there is one."""
        if self._alive:
            gc.collect()
        return next((tensor for ref in self._alive.values() if (tensor := ref()) is not None), None)


@contextmanager
def fake_parameters(model: nn.Module, fakes: Fakes) -> Iterator[None]:
    """A context in which the modules of a model show whole fake parameters, and have fake buffers."""
    params = [(group, param) for unit in units_in(model) for group in unit.groups for param in group.params]
    hidden = {id(param.hidden): (group, param) for group, param in params if param.hidden is not None}
    modules = [vars(module) for module in model.modules()]

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in hidden:
            return fakes.whole(*hidden[id(tensor)])
        if (owner := owner_of(tensor)) is None:
            return fakes.like(tensor)
        group, index = owner
        return fakes.whole(group, group.params[index])

    with restored(modules):
        for attributes in modules:
            for name, value in attributes.items():
                if name in ("_parameters", "_buffers"):
                    value.update({key: fake(tensor) for key, tensor in value.items() if tensor is not None})
                elif isinstance(value, (torch.Tensor, list, tuple, dict)) and name != "_modules":
                    attributes[name] = tree.map_tensors(fake, value)
        for group, param in params:
            for place in param.locations:  # a flat parameter has taken away the name
                vars(place.module).pop(place.name, None)
                place.module._parameters[place.name] = fakes.whole(group, param)
        yield


@contextmanager
def restored(objects: Sequence[dict[str, Any]]) -> Iterator[None]:
    """A context that ends with each dict as it was, and with the dicts and lists in it as they were."""
    before = [
        [(name, value, copy(value) if type(value) in (dict, list) else None) for name, value in each.items()]
        for each in objects
    ]
    try:
        yield
    finally:
        for each, values in zip(objects, before, strict=True):
            each.clear()
            for name, value, copied in values:
                each[name] = value
                if copied is not None:
                    value.clear()
                    (value.update if type(value) is dict else value.extend)(copied)
