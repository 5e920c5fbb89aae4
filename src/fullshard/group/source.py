"""Where a gather takes this rank's part of the values from, and what has to be done before.

Owns the memory between the shard and the full buffer, and the route of the gather. The full buffer decides when::

    shard ─────────────────────────────────────▶ full buffer    Source
    shard ─── cast, copied to the device ─▶ staging ─▶ full     StagedSource
    disk ──── read ─▶ staging ─▶ full                           DiskSource
    any of these ─── all-gather over replicas ─▶ shard of the replica ─▶ full    ReplicaShard
    full ── after forward ─▶ parts on a smaller mesh ─▶ full    PostForwardShard
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.nn as nn
from torch.distributed.tensor import Replicate, Shard

from fullshard import torch_private as private
from fullshard.buffer.sections import shard_bytes, shard_views
from fullshard.buffer.slots import SlotBuffer
from fullshard.comm.transport import Route, Transfer
from fullshard.device import PASSED, Mark, Pending, host_memory, is_host, mark_now
from fullshard.disk.file import DiskWork
from fullshard.disk.tensor import in_memory_order
from fullshard.group.context import GroupContext
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import chunk_views
from fullshard.group.shard import ShardBuffer

#: Identifies values: the number of the forward, and the number of writes to the shard before they were gathered.
Values = tuple[int, int]


class Source:
    """The shard, in the dtype and on the device in which it is computed.

    Attributes:
        views: the sections of the shard of this rank, or of its replica.
        ready: the route, once it is known, if nothing has to be done before it starts.
        filled: the gather waits for this mark.
        is_staged: whether it has to be released after the gather.
        accumulates: whether no optimizer steps before the next forward, so that values may stay.
    """

    ready: Route | None = None
    filled: Mark = PASSED
    is_staged = False
    accumulates = False
    starts_ahead = False  # whether :meth:`start_ahead` saves time

    def __init__(self, group: GroupContext, shard: ShardBuffer) -> None:
        self._group, self._shard = group, shard
        self._route: Route | None = None
        self.views: tuple[torch.Tensor, ...] = shard.views

    def start(self, values: Values) -> None:
        """Start what comes before the gather, unless it was started for these values."""

    def start_ahead(self, values: Values, is_needed: bool) -> None:
        """Call :meth:`start` ahead of the gather, if that saves time. ``is_needed``: the values are not there yet."""

    def finish(self) -> None:
        """Complete what was started: the route may start."""

    def release(self) -> None:
        """Give back memory that no gather reads any more."""

    def route(self, fulls: Sequence[torch.Tensor]) -> Route:
        """The route to these sections of the full buffer."""
        if self._route is None:
            group = self._group
            transfers = list(map(Transfer, [section.plan for section in group.sections], fulls, self.views))
            over, wire = group.data.shard_group, group.wire("gather")
            self._route = group.gather_transport.gather_route(transfers, over, group.tag, wire)
            if type(self) is Source:
                self.ready = self._route
        return self._route


class StagedSource(Source):
    """A shard of another dtype, or on the CPU where a device computes: a copy is gathered."""

    is_staged = True

    def __init__(self, group: GroupContext, shard: ShardBuffer) -> None:
        super().__init__(group, shard)
        self._buffer: SlotBuffer | None = None

    def start(self, values: Values) -> None:
        self._take()
        with torch.no_grad():
            if self._shard.views:
                private.foreach_copy(self.views, self._shard.views)

    def _take(self) -> None:
        group = self._group
        if self._buffer is not None:
            self._buffer.take()  # given back in the lane in which it is taken: nobody else can still read it
            return
        pool = group.comm.pool("staging", group.transport.private)
        self._buffer = SlotBuffer(pool, shard_bytes(group.own_sections, group.compute_dtypes))
        pool.ordinary = max(pool.ordinary, self._buffer.nbytes)
        self._buffer.take()
        with torch.inference_mode(False):
            self.views = shard_views(self._buffer.memory, group.own_sections, group.compute_dtypes)

    def release(self) -> None:
        if self._buffer is not None:
            self._buffer.give_back(PASSED)  # nobody takes it outside of this lane


class DiskSource(StagedSource):
    """A shard of which some sections are on a disk, which is read ahead."""

    starts_ahead = True

    def __init__(self, group: GroupContext, shard: ShardBuffer) -> None:
        super().__init__(group, shard)
        self._reads = DiskWork()
        self._ahead: Values | None = None  # what is read ahead

    def start(self, values: Values) -> None:
        if self._ahead == values:
            return
        self.release()
        self._take()
        group, reads = self._group, list[DiskWork]()
        for section, view, staged in zip(group.own_sections, self._shard.views, self.views, strict=True):
            if section.members[0] not in self._shard.stored:
                with torch.no_grad():
                    staged.copy_(view)
                continue
            for index, chunk in chunk_views(group.params, section.members, section.plan, staged, group.own_rank):
                region, chunk = self._shard.stored[index].region, in_memory_order(chunk)
                if is_host(group.device):
                    reads.append(region.read(chunk))
                    continue
                memory = host_memory(chunk.shape, region.dtype, group.device, pin=False)
                region.read(memory).wait()
                chunk.copy_(memory)
        self._reads, self._ahead = DiskWork.of(reads), values

    def start_ahead(self, values: Values, is_needed: bool) -> None:
        if is_needed:
            self.start(values)

    def finish(self) -> None:
        """Wait for what is read. Raises DiskError."""
        self._ahead, reads, self._reads = None, self._reads, DiskWork()
        reads.wait()

    def release(self) -> None:
        if self._ahead is not None:  # read ahead, and not used
            with suppress(OSError):  # whoever needs the values reads them again
                self.finish()
        super().release()


class ReplicaShard(Source):
    """The shard of a replica, of which each rank has a part between steps, as in the hybrid sharding of optimizer state
    of Megatron-FSDP: gathered over the replicas once for each optimizer step, from the source of that part."""

    starts_ahead = True

    def __init__(self, group: GroupContext, own: Source) -> None:
        super().__init__(group, own._shard)
        self._own, self.is_staged = own, own.is_staged
        pool = group.comm.pool(f"replica {group.tag}", group.transport.private)  # its own: the values stay
        self._buffer = SlotBuffer(pool, shard_bytes(group.sections, group.compute_dtypes))
        self._values: Values | None = None
        self._pending: Pending | None = None
        self._over_replicas: Route | None = None

    def start_ahead(self, values: Values, is_needed: bool) -> None:
        self.start(values)  # also where the values are there: other ranks may have written

    def start(self, values: Values) -> None:
        has = self._values if self._buffer.slot is not None else None  # or they are on their way
        if has is None or has[1] != values[1] or not (self.accumulates or has[0] == values[0]):
            self._gather(values)

    def _gather(self, values: Values) -> None:
        self.finish()  # a gather for a group that was then not used
        self._own.release()
        self._own.start(values)
        self._own.finish()
        group, self._values = self._group, None
        self._buffer.take().wait()
        try:
            if self._over_replicas is None:
                with torch.inference_mode(False):
                    self.views = shard_views(self._buffer.memory, group.sections, group.compute_dtypes)
                transfers = map(Transfer, [each.plan for each in group.own_sections], self.views, self._own.views)
                over, wire = group.data.replicate_group, group.wire("gather", outer=True)
                self._over_replicas = group.transport.private.gather_route([*transfers], over, group.tag, wire)
            self._pending = self._over_replicas.start()
        except BaseException:
            self._buffer.give_back()
            raise
        self._values = values

    def finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.finish()
            except BaseException:
                self._values = None
                raise
            finally:
                self._buffer.give_back()

    def release(self) -> None:
        self._own.release()


class PostForwardShard(Source):
    """The parts of the gathered values of a group, in ``full_views``, that the ranks of a smaller mesh keep."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self, group: GroupContext, shard: ShardBuffer, mesh: DataMesh, full_views: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(group, shard)
        sections = [section.over(mesh.shard_size) for section in group.sections]
        nbytes = shard_bytes(sections, group.compute_dtypes)
        views = shard_views(group.transport.private.allocate(nbytes, group.device), sections, group.compute_dtypes)
        transfers = []
        #: What the modules show of it, by index. With tensor parallel there is no DTensor on the small mesh.
        self.shown: dict[int, nn.Parameter] = {}
        for section, full, part in zip(sections, full_views, views, strict=True):
            transfers.append(Transfer(section.plan, full, part))
            if pieces := section.plan.pieces(mesh.shard_rank):
                private.foreach_copy([each.of_shard(part) for each in pieces], [each.of_full(full) for each in pieces])
            for index, local in chunk_views(group.params, section.members, section.plan, part, mesh.shard_rank):
                param = group.params[index]
                if param.unsharded_spec is None:
                    placements = Replicate(), Replicate() if param.dim is None else Shard(param.dim)
                    spec = private.altered_spec(param.spec, mesh.mesh, placements, local.dtype)
                    shown = private.make_dtensor(local, spec)
                    self.shown[index] = nn.Parameter(shown, requires_grad=param.sharded.requires_grad)
        self._route = self.ready = group.transport.private.gather_route(transfers, mesh.shard_group, group.tag)
        self.filled = mark_now(group.device)  # the slot that the gather takes is usually given back later


def source_of(group: GroupContext, shard: ShardBuffer) -> Source:
    """The source of gathers of a group."""
    kind = DiskSource if shard.stored else StagedSource if shard.needs_staging else Source
    own = kind(group, shard)
    return ReplicaShard(group, own) if group.data.shards_replicas else own
