"""Random elastic jobs, compared with the same jobs undisturbed: `python -m tests.elastic --programs 50`."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from functools import cache

from tests.elastic.jobs import PLACES, Job, Result, run

_GRIDS = ((2, 2), (2, 2), (2, 2), (1, 2), (1, 3))  # shards by replicas


def random_job(seed: int) -> Job:
    """A job in which up to three things happen: kills, stops, processes that are asked to leave, new processes."""
    chosen = random.Random(seed)
    shards, replicas = chosen.choice(_GRIDS)
    size, faults, joins = shards * replicas, dict[int, list[tuple[int, str, str]]](), list[int]()
    steps = chosen.choice((6, 10))
    for _ in range(chosen.randint(1, 3)):
        kind = chosen.choice(("SIGKILL", "SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP", "join"))
        step = chosen.randrange(1, steps - 1)
        if kind == "join":
            joins.append(chosen.randint(1, 2))
        else:
            faults.setdefault(chosen.randrange(size), []).append((step, chosen.choice(PLACES), kind))
    stops = any(fault[2] == "SIGSTOP" for each in faults.values() for fault in each)
    pause = chosen.choice((0.0, 0.1))
    if joins:  # a process needs some seconds to start
        steps, pause = 10, 1.5
    transport = chosen.choice(("", "", "p2p", "collective"))
    return Job(shards, replicas, steps, faults, sorted(joins), transport, pause, 4.0 if stops else 30.0)


@cache
def undisturbed(shards: int, replicas: int, steps: int) -> Result:
    return run(Job(shards, replicas, steps))


def complaints(job: Job, result: Result) -> list[str]:
    """What is wrong with the end of a job."""
    clean, found = undisturbed(job.shards, job.replicas, job.steps), list[str]()
    expected = clean.digests(job.steps)
    if len(expected) != job.shards or any(len(each) != 1 for each in expected.values()):
        return [f"the undisturbed job ended with {expected}: {clean.errors}"]
    for shard, digests in result.digests(job.steps).items():
        if digests != expected[shard]:
            found.append(f"shard {shard} ended as {digests}, not {expected[shard]}")
    size = job.shards * job.replicas
    gave_up = result.lost(size)
    for rank, (status, said) in enumerate(zip(result.statuses, result.said, strict=True)):
        signals = [each["fault"][2] for each in said if "fault" in each]
        allowed = {0} | {-9 for each in signals if each == "SIGKILL"} | {-19 for each in signals if each == "SIGSTOP"}
        if gave_up or rank >= size:  # a process may be too late to join
            allowed |= {3}
        if status not in allowed:
            found.append(f"process {rank} ended with {status}: {result.errors[rank][-1500:]}")
    if gave_up and any(each["step"] == job.steps for each in result.ends()):
        found.append(f"some processes ended, others gave up: {gave_up}")
    is_left = any(not any("fault" in each for each in one) for one in result.said[:size])
    if is_left and not gave_up and not result.digests(job.steps):
        found.append("no process made all steps")
    if result.digests(job.steps) and (missing := clean.ran() - result.ran()):
        found.append(f"nobody ran {sorted(missing)[:5]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.elastic", description=__doc__)
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print each job and what its processes logged")
    options = parser.parse_args()
    failed, recoveries, lost = [], list[float](), 0
    for seed in range(options.first_seed, options.first_seed + options.programs):
        job = random_job(seed)
        result = run(job)
        wrong = complaints(job, result)
        lost += bool(result.lost(job.shards * job.replicas))
        if job.silence >= 30:
            recoveries += result.recoveries()
        if wrong or options.show:
            print(f"seed {seed}: {job}\n  " + "\n  ".join(wrong or ["right"]), flush=True)
        if options.show:
            print("\n".join(result.errors), *result.lost(), sep="\n")
        if wrong:
            failed.append(seed)
    ordered = sorted(recoveries)
    if ordered:
        worst = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        half = statistics.median(ordered)
        print(f"from a kill to the next step: median {half:.2f} s, p99 {worst:.2f} s, of {len(ordered)}")
    print(f"{options.programs} programs, {len(failed)} failed {failed}; {lost} could not be survived")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
