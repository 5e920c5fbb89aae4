"""Beginning and ending: the time it takes to shard a model, and to save and load a checkpoint of it.

Contenders take turns in the same processes. Checkpoints are torch's distributed ones (DCP), of the parameters, made in
the way each library documents; the files lie in a temporary folder.
"""

from __future__ import annotations

import gc
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders import DDP, FSDP1, FSDP2, Contender, ours
from benchmarks.models import Work
from benchmarks.ranks import run_ranks

_PARTS = ("wrap", "first step", "save", "load")


def measure_startup(work: Work, world_size: int, rounds: int) -> dict[str, Any]:
    """Seconds of the slowest rank, for each contender and part a number for each round."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank = run_ranks(_measure, world_size, work, rounds, folder)
    contenders = {
        name: {
            part: [max(values) for values in zip(*(rank[name][part] for rank in by_rank), strict=True)]
            for part in found
        }
        for name, found in by_rank[0].items()
    }
    return {"ranks": world_size, "model_bytes": work.model_bytes, "contenders": contenders}


def _measure(work: Work, rounds: int, folder: str) -> dict[str, dict[str, list[float]]]:
    contenders = [*ours(every_transport=False), FSDP2, FSDP1, DDP]
    found: dict[str, dict[str, list[float]]] = {each.name: {part: [] for part in _PARTS} for each in contenders}
    for number in range(-1, rounds):
        random.Random(number).shuffle(contenders)
        for contender in contenders:
            seconds = _live(contender, work, Path(folder) / "checkpoint")
            gc.collect()
            if number >= 0:
                for part, value in zip(_PARTS, seconds, strict=True):
                    found[contender.name][part].append(value)
    return found


def _live(contender: Contender, work: Work, folder: Path) -> list[float]:
    """Seconds of each part."""
    model = work.build()
    blocks = list(model.blocks)
    sharded: list[nn.Module] = []
    seconds = [_timed(lambda: sharded.append(contender.wrap(model, blocks)))]
    batch = work.batch(dist.get_rank(), 0)
    seconds.append(_timed(lambda: sharded[0](batch).backward()))
    sharded[0].zero_grad()
    seconds.append(_timed(lambda: save(_state(contender, sharded[0]), checkpoint_id=folder)))
    seconds.append(_timed(lambda: load(_state(contender, sharded[0]), checkpoint_id=folder)))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return seconds


def _state(contender: Contender, model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters as DCP wants them: every rank its shards."""
    if contender.library == "FSDP1":
        state: dict[str, torch.Tensor] = get_model_state_dict(model)  # type: ignore[assignment]
        return state
    return (model.module if isinstance(model, DistributedDataParallel) else model).state_dict()


def _timed(run: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
