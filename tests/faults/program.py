"""One rank of a small training program, to which a fault is done at a chosen moment."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.comm import local_ranks
from fullshard.optim import LocalSteps
from tests.harness import HOSTS
from tests.simulated import simulated

#: What may go wrong on one rank.
FAULTS = ("none", "delay", "raise", "kill", "between", "stop", "swap", "leave", "skip", "early", "more")
#: Faults after which every rank trains right.
HARMLESS = ("none", "delay")
#: Faults after which ranks do not run the same: replicas of LocalSteps may.
DIFFERENT = ("swap", "leave", "skip", "more")


@dataclass(frozen=True)
class Case:
    """A program and its fault.

    Args:
        seed: of the model and the batches.
        world: ranks.
        transport: as ``FULLSHARD_TRANSPORT`` says it.
        front_end: ``fully_shard``, ``original``, ``flat``, or ``local``: ``LocalSteps`` of replicas, after each step.
        widths: of the blocks' inner layers.
        micro_batches: for each step of the optimizer.
        fault: one of :data:`FAULTS`; ``between`` kills the rank before its step, to which the others come later.
        rank: to which it is done.
        step: in which.
        block: at which, in forward.
        in_backward: whether at that block in backward, where the fault can be done there.
        store_with_rank_0: whether the store dies with rank 0, as without a launcher.
        wire: whether a wire carries the messages (of ``fully_shard``) and encodes nothing: losses stay as close.
        on_device: whether the CPU is taken for a device with streams.
    """

    seed: int
    world: int
    transport: str
    front_end: str
    widths: tuple[int, ...]
    micro_batches: int
    fault: str
    rank: int
    step: int
    block: int
    in_backward: bool
    store_with_rank_0: bool = False
    wire: bool = False
    on_device: bool = False
    steps: int = 4


def random_case(seed: int) -> Case:
    """The case of a seed."""
    choose = random.Random(seed)
    world, blocks = choose.choice([2, 2, 3]), choose.randint(2, 5)
    case = Case(
        seed,
        world,
        choose.choice(["shm", "p2p", "collective", ""]),
        choose.choice(["fully_shard", "fully_shard", "original", "flat", "local"]),
        # of one size, so that blocks can be taken for each other, or of any
        (choose.choice([8, 48]),) * blocks
        if choose.random() < 0.5
        else tuple(choose.choices([8, 12, 48, 200], k=blocks)),
        choose.choice([1, 1, 2]),
        choose.choice(FAULTS),
        choose.randrange(world),
        choose.randrange(4),
        choose.randrange(blocks),
        choose.random() < 0.5,
        choose.random() < 0.25,
        choose.random() < 0.3,
    )
    if case.transport in ("shm", "p2p") and random.Random(f"hosts of {seed}").random() < 0.3:
        case = replace(case, transport="hosts")
    # On a device, ranks that part are told one pass later.
    if case.transport == "collective" and case.front_end != "local" and case.fault not in DIFFERENT:
        case = replace(case, on_device=random.Random(f"device of {seed}").random() < 0.4)
    return replace(case, fault="between") if case.front_end == "local" and case.fault in DIFFERENT else case


class _Do(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Any) -> Tensor:
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.fault()
        return grads[0], None


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.blocks = nn.ModuleList(map(Block, case.widths))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, is_faulty: bool = False) -> Tensor:
        case, order = self.case, list(range(len(self.blocks)))
        if is_faulty and case.fault == "swap":
            other = (case.block + 1) % len(order)
            order[case.block], order[other] = other, case.block
        if is_faulty and case.fault == "leave":
            order.remove(case.block)
        for index in order:
            happens = is_faulty and index == case.block and case.fault in ("delay", "raise", "kill", "stop")
            if happens and not case.in_backward:
                self._do()
            x = self.blocks[index](x)
            if happens and case.in_backward:
                x = _Do.apply(x, self._do)
        return self.head(x)

    def _do(self) -> None:
        if self.case.fault == "delay":
            time.sleep(3.5)
        elif self.case.fault == "raise":
            raise ValueError("a bad batch")
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.case.fault == "kill" else signal.SIGSTOP)


def _model(case: Case) -> Any:
    """The model of a case; cases are judged side by side, so it draws from a generator of its own."""
    model, generator = Model(case), torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.25, 0.25, generator=generator)
    return model


def _batch(case: Case, step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(((case.seed * 64 + step) * 8 + micro_batch) * 8 + rank)
    return torch.randn(3, 16, generator=generator)


def reference(case: Case) -> list[list[float]]:
    """The losses of each rank, in order, of unsharded training without a fault."""
    model = _model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[list[float]] = [[] for _ in range(case.world)]
    for step in range(case.steps):
        for micro_batch in range(case.micro_batches):
            for rank in range(case.world):
                loss = model(_batch(case, step, micro_batch, rank)).square().mean()
                (loss / case.world).backward()
                losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _sharded(case: Case) -> Any:
    model = _model(case)
    if case.front_end in ("fully_shard", "local"):
        options: dict[str, Any] = {}
        if case.wire:
            options["wire_policy"] = fullshard.WirePolicy("int8", "int8", min_numel=10**9)
        if case.front_end == "local":
            options["mesh"] = init_device_mesh("cpu", (case.world, 1), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fullshard.fully_shard(block, **options)
        return fullshard.fully_shard(model, **options)
    original = case.front_end == "original"
    for index, block in enumerate(model.blocks):
        model.blocks[index] = fullshard.FullyShardedDataParallel(block, use_orig_params=original)
    return fullshard.FullyShardedDataParallel(model, use_orig_params=original)


def train(case: Case, rank: int) -> Iterator[float]:
    """The losses of a rank, as they come."""
    model = _sharded(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if case.front_end == "local":
        LocalSteps(model, optimizer, every=1)
    for step in range(case.steps):
        is_faulty = rank == case.rank and step == case.step
        if is_faulty and case.fault == "early":
            return
        if is_faulty and case.fault == "between":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == case.step and case.fault == "between":
            time.sleep(0.7)  # the system has closed the connections meanwhile
        for micro_batch in range(case.micro_batches):
            if is_faulty and case.fault == "skip" and micro_batch == case.micro_batches - 1:
                continue
            loss = model(_batch(case, step, micro_batch, rank), is_faulty and micro_batch == 0).square().mean()
            loss.backward()
            yield loss.item()
        if is_faulty and case.fault == "more":
            model(_batch(case, step, 7, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def _joined(case: Case, rank: int, port: int) -> Iterator[None]:
    is_master = case.store_with_rank_0 and rank == 0
    store = dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(str(case.seed), store), rank=rank, world_size=case.world)
    yield


def run_rank(case: Case, rank: int, port: int, folder: str) -> None:
    """Runs in a process of its own; writes what came of it to ``folder``."""
    said = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    gc.freeze()  # to walk what was imported would copy the pages of the server
    torch.set_num_threads(1)
    if not case.store_with_rank_0:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as a launcher says it
    os.environ["FULLSHARD_HANG_TIMEOUT"] = "8"
    os.environ["FULLSHARD_WAIT_WARNING"] = "2"
    os.environ["FULLSHARD_TRANSPORT"] = case.transport
    if case.transport == "hosts":  # those who share memory; the watch sees that all are on one host
        local_ranks.host_id = lambda: HOSTS[rank]
    losses: list[float] = []
    error, at = "", 0.0
    try:
        with _joined(case, rank, port), simulated("checked") if case.on_device else nullcontext():
            losses.extend(train(case, rank))
            at = time.monotonic()
            # as a program does that saves its model: ranks that are done wait for the others
            dist.barrier() if case.fault in HARMLESS else None
    except Exception as raised:
        error, at = f"{type(raised).__name__}: {raised}", time.monotonic()
        sys.excepthook(type(raised), raised, raised.__traceback__)
    Path(f"{folder}/{rank}.json").write_text(json.dumps({"losses": losses, "error": error, "at": at}))
    sys.stdout.flush()
    import atexit

    atexit._run_exitfuncs()
    os._exit(1 if error else 0)
