"""Runs random programs with random faults and prints those of which a rank hangs, is wrong or is not clear."""

from __future__ import annotations

import argparse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.faults.program import random_case
from tests.faults.run import judge, run


def main() -> int:
    """Returns 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run this program alone, and print what its ranks said")
    parser.add_argument("--at-once", type=int, default=2, help="programs that run side by side")
    given = parser.parse_args()
    if given.seed is not None:
        case = random_case(given.seed)
        results = run(case)
        print(case, *results, judge(case, results) or "right", sep="\n\n")
        return 0
    counts: Counter[str] = Counter()
    slowest = 0.0

    def one(seed: int) -> None:
        nonlocal slowest
        case = random_case(seed)
        results = run(case)
        wrong = judge(case, results)
        counts[f"{case.fault}: {'wrong' if wrong else 'right'}"] += 1
        slowest = max(slowest, *(each.seconds for each in results if each.ended != "hung"), 0.0)
        if wrong:
            print(f"seed {seed}: {case}\n    {wrong}", flush=True)

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(one, range(given.first_seed, given.first_seed + given.programs)))
    for outcome, count in sorted(counts.items()):
        print(f"{outcome:20}{count:6}")
    print(f"the slowest rank ended after {slowest:.1f} s")
    return int(any(outcome.endswith("wrong") for outcome in counts))


if __name__ == "__main__":
    raise SystemExit(main())
