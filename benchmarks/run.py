"""Compare fullshard with torch's FSDP2, FSDP1 and DDP on this machine: the command.

::

    python benchmarks/run.py                               everything, in some minutes on two cores
    python benchmarks/run.py communication host            two of the benchmarks
    FULL=1 python benchmarks/run.py                        more rounds, and four ranks on all of the work
    python benchmarks/run.py --docs docs    and put the tables into its pages, and the picture beside them
    python benchmarks/run.py --quick                       sizes at which numbers mean nothing, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Started as a script, Python looks for modules in this folder, and not where the folder itself is found.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine, page, summary
from benchmarks.checkpoint import measure_checkpoint
from benchmarks.checks import measure_checks
from benchmarks.elastic import measure_elastic
from benchmarks.elastic import parser as elastic_options
from benchmarks.exchanges import measure_exchanges
from benchmarks.group import measure_group
from benchmarks.host import measure_host
from benchmarks.hosts import WORK, measure_hosts
from benchmarks.initialisation import measure_initialisation
from benchmarks.launches import LARGE_TRANSFORMER, TRANSFORMER, measure_launches
from benchmarks.memory import measure_memory, measure_padding, measure_peaks
from benchmarks.models import BLOCKS, COMMUNICATION, COMPUTE, REALISTIC, SAVED, TINY
from benchmarks.optimizer import measure_optimizer
from benchmarks.plot import draw_decision
from benchmarks.report import parts, read, save
from benchmarks.saves import measure_saves
from benchmarks.steps import measure_steps

NAMES = (
    "communication",
    "compute",
    "realistic",
    "group",
    "exchanges",
    "host",
    "launches",
    "optimizer",
    "memory",
    "padding",
    "initialisation",
    "checkpoint",
    "saves",
    "checks",
    "hosts",
    "elastic",
)


def plan(quick: bool, full: bool) -> dict[str, dict[str, Callable[[], Any]]]:
    """What each name on the command line runs: results by name."""
    works = [TINY] * 5 if quick else [COMMUNICATION, COMPUTE, REALISTIC, BLOCKS, SAVED]
    communication, compute, realistic, blocks, saved = works
    rounds, few, fewest = (2, 1, 1) if quick else (24, 10, 10) if full else (6, 2, 2)
    sizes = [2, 8] if quick else [2, 8, 64, 1024] if full else [2, 64, 1024]
    exchanged = [2**14] if quick else [2**14, 2**16, 2**18, 2**20, 2**22, 2**24]
    stored = {"1 GiB": (64, 2048), "5,000 small tensors": (5000, 64)}
    stored = {"small": (4, 64)} if quick else stored
    small: list[int | str]
    simulated, small = ([2], [4, TRANSFORMER]) if quick else ([2, 8, 64], [4, 8, 32, TRANSFORMER, LARGE_TRANSFORMER])
    elastic = elastic_options().parse_args(
        ["--rounds=1", "--kills=1", "--joins=1", "--blocks=2", "--width=64", "--steps=240"]
        if quick
        else [f"--rounds={rounds}", "--kills=20"]
    )
    ranks = [2] if quick else [2, 3, 4, 6, 8] if full else [2, 3, 6]
    return {
        "communication": {
            "communication W=2": lambda: measure_steps(communication, 2, rounds, keep=True),
            "communication W=4": lambda: measure_steps(communication, 4, few),
        },
        "compute": {
            "compute W=2": lambda: measure_steps(compute, 2, rounds),
            "compute W=4": lambda: measure_steps(compute, 4, fewest),
        },
        "realistic": {"realistic W=2": lambda: measure_steps(realistic, 2, few)},
        "group": {"group": lambda: measure_group(2, communication.width, rounds)},
        "exchanges": {"exchanges": lambda: measure_exchanges(exchanged, ranks, rounds)},
        "host": {"host": lambda: [measure_host(size, [1, 4, 8, 32], 2 if quick else 8, 4 * rounds) for size in sizes]},
        "launches": {"launches": lambda: [measure_launches(size, small, 8) for size in simulated]},
        "optimizer": {"optimizer": lambda: measure_optimizer(*((8, 8, 2) if quick else (200, 64, 4 * rounds)))},
        "memory": {"memory": lambda: measure_memory(blocks, 2), "peaks": lambda: measure_peaks(communication, 2)},
        "padding": {"padding": lambda: measure_padding([8, 64, 1024])},
        "initialisation": {"initialisation": lambda: measure_initialisation(blocks, 2, fewest)},
        "checkpoint": {"checkpoint": lambda: measure_checkpoint(saved, 2, fewest)},
        "saves": {"saves": lambda: measure_saves(stored, 2, few)},
        "checks": {"checks": lambda: measure_checks(communication, 2, 8 * rounds, 2.0 if quick else 20.0)},
        "hosts": {
            "hosts": lambda: measure_hosts(TINY if quick else WORK, [1] if quick else [1, 2, 4], "1gbit", rounds)
        },
        "elastic": {"elastic": lambda: measure_elastic(elastic)},
    }


def run(names: list[str], quick: bool, full: bool) -> Iterator[tuple[str, Any]]:
    """The results of each benchmark as it ends; what runs is told on standard error."""
    todo = {
        label: measure for name, each in plan(quick, full).items() if name in names for label, measure in each.items()
    }
    for number, (label, measure) in enumerate(todo.items(), 1):
        print(f"[{number}/{len(todo)}] {label} ...", end=" ", file=sys.stderr, flush=True)
        watch = machine.Watch()
        result = measure()
        seen = watch.read()
        busy = f", other programs used {seen['others']:.0%} of the machine" if seen["others"] > machine.QUIET else ""
        print(f"{seen['seconds']:.0f} s{busy}", file=sys.stderr)
        yield label, result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="fullshard beside torch's FSDP2, FSDP1 and DDP, on this machine")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run, of {', '.join(NAMES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: numbers mean nothing, but all of it runs")
    parser.add_argument(
        "--full", action="store_true", default=os.environ.get("FULL", "") not in ("", "0"), help="the same as FULL=1"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    parser.add_argument(
        "--docs", type=Path, metavar="FOLDER", help="replace the tables and the picture of the documentation there"
    )
    parser.add_argument("--read", type=Path, metavar="FILE", help="run nothing: take the results of this results.json")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"no benchmark is named {', '.join(unknown)}: choose from {', '.join(NAMES)}")
    if options.docs and options.names:
        parser.error("--docs takes the tables of one whole run: leave out the names")
    results = (
        read(options.read)
        if options.read
        else _measure(options.names or list(NAMES), options.quick, options.full, options.output)
    )
    print(save(results, options.output))
    print(f"Saved as results.json, results.md and results.png in {options.output}")
    if options.docs:
        pages = [options.docs / "explanation" / name for name in ("performance.md", "measurements.md")]
        left = page.update(pages, {**parts(results), **({} if results["quick"] else summary.parts(results))})
        (options.docs / "explanation/measurements.json").write_text(json.dumps(results) + "\n")
        draw_decision(results, options.docs / "pictures/speed.png")
        print(f"{options.docs} has the tables" + (f"; no marks for {', '.join(left)}" if left else ""))
    return 0


def _measure(names: list[str], quick: bool, full: bool, output: Path) -> dict[str, Any]:
    watch = machine.Watch()
    cores = os.cpu_count() or 1
    if watch.load_before > cores / 2:
        print(
            f"Load average {watch.load_before:.1f} on {cores} cores: the machine is busy, figures will be noisy",
            file=sys.stderr,
        )
    results = {"machine": machine.facts(), "quick": quick}
    output.mkdir(parents=True, exist_ok=True)
    for label, result in run(names, quick, full):
        results[label] = result
        (output / "results.json").write_text(json.dumps(results) + "\n")  # what follows may fail
    return {**results, "watch": watch.read()}


if __name__ == "__main__":
    sys.exit(main())
