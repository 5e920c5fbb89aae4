"""Compare fullshard with torch's FSDP2, FSDP1 and DDP on this machine: the command.

::

    python benchmarks/run.py                       everything, in some minutes on two cores
    python benchmarks/run.py communication host    two of the benchmarks
    FULL=1 python benchmarks/run.py                with four ranks too, and more rounds
    python benchmarks/run.py --quick               sizes at which numbers mean nothing, to see that all of it runs
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Started as a script, Python looks for modules in this folder, and not where the folder itself is found.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.group import measure_group
from benchmarks.host import measure_host
from benchmarks.memory import measure_memory, measure_padding
from benchmarks.models import COMMUNICATION, COMPUTE, TINY
from benchmarks.optimizer import measure_optimizer
from benchmarks.report import save
from benchmarks.startup import measure_startup
from benchmarks.steps import measure_steps

NAMES = ("communication", "compute", "group", "host", "memory", "optimizer", "padding", "startup")


def plan(quick: bool, full: bool) -> dict[str, dict[str, Callable[[], Any]]]:
    """What each name on the command line runs: results by name."""
    communication, compute = (TINY, TINY) if quick else (COMMUNICATION, COMPUTE)
    rounds = 2 if quick else 24 if full else 10
    ranks = (2, 4) if full else (2,)
    sizes = [2, 8] if quick else [2, 8, 64, 1024]
    return {
        "communication": {
            f"communication W={size}": partial(measure_steps, communication, size, rounds) for size in ranks
        },
        "compute": {"compute W=2": lambda: measure_steps(compute, 2, max(2, rounds * 2 // 3))},
        "group": {"group": lambda: measure_group(2, communication.width, rounds)},
        "host": {"host": lambda: [measure_host(size, [1, 4, 8, 32], 2 if quick else 8, 4 * rounds) for size in sizes]},
        "memory": {"memory": lambda: measure_memory(communication, 2)},
        "optimizer": {"optimizer": lambda: measure_optimizer(*((8, 8, 2) if quick else (200, 64, 4 * rounds)))},
        "padding": {"padding": lambda: measure_padding([8, 64, 1024])},
        "startup": {"startup": lambda: measure_startup(communication, 2, max(1, rounds // 4))},
    }


def run(names: list[str], quick: bool, full: bool) -> Iterator[tuple[str, Any]]:
    """The results of each benchmark as it ends; what runs is told on standard error."""
    todo = {
        label: measure for name, parts in plan(quick, full).items() if name in names for label, measure in parts.items()
    }
    for number, (label, measure) in enumerate(todo.items(), 1):
        print(f"[{number}/{len(todo)}] {label} ...", end=" ", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        result = measure()
        print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr)
        yield label, result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="fullshard beside torch's FSDP2, FSDP1 and DDP, on this machine")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run, of {', '.join(NAMES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: numbers mean nothing, but all of it runs")
    parser.add_argument(
        "--full", action="store_true", default=os.environ.get("FULL", "") not in ("", "0"), help="the same as FULL=1"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"no benchmark is named {', '.join(unknown)}: choose from {', '.join(NAMES)}")
    results = {"quick": options.quick, **dict(run(options.names or list(NAMES), options.quick, options.full))}
    print(save(results, options.output))
    print(f"Saved as results.json, results.md and results.png in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
