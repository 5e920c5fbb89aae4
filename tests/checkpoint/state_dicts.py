"""What the tests of state dicts share: a model with everything that a state dict may hold, and ways to wrap it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.harness import World
from tests.harness.models import seeded
from tests.harness.wrapper import HYBRID, wrap

KINDS = ("FULL", "SHARDED", "LOCAL")


class Net(nn.Module):
    """Odd sizes, a single number, a tie within the root's unit, batch norms, buffers, one of them not persistent."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.25]))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(columns, rows), nn.BatchNorm1d(rows), nn.Tanh())
            for columns, rows in [(6, 5), (5, width)]
        )
        self.register_buffer("shift", torch.rand(width))
        self.register_buffer("scratch", torch.rand(3), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.second(torch.tanh(self.first(x) + self.get_buffer("shift"))) * self.gain


def build(seed: int = 0) -> Net:
    """Equal on all ranks, with statistics that are not those of a new one."""
    model = seeded(Net, seed)
    for index, block in enumerate(model.blocks):
        block[1].running_mean.copy_(torch.linspace(0.0, 1.0 + seed, block[1].num_features))
        block[1].num_batches_tracked.fill_(index + 1 + seed)
    return model


def wrapped(fsdp: ModuleType, model: Any, **options: Any) -> Any:
    """Each block by itself, and the model."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(fsdp, block, **options)
    return wrap(fsdp, model, **options)


def mesh_options(world: World, strategy: str = "FULL_SHARD", kind: str = "SHARDED") -> dict[str, Any]:
    """With a mesh torch makes DTensors for sharded state dicts, and no local ones; hybrids replicate over two nodes."""
    if kind == "LOCAL":
        return {}
    if strategy in HYBRID:
        return {"device_mesh": world.mesh(2, world.size // 2, names=("replicate", "shard"))}
    return {"device_mesh": world.mesh()}


def speaking(fsdp: ModuleType, model: nn.Module, kind: str, **config: bool) -> AbstractContextManager[Any]:
    """The context in which state dicts of `model` are of a kind."""
    name = kind.capitalize() + "StateDictConfig"
    return fsdp.FullyShardedDataParallel.state_dict_type(
        model, fsdp.StateDictType[f"{kind}_STATE_DICT"], getattr(fsdp, name)(**config)
    )


def look(state: Mapping[str, Any]) -> dict[str, Any]:
    """Every value of a state dict, what it is, and this rank's part of it, in order."""
    seen = {}
    for name, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        placements = value.placements if isinstance(value, DTensor) else None
        seen[name] = (placements, list(value.shape), value.dtype, list(local.shape), local.tolist())
    return seen


def whole(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The values of a state dict without sharding. All ranks call it."""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def assert_equal_states(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names in the same order, shapes, dtypes and values."""
    assert list(found) == list(expected)
    for name, value in found.items():
        assert (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype), name
        assert torch.equal(value, expected[name]), name


def is_compact(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory, so that saving it saves nothing else."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().nbytes() == local.nbytes
