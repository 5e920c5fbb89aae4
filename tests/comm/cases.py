"""Groups to move between ranks, and what has to come out: computed on whole tensors, without plans or messages.

A `Case` is a list of sections, each parameters of one dtype. Its values are the same on every rank that asks, so that
each rank knows what all others have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.buffer.plan import BufferPlan, ParamShape, make_plan
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.transport import Reduction, StillRead, Transfer, Transport
from fullshard.device import Pending
from fullshard.ragged import balance

Shape = tuple[tuple[int, ...], int | None]
"""The shape of a parameter, and the dim along which it is cut."""
Shapes = tuple[Shape, ...]

ODD: Shapes = (
    ((7, 3), 0),
    ((), None),
    ((1, 5), 0),
    ((3, 8), 1),
    ((0, 4), 0),
    ((5,), 0),
    ((2, 3, 5), 2),
    ((4, 1), 1),
    ((3,), None),
)
"""Uneven along several dims, fewer rows than ranks, no elements at all, scalars, and one that every rank keeps."""

LARGE: Shapes = (
    ((301, 257), 0),
    ((257,), 0),
    ((3, 66_001), 1),
    ((300, 303), 1),
    ((2, 5, 9_000), 1),
    ((40,), 0),
    ((70_003,), 0),
)
"""Pieces that travel alone, in rows, and packed, and that take several rounds when staging is small."""

ZERO_COPY: Shapes = (
    ((5,), 0),
    ((600, 1000), 0),
    ((301, 1000), 0),
    ((), None),
    ((1, 786_432), 1),
    ((1000, 600), 1),
    ((1200, 400), 0),
    ((48, 7), 0),
)
"""Parameters whose chunks are large and whole on every rank, among others that are not."""

EMPTY: Shapes = (((0, 3), 0), ((0,), 0))

TINY: Shapes = (((1, 3), 0), ((1,), 0))
"""Everything belongs to the first rank."""

EQUAL: Shapes = (*[((7, 3), 0)] * 3, ((5,), 0), *[((7, 3), 0)] * 2, *[((3, 8), 1)] * 2, *[((), None)] * 2, ((7, 3), 0))
"""Runs of equal parameters, of which some go on after others that lie in between."""

WIDE: Shapes = (((2, 600_000), 1),)
"""Rows of which each is longer than what is added up at a time."""

SCALARS: Shapes = (((), None), ((), None))


LayoutName = Literal["even", "flat", "ragged"]
"""The layouts of a plan; in *ragged*, some parameters of *even* are cut unevenly or not at all."""


@dataclass(frozen=True)
class Section:
    dtype: torch.dtype
    shapes: Shapes


@dataclass(frozen=True)
class Case:
    """Sections in one layout."""

    layout: LayoutName
    sections: tuple[Section, ...]

    def plans(self, size: int) -> list[BufferPlan]:
        shapes = [[ParamShape(f"p{i}", *shape) for i, shape in enumerate(each.shapes)] for each in self.sections]
        if self.layout == "ragged" and size > 1:
            return [make_plan(ragged(params, size), size) for params in shapes]
        return [make_plan(params, size, "flat" if self.layout == "flat" else "even") for params in shapes]

    @lru_cache(maxsize=4)  # noqa: B019
    def values(self, rank: int) -> list[list[Tensor]]:
        """The parameters (or gradients) of a rank, section by section."""
        generator = torch.Generator().manual_seed(rank)
        return [
            [torch.randn(shape, generator=generator).to(section.dtype) for shape, _ in section.shapes]
            for section in self.sections
        ]


def ragged(params: Sequence[ParamShape], size: int) -> list[ParamShape]:
    """Of three parameters one is whole on a rank and one is cut between any rows; the third stays as it is."""
    chosen = [i for i, param in enumerate(params) if param.dim is not None and i % 3 < 2]
    counts = {i: 1 if i % 3 == 0 else params[i].shape[params[i].dim or 0] for i in chosen}
    blocks = [(count, params[i].numel // max(1, count)) for i, count in counts.items()]
    cuts = dict(zip(chosen, balance(blocks, size, first=1), strict=True))
    found = list(params)
    for i, numbers in cuts.items():
        length = params[i].shape[params[i].dim or 0]
        places = [length if number == counts[i] else number * (i % 3) for number in numbers]
        found[i] = replace(params[i], cuts=tuple(places))
    return found


def cut(plan: BufferPlan, values: Sequence[Tensor], rank: int) -> list[tuple[int, Tensor]]:
    """What `rank` owns of `values`: where it begins in the shard, and the elements."""
    if plan.layout == "flat":
        start = rank * plan.shard_numel
        found = []
        for value, offset in zip(values, plan.full_offsets, strict=True):
            first, last = max(offset, start), min(offset + value.numel(), start + plan.shard_numel)
            if first < last:
                found.append((first - start, value.flatten()[first - offset : last - offset]))
        return found
    chunks = []
    for i, (value, param, offset) in enumerate(zip(values, plan.params, plan.shard_offsets, strict=True)):
        if param.dim is not None and param.cuts is not None:
            value = value.narrow(param.dim, param.cuts[rank], param.cuts[rank + 1] - param.cuts[rank])
            offset = plan.cuts[i].share(rank).place
        elif param.dim is not None:
            parts = value.chunk(plan.world_size, param.dim)
            value = parts[rank] if rank < len(parts) else value.flatten()[:0]
        chunks.append((offset, value.flatten()))
    return chunks


def is_kept(plan: BufferPlan, param: ParamShape) -> bool:
    """Whether every rank has all of a parameter."""
    return plan.layout == "even" and param.dim is None


def transfers_of(
    case: Case, size: int, shard_dtype: torch.dtype | None = None, transport: Transport | None = None
) -> list[Transfer]:
    """Buffers for a case, full of NaN.

    The sections of a shard lie in one piece of memory, as those of a group do; those of a full buffer do if a transport
    allocates it.
    """
    plans = case.plans(size)
    dtypes = [section.dtype for section in case.sections]
    shard_dtypes = [shard_dtype or dtype for dtype in dtypes]
    shards = _end_to_end([plan.shard_numel for plan in plans], shard_dtypes, PointToPointTransport())
    if transport is None:
        fulls = [torch.empty(plan.full_numel, dtype=dtype) for plan, dtype in zip(plans, dtypes, strict=True)]
    else:
        fulls = _end_to_end([plan.full_numel for plan in plans], dtypes, transport)
    transfers = [Transfer(*each) for each in zip(plans, fulls, shards, strict=True)]
    for transfer in transfers:
        transfer.full.fill_(math.nan)
        transfer.shard.fill_(math.nan)
    return transfers


def _end_to_end(numels: Sequence[int], dtypes: Sequence[torch.dtype], transport: Transport) -> list[Tensor]:
    ends = [0]
    for numel, dtype in zip(numels, dtypes, strict=True):
        ends.append(math.ceil((ends[-1] + numel * dtype.itemsize) / 64) * 64)
    memory = transport.allocate(ends[-1], torch.device("cpu"))
    pieces = zip(numels, dtypes, ends[:-1], strict=True)
    return [memory[start : start + numel * dtype.itemsize].view(dtype) for numel, dtype, start in pieces]


def fill_shards(case: Case, transfers: Sequence[Transfer], rank: int) -> None:
    """Give a rank its part of the parameters; those that every rank keeps are different on each."""
    everybody, own = case.values(0), case.values(rank)
    for section, transfer in enumerate(transfers):
        values = [
            mine if is_kept(transfer.plan, param) else value
            for param, value, mine in zip(transfer.plan.params, everybody[section], own[section], strict=True)
        ]
        for start, elements in cut(transfer.plan, values, rank):
            transfer.shard[start : start + elements.numel()] = elements


def assert_gathered(case: Case, transfers: Sequence[Transfer], rank: int) -> None:
    """All parameters are there, bit for bit."""
    everybody, own = case.values(0), case.values(rank)
    for section, transfer in enumerate(transfers):
        plan = transfer.plan
        for i, (param, offset) in enumerate(zip(plan.params, plan.full_offsets, strict=True)):
            expected = own[section][i] if is_kept(plan, param) else everybody[section][i]
            found = transfer.full[offset : offset + param.numel].view(param.shape)
            assert torch.equal(found, expected), f"section {section}, {param}"


def fill_fulls(case: Case, transfers: Sequence[Transfer], rank: int) -> None:
    """Give a rank its own gradients."""
    for transfer, gradients in zip(transfers, case.values(rank), strict=True):
        for gradient, offset in zip(gradients, transfer.plan.full_offsets, strict=True):
            transfer.full[offset : offset + gradient.numel()] = gradient.flatten()


def assert_reduced(
    case: Case, transfers: Sequence[Transfer], rank: int, divisor: float, exactly_added: bool = True
) -> None:
    """The shard has the sum over all ranks, divided.

    `exactly_added` allows for one rounding to the dtype of the shard, and a few roundings of fp32; without it there
    may be one rounding of the dtype that travels for each rank.
    """
    size = transfers[0].plan.world_size
    gradients = [case.values(other) for other in range(size)]
    for section, transfer in enumerate(transfers):
        terms = [
            torch.stack([values[section][i].double() for values in gradients])
            for i in range(len(gradients[0][section]))
        ]
        largest = max((term.abs().sum(0).max().item() for term in terms if term.numel()), default=0.0) / divisor
        epsilon = torch.finfo(transfer.shard.dtype).eps
        if exactly_added:
            tolerance = epsilon + (size + 1) * torch.finfo(torch.float32).eps
        else:
            tolerance = epsilon + (size + 1) * torch.finfo(transfer.full.dtype).eps
        if transfer.full.dtype == torch.float64 and transfer.shard.dtype == torch.float64:
            tolerance = (size + 2) * epsilon
        for start, expected in cut(transfer.plan, [term.sum(0) / divisor for term in terms], rank):
            found = transfer.shard[start : start + expected.numel()].double()
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * largest)


def group() -> dist.ProcessGroup:
    """All ranks of the test."""
    return dist.group.WORLD


def gather(
    transport: Transport, transfers: Sequence[Transfer], process_group: dist.ProcessGroup | None, tag: int = 0
) -> Pending:
    """One gather along a route of its own."""
    return transport.gather_route(transfers, process_group, tag).start()


def reduce(
    transport: Transport,
    transfers: Sequence[Transfer],
    process_group: dist.ProcessGroup | None,
    tag: int,
    reduction: Reduction,
) -> Pending:
    """One reduction along a route of its own."""
    route = transport.reduce_route(transfers, process_group, tag)
    return route.start([transfer.shard for transfer in transfers], reduction)


def complete(pending: Pending) -> None:
    """Finish, and wait until the buffers that were handed over may be written again."""
    pending.finish()
    if isinstance(pending, StillRead):
        pending.wait()
