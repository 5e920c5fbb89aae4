"""Memory: what a step takes above what a rank has to keep, what rests between steps, and padding.

Each contender has fresh processes of its own, in which freed memory goes back to the kernel at once, so that the
kernel's count is what is alive: of every thread, gloo's own temporaries included. The model is blocks of one size and
next to nothing else, so that bytes can be told in blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from benchmarks import resident
from benchmarks.contenders import ALONE, DDP, FSDP1, FSDP2, Contender, ours
from benchmarks.models import TINY, Awkward, Block, Work
from benchmarks.ranks import run_ranks, run_simulated
from benchmarks.traffic import Traffic
from fullshard.buffer.plan import ALIGNMENT, ParamShape, make_plan

_STEPS = 2
#: Sizes of groups in fp32, in MiB, within which padding is looked for: from one to the next.
_GROUP_SIZES = (1, 2, 4, 16, 64)


@dataclass(frozen=True)
class Phases:
    """Bytes of one rank above what it had before the model was built.

    Args:
        state: its parameters, and as much again for its gradients.
        forward: the peak of a forward that begins without buffers of earlier steps.
        backward: the peak of the backward that follows.
        rest: between steps, after ``zero_grad()``.
        allocated: the same, by the count of ``malloc``.
        freed: the same, after buffers were given back where a library can.
        predicted_forward, predicted_backward, predicted_rest: how much more than in ``freed`` these are by
            ``fullshard.explain``, activations included.
    """

    transport: str
    state: float
    forward: float
    backward: float
    rest: float
    allocated: float
    freed: float
    predicted_forward: float = math.nan
    predicted_backward: float = math.nan
    predicted_rest: float = math.nan


def measure_memory(work: Work, world_size: int) -> dict[str, Any]:
    """For each contender the bytes of the rank that has most; fullshard with prefetch, as by default, and without."""
    found: dict[str, Any] = {}
    for contender in run_ranks(_contenders, world_size)[0]:
        found[contender.name] = measure_contender(contender, work, world_size)
        if contender.library == "fullshard" and contender.transport != "collective":
            found[f"{contender.name}, no prefetch"] = measure_contender(contender, work, world_size, prefetch=0)
    return {"ranks": world_size, "model_bytes": work.model_bytes, "group_bytes": work.block_bytes, "contenders": found}


def measure_contender(contender: Contender, work: Work, world_size: int, prefetch: int | None = None) -> dict[str, Any]:
    """The bytes of one contender: of each figure the largest of the ranks."""
    by_rank = [vars(phases) for phases in run_ranks(_measure, world_size, contender, work, prefetch)]
    return {key: max(rank[key] for rank in by_rank) for key in by_rank[0]}


def measure_peaks(work: Work, world_size: int) -> dict[str, Any]:
    """For each contender over sockets, and torch's FSDP2, the peak of a step in a process, the parameters included."""
    found: dict[str, Any] = {}
    for contender in run_ranks(_contenders, world_size)[0]:
        if contender.library == "FSDP2" or contender.transport in ("p2p", "collective"):
            peak = max(run_ranks(_measure_peak, world_size, contender, work))
            found[contender.name] = {"transport": contender.transport, "peak": peak}
    return {"ranks": world_size, "model_bytes": work.model_bytes, "contenders": found}


def measure_padding(world_sizes: list[int]) -> dict[str, Any]:
    """What sharding adds to the bytes of parameters.

    Returns:
        ``world_sizes``: bytes that gathering a parameter of 3 x 4096 delivers, as a multiple of its own, for each
        contender. ``flat``: the most padding that transformer blocks have in the *flat* layout at the largest of
        ``world_sizes``, as a fraction of their parameters, by their size, for alignments that fp32 can have.
    """
    return {
        "world_sizes": {size: run_simulated(_measure_padding, size) for size in world_sizes},
        "flat": [_flat_padding(least, most, max(world_sizes)) for least, most in pairwise(_GROUP_SIZES)],
        "flat_world_size": max(world_sizes),
    }


def _contenders() -> list[Contender]:
    return [*ours(), FSDP2, FSDP1, DDP, ALONE]


def _measure(contender: Contender, work: Work, prefetch: int | None) -> Phases:
    resident.return_what_is_freed()
    tiny, *_ = _train(contender, TINY, prefetch)  # what a first step imports and keeps is not the model's
    is_explained = contender.library in ("fullshard", "wrapper")
    if is_explained:
        fullshard.explain(tiny, batch=TINY.batch(0, 0))
    del tiny
    resident.settle()
    before, allocated_before = resident.bytes_now(), resident.bytes_allocated()
    model, optimizer, steps = _train(contender, work, prefetch)
    resident.settle()
    rest, allocated = resident.bytes_now() - before, resident.bytes_allocated() - allocated_before
    batch = work.batch(dist.get_rank(), steps)
    predicted: list[int] = []
    if is_explained:
        model.free_buffers()  # type: ignore[operator]
        at_rest, *phases, _ = fullshard.explain(model, optimizer_bytes=0, batch=batch).memory
        predicted = [phase.nbytes - at_rest.nbytes for phase in phases]
    resident.settle()
    freed = resident.bytes_now() - before
    with resident.Peak() as forward:
        loss = model(batch)
    with resident.Peak() as backward:
        loss.backward()
    optimizer.zero_grad()
    return Phases(
        contender.transport,
        work.model_bytes / (dist.get_world_size() if contender.is_sharded else 1),
        forward.bytes - before,
        backward.bytes - before,
        rest,
        allocated,
        freed,
        *predicted,
    )


def _measure_peak(contender: Contender, work: Work) -> float:
    """Bytes at the peak of a step, above what the process had before the model was built."""
    resident.return_what_is_freed()
    _train(contender, TINY, None)
    resident.settle()
    before = resident.bytes_now()
    model, optimizer, steps = _train(contender, work, None)
    resident.settle()
    with resident.Peak() as step:
        model(work.batch(dist.get_rank(), steps)).backward()
        optimizer.step()
    return step.bytes - before


def _train(contender: Contender, work: Work, prefetch: int | None) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """The model and its optimizer after some steps, and how many."""
    model = work.build()
    sharded = contender.wrap(model, list(model.blocks))
    if prefetch is not None:
        sharded.set_prefetch_limit(prefetch)  # type: ignore[operator]
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.01)
    for step in range(_STEPS):
        sharded(work.batch(dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sharded, optimizer, _STEPS


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
        with Traffic() as traffic:
            sharded(torch.ones(1))
    return traffic.gathered / nbytes


def _flat_padding(least: int, most: int, world_size: int) -> dict[str, Any]:
    """Of blocks with a multiple of 8 as width, and groups of ``least`` to ``most`` MiB in fp32."""
    found: dict[int, float] = dict.fromkeys((ALIGNMENT, 4), 0.0)
    for width in range(8, 2048, 8):
        with torch.device("meta"):
            params = [ParamShape(name, tuple(param.shape)) for name, param in Block(width).named_parameters()]
        numel = sum(param.numel for param in params)
        if not least <= 4 * numel / 2**20 < most:
            continue
        for alignment in found:
            plan = make_plan(params, world_size, "flat", alignment)
            found[alignment] = max(found[alignment], world_size * plan.shard_numel / numel - 1)
    return {"groups": f"{least} to {most} MiB", "alignments": found}
