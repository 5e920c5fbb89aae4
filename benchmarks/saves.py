"""What saves and loads of ``fullshard.checkpoint`` cost beside raw writes and reads of the same bytes, and beside DCP.

Every contender writes the same shards of the same sharded model and forces them to the disk, then reads them into the
same memory; they take turns. *Raw* is a write of each tensor's memory to one file a rank, and a read of each back. What
was just written lies in the memory of the machine, so that a read is a copy. Counted are the wall time of the slowest
rank and the CPU time of all ranks.
"""

from __future__ import annotations

import os
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
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

import fullshard
from benchmarks.ranks import run_ranks
from fullshard import checkpoint
from fullshard.checkpoint.blocks import BLOCK
from fullshard.disk.file import bytes_of
from fullshard.group.parameter import local_tensor

_FIGURES = ("save wall", "save cpu", "load wall", "load cpu")


def measure_saves(models: dict[str, tuple[int, int]], world_size: int, rounds: int) -> dict[str, Any]:
    """For each model, how many square weights of which width, and each contender, a number for each round."""
    found: dict[str, Any] = {}
    for name, (count, width) in models.items():
        with tempfile.TemporaryDirectory(dir=os.environ.get("FULLSHARD_BENCH_DISK")) as folder:
            by_rank = run_ranks(_measure, world_size, count, width, rounds, folder)
        found[name] = {
            contender: {
                what: [(max if "wall" in what else sum)(each) for each in zip(*values, strict=True)]
                for what in figures
                for values in [[rank[contender][what] for rank in by_rank]]
            }
            for contender, figures in by_rank[0].items()
        }
        found[name]["bytes"] = 4 * count * width * width
    return {"ranks": world_size, "models": found}


class _Weights(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) for _ in range(count))


def _measure(count: int, width: int, rounds: int, folder: str) -> dict[str, dict[str, list[float]]]:
    place = Path(folder)
    near = Path("/dev/shm") / place.name
    model = _Weights(count, width)
    fullshard.fully_shard(model)
    contenders: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "raw": (lambda: _write(model, place), lambda: _read(model, place)),
        "fullshard": (lambda: checkpoint.save(place, model), lambda: checkpoint.load(place, model)),
        "DCP": (
            lambda: save_shards({"model": get_model_state_dict(model)}, checkpoint_id=place),
            lambda: _load_dcp(model, place),
        ),
        "fullshard, near": (
            lambda: checkpoint.save(place, model, step=1, replicas=near),
            lambda: checkpoint.load(place, model, replicas=near),
        ),
        "fullshard, wait=False": (lambda: checkpoint.save(place, model, wait=False), checkpoint.wait_until_finished),
    }
    found: dict[str, dict[str, list[float]]] = {name: {what: [] for what in _FIGURES} for name in contenders}
    for number in range(rounds + 1):
        order = list(contenders)
        random.Random(number).shuffle(order)
        for name in order:
            figures = [each for call in contenders[name] for each in _timed(call)]
            dist.barrier()
            if dist.get_rank() == 0:
                for path in place.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            dist.barrier()
            if number:  # the first round imports
                for what, value in zip(_FIGURES, figures, strict=True):
                    found[name][what].append(value)
    checkpoint.forget_replicas(near)
    return found


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def _write(model: nn.Module, place: Path) -> None:
    file = os.open(place / f"{dist.get_rank()}", os.O_WRONLY | os.O_CREAT)
    for param in model.parameters():
        data = bytes_of(local_tensor(param).detach())
        for start in range(0, len(data), BLOCK):  # the fastest of the sizes that were tried
            os.write(file, data[start : start + BLOCK])
    os.fsync(file)
    os.close(file)
    dist.barrier()


def _read(model: nn.Module, place: Path) -> None:
    file = os.open(place / f"{dist.get_rank()}", os.O_RDONLY)
    for param in model.parameters():
        data = bytes_of(local_tensor(param).detach())
        for start in range(0, len(data), BLOCK):
            os.readv(file, [data[start : start + BLOCK]])
    os.close(file)
    dist.barrier()


def _load_dcp(model: nn.Module, place: Path) -> None:
    state = get_model_state_dict(model)
    load_shards({"model": state}, checkpoint_id=place)
    set_model_state_dict(model, state)
