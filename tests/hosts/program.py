"""A small training for several hosts: each rank prints its loss in each step. One rank may fail in one of them."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import checkpoint, fully_shard_blocks


def bad_batch() -> None:
    raise ValueError("bad batch")


#: What a rank may do in the step ``--at``, and where.
FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(1000),
    "raise": bad_batch,
}
PLACES = ("step", "forward", "backward", "optimizer", "summon", "save")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.0, help="how long a step takes at least")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--replicas", type=Path)
    parser.add_argument("--mesh", type=int, nargs=2, help="replicas, and ranks of each")
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--place", choices=PLACES)
    parser.add_argument("--rank", type=int, default=0, help="that fails")
    parser.add_argument("--at", type=int, default=3, help="the step in which it fails")
    options = parser.parse_args()
    if options.mesh:
        mesh = init_device_mesh("cpu", tuple(options.mesh), mesh_dim_names=("replicate", "shard"))
    sharded = fully_shard_blocks(model(), **({"mesh": mesh} if options.mesh else {}))
    optimizer = torch.optim.Adam(sharded.parameters(), lr=0.01)
    rank, first, place = dist.get_rank(), 0, ""

    def may_fail(here: str) -> None:
        if here == place:
            print(f"rank {rank} fails at {time.monotonic()}\n", end="", flush=True)
            FAULTS[options.fault]()

    inner = sharded[1][1]
    inner.register_forward_pre_hook(lambda *_: may_fail("forward"))
    inner.register_full_backward_pre_hook(lambda *_: may_fail("backward"))
    optimizer.register_step_pre_hook(lambda *_: may_fail("optimizer"))
    force = os.fsync
    os.fsync = lambda file: may_fail("save") or force(file)  # type: ignore[assignment, func-returns-value]
    if options.checkpoints is not None:
        state = checkpoint.load(options.checkpoints, sharded, optimizer, replicas=options.replicas)
        first = 0 if state is None else state["step"]
    for step in range(first, options.steps):
        place = options.place if (rank, step) == (options.rank, options.at) else ""
        may_fail("step")
        loss = sharded(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item():.9g}\n", end="", flush=True)  # one write: ranks share a pipe
        if options.place == "summon":
            with fullshard.summon_full_params(sharded):
                may_fail("summon")
        if options.checkpoints is not None:
            checkpoint.save(options.checkpoints, sharded, optimizer, step=step + 1, replicas=options.replicas)
        time.sleep(options.seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
