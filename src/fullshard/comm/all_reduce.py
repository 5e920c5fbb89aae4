"""Sums over replicas: values of all ranks are added up in place, by a reduction and a gather of what it gave each rank.

Both halves run while backward computes::

    start of sum 7      its reduction begins; that of sum 6 is completed, and what it gave begins to travel back
    start of sum 8      its reduction begins; that of sum 7 is completed, and what it gave begins to travel back
    end of sum 7        what it gave has come back

Ranks start their sums in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.buffer.sections import starts, views
from fullshard.buffer.slots import SHARED, Lease
from fullshard.comm.transport import PLAIN_SUM, Reduction, Request, Route, Transport
from fullshard.device import Pending


class AllReduceRoute:
    """The route of sums by the routes of ``transport`` for both halves; sums wait in ``under_way`` for their second."""

    def __init__(self, transport: Transport, request: Request, under_way: deque[PendingAllReduce]) -> None:
        self._transport, self._request, self._under_way = transport, request, under_way
        self._numels = [plan.shard_numel for plan, _, _ in request.transfers]
        self._dtypes = [full.dtype for _, full, _ in request.transfers]
        self.staging = starts(self._numels, self._dtypes)[-1]
        self._bound: dict[int, tuple[Sequence[torch.Tensor], Route]] = {}
        lease = SHARED.lease(self.staging, request.transfers[0].full.device)
        parts, gather = self._bind(lease)
        lease.give_back()
        transfers = [each._replace(shard=part) for each, part in zip(request.transfers, parts, strict=True)]
        self._reduction = transport.reduce_route(transfers, request.process_group, request.tag)
        self.sent = self._reduction.sent + gather.sent

    def start(
        self, shards: Sequence[torch.Tensor] = (), reduction: Reduction = PLAIN_SUM, *_: torch.Tensor
    ) -> PendingAllReduce:
        lease = SHARED.lease(self.staging, self._request.transfers[0].full.device)
        parts, gather = self._bound.get(lease.index) or self._bind(lease)
        begun = PendingAllReduce(self._reduction.start(parts, reduction), gather, lease)
        for earlier in self._under_way:
            earlier.begin_gather()
        self._under_way.clear()
        self._under_way.append(begun)
        return begun

    @torch.inference_mode(False)
    def _bind(self, lease: Lease) -> tuple[Sequence[torch.Tensor], Route]:
        """The shards in the memory of a lease, and the route by which they travel back."""
        parts = views(lease.view(torch.uint8, 0, (self.staging,)), self._numels, self._dtypes)
        _, transfers, process_group, tag = self._request
        transfers = [each._replace(shard=part) for each, part in zip(transfers, parts, strict=True)]
        gather = self._transport.gather_route(transfers, process_group, tag)
        return self._bound.setdefault(lease.index, (parts, gather))


@dataclass(eq=False)
class PendingAllReduce:
    """A sum under way."""

    reduction: Pending
    gather: Route
    lease: Lease
    gathering: Pending | None = None

    def begin_gather(self) -> Pending:
        """Complete the reduction, and let what it gave travel back."""
        if self.gathering is None:
            self.reduction.finish()
            self.gathering = self.gather.start()
        return self.gathering

    def finish(self) -> None:
        self.begin_gather().finish()
        self.lease.give_back()
