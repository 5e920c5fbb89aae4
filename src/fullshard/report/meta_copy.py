"""A model on meta, built there or copied: a model to plan for, which takes no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fullshard.report.snapshot import Snapshot

T = TypeVar("T")


class _ShareTensors(TorchFunctionMode):
    """A deep copy shares the tensors that it finds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return args[0]
        return func(*args, **(kwargs or {}))


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers are on meta. It shares other tensors with the model."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        made = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    with _ShareTensors():
        try:
            return copy.deepcopy(model, dict(memo))
        except Exception:  # a lock, an open file, a generator: what cannot be copied is shared with the model
            return copy.deepcopy(model, {**memo, **{id(value): value for value in _uncopyable(model, memo)}})


def build_on_meta(build: Callable[[], T]) -> T:
    """What a function builds on the meta device. Tables on meta that its code caches beside it are taken away."""
    before = Snapshot(build)
    with torch.device("meta"):
        built = build()
    parts = built if isinstance(built, tuple) else (built,)
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    before.restore(attrgetter("is_meta"), modules)
    return built


def _uncopyable(model: nn.Module, memo: dict[int, Any]) -> Iterator[Any]:
    """The attributes of a model's modules that cannot be copied."""
    for name, value in [each for module in model.modules() for each in vars(module).items()]:
        if name not in ("_parameters", "_buffers", "_modules"):
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                yield value
