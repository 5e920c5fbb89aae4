"""The command line: `python -m tests.fuzz --programs 5000`, or `--seed 17` for one program, which is printed too."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.planted import PLANTS
from tests.fuzz.pool import Fuzzer, Result
from tests.fuzz.programs import Program, generate, read
from tests.fuzz.shrink import shrink
from tests.harness import RankPool

_AT_ONCE = 200


def main() -> int:
    """Run programs; returns 1 if there were findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="the program of this seed alone")
    parser.add_argument("--file", type=Path, help="the program whose text is in this file alone")
    parser.add_argument("--show", action="store_true", help="print the one program and do not run it")
    parser.add_argument("--shrink", action="store_true", help="make the one program as small as it can be")
    parser.add_argument("--plant", choices=PLANTS, default="", help="plant a defect into the library")
    parser.add_argument("--lines", type=int, default=12, help="of each finding")
    options = parser.parse_args()
    only = read(options.file.read_text()) if options.file else None
    if options.seed is not None:
        only = generate(options.seed)
    if only is not None:
        return _run_only(only, options)
    began = time.monotonic()
    results: list[Result] = []
    with RankPool() as pool:
        fuzzer = Fuzzer(pool, options.plant)
        for first in range(0, options.programs, _AT_ONCE):
            seeds = range(first, min(first + _AT_ONCE, options.programs))
            for result in fuzzer.results(generate(options.first_seed + seed) for seed in seeds):
                results.append(result)
                if result.kind in ("differs", "failed", "invalid"):
                    _tell(result, options.lines)
            print(f"--- {len(results)} in {time.monotonic() - began:.0f} s: {_counts(results)}", flush=True)
    for result in sorted(results, key=lambda each: -each.seconds)[:3]:
        print(f"slow: seed {result.program.seed}, {result.seconds:.2f} s")
    for where, count in sorted(Counter(_where(result.program) for result in results).items()):
        print(f"{count:6} {where}")
    return 1 if any(result.is_finding for result in results) else 0


def _run_only(program: Program, options: argparse.Namespace) -> int:
    print(program.text(), flush=True)
    if options.show:
        return 0
    with RankPool() as pool:
        fuzzer = Fuzzer(pool, options.plant)
        result = fuzzer.run(program)
        _tell(result, 10_000)
        if options.shrink and result.is_finding:
            result = shrink(fuzzer, result)
            print(result.program.text())
            _tell(result, 10_000)
    return 1 if result.is_finding else 0


def _tell(result: Result, lines: int) -> None:
    text = "\n".join(result.text.splitlines()[:lines])
    print(f"=== seed {result.program.seed}: {result.kind}\n{text}", flush=True)


def _counts(results: list[Result]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in Counter(result.kind for result in results).items())


def _where(program: Program) -> str:
    return f"{program.sharding.api}, {program.world} ranks, {program.transport}"


if __name__ == "__main__":
    sys.exit(main())
