"""What a step costs whose messages are encoded, beside DDP: between two ranks over sockets, or between two hosts.

All train the same model in the same processes and take turns, as in :mod:`benchmarks.strategies`, which says what the
columns are. The hosts are namespaces on this machine with a network of a given rate, which takes root::

    python -m benchmarks.wires                              # sockets between two ranks
    python -m benchmarks.wires --rate 1gbit --rounds 6      # two hosts with a slow network
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.hosts.hosts import HostsError, TwoHosts

from benchmarks.models import COMMUNICATION, TINY
from benchmarks.ranks import run_ranks
from benchmarks.strategies import DDP, Options, Turns, measure, print_table
from fullshard import WirePolicy

OPTIONS: Options = {
    "exact": {},
    "bf16": {"wire_policy": WirePolicy("bf16", "bf16")},
    "int8": {"wire_policy": WirePolicy("int8", "int8")},
    "int8 without error feedback": {"wire_policy": WirePolicy("int8", "int8", error_feedback=False)},
    "int8 gathers, int4 reductions": {"wire_policy": WirePolicy("int8", "int4")},
    "stage 1, int8": {"zero_stage": 1, "wire_policy": WirePolicy("int8", "int8")},
}


def run_on_hosts(rate: str) -> Callable[..., list[Turns]]:
    """A function like ``run_ranks``, which runs one rank on each of two hosts. It raises HostsError where these cannot
    be made."""

    def run(function: Callable[..., Turns], world_size: int, *args: Any) -> list[Turns]:
        with tempfile.TemporaryDirectory() as folder, TwoHosts(rate) as hosts:
            (Path(folder) / "given").write_bytes(pickle.dumps((function, args)))
            program = "--no-python", sys.executable, "-m", "benchmarks.wires", "--folder", folder
            started = [host.torchrun(*program[1:], options=program[:1]) for host in hosts]
            printed = [each.communicate()[0] for each in started]
            if any(each.returncode for each in started):
                raise HostsError("\n".join(printed))
            return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]

    return run


def _run_rank(folder: Path) -> None:
    """Run on one host what :func:`run_on_hosts` was given."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    function, args = pickle.loads((folder / "given").read_bytes())
    (folder / str(dist.get_rank())).write_bytes(pickle.dumps(function(*args)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--rate", default="", help="of the network between two hosts: 1gbit (none: one host)")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None:
        _run_rank(given.folder)
        return
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    run = run_on_hosts(given.rate) if given.rate else run_ranks
    work = TINY if given.quick else COMMUNICATION
    try:
        found = measure(work, 2, given.optimizer, given.rounds, (DDP,), OPTIONS, run)
    except HostsError as error:
        sys.exit(f"no hosts to measure between: {error}")
    print_table(found, 2, f"{given.rate} between two hosts" if given.rate else "sockets", given.optimizer)


if __name__ == "__main__":
    main()
