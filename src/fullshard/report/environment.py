"""Checks of the environment in which ranks run: versions, devices, memory, threads, settings and the network.

Owns the facts that each rank knows about its process, their comparison between ranks, and the measurement of messages
between pairs of ranks. A check without a finding says what was checked.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from textwrap import indent
from typing import Literal

import torch
import torch.distributed as dist

import fullshard
from fullshard.buffer.shared_memory import missing
from fullshard.comm.backends import backend_of
from fullshard.comm.process_group import gather_objects
from fullshard.comm.select import choose_transport
from fullshard.comm.waits import waiting
from fullshard.device import CPU, compute_device, default_device_type, is_host
from fullshard.disk.file import DiskFile
from fullshard.platforms import resource
from fullshard.text import bytes_text, percent, seconds_text, table

Result = Literal["error", "warning", "not checked", "ok"]

#: Prefixes of environment variables that are shown, and of those that must be equal on all ranks.
_SHOWN = ("FULLSHARD_", "FSDP_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "CUDA_VISIBLE")
_COMPARED = ("FULLSHARD_", "FSDP_", "NCCL_", "TORCH_")
#: Variables that describe one host, and may differ between hosts.
_OF_HOSTS = {f"NCCL_{n}" for n in ("SOCKET_IFNAME", "OOB_NET_IFNAME", "IB_HCA", "IB_GID_INDEX", "TOPO_FILE")}
_OF_HOSTS |= {f"NCCL_{n}" for n in ("HOSTID", "DEBUG_FILE")}
#: Variables that fullshard reads.
_KNOWN = {f"FULLSHARD_{n}" for n in ("TRANSPORT", "PATCH", "DEBUG", "CHECKS", "HANG_TIMEOUT", "WAIT_WARNING")}
#: Variables that commands set for the processes that they start.
_OURS = ("FULLSHARD_DOCTOR", "FULLSHARD_DOCTOR_STEPS", "FULLSHARD_RANKS_PRELOAD", "FULLSHARD_REHEARSAL")
#: A warning is due below these bytes of ``/dev/shm``, below this number of open files, and above these seconds between
#: clocks.
_SHARED, _FILES, _CLOCKS = 1 << 28, 4096, 2.0
_SHM = "/dev/shm"
#: Types of file systems that are in memory.
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
#: A warning is due if a rank waits for a core for more than this part of the time in which it could run.
_CROWDED = 0.2
#: Rounds in which pairs of ranks are measured: enough for all pairs of 8 ranks.
_ROUNDS = 7
#: A measurement sends this many small messages, this many large ones, and large ones have these bytes.
_SMALL, _LARGE, _NBYTES = 20, 4, 1 << 22
#: A pair is slow if it is this many times slower than the median pair. A latency below these seconds is never slow.
_SLOW, _FINE = 4.0, 2e-3
#: The most ranks for which the matrix of all pairs is shown.
_MATRIX = 8


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: the subject of the check.
        result: ``error`` if the job fails or computes something wrong because of it, ``warning`` if it may, or if the
            job is slow because of it, ``not checked`` or ``ok``.
        text: what was found.
        advice: what to do.
    """

    name: str
    result: Result
    text: str
    advice: str = ""


def judged(name: str, is_fine: bool, text: str, advice: str, bad: Result = "warning") -> Check:
    """A check, with advice if it is not fine."""
    return Check(name, "ok", text) if is_fine else Check(name, bad, text, advice)


