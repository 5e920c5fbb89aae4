"""What the checks of a step cost: the comparison of the ranks, the watch over waits, and the search for NaN.

Two models of one kind take turns step by step, one of them with checks and one without.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fullshard
from benchmarks.contenders import Contender
from benchmarks.models import Work
from benchmarks.ranks import run_ranks
from benchmarks.steps import Trainer

TRANSPORTS = ("host", "p2p", "collective")
_WATCHED = 10.0


def measure_checks(work: Work, world_size: int, rounds: int, watched: float = _WATCHED) -> dict[str, Any]:
    """Seconds of a step of the slowest rank, by transport, with checks and without; and the CPU of the watch.

    Args:
        watched: seconds of training in which the CPU time of the watch is counted.
    """
    by_rank = run_ranks(_measure, world_size, work, rounds, watched)
    first = by_rank[0]["steps"]
    steps = {
        transport: {
            name: {
                "wall": [max(each) for each in zip(*(rank["steps"][transport][name] for rank in by_rank), strict=True)]
            }
            for name in first[transport]
        }
        for transport in first
    }
    return {"ranks": world_size, "steps": steps, "watch": max(rank["watch"] for rank in by_rank)}


def _measure(work: Work, rounds: int, watched: float) -> dict[str, Any]:
    steps = {transport: _take_turns(transport, work, rounds) for transport in TRANSPORTS}
    trainer = Trainer(Contender("p2p", "fullshard", "p2p", forced=True), work)
    before, begin = _cpu_of_watch(), time.monotonic()
    last = torch.zeros(())
    while not last:
        trainer.step(trainer.next_batch())
        last = torch.tensor(float(time.monotonic() - begin > watched))
        dist.all_reduce(last, op=dist.ReduceOp.MAX)  # ranks make as many steps as each other
    return {"steps": steps, "watch": (_cpu_of_watch() - before) / (time.monotonic() - begin)}


def _take_turns(transport: str, work: Work, rounds: int) -> dict[str, list[float]]:
    trainers = {}
    for name, checks in (("without", "0"), ("with", "1"), ("and detect_non_finite", "1")):
        os.environ["FULLSHARD_CHECKS"] = checks
        trainers[name] = Trainer(Contender(name, "fullshard", transport, forced=True), work)
        trainers[name].step(trainers[name].next_batch())  # the first forward reads the variable too
        if name == "and detect_non_finite":
            fullshard.detect_non_finite(trainers[name].model)
        trainers[name].step(trainers[name].next_batch())
    found: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(rounds):
        names = list(trainers)
        random.Random(number).shuffle(names)
        for name in names:
            batch = trainers[name].next_batch()
            dist.barrier()
            begin = time.perf_counter()
            trainers[name].step(batch)
            found[name].append(time.perf_counter() - begin)
    return found


def _cpu_of_watch() -> float:
    """Seconds of CPU of the thread that watches over waits."""
    native = next(thread.native_id for thread in threading.enumerate() if thread.name == "fullshard-watch")
    fields = Path(f"/proc/self/task/{native}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
