"""Sums over replicas, each of which has all of the parameters.

Large gradients are added up in the tensors that autograd made, small ones in the runs of a buffer, each by an
all-reduce of the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm.process_group import backend_name
from fullshard.comm.sums import choose_scaling, divide_
from fullshard.comm.transport import PLAIN_SUM, Reduction, Route, Transfer, Transport, alias
from fullshard.comm.waits import Wait, wait_for
from fullshard.device import Pending, is_host


def sum_route(transport: Transport, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> Route:
    """The route by which replicas add up what they have in buffers of ``transport``."""
    route = transport.sum_route(transfers, process_group, tag)
    return AllReduceRoute(transport, transfers, process_group, tag) if route is None else route


class AllReduceRoute:
    """The route from partial to replicated. A start adds up what the ranks have in the full buffers and in the tensors
    that it is given beside these, in place; then the values of the buffers are copied to the shards."""

    staging = 0

    def __init__(
        self, transport: Transport, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int
    ) -> None:
        self._group = process_group
        self._wait = Wait("an all-reduce", process_group, tag)
        self._local = transport.reduce_route(transfers, None, tag)
        spans = list[tuple[torch.Tensor, int, int]]()  # runs of elements in full buffers
        for plan, full, _ in transfers:
            for param, start in zip(plan.params, plan.full_offsets, strict=True):
                before, first, end = spans[-1] if spans else (full, 0, -plan.alignment)
                if before is full and 0 <= start - end < plan.alignment:
                    spans[-1] = full, first, start + param.numel
                elif param.numel:
                    spans.append((full, start, start + param.numel))
        self._runs = [alias(full)[first:end] for full, first, end in spans]
        size = process_group.size()
        self.sent = 2 * (size - 1) * sum(run.nbytes for run in self._runs) // size

    def start(
        self, shards: Sequence[torch.Tensor] = (), reduction: Reduction = PLAIN_SUM, *zero_copy: torch.Tensor
    ) -> Pending:
        works = list[dist.Work | None]()
        after = list[tuple[torch.Tensor, float]]()
        for values in (*zero_copy, *self._runs):
            scaling = choose_scaling(
                values.dtype, self._group.size(), *reduction, backend_name(self._group, values.device)
            )
            values = torch.view_as_real(values) if values.is_complex() else values
            divide_(values, scaling.before)
            works.append(dist.all_reduce(values, scaling.op, self._group, async_op=is_host(values.device)))
            after.append((values, scaling.after))
        return _PendingAllReduces(self, works, after, shards)


@dataclass(eq=False, slots=True)
class _PendingAllReduces:
    """All-reduces on their way, and what still divides each."""

    route: AllReduceRoute
    works: list[dist.Work | None]
    after: list[tuple[torch.Tensor, float]]
    shards: Sequence[torch.Tensor]

    def finish(self) -> None:
        wait_for(self.route._wait, self.works)
        for values, divisor in self.after:
            divide_(values, divisor)
        self.route._local.start(self.shards)