@dataclass
class Facts:
    """What a rank knows about its process. The defaults are the facts of this process."""

    rank: int = field(default_factory=dist.get_rank)
    host: str = field(default_factory=socket.gethostname)
    versions: str = f"fullshard {fullshard.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    device: str = "cpu"
    accelerators: int = field(
        default_factory=lambda: 0 if default_device_type() == "cpu" else torch.accelerator.device_count()
    )
    cores: list[int] = field(default_factory=lambda: _cores())
    crowded: float = field(default_factory=lambda: _crowded())
    threads: int = field(default_factory=torch.get_num_threads)
    files: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource else -1)
    shared: int = field(default_factory=lambda: shutil.disk_usage(_SHM).free if os.path.exists(_SHM) else -1)
    #: Each directory to which values are offloaded: its name, the bytes of its file, those free, and its file system.
    disks: list[tuple[str, int, int, str]] = field(default_factory=lambda: _disks_in_use())
    clock: float = field(default_factory=time.time)
    environment: dict[str, str] = field(
        default_factory=lambda: {k: v for k, v in sorted(os.environ.items()) if k.startswith(_SHOWN) and k not in _OURS}
    )
    restarts: int = field(default_factory=lambda: int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") or 0))


def _cores() -> list[int]:
    """The cores that this process may use, by number."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def _crowded() -> float:
    """How much the main thread waited for a core, as a part of the time in which it could run; -1 if unknown."""
    try:
        ran, waited = map(int, Path("/proc/self/schedstat").read_text(encoding="utf-8").split()[:2])
    except (OSError, ValueError):
        return -1.0
    return waited / (ran + waited) if ran else -1.0


def _disks_in_use() -> list[tuple[str, int, int, str]]:
    found = []
    for file in DiskFile.opened():
        path = file.directory.absolute()
        if hasattr(os, "fstatvfs"):  # the directory itself may be gone
            room = os.fstatvfs(file.fd)
            free = room.f_bavail * room.f_frsize
        else:
            free = shutil.disk_usage(path).free
        found.append((str(path), file.nbytes, free, _file_system(path)))
    return found


def _file_system(path: Path) -> str:
    """The type of a directory's file system, such as ``ext4``; empty if it is not known."""
    try:
        table_of_mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
        mounts = [line.split() for line in table_of_mounts.splitlines()]
    except OSError:
        return ""
    around = {str(each) for each in (path.resolve(), *path.resolve().parents)}
    return max(((len(where), kind) for _, where, kind, *_ in mounts if where in around), default=(0, ""))[1]


def check_environment(process_group: dist.ProcessGroup, device_type: str) -> list[Check]:
    """Checks where the ranks of a process group run. All of them must call it, and get the same result.

    Args:
        device_type: the type of the device on which they compute, such as ``cpu``.
    """
    device = compute_device(device_type)
    # Synchronise first, so that all ranks read their clocks within the time of one exchange.
    gather_objects(None, process_group)
    every = [Facts(**each) for each in gather_objects(asdict(Facts(device=str(device))), process_group)]
    checks = [check for run_check in _CHECKS for check in run_check(every)]
    backend = backend_of(process_group, device).name
    if not backend:
        text = f"The process group has no backend for {device_type}."
        return [*checks, Check("process group", "error", text, f"Initialize it with a backend for {device_type}.")]
    checks.append(Check("process group", "ok", f"{len(every)} ranks communicate by {backend}."))
    checks.append(_transport(process_group, device, every))
    checks += _pairs(process_group, device, every)
    return checks


def _versions(every: Sequence[Facts]) -> Iterator[Check]:
    first, other = every[0], next((fact for fact in every if fact.versions != every[0].versions), None)
    text = f"{first.versions}, on all ranks."
    if other is not None:
        text = f"Rank {first.rank} ({first.host}) has {first.versions}; "
        text += f"rank {other.rank} ({other.host}) has {other.versions}."
    yield judged("versions", other is None, text, "Install the same on all hosts.", "error")


def _devices(every: Sequence[Facts]) -> Iterator[Check]:
    on_host = [fact for fact in every if fact.device == "cpu"]
    shared = [
        device_of_host
        for device_of_host, count in Counter((fact.host, fact.device) for fact in every).items()
        if count > 1
    ]
    hosts = len({fact.host for fact in every})
    if on_host and (found := max(fact.accelerators for fact in on_host)):
        text = f"Rank {on_host[0].rank} computes on the CPU, and its host has {found} accelerators."
        yield Check("devices", "warning", text, "Shard over a mesh of the accelerators: init_device_mesh('cuda', ...).")
    elif not on_host and shared:
        text = f"Several ranks of {shared[0][0]} compute on {shared[0][1]}."
        advice = "Call torch.accelerator.set_device_index(int(os.environ['LOCAL_RANK'])) first on each rank."
        yield Check("devices", "error", text, advice)
    else:
        kinds = ", ".join(sorted({fact.device.partition(":")[0] for fact in every}))
        yield Check("devices", "ok", f"{len(every)} ranks on {hosts} host{'s' * (hosts > 1)} compute on {kinds}.")


def _shared_memory(every: Sequence[Facts]) -> Iterator[Check]:
    least = min(every, key=lambda fact: fact.shared)
    if least.shared < 0:
        yield Check("shared memory", "not checked", f"{least.host} has no /dev/shm.")
        return
    text = f"{bytes_text(least.shared)} are free in /dev/shm of {least.host}."
    advice = "Workers of a DataLoader and NCCL need it (fullshard does not). "
    advice += "Make it larger: docker run --shm-size=8g, or --ipc=host."
    yield judged("shared memory", least.shared >= _SHARED, text, advice)


def _disks(every: Sequence[Facts]) -> Iterator[Check]:
    for fact in every:
        for directory, nbytes, free, kind in fact.disks:
            text = f"Rank {fact.rank} keeps {bytes_text(nbytes)} of offloaded values in {directory} of {fact.host} "
            text += f"({kind or 'unknown file system'}), where {bytes_text(free)} are free."
            if kind in _IN_MEMORY:
                advice = "This file system is in memory, so nothing is saved. Use a directory on a disk."
                yield Check("disk offload", "warning", text, advice)
            else:
                advice = "Gradients and new optimizer state need as much again, or more: free some space."
                yield judged("disk offload", free >= nbytes, text, advice)


def _threads(every: Sequence[Facts]) -> Iterator[Check]:
    for host in sorted({fact.host for fact in every}):
        here = [fact for fact in every if fact.host == host]
        threads, cores = sum(fact.threads for fact in here), len({core for fact in here for core in fact.cores})
        text = f"{len(here)} ranks of {host} compute with {threads} threads, on {cores} cores."
        advice = f"Set OMP_NUM_THREADS={max(1, cores // len(here))}."
        if len(here) > cores:
            advice = "There are more ranks than cores: they share cores, and each waits for the others."
        yield judged("threads", threads <= cores, text, advice)


def _other_programs(every: Sequence[Facts]) -> Iterator[Check]:
    most = max(every, key=lambda fact: fact.crowded)
    if most.crowded < 0:
        yield Check("other programs", "not checked", f"The kernel of {most.host} does not say who waits for a core.")
        return
    text = f"Since it started, rank {most.rank} ({most.host}) has waited for a free core for {percent(most.crowded)} "
    text += "of the time in which it could run; the other ranks have waited less." if len(every) > 1 else "of its time."
    advice = "Find what else computes there (top): another job, or too many DataLoader workers."
    yield judged("other programs", most.crowded < _CROWDED, text, advice)


def _clocks(every: Sequence[Facts]) -> Iterator[Check]:
    first, last = (extreme(every, key=lambda fact: fact.clock) for extreme in (min, max))
    apart = last.clock - first.clock
    if apart > _CLOCKS and first.host != last.host:
        text = f"The clocks of {first.host} and {last.host} are {apart:.1f} s apart."
        yield Check("clocks", "warning", text, "Synchronize them (chrony, ntpd): logs and deadlines are compared.")
    else:
        yield Check("clocks", "ok", f"The clocks of all ranks are within {seconds_text(apart)}.")


def _open_files(every: Sequence[Facts]) -> Iterator[Check]:
    least = min(every, key=lambda fact: fact.files)
    if least.files < 0:
        yield Check("open files", "not checked", f"{least.host} does not say how many files a process may open.")
        return
    text = f"A process may open {least.files} files on {least.host}."
    advice = f"Allow more (ulimit -n {_FILES}): ranks that share memory need one for each buffer."
    yield judged("open files", least.files >= _FILES, text, advice)


def _settings(every: Sequence[Facts]) -> Iterator[Check]:
    first, known = every[0], every[0].environment
    found = list(_odd_settings(every))
    for name in sorted({name for fact in every for name in fact.environment} - _OF_HOSTS):
        other = next((fact for fact in every if fact.environment.get(name) != known.get(name)), None)
        if other is not None and name.startswith(_COMPARED):
            text = f"{name} is {known.get(name, 'not set')} on rank {first.rank} ({first.host}), and "
            text += f"{other.environment.get(name, 'not set')} on rank {other.rank} ({other.host})."
            found.append(Check("settings", "error", text, "Give it the same value on all ranks."))
    yield from found or [
        Check("settings", "ok", ", ".join(f"{name}={value}" for name, value in known.items()) or "None are set.")
    ]


def _odd_settings(every: Sequence[Facts]) -> Iterator[Check]:
    first = every[0].environment
    for name in sorted(first):
        if name.startswith("FULLSHARD_") and name not in _KNOWN:
            advice = f"fullshard reads only {', '.join(sorted(_KNOWN))}."
            yield Check("settings", "warning", f"{name} is set, and nothing reads it.", advice)
    if first.get("FULLSHARD_CHECKS") == "0":
        text = "FULLSHARD_CHECKS=0: ranks do not compare what they run, and ranks that hang are not ended."
        yield Check("settings", "warning", text, "Unset it.")
    if first.get("FULLSHARD_DEBUG", "0") not in ("", "0"):
        text = "FULLSHARD_DEBUG is set: memory is filled with NaN when it is released, which takes time."
        yield Check("settings", "warning", text, "Unset it once the error is found.")
    if first.get("GLOO_SOCKET_IFNAME") == "lo" and len({fact.host for fact in every}) > 1:
        text = "GLOO_SOCKET_IFNAME=lo, but the ranks are on several hosts, which cannot reach each other over lo."
        yield Check("settings", "error", text, "Name the interface that connects the hosts (ip addr).")
    if every[0].restarts and first.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1" and every[0].device == "cpu":
        text = "torchrun may restart the ranks (--max-restarts), and they then read addresses of the previous attempt."
        yield Check("restarts", "warning", text, "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun.")


#: The checks of all ranks' facts.
_CHECKS: tuple[Callable[[Sequence[Facts]], Iterator[Check]], ...] = (
    _versions,
    _devices,
    _threads,
    _other_programs,
    _shared_memory,
    _disks,
    _open_files,
    _clocks,
    _settings,
)


def _transport(process_group: dist.ProcessGroup, device: torch.device, every: Sequence[Facts]) -> Check:
    try:
        transport, why = choose_transport(process_group, device)
    except ValueError as error:
        return Check("transport", "error", f"{error}.")
    text = f"Buffers move by '{transport.name}': {why}."
    together = len({fact.host for fact in every}) == 1 < len(every)
    may_share = is_host(device) and backend_of(process_group, device).has_messages and together and not missing()
    advice = "Unset FULLSHARD_TRANSPORT. " if "FULLSHARD_TRANSPORT" in os.environ else ""
    advice += "The ranks share a host, and could share memory."
    return judged("transport", transport.name in ("shm", "hosts") or not may_share, text, advice)


def _rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of pairs of ranks. In a round each rank is in one pair at most; in all rounds together each pair occurs
    once."""
    seats = [*range(size), *([-1] if size % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _pairs(process_group: dist.ProcessGroup, device: torch.device, every: Sequence[Facts]) -> list[Check]:
    """Measures messages between pairs of ranks. The pairs of a round run at the same time."""
    me, size = process_group.rank(), process_group.size()
    if size == 1:
        return [Check("network", "not checked", "There is one rank.")]
    if backend_of(process_group, device).has_messages:  # which go from the memory of the host
        device = CPU
    mine: dict[tuple[int, int], tuple[float, float]] = {}
    small, large = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in (1, _NBYTES))
    for pairs, _ in zip(_rounds(size), range(_ROUNDS), strict=False):
        for pair in pairs:
            if me in pair:
                other = sum(pair) - me
                _times(small, 1, me < other, other, process_group)
                latency = median(_times(small, _SMALL, me < other, other, process_group)) / 2
                seconds = min(_times(large, _LARGE, me < other, other, process_group)) / 2
                mine[pair] = latency, _NBYTES / seconds
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for each in gather_objects(mine, process_group):
        found |= {pair: times for pair, times in each.items() if pair not in found}
    return _judge(found, every)


def _judge(found: dict[tuple[int, int], tuple[float, float]], every: Sequence[Facts]) -> list[Check]:
    """Compares the pairs of ranks of one host, and those of different hosts."""
    host_of = {fact.rank: fact.host for fact in every}
    found = {(every[a].rank, every[b].rank): times for (a, b), times in found.items()}
    counts = Counter(one.host != other.host for one, other in combinations(every, 2))
    checks = list[Check]()
    for differ, where in ((True, "on different hosts "), (False, "of a host ")):
        if some := {(a, b): times for (a, b), times in found.items() if (host_of[a] != host_of[b]) is differ}:
            checks.append(_judge_pairs(some, counts[differ], where if len(counts) > 1 else ""))
    return [replace(checks[0], text=checks[0].text + _matrix(found)), *checks[1:]]


def _times(
    message: torch.Tensor, count: int, begins: bool, other: int, process_group: dist.ProcessGroup
) -> list[float]:
    """The seconds of ``count`` round trips."""
    found = []
    with waiting("a message that measures the network", process_group):
        for _ in range(count):
            begin = time.perf_counter()
            for sends in (begins, not begins):
                if sends:
                    dist.send(message, group=process_group, group_dst=other)
                else:
                    dist.recv(message, group=process_group, group_src=other)
            if not is_host(message.device):
                torch.accelerator.synchronize(message.device)
            found.append(time.perf_counter() - begin)
    return found


def _judge_pairs(found: dict[tuple[int, int], tuple[float, float]], every: int, where: str) -> Check:
    """Checks the latencies (in seconds) and bandwidths (in bytes each second) of pairs of ranks, of ``every`` ones."""
    latency, bandwidth = (median(times[index] for times in found.values()) for index in (0, 1))
    which = "All pairs" if len(found) == every else f"{len(found)} of {every} pairs"
    text = f"{which} of ranks {where}reach each other: median latency {seconds_text(latency)}, "
    text += f"median bandwidth {bandwidth / 1e9:.2f} GB/s."
    slow = [pair for pair, t in found.items() if t[1] * _SLOW < bandwidth or t[0] > max(_FINE, _SLOW * latency)]
    if not slow:
        return Check("network", "ok", text)
    slow.sort(key=lambda pair: found[pair][1])
    often, count = Counter(rank for pair in slow for rank in pair).most_common(1)[0]
    named = [f"{a} and {b} ({seconds_text(found[a, b][0])}, {found[a, b][1] / 1e9:.2f} GB/s)" for a, b in slow[:3]]
    advice = f"Check the host and the network of rank {often}." if count > 1 else "Check their hosts and network."
    slow_text = f"{len(slow)} pairs of ranks {where}are slower than the others, the slowest first: {'; '.join(named)}."
    return Check("network", "warning", f"{slow_text} {text}", advice)


def _matrix(found: dict[tuple[int, int], tuple[float, float]]) -> str:
    """The bandwidths of all pairs as a matrix, if there are few ranks."""
    ranks = sorted({rank for pair in found for rank in pair})
    if not 2 < len(ranks) <= _MATRIX:
        return ""
    speeds = {pair: f"{bandwidth / 1e9:.2f}" for pair, (_, bandwidth) in found.items()}
    rows = [[str(a), *(speeds.get((min(a, b), max(a, b)), "-") for b in ranks)] for a in ranks]
    return "\n" + indent(table(["GB/s", *map(str, ranks)], rows), "  ")
