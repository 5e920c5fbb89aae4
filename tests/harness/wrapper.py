"""How the tests of the wrapper wrap a model: the same call for fullshard and for torch, with settings told as data.

`WRAPPERS` are the libraries that have the wrapper. The comparison with unsharded training is that of
`tests.harness.compare`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.compare import LIBRARIES, OURS, WRAPPER, Precision, ShardFunction, Training
from tests.harness.models import MLP, random_batch, seeded

WRAPPERS = {name: library for name, library in LIBRARIES.items() if hasattr(library, WRAPPER)}
OUR_WRAPPER = {name: library for name, library in OURS.items() if name in WRAPPERS}

EACH_WRAPPER = pytest.mark.parametrize("library", WRAPPERS)
ORIGINAL = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
"""Whether the modules keep their original parameters: `use_orig_params`."""
CPU = torch.device("cpu")
SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP")
STRATEGIES = (*SHARDED, "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def wrap(
    fsdp: ModuleType,
    module: nn.Module,
    *,
    strategy: str = "FULL_SHARD",
    original: bool = True,
    precision: Precision | None = None,
    offload: bool = False,
    device: torch.device = CPU,
    flags: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Wrap a module on a device that torch wants to be told; `flags` are more of mixed precision."""
    if precision is not None or flags is not None:
        settings = vars(precision or Precision()).copy()
        del settings["output_dtype"], settings["cast_forward_inputs"]
        options["mixed_precision"] = fsdp.MixedPrecision(**settings, **(flags or {}))
    return fsdp.FullyShardedDataParallel(
        module,
        sharding_strategy=fsdp.ShardingStrategy[strategy],
        cpu_offload=fsdp.CPUOffload(offload_params=offload),
        use_orig_params=original,
        device_id=device,
        **options,
    )


def wrap_blocks(**options: Any) -> ShardFunction:
    """The usual way to wrap: each of `model.blocks` and the model itself, all with the same options."""

    def shard(fsdp: ModuleType, model: Any) -> Any:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap(fsdp, block, **options)
        return wrap(fsdp, model, **options)

    return shard


def wrap_whole(**options: Any) -> ShardFunction:
    """All parameters of a model in one unit."""
    return lambda fsdp, model: wrap(fsdp, model, **options)


def training(shard: ShardFunction, **changes: Any) -> Training:
    """Two steps of the MLP, which is what most cases train."""
    defaults: dict[str, Any] = {
        "build": lambda: seeded(MLP),
        "shard": shard,
        "batch": random_batch(4, 6),
        "steps": 2,
    }
    return Training(**{**defaults, **changes})


def no_sync_before(last: int) -> Callable[[Any, int], AbstractContextManager[object]]:
    """Micro-batches before the last one do not communicate gradients."""
    return lambda model, micro: model.no_sync() if micro < last else nullcontext()


def assert_all_see(observe: Callable[[ModuleType], Any]) -> None:
    """What there is to see, told in plain Python values, is the same with every library."""
    seen = {name: observe(fsdp) for name, fsdp in WRAPPERS.items()}
    for name, value in seen.items():
        assert value == seen["torch"], f"{name} differs from torch"
