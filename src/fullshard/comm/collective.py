"""The native collectives, on any backend and device: the reference for all transports.

Owns the copies between buffers and the one tensor that a collective wants, with the ranks' parts end to end. The *flat*
layout has it already, and one transfer moves without a copy. Everything else is staged, so that one gather serves
sections of several dtypes as bytes (a reduction: one for each dtype)::

    shard of rank r    a_r | b_r                            two sections, the message of rank r
    staging            a_0 b_0 | a_1 b_1 | a_2 b_2          rank-major
    full buffers       a_0 a_1 a_2     b_0 b_1 b_2          parameter-major

The copies between the last two are strided, at most two for each parameter, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.comm.packing import Batch, Gather, GatherPacking, ReducePacking, as_real
from fullshard.comm.routes import check_transfers, wait_for
from fullshard.comm.scaling import Scaling, choose_scaling, divide_
from fullshard.comm.staging import SHARED, Lease
from fullshard.comm.transport import GatherRoute, MovesPrivately, Nowhere, ReduceRoute, Reduction, Transfer
from fullshard.device import Pending
from fullshard.policies import AllGather, ReduceScatter
from fullshard.torch_private import foreach_copy, start_all_gather, start_reduce_scatter


class CollectiveTransport(MovesPrivately):
    """Moves buffers by all-gather and reduce-scatter of the process group's backend, or by the user's own.

    Args:
        all_gather: replaces the backend's all-gather, and allocates what it reads and writes.
        reduce_scatter: replaces the backend's reduce-scatter, and allocates what it reads and writes.
    """

    name = "collective"

    def __init__(self, all_gather: AllGather | None = None, reduce_scatter: ReduceScatter | None = None) -> None:
        self._all_gather = all_gather
        self._reduce_scatter = reduce_scatter

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._all_gather is not None:
            return self._all_gather.allocate((nbytes,), dtype=torch.uint8, device=device)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def gather_route(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> GatherRoute:
        """See :class:`~fullshard.comm.transport.Transport`. The order of calls is enough, ``tag`` is not used."""
        check_transfers(transfers, process_group.size(), one_dtype=True)
        route = _AllGatherRoute(transfers, process_group, self._all_gather) if transfers else None
        return Nowhere() if route is None or route.is_empty else route

    def reduce_route(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> ReduceRoute:
        """See :class:`~fullshard.comm.transport.Transport`. The order of calls is enough, ``tag`` is not used."""
        check_transfers(transfers, process_group.size(), one_dtype=False)
        return _ReduceScatterRoute(transfers, process_group, self._reduce_scatter) if transfers else Nowhere()


class _AllGatherRoute(GatherPacking):
    def __init__(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, comm: AllGather | None) -> None:
        super().__init__(transfers, process_group.rank(), comm)
        self._group = process_group
        self._collective = comm or start_all_gather

    def start(self) -> Pending:
        lease, gather = self.bind()
        if gather.before[0]:
            foreach_copy(*gather.before)
        work = self._collective(gather.output, gather.input, group=self._group, async_op=self.is_host)
        return _PendingAllGather(work, gather, lease)


class _PendingAllGather:
    """An all-gather on its way."""

    __slots__ = ("_gather", "_lease", "_work")

    def __init__(self, work: dist.Work | None, gather: Gather, lease: Lease | None) -> None:
        self._work = work
        self._gather = gather
        self._lease = lease

    def finish(self) -> None:
        if self._work is not None:
            wait_for(self._work, "an all-gather")
        if self._gather.after[0]:
            foreach_copy(*self._gather.after)
        if self._lease is not None:
            SHARED.give_back(self._lease)


class _ReduceScatterRoute(ReducePacking):
    def __init__(
        self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, comm: ReduceScatter | None
    ) -> None:
        super().__init__(transfers, process_group, comm)
        self._group = process_group
        self._collective = comm or start_reduce_scatter

    def start(self, shards: Sequence[torch.Tensor], reduction: Reduction) -> Pending:
        lease, batches = self.bind()
        divisor, sum_only = reduction
        started = []
        for batch in batches:
            scaling = choose_scaling(batch.dtype, self.world_size, divisor, sum_only, self.backend)
            if batch.before[0]:
                foreach_copy(*batch.before)
            divide_(batch.input, scaling.before)
            output = shards[batch.members[0]] if batch.output is None else batch.output
            source = batch.input
            if batch.dtype.is_complex:
                output, source = as_real(output), as_real(source)
            work = self._collective(output, source, op=scaling.op, group=self._group, async_op=self.is_host)
            started.append((work, batch, scaling))
        return _PendingReduceScatter(shards, started, lease)


class _PendingReduceScatter:
    """Reduce-scatters on their way, one for each dtype."""

    __slots__ = ("_lease", "_shards", "_started")

    def __init__(
        self,
        shards: Sequence[torch.Tensor],
        started: Sequence[tuple[dist.Work | None, Batch, Scaling]],
        lease: Lease | None,
    ) -> None:
        self._shards = shards
        self._started = started
        self._lease = lease

    def finish(self) -> None:
        for work, batch, scaling in self._started:
            if work is not None:
                wait_for(work, "a reduce-scatter")
            if batch.output is None:
                divide_(self._shards[batch.members[0]], scaling.after)
                continue
            for member, part in zip(batch.members, batch.parts, strict=True):
                _move(part, self._shards[member], scaling.after)
        if self._lease is not None:
            SHARED.give_back(self._lease)


def _move(part: torch.Tensor, shard: torch.Tensor, divisor: float) -> None:
    """Copy a part to its shard, and divide it in the dtype that has more bits."""
    if part.itemsize < shard.itemsize:
        shard.copy_(part)
        divide_(shard, divisor)
    else:
        divide_(part, divisor)
        shard.copy_(part)
