"""What the tests of checkpoints and optimizer state share: wrapped models, optimizers by name, damage, comparison."""

from __future__ import annotations

import contextlib
import json
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard import checkpoint
from fullshard.checkpoint.blocks import checksum
from fullshard.wrapper import settings
from fullshard.wrapper.fsdp import FullyShardedDataParallel
from fullshard.wrapper.optim_methods import OptimStateMethods
from tests.harness.models import MLP, random_batch, seeded

CPU = torch.device("cpu")
BATCH = random_batch(4, 6)
SHARDINGS = {"flat": False, "fragments": True}
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.02, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-2}),
}

OURS = SimpleNamespace(
    wrap=FullyShardedDataParallel, methods=OptimStateMethods, settings=settings, strategy=settings.ShardingStrategy
)
TORCHS = SimpleNamespace(
    wrap=torch_fsdp.FullyShardedDataParallel,
    methods=torch_fsdp.FullyShardedDataParallel,
    settings=torch_fsdp,
    strategy=torch_fsdp.ShardingStrategy,
)
LIBRARIES = {"ours": OURS, "torch": TORCHS}
both_ways = pytest.mark.parametrize("use_orig_params", SHARDINGS.values(), ids=SHARDINGS)
libraries = pytest.mark.parametrize("name", LIBRARIES)
to_dict, to_load = OptimStateMethods.optim_state_dict, OptimStateMethods.optim_state_dict_to_load
KINDS = ("FULL", "SHARDED", "LOCAL")


def wrapped(
    library: SimpleNamespace = OURS, build: Callable[[], Any] = MLP, strategy: str = "FULL_SHARD", **options: Any
) -> Any:
    """A model of which each block, and the rest, is a unit."""
    model = seeded(build)
    how = {"device_id": CPU, "sharding_strategy": library.strategy[strategy], **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, block in enumerate(model.blocks):
            model.blocks[index] = library.wrap(block, **how)
        return library.wrap(model, **how)


def save_at(*given: Any, **options: Any) -> Path:
    """Save a checkpoint. Returns its directory."""
    path = checkpoint.save(*given, **options)
    assert isinstance(path, Path)
    return path


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


def rewrite_manifest(path: Path, change: Callable[[Any], Any]) -> None:
    """Let a checkpoint's manifest say something else, with the checksum that fits."""
    fields = json.loads((path / "manifest.json").read_text())["manifest"]
    change(fields)
    text = json.dumps(fields, separators=(",", ":")).encode()
    (path / "manifest.json").write_bytes(b'{"checksum": "%s", "manifest": %s}\n' % (checksum(text).encode(), text))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of 4 MiB on a folder."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def optimizer_of(model: nn.Module, name: str) -> Optimizer:
    cls, options = OPTIMIZERS[name]
    return cls(model.parameters(), **options)


def train(model: nn.Module, optimizer: Optimizer, steps: range, rank: int = 0) -> list[float]:
    """The losses of some steps; with the same ``rank`` everywhere it does not matter how many ranks there are."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*BATCH(10 * step + rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_optimizer(model: Any, name: str, steps: int = 0, rank: int = 0) -> tuple[Any, Optimizer]:
    """A model and an optimizer of its parameters, after some steps."""
    optimizer = optimizer_of(model, name)
    train(model, optimizer, range(steps), rank)
    return model, optimizer


def choose(library: SimpleNamespace, model: nn.Module, kind: str, **config: bool) -> None:
    """What state dicts of ``model`` are to be."""
    settings, prefix = library.settings, kind.capitalize()
    with quiet():
        library.wrap.set_state_dict_type(
            model,
            getattr(settings.StateDictType, f"{kind}_STATE_DICT"),
            getattr(settings, f"{prefix}StateDictConfig")(),
            getattr(settings, f"{prefix}OptimStateDictConfig")(**config),
        )


def assert_same(found: Any, expected: Any, where: str = "state dict") -> None:
    """Two state dicts have the same keys, shapes, dtypes and values."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert set(found) == set(expected), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(expected, Tensor):
        one, other = whole(found), whole(expected)
        assert one.dtype == other.dtype, where
        assert one.shape == other.shape, where
        torch.testing.assert_close(one, other, msg=lambda text: f"{where}: {text}")
    else:
        assert found == expected, where


def whole(value: Any) -> Tensor:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, Tensor) or hasattr(value, "local_shards"):  # a ShardedTensor
        gathered = torch.empty(value.size(), dtype=value.dtype)
        value.gather(out=gathered if torch.distributed.get_rank() == 0 else None)
        torch.distributed.broadcast(gathered, 0)
        return gathered
    return value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
