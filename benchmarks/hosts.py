"""What crosses the network cards of several hosts with several ranks each, and how long a step takes, beside torch's.

All train the same model in the same processes and take turns step by step; ratios are taken within a round. The hosts
are namespaces on this machine with a network between them, which takes root::

    python -m benchmarks.hosts --hosts 2 --ranks 4 --rate 1gbit

*bytes* are those that the card of a host sends in a step (the host that sends most), in those of all parameters. With
``--memory`` each trains in processes of its own instead, and *memory* is what the ranks of a host have beside shards,
their gradients and what they had before, at the most, in the bytes of a block: what they share counts once. With
``--exchange`` nobody trains: hosts exchange bytes, between one pair of ranks or between several.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from tests.hosts.hosts import INTERFACE, Hosts, HostsError, why_impossible
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import resident
from benchmarks.models import TINY, Block, Work
from benchmarks.strategies import DDP, Options, Trainer
from benchmarks.traffic import device_bytes
from fullshard import WirePolicy
from fullshard.report.pictures import BLUE, ORANGE, VERMILION

FSDP2 = "FSDP2"
HSDP = "HSDP"
OPTIONS: Options = {
    "zero_stage=3": {},
    "zero_stage=0": {"zero_stage": 0},
    "zero_stage=3, int8": {"wire_policy": WirePolicy("int8", "int8")},
    "zero_stage=3, p2p": {},
    HSDP: {},  # each host is a replica
}
_LOOKS = {
    FSDP2: ("s--", BLUE),
    DDP: ("d:", "#999999"),
    "zero_stage=3": ("o-", ORANGE),
    "zero_stage=0": ("v-.", VERMILION),
}
_TRANSPORTS = {"zero_stage=3, p2p": "p2p"}  # of the others the default
#: 25 M parameters and 16 tokens a rank: the time goes into moving parameters and gradients.
WORK = Work("hosts", blocks=8, width=512, sequence=16, vocabulary=256)
_WARM_UP, _COUNTED = 2, 2  # steps
_EXCHANGED = 2**18, 6 * 2**20, 50 * 2**20  # bytes: less than a connection has under way, half of a block, much


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
        if name == HSDP:
            ranks = int(os.environ["LOCAL_WORLD_SIZE"])
            mesh = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("over", "inside"))
            options = {name: {"mesh": mesh}}
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


def measure_hosts(work: Work, counts: list[int], rate: str, rounds: int) -> dict[str, Any]:
    """Two hosts with each of some numbers of ranks: by contender the seconds of steps, and what a card sends in one, in
    bytes of all parameters. ``why`` says it if hosts cannot be made here."""
    found: dict[str, Any] = {"hosts": 2, "rate": rate, "ranks": {}}
    if why := why_impossible():
        return {**found, "why": why}
    names = [DDP, FSDP2, "zero_stage=3"]
    for count in counts:
        every = run_on_hosts(2, count, rate)(take_turns, 2 * count, work, rounds, names)
        found["ranks"][count] = over_ranks(every, work)
    return found


def over_ranks(every: list[dict[str, tuple[list[float], float]]], work: Work) -> dict[str, dict[str, Any]]:
    """What :func:`take_turns` found on all ranks: by contender the seconds of the slowest rank in each step, and what
    the card that sends most sends, in bytes of all parameters."""
    return {
        name: {
            "wall": [max(step) for step in zip(*(rank[name][0] for rank in every), strict=True)],
            "sent": max(rank[name][1] for rank in every) / work.model_bytes,
        }
        for name in every[0]
    }


def most_held(work: Work, name: str) -> float:
    """Bytes that this rank has at the most in a step, beside shards and their gradients."""
    resident.return_what_is_freed()
    _Trainer(DDP, TINY, "SGD", OPTIONS).step(0)  # what is loaded when it is first used
    resident.settle()
    before, most = _proportional_bytes(), 0
    trainer = _Trainer(name, work, "SGD", OPTIONS)
    resident.settle()

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, _proportional_bytes())

    for block in trainer.model.modules():
        if isinstance(block, Block):
            block.register_forward_hook(look)
            block.register_full_backward_hook(look)
    for number in range(_WARM_UP + _COUNTED):
        trainer.step(number)
    kept = 0 if name == DDP else dist.get_world_size()
    return most - before - 2 * work.model_bytes / max(1, kept)


def _proportional_bytes() -> int:
    """Bytes that this process occupies, with its share of each page that others have too."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(text.partition("\nPss:")[2].split()[0])


