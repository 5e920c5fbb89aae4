"""Training what does not fit into memory: a model whose state is on a disk, in processes that may use a third of it.

    python -m benchmarks.disk                       # 184 M parameters: 2.1 GiB with AdamW's state, in 0.7 GiB
    python -m benchmarks.disk --in-backward         # optimizers step in backward: gradients need no disk
    python -m benchmarks.disk --width 256 --blocks 8 --memory 400MiB --tokens 32   # to see that it runs

The same training runs in memory and from the disk, and must give the same bits. The seconds of a step are compared with
the larger of two: those of the step in memory, and those that the disk takes for the bytes of a step alone.
A cgroup limits the memory of each process, where this user may make one, otherwise ``RLIMIT_DATA`` does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard import DiskOffloadPolicy, OffloadPolicy, fully_shard
from fullshard.disk.file import DiskFile, DiskWork
from fullshard.text import bytes_of, bytes_text, table

#: Steps that are not measured: optimizer state is made, and orders are recorded.
_WARM_UP = 2


def _block(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class _Model(nn.Module):
    """Blocks with residual connections, which are recomputed in backward. Each is sharded right after it is made, so
    that the whole is never in memory."""

    def __init__(self, width: int, blocks: int, policy: OffloadPolicy) -> None:
        super().__init__()
        made = []
        for seed in range(blocks):
            torch.manual_seed(seed)
            made.append(fully_shard(_block(width), offload_policy=policy))
        self.blocks = nn.ModuleList(made)
        fully_shard(self, offload_policy=policy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def _train(args: argparse.Namespace) -> dict[str, Any]:
    """Train as one rank; what a step took, what was moved, and a hash of the losses and the parameters."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    policy = DiskOffloadPolicy(args.directory, direct=not args.cached) if args.directory else OffloadPolicy()
    model = _Model(args.width, args.blocks, policy)
    step = _step_in_backward(model) if args.in_backward else _step_after(model)
    losses, seconds, moved, waited = [], [], [0, 0], 0.0
    for number in range(_WARM_UP + args.steps):
        torch.manual_seed(1000 + number + dist.get_rank())
        batch = torch.randn(args.tokens, args.width)
        before = DiskFile.transferred(), DiskWork.waited_seconds
        dist.barrier()
        began = time.perf_counter()
        loss = (model(batch) - batch.roll(1, 0)).square().mean()
        loss.backward()
        step()
        dist.barrier()
        losses.append(loss.item())
        if number >= _WARM_UP:
            seconds.append(time.perf_counter() - began)
            moved = [after - earlier for after, earlier in zip(DiskFile.transferred(), before[0], strict=True)]
            waited = DiskWork.waited_seconds - before[1]
    found = hashlib.sha256(str(losses).encode())
    for param in model.parameters():
        found.update(param.to_local().detach().clone().numpy().tobytes())  # type: ignore[attr-defined]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    dist.destroy_process_group()
    return {"seconds": median(seconds), "moved": moved, "waited": waited, "hash": found.hexdigest(), "peak": peak}


def _step_after(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def _step_in_backward(model: nn.Module) -> Callable[[], None]:
    """Each parameter has an optimizer, which steps as soon as the gradient is there."""
    for param in model.parameters():
        own = torch.optim.AdamW([param], lr=1e-3)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = own) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    return lambda: None


def _disk_seconds(directory: str, read: int, written: int, direct: bool) -> float:
    """The seconds that the disk takes for these bytes alone, in calls and threads like those of training."""
    file = DiskFile(Path(directory), direct)
    block = torch.zeros(1 << 20)
    regions = [file.allocate(block.numel(), torch.float32, "a block") for _ in range(256)]
    for region in regions:
        region.write(block).wait()
    target = [torch.empty_like(block) for _ in range(8)]
    began, moves = time.perf_counter(), []
    reads, writes = read // block.nbytes, written // block.nbytes
    for number in range(max(reads, writes)):
        region = regions[number % len(regions)]
        moves += [region.read(target[number % 8])] if number < reads else []
        moves += [region.write(block)] if number < writes else []
        for move in moves[:-16]:
            move.wait()
        moves = moves[-16:]
    for move in moves:
        move.wait()
    return time.perf_counter() - began


