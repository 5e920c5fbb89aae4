"""Runs elastic jobs of several processes on this machine, and says what became of them."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from typing import Any

from tests.elastic.program import train
from tests.hosts.hosts import INTERFACE, Host, Hosts

Fault = tuple[int, str, str]  # a step, a place in it, and what happens: see :mod:`tests.elastic.program`

_context = multiprocessing.get_context("forkserver")
# What a process would import at its start, at its first DTensor, and (pytest) because it is the program of its parent.
_context.set_forkserver_preload(["tests.elastic.jobs", "torch._dynamo", "pytest"])


@dataclass
class Job:
    """What is to happen in a job.

    ``faults`` are those of each process, by its index in the order of their start: its rank too, if the job
    ``has_launcher``. Otherwise processes find each other in the directory. ``joins`` are the numbers of steps after
    which one more process is started; if the job ``is_supervised``, another one is for each that ends early. ``hosts``
    has a letter for the pretended host of each process, by its index modulo the letters. Steps are rounds of ``every``
    inner steps, unless that is 0. ``device`` is a simulated one. If the job ``has_network``, a host has a network
    of its own (:mod:`tests.hosts`), and a fault may be to ``cut`` it.
    """

    shards: int = 2
    replicas: int = 2
    steps: int = 6
    faults: Mapping[int, Sequence[Fault]] = field(default_factory=dict)
    joins: Sequence[int] = ()
    transport: str = ""
    pause: float = 0.0
    silence: float = 30.0
    micro_batches: int = 2
    groups: str = "blocks"
    hosts: str = "a"
    every: int = 0
    quorum: int = 1
    grace: float = 30.0
    copy_every: int = 0
    is_supervised: bool = False
    saved: str = ""
    device: str = ""
    has_launcher: bool = True
    has_network: bool = False

    def host_of(self, process: int) -> str:
        """The host of a process. If a network is cut for good, a new process starts in the larger part."""
        size, hosts = self.shards * self.replicas, self.hosts
        cut = {
            hosts[each % len(hosts)] for each, faults in self.faults.items() if "cut" in [fault[2] for fault in faults]
        }
        if process >= size and cut:
            is_larger = 2 * sum(self.host_of(each) in cut for each in range(size)) > size
            hosts = "".join(each for each in hosts if (each in cut) is is_larger) or hosts
        return hosts[process % len(hosts)]


@dataclass
class Result:
    """What became of a job: the exit statuses of its processes and what each has said, in the order of their start."""

    statuses: list[int]
    said: list[list[dict[str, Any]]]
    errors: list[str]

    def ends(self, most: int | None = None) -> list[dict[str, Any]]:
        """What processes said at their end, of the first ``most``."""
        return [each for one in self.said[:most] for each in one if "ended" in each]

    def digests(self, step: int) -> dict[int, set[str]]:
        """The digests of each shard, on the processes that have made all steps."""
        found: dict[int, set[str]] = {}
        for each in self.ends():
            if each["step"] == step:
                found.setdefault(each["shard"], set()).add(each["digest"])
        return found

    def ran(self) -> set[tuple[int, ...]]:
        return {tuple(each["ran"]) for one in self.said for each in one if "ran" in each}

    def recoveries(self) -> list[float]:
        """Seconds from each kill to the next step that any process has ended."""
        kills = [each["time"] for one in self.said for each in one if "fault" in each and each["fault"][2] == "SIGKILL"]
        ends = sorted(each["time"] for one in self.said for each in one if "step" in each and "ended" not in each)
        return [min(later) - kill for kill in kills if (later := [end for end in ends if end > kill])]

    def shards(self) -> list[int]:
        """The shard of each process; -1 if it has none yet."""
        return [next((each["shard"] for each in one if "begun" in each), -1) for one in self.said]

    def lost(self, most: int | None = None) -> list[str]:
        """The errors with which processes gave up, of the first ``most``."""
        return [each["error"] for one in self.said[:most] for each in one if "error" in each]


def run(job: Job, limit: float = 90.0) -> Result:
    """Runs a job to its end. Processes that are left after ``limit`` seconds tell where their threads are, are killed,
    and have the status -9."""
    with ExitStack() as made:
        directory = made.enter_context(tempfile.TemporaryDirectory())
        hosts = made.enter_context(Hosts(max(2, len({*job.hosts})))) if job.has_network else ()
        host_of = dict(zip("abcdefgh", hosts, strict=False))
        port, size = _free_port(), job.shards * job.replicas
        deadline = time.monotonic() + limit
        processes = [_start(job, directory, port, rank, host_of) for rank in range(size)]
        for joins in job.joins:
            _wait_for_step([f"{directory}/{rank}.out" for rank in range(size)], joins, processes, deadline)
            processes.append(_start(job, directory, port, len(processes), host_of))
        replaced = 0
        while time.monotonic() < deadline and any(_runs(each) for each in processes):
            time.sleep(0.05)
            early = sum(_ended_early(each, f"{directory}/{at}.out", job.steps) for at, each in enumerate(processes))
            while job.is_supervised and early > replaced:
                processes.append(_start(job, directory, port, len(processes), host_of))
                replaced += 1
            trained = [each for rank, each in enumerate(processes) if rank < size or _read(f"{directory}/{rank}.out")]
            if not any(_runs(each) for each in trained):  # a process that is new finds no job, and waits for a launcher
                deadline = min(deadline, time.monotonic() + 8)
        running = [process for process in processes if _runs(process)]
        for process in running:
            os.kill(process.pid or 0, signal.SIGUSR2)
        time.sleep(1 if running else 0)
        statuses = [_end(process) for process in processes]
        outputs = [_lines(f"{directory}/{rank}.out") for rank in range(len(processes))]
        errors = [_read(f"{directory}/{rank}.err") for rank in range(len(processes))]
    return Result(statuses, outputs, errors)


def _ended_early(process: ForkServerProcess, output: str, steps: int) -> bool:
    """Whether a process was killed, has given up, or has left a job before its end."""
    has_left = process.exitcode == 0 and any("ended" in each and each["step"] < steps for each in _lines(output))
    return has_left or process.exitcode in (-signal.SIGKILL, 3)


def _end(process: ForkServerProcess) -> int:
    """The status of a process, which is killed if it still runs."""
    assert process.pid is not None
    is_stopped = _state(process) == "T"
    process.kill()
    process.join()
    return -signal.SIGSTOP if is_stopped else process.exitcode or 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _start(job: Job, directory: str, port: int, rank: int, host_of: Mapping[str, Host]) -> ForkServerProcess:
    plan = {"steps": job.steps, "replicas": job.replicas, "directory": f"{directory}/members", "pause": job.pause}
    plan |= {"faults": job.faults.get(rank, ()), "micro_batches": job.micro_batches, "groups": job.groups}
    plan |= {"host": job.host_of(rank), "every": job.every, "quorum": job.quorum, "grace": job.grace}
    plan |= {"copy_every": job.copy_every, "saved": job.saved, "device": job.device}
    size, env = job.shards * job.replicas, {"FULLSHARD_TRANSPORT": job.transport}
    if job.has_launcher:
        first = host_of[job.host_of(0)].address if host_of else "127.0.0.1"
        env |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": first, "MASTER_PORT": str(port)}
    else:
        plan["processes"] = size
    if host_of:
        env["GLOO_SOCKET_IFNAME"] = INTERFACE
    env["FULLSHARD_HANG_TIMEOUT"] = str(job.silence)
    host = host_of[job.host_of(rank)].process if host_of else 0
    process = _context.Process(target=_run_process, args=(plan, env, f"{directory}/{rank}", host))
    process.start()
    return process


def _run_process(plan: Mapping[str, Any], env: Mapping[str, str], files: str, host: int) -> None:
    """Trains, in the network of a process of a host, unless that is 0."""
    os.environ.update(env)
    if host and ctypes.CDLL(None, use_errno=True).setns(os.open(f"/proc/{host}/ns/net", os.O_RDONLY), 0):
        raise OSError(ctypes.get_errno(), "a process cannot be moved to a network")
    for output, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{files}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), output)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    try:
        train(plan)
    finally:
        atexit._run_exitfuncs()  # as at the end of a program, but multiprocessing leaves them out


def _wait_for_step(files: Sequence[str], number: int, running: Sequence[ForkServerProcess], deadline: float) -> None:
    while time.monotonic() < deadline and any(_runs(each) for each in running):
        if any(sum("step" in each and "ended" not in each for each in _lines(file)) >= number for file in files):
            return
        time.sleep(0.05)


def _read(file: str) -> str:
    if not os.path.exists(file):  # its process has not begun yet
        return ""
    with open(file, encoding="utf-8", errors="replace") as read:
        return read.read()


def _lines(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _read(file).splitlines() if line.startswith("{") and line.endswith("}")]


def _state(process: ForkServerProcess) -> str:
    try:
        return _read(f"/proc/{process.pid}/stat").rpartition(") ")[2][:1]
    except OSError:
        return ""


def _runs(process: ForkServerProcess) -> bool:
    return process.is_alive() and _state(process) != "T"
