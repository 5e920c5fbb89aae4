"""The typed sections of a group's buffers.

A group may hold parameters of several dtypes. Those of one dtype form a section, which has a Plan of its own; the
sections of a buffer lie end to end in one piece of memory and travel in one call. This file owns the step from plans
and dtypes to bytes and typed views, and leaves to others where the memory comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from fullshard.buffer.plan import BufferPlan, make_plan

#: Bytes to which sections, and everything on its way, are aligned: a cache line, and more than any dtype asks for.
ALIGNMENT = 64
Dtypes = Sequence[torch.dtype]


@dataclass(frozen=True)
class Section:
    """Parameters of one dtype."""

    dtype: torch.dtype  # in which they are stored
    members: tuple[int, ...]  # which of the group's parameters they are, in the order of ``plan.params``
    plan: BufferPlan

    def over(self, ranks: int) -> Section:
        """The same parameters, cut into equal parts over another number of ranks."""
        params = [replace(param, cuts=None) for param in self.plan.params]
        return replace(self, plan=make_plan(params, ranks))

    def inside(self, rank: int, parts: int) -> Section:
        """The chunks of ``rank``, each cut again into ``parts``."""
        return replace(self, plan=self.plan.inside(rank, parts))


def full_bytes(sections: Sequence[Section], dtypes: Dtypes) -> int:
    return full_starts(sections, dtypes)[-1]


def full_starts(sections: Sequence[Section], dtypes: Dtypes) -> list[int]:
    """Where in the full buffer each section begins, and where the last ends, in bytes."""
    return starts([section.plan.full_numel for section in sections], dtypes)


def shard_bytes(sections: Sequence[Section], dtypes: Dtypes) -> int:
    return starts([section.plan.shard_numel for section in sections], dtypes)[-1]


def full_views(memory: torch.Tensor, sections: Sequence[Section], dtypes: Dtypes) -> tuple[torch.Tensor, ...]:
    """The sections of a full buffer: 1-D tensors of ``plan.full_numel`` elements in ``memory`` (1-D, uint8)."""
    return views(memory, [section.plan.full_numel for section in sections], dtypes)


def shard_views(memory: torch.Tensor, sections: Sequence[Section], dtypes: Dtypes) -> tuple[torch.Tensor, ...]:
    """The sections of a shard: 1-D tensors of ``plan.shard_numel`` elements in ``memory`` (1-D, uint8)."""
    return views(memory, [section.plan.shard_numel for section in sections], dtypes)


def starts(numels: Sequence[int], dtypes: Dtypes) -> list[int]:
    """Where tensors that lie end to end begin, each on a boundary, and where the last ends, in bytes."""
    nbytes = (align(numel * dtype.itemsize) for numel, dtype in zip(numels, dtypes, strict=True))
    return list(accumulate(nbytes, initial=0))


def views(memory: torch.Tensor, numels: Sequence[int], dtypes: Dtypes) -> tuple[torch.Tensor, ...]:
    """Such tensors in ``memory`` (1-D, uint8)."""
    return tuple(
        memory[start : start + numel * dtype.itemsize].view(dtype)
        for start, numel, dtype in zip(starts(numels, dtypes), numels, dtypes, strict=False)
    )


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