@contextmanager
def _limited(nbytes: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """How memory is limited, and a function that limits that of the process that calls it."""
    name, root = f"fullshard-{os.getpid()}-{os.urandom(4).hex()}", Path("/sys/fs/cgroup")
    for group, limit in ((root / "memory" / name, "memory.limit_in_bytes"), (root / name, "memory.max")):
        try:
            group.mkdir()
            (group / limit).write_text(str(nbytes))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        try:
            yield "a cgroup", partial(_join, group)
        finally:
            group.rmdir()
        return
    yield "RLIMIT_DATA", partial(resource.setrlimit, resource.RLIMIT_DATA, (nbytes, nbytes))


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _run(args: argparse.Namespace, directory: str, memory: int | None) -> tuple[list[dict[str, Any]], str]:
    """Train on ``args.ranks`` fresh processes; what each found, and how its memory was limited."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"width": args.width, "blocks": args.blocks, "tokens": args.tokens, "steps": args.steps}
    command = [sys.executable, "-m", "benchmarks.disk", "--train", f"--directory={directory}"]
    command += [f"--{name}={value}" for name, value in options.items()]
    command += ["--cached"] * args.cached + ["--in-backward"] * args.in_backward
    how, processes = "nothing", []
    with ExitStack() as stack:
        for rank in range(args.ranks):
            limit = None
            if memory is not None:
                how, limit = stack.enter_context(_limited(memory))
            variables = {"RANK": rank, "WORLD_SIZE": args.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "FULLSHARD_TRANSPORT": "p2p"}
            environment |= {name: str(value) for name, value in variables.items()}
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, preexec_fn=limit))
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank ended with {[process.returncode for process in processes]}: see above")
    return [json.loads(output.splitlines()[-1]) for output in outputs], how


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 640), ("blocks", 56), ("tokens", 384), ("steps", 5), ("ranks", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory", default="700MiB", help="of each process")
    parser.add_argument("--directory", default="", help="where the file is; a temporary one")
    parser.add_argument("--cached", action="store_true", help="through the page cache")
    parser.add_argument("--in-backward", action="store_true", help="an optimizer for each parameter steps in backward")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        print(json.dumps(_train(args)))
        return
    memory = bytes_of(args.memory)
    params = args.blocks * (8 * args.width**2 + 7 * args.width)
    with tempfile.TemporaryDirectory(dir=args.directory or None) as directory:
        inside, _ = _run(args, "", None)
        outside, how = _run(args, directory, memory)
        read, written = outside[0]["moved"]
        disk = args.ranks * _disk_seconds(directory, read, written, not args.cached)
    print(f"{params / 1e6:.0f} M parameters on {args.ranks} ranks, with AdamW's state {bytes_text(12 * params)}")
    print(
        f"Each process may use {bytes_text(memory)}, limited by {how}: {12 * params / args.ranks / memory:.2f} x that"
    )
    rows = [
        ["in memory", f"{inside[0]['seconds']:.2f}", "", "", bytes_text(inside[0]["peak"])],
        [
            "from the disk",
            f"{outside[0]['seconds']:.2f}",
            f"{outside[0]['waited']:.2f}",
            bytes_text(read + written),
            bytes_text(outside[0]["peak"]),
        ],
        ["the disk alone", f"{disk:.2f}", "", bytes_text(read + written), ""],
    ]
    print(table(["a step", "seconds", "waited", "moved", "peak"], rows))
    most = max(inside[0]["seconds"], disk)
    print(f"the larger of both: {outside[0]['seconds'] / most:.2f} x")
    same = [one["hash"] for one in inside] == [one["hash"] for one in outside]
    print("the same bits" if same else "DIFFERENT from the training in memory")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
