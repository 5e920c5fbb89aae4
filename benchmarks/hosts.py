"""What crosses the network cards of several hosts with several ranks each, and how long a step takes, beside torch's.

All train the same model in the same processes and take turns step by step; ratios are taken within a round. The hosts
are namespaces on this machine with a network between them, which takes root::

    python -m benchmarks.hosts --hosts 2 --ranks 4 --rate 1gbit

*bytes* are those that the card of a host sends in a step (the host that sends most), in those of all parameters.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from tests.hosts.hosts import INTERFACE, Hosts, HostsError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.models import TINY, Work
from benchmarks.strategies import DDP, Options, Trainer
from benchmarks.traffic import device_bytes
from fullshard import WirePolicy

FSDP2 = "FSDP2"
OPTIONS: Options = {
    "zero_stage=3": {},
    "zero_stage=0": {"zero_stage": 0},
    "zero_stage=3, int8": {"wire_policy": WirePolicy("int8", "int8")},
    "zero_stage=3, p2p": {},
}
_TRANSPORTS = {"zero_stage=3, p2p": "p2p"}  # of the others the default
#: 25 M parameters and 16 tokens a rank: the time goes into moving parameters and gradients.
WORK = Work("hosts", blocks=8, width=512, sequence=16, vocabulary=256)
_WARM_UP, _COUNTED = 2, 2  # steps


def run_on_hosts(hosts: int = 2, ranks: int = 1, rate: str = "") -> Callable[..., list[Any]]:
    """A function like ``run_ranks``, which runs so many ranks on each of several hosts. It raises HostsError where
    these cannot be made."""

    def run(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder, Hosts(hosts, rate) as made:
            (Path(folder) / "given").write_bytes(pickle.dumps((function, args)))
            program = "--no-python", sys.executable, "-m", "benchmarks.hosts", "--folder", folder
            started = [host.torchrun(*program[1:], ranks=ranks, options=program[:1]) for host in made]
            printed = [each.communicate()[0] for each in started]
            if any(each.returncode for each in started):
                raise HostsError("\n".join(printed))
            return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]

    return run


def _run_rank(folder: Path) -> None:
    """Run on one rank what :func:`run_on_hosts` was given."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    function, args = pickle.loads((folder / "given").read_bytes())
    (folder / str(dist.get_rank())).write_bytes(pickle.dumps(function(*args)))
    dist.barrier()
    dist.destroy_process_group()


class _Trainer(Trainer):
    """Trains torch's FSDP2 too, and sets the transport of each contender."""

    def shard(self, name: str, modules: list[nn.Module], options: Options) -> nn.Module:
        os.environ["FULLSHARD_TRANSPORT"] = _TRANSPORTS.get(name, "")
        if name != FSDP2:
            return super().shard(name, modules, options)
        for module in modules:
            torch_fsdp.fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return modules[-1]


def take_turns(work: Work, rounds: int, names: list[str]) -> dict[str, tuple[list[float], float]]:
    """For each contender the seconds of its steps on this rank, and the bytes that its host sent in one."""
    trainers = {name: _Trainer(name, work, "SGD", OPTIONS) for name in names}
    found: dict[str, tuple[list[float], float]] = {}
    for name, trainer in trainers.items():
        for number in range(_WARM_UP):
            trainer.step(number)
        before = _sent()
        for number in range(_COUNTED):
            trainer.step(number)
        found[name] = [], (_sent() - before) / _COUNTED
    for number in range(rounds):
        for name in random.Random(number).sample(names, len(names)):
            found[name][0].append(trainers[name].step(number))
    return found


def _sent() -> int:
    """Bytes that the card of this host has sent so far, when nobody sends any more."""
    dist.barrier()
    time.sleep(0.1)  # for acknowledgements
    sent = device_bytes(INTERFACE)
    assert sent is not None, "these hosts have a card"
    dist.barrier()
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--rate", default="", help="of the network between them: 1gbit (none: as fast as it can)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=[DDP, FSDP2, *OPTIONS], help="some of the contenders")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None:
        _run_rank(given.folder)
        return
    names, work = given.only or [DDP, FSDP2, *OPTIONS], replace(TINY, vocabulary=256) if given.quick else WORK
    try:
        ranks = run_on_hosts(given.hosts, given.ranks, given.rate)(
            take_turns, given.hosts * given.ranks, work, given.rounds, names
        )
    except HostsError as error:
        sys.exit(f"no hosts to measure between: {error}")
    walls = {name: [max(each) for each in zip(*(rank[name][0] for rank in ranks), strict=True)] for name in names}
    print(
        f"{given.hosts} hosts of {given.ranks} ranks, {given.rate or 'no limit'} between them, {os.cpu_count()} cores"
    )
    print(f"{'':<22}{'bytes':>8}{'ms':>8}{'/ DDP':>8}{'/ FSDP2':>8}")
    for name in names:
        sent = max(rank[name][1] for rank in ranks) / work.model_bytes
        line = f"{name:<22}{sent:>8.2f}{1000 * median(walls[name]):>8.0f}"
        for other in (DDP, FSDP2):
            pairs = zip(walls[name], walls.get(other, []), strict=False)
            line += f"{median([one / two for one, two in pairs] or [float('nan')]):>8.2f}"
        print(line)


if __name__ == "__main__":
    main()
