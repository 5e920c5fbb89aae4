"""What elastic training costs, and how fast it goes on: `python -m benchmarks.elastic`.

Four processes, two replicas of two shards, train blocks of linear layers. Prints the time of a step divided by that of
the same training on a mesh of two replicas, rounds of both in turn; the seconds from a kill to the next step that
another process finishes, less a usual step; and how much slower steps are while a new process joins: from when it asks
for its state until it is a member.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

SIZE, REPLICAS = 4, 2


def main() -> None:
    options = parser().parse_args()
    if options.train:
        train(options)
        return
    print(described(measure_elastic(options)))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64, help="samples of a logical rank in a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--joins", type=int, default=5)
    parser.add_argument("--train", choices=("elastic", "mesh"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    return parser


def measure_elastic(options: argparse.Namespace) -> dict[str, Any]:
    """The times of a step divided by that on a mesh, the seconds from each kill to the next step, and what joining
    costs."""
    ratios = []
    for _ in range(options.rounds):
        mesh, elastic = (step_of(run(options, kind)) for kind in ("mesh", "elastic"))
        ratios.append(elastic / mesh)
    kills = [recovery(options) for _ in range(options.kills)]
    joins = [joining(options) for _ in range(options.joins)]
    course = sorted(kills, key=lambda kill: kill[0])[len(kills) // 2][1] if kills else {}
    return {
        "steady": ratios,
        "recoveries": sorted(each for each, _ in kills),
        "course": course,
        "joining": [slower for slower, _ in joins],
        "joining MiB": max((mebibytes for _, mebibytes in joins), default=math.nan),
    }


def described(found: Mapping[str, Any]) -> str:
    lines = []
    if steady := found["steady"]:
        lines.append(f"steady cost: {statistics.median(steady):.3f} of a step ({min(steady):.3f} to {max(steady):.3f})")
    if slower := found["joining"]:
        lines.append(
            f"while a process joins: a step takes {statistics.median(slower):.2f} of the usual time ({min(slower):.2f} "
            f"to {max(slower):.2f}); {found['joining MiB']:.1f} MiB of state"
        )
    if kills := found["recoveries"]:
        lines.append(
            f"from a kill to the next step: {' '.join(f'{each:.3f}' for each in kills)} s, beyond a usual step"
        )
    return "\n".join(lines)


def start(options: argparse.Namespace, kind: str, rank: int, port: int, directory: str) -> subprocess.Popen[str]:
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)}
    sizes = [f"--{name}={getattr(options, name)}" for name in ("blocks", "width", "batch", "steps")]
    command = [sys.executable, "-m", "benchmarks.elastic", f"--train={kind}", f"--directory={directory}", *sizes]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def started(options: argparse.Namespace, kind: str, directory: str = "") -> list[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [start(options, kind, rank, port, directory) for rank in range(SIZE)]


def read(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.communicate()[0].splitlines() if line.startswith("{")]


def run(options: argparse.Namespace, kind: str) -> list[list[dict[str, Any]]]:
    return [read(process) for process in started(options, kind)]


def step_of(said: list[list[dict[str, Any]]]) -> float:
    """The median time of a step on the first rank, without the first steps."""
    ends = [each["end"] for each in said[0]]
    return statistics.median(after - before for before, after in pairwise(ends[3:]))


def recovery(options: argparse.Namespace) -> tuple[float, dict[str, list[float]]]:
    """Seconds from a kill to the next step that another process ends, beyond the usual time of a step; and when each
    process has ended its steps, in seconds from the kill."""
    processes = started(options, "elastic")
    victim = random.randrange(SIZE)
    lines = processes[victim].stdout
    assert lines is not None
    ends = [json.loads(lines.readline())["end"] for _ in range(options.steps // 2)]
    time.sleep(random.random() * 0.3)
    processes[victim].send_signal(signal.SIGKILL)
    killed = time.time()
    said = [read(process) for process in processes]
    said[victim][:0] = [{"end": end} for end in ends]
    usual = step_of([one for at, one in enumerate(said) if at != victim])
    later = [each["end"] for one in said for each in one if each["end"] > killed + usual / 2]
    course = {str(at): [each["end"] - killed for each in one] for at, one in enumerate(said)}
    return max(0.0, min(later) - killed - usual) if later else math.inf, course


def joining(options: argparse.Namespace) -> tuple[float, float]:
    """The time of a step while a new process joins, divided by the usual time around it; and the MiB that it gets.

    The new process has a core for itself, if there are several: what it computes is not to slow down the others.
    """
    *cores, last = sorted(os.sched_getaffinity(0))
    options = argparse.Namespace(**{**vars(options), "steps": options.steps * 2})
    with tempfile.TemporaryDirectory() as directory:
        os.sched_setaffinity(0, cores or {last})
        processes = started(options, "elastic", directory)
        lines = processes[0].stdout
        assert lines is not None
        before = [json.loads(lines.readline())["end"] for _ in range(options.steps // 4)]
        os.sched_setaffinity(0, {last})
        newcomer = start(options, "elastic", SIZE, 1, directory)
        os.sched_setaffinity(0, {*cores, last})
        said = [read(process) for process in processes]
        try:
            newcomer.wait(20)  # longer, if it found no job
        except subprocess.TimeoutExpired:
            newcomer.kill()
        news = read(newcomer)
    if not news:
        return math.nan, math.nan
    asked, nbytes, ends = news[0]["asked"], news[0]["bytes"], [*before, *(each["end"] for each in said[0])]
    if not news[1:]:
        return math.nan, nbytes / 2**20
    first = news[1]["end"]
    during, usual = list[float](), list[float]()
    for begin, end in pairwise(ends[3:]):
        if asked - 10 < begin and end < first + 10:
            (during if asked < end and begin < first else usual).append(end - begin)
    return statistics.mean(during) / statistics.mean(usual), nbytes / 2**20


def train(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from fullshard import fully_shard
    from fullshard.elastic import Elastic
    from fullshard.group.parameter import local_tensor

    elastic, mesh = None, None
    if options.train == "elastic":
        elastic = Elastic(replicas=REPLICAS, directory=options.directory or None)
    else:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (REPLICAS, SIZE // REPLICAS), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.Linear(options.width, 4 * options.width), nn.ReLU(), nn.Linear(4 * options.width, options.width)
        )
        for _ in range(options.blocks)
    ]
    model = nn.Sequential(*blocks)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(options.batch, options.width)

    def body() -> None:
        model(batch).square().mean().backward()

    if elastic is None:
        for _ in range(options.steps):
            body()
            optimizer.step()
            optimizer.zero_grad()
            print(json.dumps({"end": time.time()}), flush=True)
        dist.destroy_process_group()
        return
    asked = time.time()
    elastic.begin(model, optimizer)
    if elastic.step:
        nbytes = 3 * sum(local_tensor(param).nbytes for param in model.parameters())
        print(json.dumps({"asked": asked, "bytes": nbytes}), flush=True)
    for step in elastic.steps(options.steps):
        with step:
            for _ in step:
                body()
            optimizer.step()
        if not elastic.is_joining:
            print(json.dumps({"end": time.time()}), flush=True)
    elastic.close()


if __name__ == "__main__":
    main()
