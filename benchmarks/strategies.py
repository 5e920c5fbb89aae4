"""What a step of each ZeRO stage costs beside DDP, and beside torch's ZeroRedundancyOptimizer around DDP.

All train the same model in the same processes and take turns step by step; ratios are taken within a round. A rank has
to send *bytes* (P: those of all parameters), and holds *memory* between a backward and the step, by ``malloc``'s count
in processes that train nothing else::

    python -m benchmarks.strategies                          # sockets between two ranks
    python -m benchmarks.strategies --transport shm --optimizer AdamW --ranks 4
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks import resident
from benchmarks.models import COMMUNICATION, TINY, Work
from benchmarks.ranks import run_ranks
from benchmarks.traffic import Traffic
from fullshard import fully_shard

DDP, REDUNDANT = "DDP", "DDP with ZeroRedundancyOptimizer"
#: The options of ``fully_shard``, by the name of a contender.
Options = Mapping[str, Mapping[str, Any]]
STAGES: Options = {f"stage {stage}": {"zero_stage": stage} for stage in range(4)}
_WARM_UP = 2

#: By contender, the seconds of each of its steps, and the processor's.
Turns = dict[str, tuple[list[float], list[float]]]


class Trainer:
    """One contender's model and optimizer, on this rank."""

    def __init__(self, name: str, work: Work, optimizer: str, options: Options) -> None:
        self._work, model = work, work.build()
        self.model = self.shard(name, [*model.blocks, model], options)
        make: Any = getattr(torch.optim, optimizer)
        if name == REDUNDANT:
            self._optimizer = ZeroRedundancyOptimizer(self.model.parameters(), make, lr=1e-3)
        else:
            self._optimizer = make(self.model.parameters(), lr=1e-3)

    def shard(self, name: str, modules: list[nn.Module], options: Options) -> nn.Module:
        """Shard the blocks of a model and the model, which is the last of the modules, or wrap it; returns it."""
        if name not in options:
            return DistributedDataParallel(modules[-1])
        for module in modules:
            fully_shard(module, **options[name])
        return modules[-1]

    def step(self, number: int, held: list[float] | None = None) -> float:
        """Seconds of a step. What malloc holds between its backward and the optimizer is added to ``held``."""
        batch = self._work.batch(dist.get_rank(), number)
        dist.barrier()
        begin = time.perf_counter()
        self.model(batch).backward()
        if held is not None:
            held.append(resident.bytes_allocated())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin


def measure(
    work: Work,
    world_size: int,
    optimizer: str,
    rounds: int,
    others: tuple[str, ...] = (DDP, REDUNDANT),
    options: Options = STAGES,
    run: Callable[..., list[Turns]] = run_ranks,
) -> dict[str, dict[str, float]]:
    """For each contender its wall and CPU time by those of DDP, and its bytes and memory by those of all parameters.
    ``run`` runs the turns on ranks, as ``run_ranks`` does."""
    names = *others, *options
    turns = run(take_turns, world_size, work, optimizer, rounds, names, options)
    walls = {name: [max(each) for each in zip(*(rank[name][0] for rank in turns), strict=True)] for name in names}
    cpus = {name: [sum(each) for each in zip(*(rank[name][1] for rank in turns), strict=True)] for name in names}
    found: dict[str, dict[str, float]] = {}
    for name in names:
        alone = run_ranks(_count, world_size, name, work, optimizer, options)
        found[name] = {
            "wall": median(mine / ddp for mine, ddp in zip(walls[name], walls[DDP], strict=True)),
            "cpu": median(mine / ddp for mine, ddp in zip(cpus[name], cpus[DDP], strict=True)),
            "bytes": max(sent for sent, _ in alone) / work.model_bytes,
            "memory": max(held for _, held in alone) / work.model_bytes,
        }
    return found


def take_turns(work: Work, optimizer: str, rounds: int, names: tuple[str, ...], options: Options) -> Turns:
    """Train all contenders on this rank, in an order that is shuffled anew in every round."""
    trainers = {name: Trainer(name, work, optimizer, options) for name in names}
    found: Turns = {name: ([], []) for name in trainers}
    for number in range(rounds + _WARM_UP):
        for name in random.Random(number).sample([*trainers], len(trainers)):
            begin = time.process_time()
            seconds = trainers[name].step(number)
            if number >= _WARM_UP:
                found[name][0].append(seconds)
                found[name][1].append(time.process_time() - begin)
    return found


def _count(name: str, work: Work, optimizer: str, options: Options) -> tuple[float, float]:
    """Bytes that this rank sends in a step, and those that it holds before the optimizer's."""
    before, held = resident.bytes_allocated(), list[float]()
    trainer = Trainer(name, work, optimizer, options)
    for number in range(_WARM_UP):
        trainer.step(number)
    with Traffic() as traffic:
        trainer.step(_WARM_UP)
    trainer.step(_WARM_UP + 1, held)
    return traffic.asked, held[0] - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--transport", default="p2p", choices=["p2p", "shm", "collective"])
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    given = parser.parse_args()
    work = TINY if given.quick else COMMUNICATION
    os.environ["FULLSHARD_TRANSPORT"] = given.transport
    print_table(
        measure(work, given.ranks, given.optimizer, given.rounds), given.ranks, given.transport, given.optimizer
    )


def print_table(found: Mapping[str, Mapping[str, float]], ranks: int, how: str, optimizer: str) -> None:
    """Print what was measured."""
    print(f"{ranks} ranks, {how}, {optimizer}; wall and CPU time in those of DDP, the rest in P")
    print(f"{'':<34}{'wall':>8}{'CPU':>8}{'bytes':>8}{'memory':>8}")
    for name, each in found.items():
        print(f"{name:<34}" + "".join(f"{each[key]:>8.2f}" for key in ("wall", "cpu", "bytes", "memory")))


if __name__ == "__main__":
    main()
