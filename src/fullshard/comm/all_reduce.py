"""Sums over replicas, each of which has all of the parameters.

Large gradients are added up in the tensors that autograd made, small ones in the runs of a buffer, each by an
all-reduce of the backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.comm.backends import backend_of
from fullshard.comm.sums import Scaling, choose_scaling, divide_
from fullshard.comm.transport import PLAIN_SUM, Reduction, Request, Route, Shards, Transfer, Transport, alias
from fullshard.comm.waits import Wait, waiting
from fullshard.device import Pending, Started, is_host


def sum_route(
    transport: Transport,
    transfers: Sequence[Transfer],
    process_group: dist.ProcessGroup,
    tag: int,
    device: torch.device,
) -> Route:
    """The route by which replicas add up what they have in buffers of ``transport``, and beside these."""
    return transport.sum_route(transfers, process_group, tag) or AllReduceRoute(
        transport.reduce_route(transfers, None, tag), Request("reduce", transfers, process_group, tag), device
    )


class AllReduceRoute:
    """The route from partial to replicated. A start adds up, in place, what the ranks have in the full buffers and in
    the tensors that it is given beside these. Then ``local`` copies the values of the buffers to the shards."""

    staging = 0

    def __init__(self, local: Route, request: Request, device: torch.device) -> None:
        _, transfers, group, tag, *_ = request
        self._local, self._group, self._wait = local, group, Wait("an all-reduce", group, tag)
        self._is_host, self._divides = is_host(device), backend_of(group, device).divides
        spans = list[tuple[torch.Tensor, int, int]]()  # runs of elements in full buffers
        for plan, full, _ in transfers:
            for param, start in zip(plan.params, plan.full_offsets, strict=True):
                before, first, end = spans[-1] if spans else (full, 0, -plan.alignment)
                if before is full and 0 <= start - end < plan.alignment:
                    spans[-1] = full, first, start + param.numel
                elif param.numel:
                    spans.append((full, start, start + param.numel))
        self._runs = [alias(full)[first:end] for full, first, end in spans]
        size = group.size()
        self.sent = 2 * (size - 1) * sum(run.nbytes for run in self._runs) // size

    def start(self, shards: Shards = (), reduction: Reduction = PLAIN_SUM, *zero_copy: torch.Tensor) -> Pending:
        works, started = list[dist.Work | None](), list[tuple[torch.Tensor, float]]()  # what still divides each
        with waiting(*self._wait, works):
            for values in (*zero_copy, *self._runs):
                scaling = choose_scaling(values.dtype, self._group.size(), *reduction, self._divides)
                if values.dtype == torch.float16:  # no term may overflow the sum of all
                    scaling = Scaling(before=reduction.divisor)
                values = torch.view_as_real(values) if values.is_complex() else values
                divide_(values, scaling.before)
                works.append(dist.all_reduce(values, scaling.op, self._group, async_op=self._is_host))
                started.append((values, scaling.after))

        def finish() -> None:
            with waiting(*self._wait, works):
                for work in filter(None, works):
                    work.wait()
            for summed, divisor in started:
                divide_(summed, divisor)
            self._local.start(shards)

        return Started(finish)
