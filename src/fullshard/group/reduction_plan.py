"""Which parameters take part in a reduction, and how their gradients travel: worked out once for each set of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.buffer.plan import Plan
from fullshard.comm.transport import Route, Transfer
from fullshard.group.context import GroupContext


@dataclass(frozen=True)
class Part:
    """The parameters of one section that take part in a reduction."""

    indices: tuple[int, ...]
    plan: Plan
    section: int
    allocate: Callable[[], torch.Tensor]  # memory for the reduced values, in the dtype in which they are written
    home_dtype: torch.dtype  # of ``param.grad``
    chunks: tuple[list[torch.Size], list[tuple[int, ...]], list[int]]  # sizes, strides and offsets in the shard
    lengths: list[int]  # of chunks, if all are vectors end to end: then one call finds them


@dataclass(eq=False)
class ReductionPlan:
    """The parameters that take part in a reduction, by section, and how their gradients travel."""

    parts: Sequence[Part]
    fulls: Sequence[torch.Tensor]  # where the gradients of each part's section lie
    is_final: bool  # whether the reduce-scatter gives the final values, so that they may be written in their own dtype
    straight: Sequence[int]  # parameters whose gradients are not in there
    route: Route | None = None  # once a reduction was started

    def make_route(self, group: GroupContext, over: dist.ProcessGroup, outputs: Sequence[torch.Tensor]) -> Route:
        """The route to ``outputs``, which serves all later ones."""
        transfers = list(map(Transfer, [part.plan for part in self.parts], self.fulls, outputs))
        self.route = group.reduce_transport.reduce_route(transfers, over, 2 * group.tag + 1)
        return self.route
