"""One step of training: its wall time, its CPU time, its page faults, and the bytes it moves.

All contenders live in the same processes and take turns step by step, in an order that is shuffled anew in every round,
so that whatever disturbs the machine disturbs all alike; ratios are taken within a round.
"""

from __future__ import annotations

import random
import resource
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.contenders import ALONE, DDP, FSDP1, FSDP2, Contender, ours
from benchmarks.models import Work
from benchmarks.ranks import run_ranks
from benchmarks.traffic import Traffic, device_bytes

_WARM_UP = 1  # and one in which bytes are counted
_KEPT_STEPS = 2


@dataclass
class Steps:
    """What one rank saw of one contender, a number for each round.

    Args:
        wall: seconds from the moment all ranks begin to the end of this rank's step.
        cpu: seconds of all threads of this rank.
        faults: page faults that needed no disk.
        kept_faults: the same in steps that keep the memory of gradients, ``zero_grad(set_to_none=False)``.
        wire: bytes that passed the loopback device for all ranks, or nothing where they cannot be read.
        asked: bytes that this rank has to send in a step.
        copied: bytes that the step copies within this rank.
        loss: of the last round, equal for all that train together.
    """

    transport: str
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    kept_faults: list[int] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    asked: float = 0
    copied: int = 0
    loss: float = 0
    unknown: list[str] = field(default_factory=list)


def measure_steps(work: Work, world_size: int, rounds: int, keep: bool = False) -> dict[str, Any]:
    """Steps of every contender; in the result times are of the slowest rank, counts of the average one.

    Args:
        keep: count page faults of steps that keep the memory of gradients too.
    """
    by_rank = run_ranks(_measure, world_size, work, rounds, keep)
    contenders: dict[str, Any] = {}
    for name, first in by_rank[0].items():
        ranks = [each[name] for each in by_rank]
        contenders[name] = {
            "transport": first.transport,
            "wall": [max(values) for values in zip(*(rank.wall for rank in ranks), strict=True)],
            "cpu": [sum(values) / world_size for values in zip(*(rank.cpu for rank in ranks), strict=True)],
            "faults": [sum(values) / world_size for values in zip(*(rank.faults for rank in ranks), strict=True)],
            "kept_faults": [sum(each) / world_size for each in zip(*(rank.kept_faults for rank in ranks), strict=True)],
            "wire": [value / world_size / work.model_bytes for value in first.wire],
            "asked": sum(rank.asked for rank in ranks) / world_size / work.model_bytes,
            "copied": sum(rank.copied for rank in ranks) / world_size / work.model_bytes,
            "loss": sum(rank.loss for rank in ranks) / world_size,
            "unknown": first.unknown,
        }
    own = contenders[ALONE.name]["copied"]
    for values in contenders.values():
        values["copied"] -= own  # what the model itself copies
    return {"ranks": world_size, "model_bytes": work.model_bytes, "contenders": contenders}


class Trainer:
    """One contender's model and optimizer, on this rank."""

    def __init__(self, contender: Contender, work: Work) -> None:
        self.contender = contender
        self._work = work
        model = work.build()
        self.model: nn.Module = contender.wrap(model, list(model.blocks))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self._steps = 0

    def next_batch(self) -> torch.Tensor:
        self._steps += 1
        return self._work.batch(dist.get_rank(), self._steps)

    def step(self, batch: torch.Tensor, keep_gradients: bool = False) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=not keep_gradients)
        return loss.detach()


def _measure(work: Work, rounds: int, keep: bool) -> dict[str, Steps]:
    contenders = [*ours(), FSDP2, FSDP1, DDP, ALONE]
    trainers = [Trainer(contender, work) for contender in contenders]
    found = {contender.name: Steps(contender.transport) for contender in contenders}
    for trainer in trainers:
        for _ in range(_WARM_UP):
            trainer.step(trainer.next_batch())
    for trainer in trainers:
        _count(trainer, found[trainer.contender.name])
    for number in range(rounds):
        random.Random(number).shuffle(trainers)
        for trainer in trainers:
            _take_turn(trainer, found[trainer.contender.name])
    for trainer in trainers if keep else ():
        _keep_gradients(trainer, found[trainer.contender.name])
    return found


def _count(trainer: Trainer, steps: Steps) -> None:
    batch = trainer.next_batch()
    with Traffic() as traffic:
        trainer.step(batch)
    steps.asked, steps.copied, steps.unknown = traffic.asked, traffic.copied, sorted(traffic.unknown)


def _keep_gradients(trainer: Trainer, steps: Steps) -> None:
    trainer.contender.settle_heap()
    for number in range(2 + _KEPT_STEPS):
        batch = trainer.next_batch()
        before = _faults()
        trainer.step(batch, keep_gradients=True)
        if number > 1:  # the first makes those that are kept, and the second comes upon what that left of the heap
            steps.kept_faults.append(_faults() - before)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _take_turn(trainer: Trainer, steps: Steps) -> None:
    trainer.contender.settle_heap()
    trainer.step(trainer.next_batch())  # not timed: what it leaves in caches and in the heap is its own
    batch = trainer.next_batch()
    dist.barrier()
    sent = device_bytes()
    dist.barrier()
    faults = _faults()
    cpu, wall = time.process_time(), time.perf_counter()
    loss = trainer.step(batch)
    steps.wall.append(time.perf_counter() - wall)
    steps.cpu.append(time.process_time() - cpu)
    steps.faults.append(_faults() - faults)
    steps.loss = loss.item()
    dist.barrier()
    if sent is not None:
        steps.wire.append((device_bytes() or 0) - sent)
