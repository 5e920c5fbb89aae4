"""Runs random programs with random faults and prints those of which a rank hangs, is wrong or is not clear."""

from __future__ import annotations

import argparse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.faults.program import FAULTS, random_case
from tests.faults.run import RankResult, judge, run


def main() -> int:
    """Returns 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run this program alone, and print what its ranks said")
    parser.add_argument("--at-once", type=int, default=6, help="programs that run side by side")
    given = parser.parse_args()
    if given.seed is not None:
        case = random_case(given.seed)
        results = run(case)
        print(case, *results, judge(case, results) or "right", sep="\n\n")
        return 0
    found: dict[str, list[list[RankResult]]] = {fault: [] for fault in FAULTS}
    wrongs: Counter[str] = Counter()

    def one(seed: int) -> None:
        case = random_case(seed)
        found[case.fault].append(results := run(case))
        if wrong := judge(case, results):
            wrongs[case.fault] += 1
            print(f"seed {seed}: {case}\n    {wrong}", flush=True)

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(one, range(given.first_seed, given.first_seed + given.programs)))
    print("fault     programs  trained to the end  ended with an error  wrong  slowest rank (s)")
    for fault, programs in found.items():
        trained = sum(all(rank.ended == "returned" for rank in ranks) for ranks in programs)
        slowest = max((rank.seconds for ranks in programs for rank in ranks if rank.ended != "hung"), default=0.0)
        ended = len(programs) - trained
        print(f"{fault:8}{len(programs):10}{trained:20}{ended:21}{wrongs[fault]:7}{slowest:18.1f}")
    return int(wrongs.total() > 0)


if __name__ == "__main__":
    raise SystemExit(main())
