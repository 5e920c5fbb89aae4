"""The native collectives, on any backend and device: the reference for all transports.

Owns the way between buffers and what a collective wants, which is one tensor with the ranks' parts end to end. The
*flat* layout has it already, and one transfer moves without a copy. Everything else is staged, as bytes, so that one
gather serves sections of several dtypes (a reduction: one for each dtype)::

    shard of rank r    a_r | b_r          two sections, the message of rank r
    staging            a_0 b_0 | a_1 b_1 | a_2 b_2 ...            rank-major
    full buffers       a_0 a_1 a_2 ...    b_0 b_1 b_2 ...         parameter-major

The copies between the last two are strided: at most two for each parameter, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fullshard.buffer.plan import Plan
from fullshard.comm.backend import backend_name
from fullshard.comm.prepared import PreparedCache, alias, check_transfers
from fullshard.comm.scaling import choose_scaling, divide_
from fullshard.comm.staging import Lease, Staging, align
from fullshard.comm.transport import Done, Pending, Reduction, Transfer
from fullshard.policies import AllGather, ReduceScatter
from fullshard.torch_private import all_gather_single, foreach_copy, reduce_scatter_single, same_storage

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]  # targets and sources


class CollectiveTransport:
    """Moves buffers by all-gather and reduce-scatter of the process group's backend, or by the user's own.

    Args:
        all_gather: replaces the backend's all-gather, and allocates what it gathers from and into.
        reduce_scatter: replaces the backend's reduce-scatter, and allocates what it reduces from and into; in the
            *flat* layout it reduces from the gradient buffer itself.
    """

    name = "collective"

    def __init__(self, all_gather: AllGather | None = None, reduce_scatter: ReduceScatter | None = None) -> None:
        self._all_gather = all_gather
        self._reduce_scatter = reduce_scatter
        self._staging = Staging()
        self._gathers: PreparedCache[_Gather] = PreparedCache()
        self._reductions: PreparedCache[_Reduction] = PreparedCache()

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._all_gather is not None:
            return self._all_gather.allocate((nbytes,), dtype=torch.uint8, device=device)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def all_gather(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> Pending:
        """See :class:`~fullshard.comm.transport.Transport`; ``tag`` is not needed, the order of calls is enough."""
        subjects = [subject for transfer in transfers for subject in (transfer.plan, transfer.full, transfer.shard)]
        key = (id(process_group), *map(id, subjects))
        gather = self._gathers.get(key)
        if gather is None:
            check_transfers(transfers, process_group.size(), one_dtype=True)
            gather = _Gather(transfers)
            self._gathers.put(key, gather, [process_group, *subjects])
        if gather.message.nbytes == 0:
            return Done()
        lease = None
        if gather.nbytes_staged:
            lease = self._lease(gather.nbytes_staged, gather.message.dtype, gather.device, self._all_gather)
        bound = gather.bind(lease)
        foreach_copy(*bound.copies_in)
        is_host = gather.device.type == "cpu"
        collective = self._all_gather or all_gather_single
        work = collective(bound.output, bound.input, group=process_group, async_op=is_host)
        return _Started([work], lambda: foreach_copy(*bound.copies_out), self._staging, lease)

    def reduce_scatter(
        self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int, reduction: Reduction
    ) -> Pending:
        """See :class:`~fullshard.comm.transport.Transport`; ``tag`` is not needed, the order of calls is enough."""
        subjects = [subject for transfer in transfers for subject in (transfer.plan, transfer.full)]
        key = (id(process_group), *map(id, subjects), *[transfer.shard.dtype for transfer in transfers])
        prepared = self._reductions.get(key)
        if prepared is None:
            check_transfers(transfers, process_group.size(), one_dtype=False)
            prepared = _Reduction(transfers, process_group, self._reduce_scatter is not None)
            self._reductions.put(key, prepared, [process_group, *subjects])
        lease = None
        if prepared.nbytes_staged:
            lease = self._lease(prepared.nbytes_staged, prepared.lease_dtype, prepared.device, self._reduce_scatter)
        ...
