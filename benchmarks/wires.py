"""What a step costs whose messages are encoded, beside DDP: between two ranks over sockets, or between two hosts.

All train the same model in the same processes and take turns, as in :mod:`benchmarks.strategies`, which says what the
columns are. The hosts are namespaces on this machine with a network of a given rate, which takes root::

    python -m benchmarks.wires                              # sockets between two ranks
    python -m benchmarks.wires --rate 1gbit --rounds 6      # two hosts with a slow network
    python -m benchmarks.wires --rate 100mbit --local-steps # two hosts that are replicas which meet every 50 steps
    python -m benchmarks.wires --encodings                  # how long encoding takes, on one core
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tests.hosts.hosts import HostsError
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.hosts import run_on_hosts
from benchmarks.models import COMMUNICATION, COMPUTE, TINY, Work
from benchmarks.ranks import run_ranks
from benchmarks.strategies import DDP, Options, measure, print_table
from fullshard import WirePolicy, fully_shard
from fullshard.comm.encoded import CHUNK
from fullshard.encodings import encoding
from fullshard.optim import LocalSteps

OPTIONS: Options = {
    "exact": {},
    "bf16": {"wire_policy": WirePolicy("bf16", "bf16")},
    "int8": {"wire_policy": WirePolicy("int8", "int8")},
    "int8 without error feedback": {"wire_policy": WirePolicy("int8", "int8", error_feedback=False)},
    "int8 gathers, int4 reductions": {"wire_policy": WirePolicy("int8", "int4")},
    "stage 1, int8": {"zero_stage": 1, "wire_policy": WirePolicy("int8", "int8")},
}


def time_encodings() -> None:
    """Print the milliseconds in which one core encodes and decodes a MiB of fp32, in chunks as routes have them."""
    torch.set_num_threads(1)
    values, scratch, into = torch.randn(CHUNK), torch.empty(CHUNK), torch.empty(CHUNK)
    mib = 2**20 / values.nbytes
    print(f"{'ms for a MiB of fp32':<24}{'encode':>8}{'decode':>8}   in general operators")
    print(f"{'copy':<24}{mib * _milliseconds(lambda: into.copy_(values)):>8.3f}")
    for name in ("bf16", "fp8", "int8", "int4"):
        chosen = encoding(name, 128)
        assert chosen is not None
        out = torch.empty(chosen.nbytes(CHUNK), dtype=torch.uint8)
        blocks, rows = values.view(-1, 128), chosen.rows(out, CHUNK)
        times = [_milliseconds(partial(chosen.encode, values, out, scratch))]
        times.append(_milliseconds(partial(chosen.decode, out, CHUNK)))
        if name != "bf16":
            times.append(_milliseconds(partial(chosen.encode_any, blocks, rows)))
            times.append(_milliseconds(partial(chosen.decode_any, rows)))
        print(f"{name:<24}" + "".join(f"{mib * each:>8.3f}" for each in times))


def _milliseconds(function: Callable[[], object]) -> float:
    """The shortest of some calls."""
    found = []
    for _ in range(30):
        begin = time.perf_counter()
        function()
        found.append(1000 * (time.perf_counter() - begin))
    return min(found)


def time_local_steps(work: Work, steps: int) -> dict[str, float]:
    """Seconds of a step of this rank, the mean of ``steps``: as a replica alone, with one that it meets, and with one
    with which it adds up each gradient (one step)."""
    found: dict[str, float] = {}
    for name in ("alone", "local steps", "synchronous"):
        model: Any = work.build()
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["shard"] if name == "alone" else mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if name == "local steps":
            LocalSteps(model, optimizer, every=50, overlap=20, wire_policy=WirePolicy("int8", "int8"))
        for step in range(-2, steps if name != "synchronous" else 1):
            if step == 0:
                dist.barrier()
                begin = time.perf_counter()
            model(work.batch(dist.get_rank(), step + 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = (time.perf_counter() - begin) / (step + 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--rate", default="", help="of the network between two hosts: 1gbit (none: one host)")
    parser.add_argument("--local-steps", action="store_true", help="replicas on the hosts meet every 50 steps")
    parser.add_argument("--encodings", action="store_true", help="time the encodings alone")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    given = parser.parse_args()
    if given.encodings:
        time_encodings()
        return
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    run: Callable[..., list[Any]] = run_on_hosts(rate=given.rate) if given.rate else run_ranks
    work = TINY if given.quick else COMMUNICATION
    try:
        if given.local_steps:
            seconds = run(time_local_steps, 2, TINY if given.quick else COMPUTE, 100)
            for name, alone in seconds[0].items():
                print(f"{name:<14}{1000 * alone:>8.1f} ms a step, {alone / seconds[0]['alone']:.2f} x alone")
            return
        found = measure(work, 2, given.optimizer, given.rounds, (DDP,), OPTIONS, run)
    except HostsError as error:
        sys.exit(f"no hosts to measure between: {error}")
    print_table(found, 2, f"{given.rate} between two hosts" if given.rate else "sockets", given.optimizer)


if __name__ == "__main__":
    main()
