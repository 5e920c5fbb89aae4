"""Tries an installation: `python tests/installed.py`, where only fullshard, torch and what they need have to be.

It asks each command for its help. Then two ranks train with either front end and AdamW, save, load and train on, and
compare losses and parameters with unsharded training.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
import fullshard.elastic
from fullshard import FullyShardedDataParallel, checkpoint, fully_shard_blocks, summon_full_params
from fullshard.cli import main as command
from fullshard.wrap import ModuleWrapPolicy

RANKS, SAVED, STEPS = 2, 6, 10


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same initial weights on every rank
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, ranks: int) -> Tensor:
    """Trains on this rank's part of each batch; returns the losses."""
    losses = []
    for step in steps:
        batch = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step))
        inputs, targets = batch.chunk(ranks, dim=1)[rank]
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def shard(front_end: str) -> nn.Module:
    if front_end == "fully_shard":
        return fully_shard_blocks(make_model())
    return FullyShardedDataParallel(make_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))


def full_parameters(model: nn.Module) -> list[Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with summon_full_params(model):
            return [each.detach().clone() for each in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]


def train_on_ranks(folder: Path) -> None:
    """What a rank does."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plain = make_model()
    expected = train(plain, make_optimizer(plain), range(STEPS), 0, 1)
    for front_end in ("fully_shard", "FullyShardedDataParallel"):
        model = shard(front_end)
        optimizer = make_optimizer(model)
        losses = train(model, optimizer, range(SAVED), rank, RANKS)
        checkpoint.save(folder / front_end, model, optimizer, step=SAVED)
        resumed = shard(front_end)
        optimizer = make_optimizer(resumed)
        state = checkpoint.load(folder / front_end, resumed, optimizer)
        assert state is not None
        assert state["step"] == SAVED
        losses = torch.cat([losses, train(resumed, optimizer, range(SAVED, STEPS), rank, RANKS)])
        dist.all_reduce(losses)
        torch.testing.assert_close(losses / RANKS, expected)
        for found, right in zip(full_parameters(resumed), plain.parameters(), strict=True):
            torch.testing.assert_close(found.detach(), right.detach(), rtol=1e-4, atol=1e-5)
        if rank == 0:
            print(f"{front_end} on {RANKS} ranks trains like one process, and resumes from a checkpoint", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def ask_for_help(*words: str) -> int:
    """Asks a command for its help, and then the commands below it; returns how many have answered."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        command([*words, "--help"])
    assert said.getvalue().startswith("usage: "), words
    below = re.search(r"positional arguments:\s+\{([\w,]+)\}", said.getvalue())
    return 1 + sum(ask_for_help(*words, each) for each in (below[1].split(",") if below else ()))


def main() -> None:
    where = Path(fullshard.__file__)
    if not where.is_relative_to(sysconfig.get_path("purelib")):
        sys.exit(f"fullshard was imported from {where}: install its wheel or sdist first")
    script = Path(sysconfig.get_path("scripts"), "fullshard")
    subprocess.run([script, "--version"], check=True)
    print(f"{ask_for_help()} commands have help, torch {version('torch')}, {sys.platform}", flush=True)
    # The ranks use the CPU. A host name that does not resolve is no reason to fail, nor a torch without libuv.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for loopback in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        environment["GLOO_SOCKET_IFNAME"] = loopback
    if os.name == "nt":
        environment["USE_LIBUV"] = "0"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    torchrun += [f"--nproc-per-node={RANKS}", __file__]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*torchrun, folder], check=True, env=environment, timeout=300)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_on_ranks(Path(sys.argv[1]))
    else:
        main()