def exchange(nbytes: int, rounds: int) -> dict[int, float]:
    """Seconds in which two hosts exchange so many bytes in each direction, by the pairs of ranks that share it."""
    rank, ranks = dist.get_rank(), dist.get_world_size() // 2
    found = {}
    for pairs in [1 << at for at in range(ranks.bit_length())]:
        sent, seconds = torch.ones(nbytes // 4 // pairs), []
        received = torch.empty_like(sent)
        for _ in range(_WARM_UP + rounds):
            dist.barrier()
            begin = time.perf_counter()
            if rank % ranks < pairs:
                other = (rank + ranks) % (2 * ranks)
                for work in [dist.isend(sent, other), dist.irecv(received, other)]:
                    assert work is not None
                    work.wait()
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
        found[pairs] = median(seconds[_WARM_UP:])
    return found


def draw(sent: Mapping[str, Mapping[int, float]], hosts: int, file: Path) -> None:
    """A picture of the bytes that a card sends: by contender and number of ranks, in those of all parameters."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.4))
    for name, (line, color) in _LOOKS.items():
        axis.plot([*sent[name]], [*sent[name].values()], line, color=color, label=name, linewidth=2)
    axis.set(xlabel="ranks on each host", ylabel="bytes / those of all parameters", ylim=(0, None))
    axis.set_xticks([*sent[FSDP2]])
    axis.set_title(f"What the network card of a host sends in a step, {hosts} hosts", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, bbox_to_anchor=(1, 0.5), loc="center left")
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


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
    parser.add_argument("--picture", type=Path, help="draw bytes for 1 to --ranks ranks on each host into this file")
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    parser.add_argument("--exchange", action="store_true", help="exchange bytes between two hosts instead")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None:
        _run_rank(given.folder)
        return
    names, work = given.only or [DDP, FSDP2, *OPTIONS], replace(TINY, vocabulary=256) if given.quick else WORK
    run, size = run_on_hosts(given.hosts, given.ranks, given.rate), given.hosts * given.ranks
    print(
        f"{given.hosts} hosts of {given.ranks} ranks, {given.rate or 'no limit'} between them, {os.cpu_count()} cores"
    )
    try:
        if given.picture:
            counts = [1 << at for at in range(given.ranks.bit_length())]
            drawn: dict[str, dict[int, float]] = {name: {} for name in _LOOKS}
            for count in counts:
                every = run_on_hosts(given.hosts, count, given.rate)(take_turns, given.hosts * count, work, 0, [*drawn])
                for name, found in over_ranks(every, work).items():
                    drawn[name][count] = found["sent"]
            draw(drawn, given.hosts, given.picture)
            return
        if given.exchange:
            for nbytes in _EXCHANGED:
                every = run(exchange, size, nbytes, given.rounds)
                times = [f"{pairs} pairs {1000 * max(rank[pairs] for rank in every):.1f} ms" for pairs in every[0]]
                print(f"{nbytes / 2**20:g} MiB: {', '.join(times)}")
            return
        if given.memory:
            for name in names:
                held = sum(run(most_held, size, work, name)) / given.hosts
                print(f"{name:<22}{held / work.block_bytes:>8.1f} blocks a host")
            return
        compared = over_ranks(run(take_turns, size, work, given.rounds, names), work)
    except HostsError as error:
        sys.exit(f"no hosts to measure between: {error}")
    walls = {name: found["wall"] for name, found in compared.items()}
    print(f"{'':<22}{'bytes':>8}{'ms':>8}{'/ DDP':>8}{'/ FSDP2':>8}")
    for name in names:
        line = f"{name:<22}{compared[name]['sent']:>8.2f}{1000 * median(walls[name]):>8.0f}"
        for other in (DDP, FSDP2):
            pairs = zip(walls[name], walls.get(other, []), strict=False)
            line += f"{median([one / two for one, two in pairs] or [float('nan')]):>8.2f}"
        print(line)


if __name__ == "__main__":
    main()
