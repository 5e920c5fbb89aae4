"""The native collectives, on any backend and device: the reference for all transports.

Owns the way between buffers and what a collective wants, which is one tensor with the ranks' parts end to end. The
*flat* layout has it already, and one transfer moves without a copy. Everything else is staged, so that one gather
serves sections of several dtypes as bytes (a reduction: one for each dtype)::

    shard of rank r    a_r | b_r                            two sections, the message of rank r
    staging            a_0 b_0 | a_1 b_1 | a_2 b_2          rank-major
    full buffers       a_0 a_1 a_2     b_0 b_1 b_2          parameter-major

The copies between the last two are strided, at most two for each parameter, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist

from fullshard.comm.packing import Batch, Gather, GatherPacking, ReducePacking
from fullshard.comm.prepared import PreparedCache, check_transfers
from fullshard.comm.scaling import Scaling, choose_scaling, divide_
from fullshard.comm.staging import SHARED, Lease
from fullshard.comm.transport import Done, MovesPrivately, Pending, Reduction, Transfer
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
        self._gathers: PreparedCache[GatherPacking] = PreparedCache()
        self._reductions: PreparedCache[ReducePacking] = PreparedCache()

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._all_gather is not None:
            return self._all_gather.allocate((nbytes,), dtype=torch.uint8, device=device)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def all_gather(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> Pending:
        """See :class:`~fullshard.comm.transport.Transport`. The order of calls is enough, ``tag`` is not used."""
        if not transfers:
            return Done()
        key = (id(process_group), *map(id, chain.from_iterable(transfers)))
        packing = self._gathers.get(key)
        if packing is None:
            check_transfers(transfers, process_group.size(), one_dtype=True)
            packing = GatherPacking(transfers, process_group.rank(), self._all_gather)
            self._gathers.put(key, packing, [process_group, *chain.from_iterable(transfers)])
        if packing.is_empty:
            return Done()
        lease, gather = packing.bind()
        foreach_copy(*gather.before)
        work = (self._all_gather or start_all_gather)(
            gather.output, gather.input, group=process_group, async_op=packing.is_host
        )
        return _Gathering(work, gather, lease)

    def reduce_scatter(
        self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int, reduction: Reduction
    ) -> Pending:
        """See :class:`~fullshard.comm.transport.Transport`. The order of calls is enough, ``tag`` is not used."""
        if not transfers:
            return Done()
        subjects = [subject for plan, full, _ in transfers for subject in (plan, full)]
        key = (id(process_group), *map(id, subjects), *[shard.dtype for _, _, shard in transfers])
        packing = self._reductions.get(key)
        if packing is None:
            check_transfers(transfers, process_group.size(), one_dtype=False)
            packing = ReducePacking(transfers, process_group, self._reduce_scatter)
            self._reductions.put(key, packing, [process_group, *subjects])
        lease, batches = packing.bind()
        reducing = _Reducing(transfers, lease)
        for batch in batches:
            scaling = choose_scaling(
                batch.dtype, packing.world_size, reduction.divisor, reduction.sum_only, packing.backend
            )
            foreach_copy(*batch.before)
            divide_(batch.input, scaling.before)
            output = transfers[batch.members[0]].shard if batch.output is None else batch.output
            work = (self._reduce_scatter or start_reduce_scatter)(
                output, batch.input, op=scaling.op, group=process_group, async_op=packing.is_host
            )
            reducing.add(work, batch, scaling)
        return reducing


class _Gathering:
    """An all-gather on its way."""

    __slots__ = ("_gather", "_lease", "_work")

    def __init__(self, work: dist.Work | None, gather: Gather, lease: Lease | None) -> None:
        self._work = work
        self._gather = gather
        self._lease = lease

    def finish(self) -> None:
        if self._work is not None:
            self._work.wait()
        foreach_copy(*self._gather.after)
        if self._lease is not None:
            SHARED.give_back(self._lease)


class _Reducing:
    """Reduce-scatters on their way, one for each dtype."""

    __slots__ = ("_lease", "_started", "_transfers")

    def __init__(self, transfers: Sequence[Transfer], lease: Lease | None) -> None:
        self._transfers = transfers
        self._lease = lease
        self._started: list[tuple[dist.Work | None, Batch, Scaling]] = []

    def add(self, work: dist.Work | None, batch: Batch, scaling: Scaling) -> None:
        self._started.append((work, batch, scaling))

    def finish(self) -> None:
        for work, batch, scaling in self._started:
            if work is not None:
                work.wait()
            if batch.output is None:
                divide_(self._transfers[batch.members[0]].shard, scaling.after)
                continue
            for member, part in zip(batch.members, batch.parts, strict=True):
                _move(part, self._transfers[member].shard, scaling.after)
        if self._lease is not None:
            SHARED.give_back(self._lease)


def _move(part: torch.Tensor, shard: torch.Tensor, divisor: float) -> None:
    """Divide in the dtype that has more bits."""
    if part.itemsize < shard.itemsize:
        shard.copy_(part)
        divide_(shard, divisor)
    else:
        divide_(part, divisor)
        shard.copy_(part)
