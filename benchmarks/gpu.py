"""fullshard beside torch's FSDP2 on a machine with a GPU: `python benchmarks/gpu.py`.

Both train the same transformer in bf16 in one process, in turns: the time of a step by events of the device, the part
of its peak that this is, the time that the host takes for a step, what it waits for, memory, and the time of kernels by
kind. One process is one rank, so that collectives move nothing between GPUs; with `torchrun` there are as many ranks as
it starts. Several ranks share a GPU where NCCL is 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1 is set.

Without a GPU it says so, and does nothing. It has never been run on one: its parts are tested on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from tabulate import tabulate
from torch import nn

# Started as a script, Python looks for modules in this folder, and not where the folder itself is found.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fullshard
from benchmarks.models import Work

#: Dense bf16 operations of matrix units in a second, by a part of the name of the GPU.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
#: By billions of parameters. Parameters and gradients of the last take 54 GB on one rank.
SIZES = {
    1: Work("1 B", blocks=20, width=2048, sequence=2048, vocabulary=32_000),
    3: Work("3 B", blocks=21, width=3328, sequence=2048, vocabulary=32_000),
    7: Work("7 B", blocks=32, width=4096, sequence=2048, vocabulary=32_000),
}
#: Groups of 256 MiB, of which the kernels are looked at.
GROUPS = Work("groups of 256 MiB", blocks=4, width=2368, sequence=128, vocabulary=512)
LIBRARIES = {"fullshard": fullshard, "torch FSDP2": torch_fsdp, "not sharded": None}
_WARM_UP = 3
#: Kinds of kernels, and what their names have in them.
KINDS = {
    "collectives": ("nccl",),
    "copies": ("copy", "memcpy", "cat", "split"),
    "matrix products": ("gemm", "cutlass", "xmma", "flash", "fmha", "aten::mm", "aten::addmm"),
}


@dataclass
class Trained:
    """A model on a device, one step of which is measured."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device

    def step(self, tokens: torch.Tensor) -> None:
        self.model(tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(library: Any, work: Work, device: torch.device) -> Trained:
    """The model of a work, in bf16, sharded by a library that has torch's names or by none."""
    with device:
        model = work.build()
    if library is None:
        return Trained(model.bfloat16(), torch.optim.SGD(model.parameters(), 1e-4, foreach=True), device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        library.fully_shard(module, mesh=mesh, mp_policy=policy)
    return Trained(model, torch.optim.SGD(model.parameters(), 1e-4, foreach=True), device)


def timed(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds that the device takes for a step, and the host until it has asked for all of it."""
    if device.type == "cpu":
        begin = time.perf_counter()
        step()
        return (seconds := time.perf_counter() - begin), seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    events[0].record()
    step()
    events[1].record()
    asked = time.perf_counter() - begin
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) / 1e3, asked


def operations(work: Work) -> float:
    """Floating-point operations of a step of one rank: products with each parameter, and causal attention."""
    inside = work.blocks * 12 * work.width**2 + work.vocabulary * work.width
    return work.sequence * (6.0 * inside + 6.0 * work.blocks * work.sequence * work.width)


def synchronizations(step: Callable[[], object], device: torch.device) -> int:
    """How often the host waits in a step, as torch's own check of synchronizing operations sees it."""
    if device.type == "cpu":
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught)


def kernels(step: Callable[[], object], device: torch.device, trace: Path | None = None) -> dict[str, float]:
    """Seconds of kernels in a step by kind (on the CPU: of operations); a trace of it goes to ``trace``."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
    if trace is not None:
        profile.export_chrome_trace(str(trace))
    found: Counter[str] = Counter()
    for each in profile.key_averages():
        seconds = each.self_cpu_time_total if device.type == "cpu" else each.self_device_time_total
        kinds = (kind for kind, names in KINDS.items() if any(name in each.key.lower() for name in names))
        found[next(kinds, "others")] += seconds / 1e6
    return {kind: found[kind] for kind in (*KINDS, "others")}


def memory(device: torch.device) -> dict[str, float]:
    """GiB that were allocated at most, and that are allocated and reserved now."""
    if device.type == "cpu":
        return {"peak": 0.0, "allocated": 0.0, "reserved": 0.0}
    peak, now, reserved = (getattr(torch.cuda, name)(device) for name in _MEMORY)
    return {"peak": peak / 2**30, "allocated": now / 2**30, "reserved": reserved / 2**30}


_MEMORY = ("max_memory_allocated", "memory_allocated", "memory_reserved")


def measure(
    library: Any, work: Work, device: torch.device, steps: int, lengths: int, trace: Path | None = None
) -> dict[str, float]:
    """What is measured of one library.

    Args:
        steps: that are timed; the median counts.
        lengths: further steps, each with another sequence length, after which memory is looked at again.
        trace: where the trace of a step goes.
    """
    trained = train(library, work, device)
    rank = dist.get_rank()
    for at in range(_WARM_UP):
        trained.step(work.batch(rank, at).to(device))
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    tokens = work.batch(rank, 0).to(device)
    times = [timed(lambda: trained.step(tokens), device) for _ in range(steps)]
    seconds, asked = (statistics.median(each) for each in zip(*times, strict=True))
    found = {"seconds": seconds, "operations/s": operations(work) / seconds}
    found |= {"host seconds a group": asked / (work.blocks + 1)}
    found |= {"synchronizations": synchronizations(lambda: trained.step(tokens), device)}
    found |= {f"{name} GiB": value for name, value in memory(device).items()}
    found |= {f"{kind}, s": value for kind, value in kernels(lambda: trained.step(tokens), device, trace).items()}
    for at in range(lengths):
        other = replace(work, sequence=1 + at * 389 % work.sequence)
        trained.step(other.batch(rank, at).to(device))
    return found | {f"{name} GiB, other lengths": value for name, value in memory(device).items()}


def compare(work: Work, device: torch.device, steps: int, lengths: int, traces: Path | None) -> dict[str, Any]:
    """Each library in turn, with the memory of the one before it given back."""
    found = {}
    for name, library in LIBRARIES.items():
        trace = None if traces is None else traces / f"{work.name}-{name}-{dist.get_rank()}.json".replace(" ", "-")
        found[name] = measure(library, work, device, steps, lengths, trace)
        gc.collect()
        if device.type != "cpu":
            torch.cuda.empty_cache()
    return found


def table(found: dict[str, Any], peak: float) -> str:
    """The figures as a table, and the part of ``peak`` (operations in a second) that each reaches if it is known."""
    rows = [[what, *(each[what] for each in found.values())] for what in next(iter(found.values()))]
    if peak:
        rows.insert(1, ["part of the peak", *(each["operations/s"] / peak for each in found.values())])
    return tabulate(rows, headers=["", *found], floatfmt=".4g")


@contextmanager
def ranks(backend: str) -> Iterator[None]:
    """A process group: of the ranks that `torchrun` started, or of this process alone."""
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py", description=__doc__)
    parser.add_argument("--billions", type=int, choices=SIZES, default=1, help="of parameters")
    parser.add_argument("--steps", type=int, default=20, help="that are timed")
    parser.add_argument("--lengths", type=int, default=100, help="steps with other sequence lengths")
    parser.add_argument("--traces", type=Path, help="a folder for a trace of each library")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a GPU that torch.cuda sees, and there is none: nothing was measured")
        return 0
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device)
    peak = next((value for part, value in PEAKS.items() if part in name), 0.0)
    with ranks("nccl"):
        for work in (SIZES[options.billions], GROUPS):
            found = compare(work, device, options.steps, options.lengths, options.traces)
            if dist.get_rank() == 0:
                print(f"\n{work.name} on {dist.get_world_size()} ranks, {name}, torch {torch.__version__}\n")
                print(table(found, peak))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
