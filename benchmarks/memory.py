"""Memory: what a step takes above the sharded state, what rests between steps, page faults, and padding.

Each contender has fresh processes of its own. Bytes are those that torch's CPU allocator handed out, as torch's
profiler records them one by one, which is exact and the same in every run; memory that ranks share is no such memory,
so that mappings are added, once a host. Temporaries inside of gloo are not tensors and are in the resident peak only.
"""

from __future__ import annotations

import gc
import json
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.contenders import ALONE, DDP, FSDP1, FSDP2, Contender, ours
from benchmarks.models import Awkward, Work
from benchmarks.ranks import run_pretending, run_ranks
from benchmarks.traffic import Traffic

_STEPS = 2
_UNWATCHED_STEPS = 6


def measure_memory(work: Work, world_size: int) -> dict[str, Any]:
    """For each contender the bytes of one rank in the phases of its life, and its page faults."""
    contenders = run_ranks(_contenders, world_size)[0]
    found = {contender.name: measure_contender(contender, work, world_size) for contender in contenders}
    return {"ranks": world_size, "model_bytes": work.model_bytes, "group_bytes": work.block_bytes, "contenders": found}


def measure_contender(contender: Contender, work: Work, world_size: int) -> dict[str, Any]:
    """Bytes and page faults of one contender, of the rank that has most."""
    by_rank = run_ranks(_measure, world_size, contender, work)
    most = {key: max(rank[key] for rank in by_rank) for key in by_rank[0]}
    return {"transport": contender.transport, **most}


def measure_padding(world_sizes: list[int]) -> dict[str, Any]:
    """Bytes that gathering a parameter of 3 x 4096 delivers, as a multiple of its own."""
    return {"world_sizes": {size: run_pretending(_measure_padding, size) for size in world_sizes}}


def _contenders() -> list[Contender]:
    return [*ours(), FSDP2, FSDP1, DDP, ALONE]


def _measure(contender: Contender, work: Work) -> dict[str, float]:
    own_pages = _shared_bytes()
    resident = _resident_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with _phase("build"):
            model = work.build()
        with _phase("wrap"):
            sharded = contender.wrap(model, list(model.blocks))
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.01)
        batches = [work.batch(dist.get_rank(), step) for step in range(_STEPS)]
        del model
        gc.collect()
        for batch in batches:
            _step(sharded, optimizer, batch)
        with _phase("rest"):
            torch.empty(1)
    phases = _phases(profiler)
    shared = max(0, _shared_bytes() - own_pages) // dist.get_world_size()
    before, after = phases["build"], phases["wrap"]
    return {
        "state": work.model_bytes // (dist.get_world_size() if contender.is_sharded else 1),
        "wrap_peak": after["peak"] - before["end"],
        "forward_peak": phases["forward"]["peak"] + shared,
        "backward_peak": phases["backward"]["peak"] + shared,
        "rest": phases["rest"]["end"] + shared,
        "resident_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident,
        "faults": _faults(sharded, optimizer, batches[0]),
    }


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    with _phase("forward"):
        loss = model(batch)
    with _phase("backward"):
        loss.backward()
    del loss
    with _phase("update"):
        optimizer.step()
        optimizer.zero_grad()


def _faults(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Page faults in a step that comes after many like it; a median, because the allocator has moods."""
    counts = []
    for _ in range(_UNWATCHED_STEPS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        _step(model, optimizer, batch)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return median(counts[2:])


@contextmanager
def _phase(name: str) -> Iterator[None]:
    with record_function(f"phase {name}"):
        yield


def _phases(profiler: profile) -> dict[str, dict[str, int]]:
    """Bytes at the end and at the peak of each phase; of phases that repeat, the last time."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    totals = sorted(
        (event["ts"], event["args"]["Total Allocated"]) for event in events if event.get("name") == "[memory]"
    )
    phases: dict[str, dict[str, int]] = {}
    spans = [event for event in events if event.get("name", "").startswith("phase ") and "dur" in event]
    for span in sorted(spans, key=lambda event: event["ts"]):
        begin, end = span["ts"], span["ts"] + span["dur"]
        before = [total for time, total in totals if time < begin]
        inside = [total for time, total in totals if begin <= time <= end]
        level = before[-1] if before else 0
        phases[span["name"].removeprefix("phase ")] = {
            "end": inside[-1] if inside else level,
            "peak": max([level, *inside]),
        }
    return phases


def _shared_bytes() -> int:
    """Resident bytes of this process that belong to shared mappings."""
    return _status("RssShmem")


def _resident_bytes() -> int:
    return _status("VmRSS")


def _status(field: str) -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def _measure_padding() -> dict[str, float]:
    contenders: list[Contender] = [*ours(every_transport=False), FSDP2, FSDP1]
    return {contender.name: _padding(contender) for contender in contenders}


def _padding(contender: Contender) -> float:
    block = Awkward()
    nbytes = block.weight.nbytes
    sharded = contender.wrap(nn.Sequential(block), [block])
    with torch.no_grad():
        sharded(torch.ones(1))
        next(sharded.parameters()).add_(0)
        with Traffic(dist.get_world_size()) as traffic:
            sharded(torch.ones(1))
    return traffic.gathered / nbytes
