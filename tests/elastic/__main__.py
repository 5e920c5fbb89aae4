"""Random elastic jobs, compared with the same jobs undisturbed: `python -m tests.elastic --programs 50`."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from tests.elastic.jobs import Fault, Job, Result, run
from tests.hosts.hosts import why_impossible

_GRIDS = ((2, 2), (2, 2), (2, 2), (1, 2), (1, 3), (2, 3))  # shards by replicas
_WEIGHTS = (4, 4, 4, 3, 4, 1)


def random_job(seed: int) -> Job:
    """A job in which some things happen: kills, sleeps, stops, processes that are asked to leave, new processes."""
    chosen = random.Random(seed)
    shards, replicas = chosen.choices(_GRIDS, _WEIGHTS)[0]
    size, faults, joins = shards * replicas, dict[int, list[Fault]](), list[int]()
    steps, micro_batches = chosen.choice((6, 10)), chosen.choice((1, 2, 2, 3))
    places = ["begin", "clip", "step", "stepped", "end"]
    places += [f"{place} {n}" for place in ("forward", "inside", "backward") for n in range(micro_batches)]
    step, place = 0, ""
    for _ in range(chosen.choice((1, 2, 2, 3, 3, 4))):
        kind = chosen.choices(("SIGKILL", "sleep", "SIGTERM", "SIGSTOP", "join"), (12, 5, 1, 1, 1))[0]
        if not place or chosen.random() < 0.7:  # else with the fault before
            step, place = chosen.randrange(steps), chosen.choice(places)
            if chosen.random() < 0.25:
                step, place = chosen.randrange(20 * steps), "time"
        if kind == "join":
            joins.append(chosen.randint(1, 2))
        else:
            what = f"{chosen.choice((0.002, 0.02, 0.1, 0.5))}" if kind == "sleep" else kind
            faults.setdefault(chosen.randrange(size), []).append((step, place, what))
    stops = any(fault[2] == "SIGSTOP" for each in faults.values() for fault in each)
    pause = chosen.choice((0.0, 0.0, 0.1))
    if joins:  # a process needs some seconds to start
        steps, pause = 10, 0.5
    transport = chosen.choice(("", "", "p2p", "collective"))
    silence = 4.0 if stops else 30.0
    groups = chosen.choice(("blocks", "blocks", "whole", "wrapped", "wrapped"))
    hosts = chosen.choice(("a", "a", "ab", "aabb", "aab"))
    copy_every = chosen.choice((0, 0, 1, 2, 3)) if shards > 1 else 0
    if copy_every:  # all processes of a shard end, and new ones come for them
        replicas, joins = chosen.choice((1, replicas)), []
        faults = {process: each for process, each in faults.items() if process < shards * replicas}
        shard, first = chosen.randrange(shards), chosen.randrange(steps)
        for process in range(shard, shards * replicas, shards):
            step = min(steps - 1, first + chosen.choice((0, 0, 0, 1)))
            faults.setdefault(process, []).append((step, chosen.choice(places), "SIGKILL"))
    job = Job(shards, replicas, steps, faults, sorted(joins), transport, pause, silence, micro_batches, groups, hosts)
    job.copy_every, job.is_supervised = copy_every, copy_every > 0
    if chosen.random() < 0.3:
        job.every, job.grace = chosen.choice((1, 2, 3)), chosen.choice((0.0, 0.05, 0.5, 30.0))
    if chosen.random() < 0.1:
        job.device, job.transport = chosen.choice(("late", "checked")), "collective"
    job.has_launcher = chosen.random() >= 0.2
    if job.every and replicas > 1 and chosen.random() < 0.4:  # a job waits for the processes that it lacks
        job.quorum, job.joins, job.is_supervised = 2, [], True
    for each in faults.values() if job.is_supervised else ():  # nobody replaces a process that is stopped
        each[:] = [(step, place, what.replace("STOP", "KILL")) for step, place, what in each]
    if job.shards * job.replicas > 2 and job.quorum < 2 and not why_impossible() and chosen.random() < 0.2:
        job.has_network, job.silence, job.hosts = True, 4.0, chosen.choice(("ab", "aabb", "aab", "abc", "aabc"))
        if chosen.random() < 0.5:
            job.faults = {}
        fault = chosen.randrange(steps), chosen.choice(places), chosen.choice(("cut", "cut 0.5", "cut 1", "cut 7"))
        job.faults = {
            **job.faults,
            (cut := chosen.randrange(job.shards * job.replicas)): [*job.faults.get(cut, ()), fault],
        }
    if job.shards == 2 and not (job.is_supervised or job.has_network) and chosen.random() < 0.2:
        job.replicas, job.steps, job.pause = 3, 10, 0.3  # one process is left of a shard, and another one takes it too
        for process in (first := chosen.randrange(2), first + 2):
            faults.setdefault(process, []).append((chosen.randrange(4), chosen.choice(places), "SIGKILL"))
    return job


@dataclass
class Cut:
    """How the network was cut, if for longer than the time after which a process is taken for lost: from when to when,
    and the part of it that each process was in."""

    begin: float = math.inf
    end: float = math.inf
    part_of: Sequence[str] = ()


def cut_of(job: Job, result: Result) -> Cut:
    for process, said in enumerate(result.said):
        for fault in [each for each in said if "fault" in each and each["fault"][2].startswith("cut")]:
            if (seconds := float(fault["fault"][2][3:] or "inf")) > job.silence:
                cut, begin = job.host_of(process), fault["time"]
                parts = [cut if job.host_of(each) == cut else "" for each in range(len(result.said))]
                return Cut(begin, begin + seconds, parts)
    return Cut()


def complaints_of_cut(job: Job, result: Result, cut: Cut) -> list[str]:
    """What is wrong after the network was cut: both parts go on, or a part that could does not."""
    found, size, made = list[str](), job.shards * job.replicas, dict[str, set[int]]()
    for process, said in enumerate(result.said):
        ends = [each for each in said if "step" in each and "ended" not in each]
        steps = {each["step"] for each in ends if cut.begin < each["time"] < cut.end}
        made.setdefault(cut.part_of[process], set()).update(steps)
    if len(made) > 1 and all(len(steps) > 1 for steps in made.values()):
        found.append(f"both parts of the network go on after it was cut: {made}")
    is_only = all(fault[2].startswith(("cut", "0")) for each in job.faults.values() for fault in each)
    for part in made if is_only and not job.joins else ():
        able = {process for process in range(size) if cut.part_of[process] == part}
        ended = {process for process in able for each in result.said[process] if each.get("step") == job.steps}
        if {result.shards()[process] for process in able} == {*range(job.shards)} and 2 * len(able) > size:
            found += [f"process {process} could go on after the network was cut" for process in sorted(able - ended)]
    return found


@cache
def undisturbed(shards: int, replicas: int, steps: int, micro_batches: int = 2, groups: str = "blocks") -> Result:
    return run(Job(shards, replicas, steps, micro_batches=micro_batches, groups=groups))


def complaints(job: Job, result: Result) -> list[str]:
    """What is wrong with the end of a job."""
    clean, found = undisturbed(job.shards, job.replicas, job.steps, job.micro_batches, job.groups), list[str]()
    is_apart = bool(job.every)  # rows that are lost or late train nothing, so only the bits of those that end are equal
    expected = clean.digests(job.steps)
    if len(expected) != job.shards or any(len(each) != 1 for each in expected.values()):
        return [f"the undisturbed job ended with {expected}: {clean.errors}"]
    for shard, digests in result.digests(job.steps).items():
        if len(digests) > 1 if is_apart else digests != expected[shard]:
            found.append(f"shard {shard} ended as {digests}, not {expected[shard]}")
    size = job.shards * job.replicas
    gave_up, cut = result.lost(size), cut_of(job, result)
    for rank, (status, said) in enumerate(zip(result.statuses, result.said, strict=True)):
        signals = [each["fault"][2] for each in said if "fault" in each]
        allowed = {0} | {-9 for each in signals if each == "SIGKILL"} | {-19 for each in signals if each == "SIGSTOP"}
        if signals.count("SIGTERM") > 1:  # the second ends it
            allowed |= {-15}
        if job.has_network and "The backend does not end this wait" in result.errors[rank]:
            allowed |= {1}
        if gave_up or rank >= size:  # a process may be too late to join
            allowed |= {3}
        if rank >= size and not said:  # it finds no job, and waits for a launcher
            allowed |= {-9}
        if status not in allowed:
            error = result.errors[rank]
            error = error[error.find("Current thread") :][:2000] if "Current thread" in error else error[-1500:]
            found.append(f"process {rank} ended with {status}: {error}")
    if cut.part_of:
        return found + complaints_of_cut(job, result, cut)
    # Without a launcher, those that are started later may begin the job again.
    if gave_up and any(each["step"] == job.steps for each in result.ends(size)):
        found.append(f"some processes ended, others gave up: {gave_up}")
    hit = [any("fault" in each and each["fault"][2].startswith("SIG") for each in one) for one in result.said[:size]]
    shards = result.shards()[:size]
    hit_of = {shard: [each for of, each in zip(shards, hit, strict=True) if of == shard] for shard in shards}
    is_left = not all(hit)
    stops = any(fault[2] == "SIGSTOP" for each in job.faults.values() for fault in each)
    has_moved = any(len({each["shard"] for each in said if "shard" in each}) > 1 for said in result.said)
    if gave_up and not (stops or has_moved) and not any(map(all, hit_of.values())):
        found.append(f"no shard was lost, but some gave up: {gave_up}")
    kills = [fault for each in job.faults.values() for fault in each if fault[2] != "sleep"]
    hit_shards = {shards[index] for index, each in job.faults.items() if any(fault in kills for fault in each)}
    has_copies = job.copy_every and all(step > 1 and place != "time" for step, place, _ in kills)
    if gave_up and has_copies and len(hit_shards) == 1 and not (stops or has_moved):
        found.append(f"one shard was lost, and there are copies, but some gave up: {gave_up}")
    if is_left and not gave_up and not result.digests(job.steps):
        found.append("no process made all steps")
    if not is_apart and result.digests(job.steps) and (missing := clean.ran() - result.ran()):
        found.append(f"nobody ran {sorted(missing)[:5]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.elastic", description=__doc__)
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="the job of this seed alone")
    parser.add_argument("--at-once", type=int, default=1, help="jobs that run side by side")
    parser.add_argument("--show", action="store_true", help="print each job and what its processes logged")
    options = parser.parse_args()
    failed, recoveries, lost = list[int](), list[float](), 0
    first, count = (options.first_seed, options.programs) if options.seed is None else (options.seed, 1)

    def judge(seed: int) -> tuple[int, Job, Result, list[str], float]:
        began, job = time.monotonic(), random_job(seed)
        result = run(job)
        return seed, job, result, complaints(job, result), time.monotonic() - began

    with ThreadPoolExecutor(options.at_once) as pool:
        for seed, job, result, wrong, took in pool.map(judge, range(first, first + count)):
            lost += bool(result.lost(job.shards * job.replicas))
            times = result.recoveries() if job.silence >= 30 else []
            recoveries += times
            if wrong or options.show or max(times, default=0.0) > 5:
                print(f"seed {seed}, {took:.1f} s: {job}\n  " + "\n  ".join(wrong or [f"right: {times}"]), flush=True)
            if options.show:
                print("\n".join(result.errors), *result.lost(), sep="\n")
            if wrong:
                failed.append(seed)
                print(f"  again: python -m tests.elastic --seed {seed} --show", flush=True)
    ordered = sorted(recoveries)
    if ordered:
        worst = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        half = statistics.median(ordered)
        print(f"from a kill to the next step: median {half:.2f} s, p99 {worst:.2f} s, of {len(ordered)}")
    print(f"{count} programs, {len(failed)} failed {failed}; {lost} could not be survived")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
