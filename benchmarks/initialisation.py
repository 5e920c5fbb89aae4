"""Beginning: the time and the memory that it takes to shard a model, from the CPU and from the meta device.

Contenders take turns in the same processes, in which freed memory goes back to the kernel at once. From the CPU, a
model with its values is handed over; what comes on top of it at the peak is told. From meta, a model without memory is
sharded, and then every rank makes the values of what it keeps; the whole peak is told.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

import torch
from torch import nn

from benchmarks import resident
from benchmarks.contenders import DDP, FSDP1, FSDP2, Contender, ours
from benchmarks.models import TINY, Work
from benchmarks.ranks import run_ranks

_WAYS = ("cpu", "meta")


def measure_initialisation(work: Work, world_size: int, rounds: int) -> dict[str, Any]:
    """For each contender and way seconds of the slowest rank and bytes of the one with most, for each round."""
    by_rank = run_ranks(_measure, world_size, work, rounds)
    contenders = {
        name: {
            what: [max(values) for values in zip(*(rank[name][what] for rank in by_rank), strict=True)]
            for what in first
        }
        for name, first in by_rank[0].items()
    }
    return {
        "ranks": world_size,
        "model_bytes": work.model_bytes,
        "group_bytes": work.block_bytes,
        "contenders": contenders,
    }


def _measure(work: Work, rounds: int) -> dict[str, dict[str, list[float]]]:
    resident.return_what_is_freed()
    contenders = [*ours(every_transport=False), FSDP2, FSDP1, DDP]
    keys = [f"{way} {what}" for way in _WAYS for what in ("seconds", "bytes")]
    found: dict[str, dict[str, list[float]]] = {each.name: {key: [] for key in keys} for each in contenders}
    for number in range(-1, rounds):
        random.Random(number).shuffle(contenders)
        for contender in contenders:
            for way in _WAYS:
                seconds, peak = _begin(contender, work if number >= 0 else TINY, way)
                if number >= 0:
                    found[contender.name][f"{way} seconds"].append(seconds)
                    found[contender.name][f"{way} bytes"].append(peak)
    return found


def _begin(contender: Contender, work: Work, way: str) -> tuple[float, float]:
    """Seconds, and bytes at the peak above what was there: the whole model on the CPU, or nothing on meta."""
    if way == "meta" and contender.library == "DDP":
        return math.nan, math.nan  # it has no such way: every rank makes the whole model
    with torch.device(way):
        model = work.build()
    resident.settle()
    before, begin = resident.bytes_now(), time.perf_counter()
    with resident.Peak(each_touches_its_own=True) as peak:
        sharded = contender.wrap(model, list(model.blocks), materialize=_materialize)
        if way == "meta" and contender.library != "FSDP1":  # which has materialized each group as it came
            sharded.to_empty(device="cpu")
            _draw(sharded)
    seconds = time.perf_counter() - begin
    del model, sharded
    resident.settle()
    return seconds, peak.bytes - before


def _draw(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.1, 0.1)


def _materialize(module: nn.Module) -> None:
    """One module of a model on meta, without its children."""
    if any(param.is_meta for param in module.parameters(recurse=False)):
        module.to_empty(device=torch.device("cpu"), recurse=False)
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.uniform_(-0.1, 0.1)
