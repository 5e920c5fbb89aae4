"""A program that trains on an elastic job, and what goes wrong in it: run by :mod:`tests.elastic.jobs`.

Its one argument is JSON: ``steps``, ``replicas``, ``directory``, ``pause`` (seconds between steps), ``micro_batches``,
``groups`` (which modules are a group of their own, or ``wrapped``), ``host`` (a pretended one), ``copy_every``,
``saved`` (where a checkpoint is saved after each second step), ``every``, ``quorum`` and ``grace`` (of rounds, if
``every`` is not 0), ``processes`` (that find each other in the directory, or none), ``device`` (a simulated one, or
none) and ``faults``: triples of a step, a place and what happens there: a signal, the seconds that the process sleeps,
or ``cut``, and perhaps the seconds after which the network of its host is there again. At the place ``time`` it happens
in another thread, so many milliseconds after the process has begun to train as the first number says. Prints a line of
JSON for the beginning, each micro-batch, each step, each fault and the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard import FullyShardedDataParallel, checkpoint, fully_shard, platforms
from fullshard.elastic import Elastic, ElasticError, LocalRounds
from fullshard.figures import listeners_for
from fullshard.group.parameter import local_tensor
from fullshard.schedule.unit import schedule_of
from tests.hosts.hosts import INTERFACE
from tests.simulated import simulated

torch.set_num_threads(1)


class Block(nn.Module):
    """Uneven shards, buffers that change, random numbers, and a layer that some micro-batches leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(16), nn.Linear(16, 33), nn.Linear(33, 16)
        self.extra, self.dropout = nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, with_extra: bool) -> torch.Tensor:
        x = x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return x + self.extra(x) if with_extra else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, with_extra: bool) -> torch.Tensor:
        x = self.frozen(x)
        for block in self.blocks:
            x = block(x, with_extra)
        return x


def tell(**said: Any) -> None:
    os.write(1, (json.dumps({**said, "time": time.time()}) + "\n").encode())


def train(plan: Mapping[str, Any]) -> None:
    with simulated(device) if (device := plan.get("device")) else nullcontext():
        _train(plan)


def _train(plan: Mapping[str, Any]) -> None:
    faults = [tuple(each) for each in plan["faults"]]
    running = [0, 0]  # the step and the number of the micro-batch

    def do(what: str) -> None:
        if what.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, what))
        elif what.startswith("cut"):
            _, _, seconds = what.partition(" ")
            again = f"; (sleep {seconds}; ip link set {INTERFACE} up) > /dev/null 2>&1 &" if seconds else ""
            subprocess.run(["sh", "-c", f"ip link set {INTERFACE} down{again}"], check=True)
        else:
            time.sleep(float(what))

    def at(step: int, place: str) -> None:
        for fault in [each for each in faults if each[:2] == (step, place)]:
            faults.remove(fault)
            tell(fault=fault)
            do(fault[2])

    def start_timers() -> list[threading.Timer]:
        timers = []
        for fault in [each for each in faults if each[1] == "time"]:
            timers.append(
                timer := threading.Timer(fault[0] / 1000, lambda fault=fault: (tell(fault=fault), do(fault[2])))
            )
            timer.daemon = True
            timer.start()
        return timers

    def inside(*_: Any) -> None:
        at(running[0], f"inside {running[1]}")

    def backward(step: int, number: int, _: torch.Tensor) -> None:
        at(step, f"backward {number}")

    platforms.pretended_host = plan["host"]
    elastic = Elastic(replicas=plan["replicas"], directory=plan["directory"], processes=plan.get("processes"))
    tell(begun=elastic.rank, shard=elastic.shard)
    torch.manual_seed(0)
    model: nn.Module = Model()
    model.blocks[1].register_forward_pre_hook(inside)
    if plan["groups"] == "wrapped":
        model.blocks = nn.ModuleList(FullyShardedDataParallel(block, use_orig_params=True) for block in model.blocks)
        model = FullyShardedDataParallel(model, use_orig_params=True)
    else:
        for block in model.blocks if plan["groups"] == "blocks" else ():
            fully_shard(block)
        fully_shard(model)
    micro_batches, saved = plan["micro_batches"], plan.get("saved") or None
    params = [each for each in model.parameters() if each.requires_grad]
    inner = optimizer = torch.optim.AdamW(params, lr=1e-2)
    local = None
    if every := plan.get("every", 0):
        optimizer = torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)
        local = LocalRounds(inner, every=every, quorum=plan["quorum"], grace=plan["grace"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    try:
        stored = {"elastic": elastic, "scheduler": scheduler}

        def load() -> None:
            checkpoint.load(saved, model, optimizer, state=stored)

        def save() -> None:
            checkpoint.save(saved, model, optimizer, step=elastic.step, state=stored)

        more = {"load": load if saved else None, "copy_every": plan.get("copy_every", 0), "local": local}
        elastic.begin(model, optimizer, micro_batches=micro_batches, state={"scheduler": scheduler}, **more)
        listeners_for(schedule_of(model, "train")).append(lambda figures: tell(figures=figures))
        timers = start_timers()
        for step in elastic.steps(plan["steps"]):
            time.sleep(plan["pause"])
            with step:
                at(step.number, "begin")
                for micro_batch in step:
                    tell(ran=[micro_batch.step, micro_batch.rank, micro_batch.number])
                    generator = torch.Generator().manual_seed(hash(micro_batch[:3]) % 2**31)
                    x = torch.randn(8, 16, generator=generator)
                    at(step.number, f"forward {micro_batch.number}")
                    running[:] = step.number, micro_batch.number
                    replica = micro_batch.rank // elastic.shards
                    output = model(x, (micro_batch.step + micro_batch.number + replica) % 3 == 0)
                    output.register_hook(partial(backward, step.number, micro_batch.number))
                    output.square().mean().div(micro_batches).backward()
                    if local is not None and micro_batch.is_last:
                        inner.step()
                        inner.zero_grad()
                at(step.number, "clip")
                step.clip_grad_norm_(0.1 if local is None else 10.0)
                at(step.number, "step")
                optimizer.step()
                at(step.number, "stepped")
                scheduler.step()
                at(step.number, "end")
            if elastic.step > step.number:  # it is not repeated
                tell(step=step.number, shard=elastic.shard)
                if saved and elastic.step % 2 == 0:
                    at(step.number, "save")
                    elastic.save(save)
    except ElasticError as error:
        tell(error=str(error))
        sys.exit(3)
    states = [optimizer.state.get(param, {}) for param in params]  # a loaded one has another order
    state = [each[name] for each in states for name in sorted(each) if isinstance(each[name], torch.Tensor)]
    tensors = [getattr(each, "_local_tensor", each) for each in (*model.parameters(), *model.buffers(), *state)]
    data = b"".join(each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors)
    digest = hashlib.sha256(data + str(scheduler.state_dict()["_last_lr"]).encode()).hexdigest()[:16]
    values = [each.tolist() for each in map(local_tensor, params)] if local is not None else []
    tell(ended=elastic.rank, shard=elastic.shard, step=elastic.step, digest=digest, values=values)
    for timer in timers:  # after close(), signals do what they do in any program
        timer.cancel()
    elastic.close()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
