"""A model on meta, built there or copied: a model to plan for, which takes no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fullshard.report.snapshot import Snapshot
from fullshard.torch_private import storage_id

T = TypeVar("T")


class _ShareTensors(TorchFunctionMode):
    """A deep copy shares the tensors that it finds, except buffers and what shares memory with them: these are on meta,
    and share memory there."""

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        super().__init__()
        nbytes = {storage_id(buffer): buffer.untyped_storage().nbytes() for buffer in buffers}
        self._storages = {key: torch.UntypedStorage(size, device="meta") for key, size in nbytes.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, storage = args[0], self._storages.get(storage_id(args[0]))
        if storage is None or tensor.requires_grad:
            return tensor
        made = torch.empty(0, dtype=tensor.dtype, device="meta")
        return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers are on meta. It shares other tensors with the model."""
    memo: dict[int, Any] = {}
    buffers = [each for each in model.buffers() if type(each) is torch.Tensor and storage_id(each)]
    buffers = [each for each in buffers if not each.requires_grad]
    for tensor in {*model.parameters(), *model.buffers()}.difference(buffers):
        made = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    with _ShareTensors(buffers):
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
