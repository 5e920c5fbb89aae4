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

TRANSPORTS = ("shm", "p2p", "collective")
_WATCHED = 10.0


def measure_checks(work: Work, world_size: int, rounds: int, watched: float = _WATCHED) -> dict[str, Any]:
    """Seconds of a step with checks and without, by transport: wall of the slowest rank, CPU of all; the watch's CPU.

    Args:
        watched: seconds of training in which the CPU time of the watch is counted.
    """
    by_rank = run_ranks(_measure, world_size, work, rounds, watched)

    def over_ranks(found: Any, *rest: Any, what: str = "") -> Any:
        """What is found on each rank, put together in the innermost lists."""
        if isinstance(found, dict):
            return {name: over_ranks(found[name], *(each[name] for each in rest), what=name) for name in found}
        return list(map(sum if what == "cpu" else max, zip(found, *rest, strict=True)))

    return {
        "ranks": world_size,
        "steps": over_ranks(*(rank["steps"] for rank in by_rank)),
        "watch": max(rank["watch"] for rank in by_rank),
    }


def _measure(work: Work, rounds: int, watched: float) -> dict[str, Any]:
    steps = {transport: _compare(transport, work, rounds) for transport in TRANSPORTS}
    trainer = Trainer(Contender("p2p", "fullshard", "p2p", forced=True), work)
    before, begin = _cpu_of_watch(), time.monotonic()
    last = torch.zeros(())
    while not last:
        trainer.step(trainer.next_batch())
        last = torch.tensor(float(time.monotonic() - begin > watched))
        dist.all_reduce(last, op=dist.ReduceOp.MAX)  # ranks make as many steps as each other
    return {"steps": steps, "watch": (_cpu_of_watch() - before) / (time.monotonic() - begin)}


def _compare(transport: str, work: Work, rounds: int) -> dict[str, Any]:
    """For each check a pair of contenders, without it and with it; the search costs much, which shows in few rounds."""
    trainers = {}
    for name, checks in (("without", "0"), ("with", "1"), ("search", "1")):
        os.environ["FULLSHARD_CHECKS"] = checks
        trainers[name] = Trainer(Contender(name, "fullshard", transport, forced=True), work)
        trainers[name].step(trainers[name].next_batch())  # the first forward reads the variable too
        if name == "search":
            fullshard.detect_nan(trainers[name].model)
        trainers[name].step(trainers[name].next_batch())
    searching = trainers.pop("search")
    found = {"default": _take_turns(trainers, rounds)}
    found["detect_nan"] = _take_turns({"without": trainers["without"], "with": searching}, -(-rounds // 8))
    return found


def _take_turns(trainers: dict[str, Trainer], rounds: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in trainers}
    for number in range(rounds):
        names = list(trainers)
        random.Random(number).shuffle(names)
        for name in names:
            batch = trainers[name].next_batch()
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            trainers[name].step(batch)
            found[name]["cpu"].append(time.process_time() - cpu)
            found[name]["wall"].append(time.perf_counter() - begin)
    return found


def _cpu_of_watch() -> float:
    """Seconds of CPU of the thread that watches over waits."""
    native = next(thread.native_id for thread in threading.enumerate() if thread.name == "fullshard-watch")
    fields = Path(f"/proc/self/task/{native}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
