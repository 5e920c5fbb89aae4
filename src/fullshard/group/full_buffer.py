"""The full buffer of a group: how it is filled with the values of all ranks, and how it is let go.

Owns the memory of the unsharded parameters, which are views of it, and the versions by which autograd knows whether
what it saved of them is still there. :class:`GatheredBuffer` gathers into a slot; :class:`MappedBuffer` lies in memory
that the ranks of a host share, and has nothing to gather. The group decides when, and what the modules show.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
import torch.nn as nn
from torch.distributed.tensor import Replicate, Shard

from fullshard import torch_private as private
from fullshard.buffer.sections import full_bytes, full_views, shard_bytes, shard_views
from fullshard.buffer.shared import SharedBuffer
from fullshard.buffer.slots import SlotBuffer
from fullshard.comm.transport import Route, Transfer
from fullshard.device import PASSED, Done, Mark, Pending, mark_now
from fullshard.group.context import GroupContext
from fullshard.group.extension import ExtensionGather
from fullshard.group.memory import Memory, SharedChunks
from fullshard.group.mesh import DataMesh
from fullshard.group.owners import register
from fullshard.group.parameter import chunk_views, whole_views

#: The version of leaves whose memory another group may have. Autograd refuses to read what it saved of them.
RELEASED = 1 << 31


class PostForwardShard:
    """The gathered values of ``group``, of which each rank of a smaller mesh keeps a part."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, group: GroupContext, mesh: DataMesh, full_views: tuple[torch.Tensor, ...]) -> None:
        sections = [section.over(mesh.shard_size) for section in group.sections]
        nbytes = shard_bytes(sections, group.compute_dtypes)
        views = shard_views(group.transport.private.allocate(nbytes, group.device), sections, group.compute_dtypes)
        transfers = []
        #: What the modules show of it, by index: beside tensor parallel the small mesh has no DTensor.
        self.shown: dict[int, nn.Parameter] = {}
        for section, full, shard in zip(sections, full_views, views, strict=True):
            transfers.append(Transfer(section.plan, full, shard))
            pieces = section.plan.pieces(mesh.shard_rank)
            if pieces:
                private.foreach_copy(
                    [piece.of_shard(shard) for piece in pieces], [piece.of_full(full) for piece in pieces]
                )
            for index, local in chunk_views(group.params, section.members, section.plan, shard, mesh.shard_rank):
                param = group.params[index]
                if param.unsharded_spec is None:
                    placements = Replicate(), Replicate() if param.dim is None else Shard(param.dim)
                    spec = private.altered_spec(param.spec, mesh.mesh, placements, local.dtype)
                    shown = private.make_dtensor(local, spec)
                    self.shown[index] = nn.Parameter(shown, requires_grad=param.sharded.requires_grad)
        assert mesh.shard_group is not None
        self.route = group.transport.private.gather_route(transfers, mesh.shard_group, group.tag)
        #: A reader of the small shard waits for these copies; as a rule its slot was given back later, which says more.
        self.filled = mark_now(group.device)


class FullBuffer:
    """What both kinds have: the leaves, and their versions."""

    buffer: SlotBuffer | SharedBuffer

    def __init__(self, group: GroupContext, memory: Memory) -> None:
        self._group = group
        self._memory = memory
        self._extensions = ExtensionGather(group) if any(param.extends for param in group.params) else None
        self._views: tuple[torch.Tensor, ...] = ()
        self._values: tuple[int, int] | None = None  # epoch and version of the values that are there
        self._written: list[int] = []  # versions that count the writes to the shard
        self._leaves: tuple[torch.Tensor, ...] = ()  # the unsharded parameters
        self._versions: tuple[int, ...] = ()
        self._released: tuple[int, ...] = ()
        self._post_forward: PostForwardShard | None = None  # where the values rest, if on a smaller mesh

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The sections, once there is memory for them."""
        if not self._views:
            with torch.inference_mode(False):
                self._views = full_views(self.buffer.memory, self._group.sections, self._group.compute_dtypes)
        return self._views

    def version(self) -> int:
        """A number that grows with writes to the shard or to what modules show. A DTensor counts its own apart."""
        group = self._group
        with private.PlainAttributes():
            versions = list(map(private.version_of, chain(group.sharded, self._memory.written)))
        if versions != self._written:
            self._written = versions
            group.writes += 1  # a sum of versions could come back to what it was
        return group.writes

    def is_current(self) -> bool:
        """Whether the values that are shown are those of the shards."""
        raise NotImplementedError

    def fill(self) -> Mark | None:
        """Start to gather; ``None`` if the values of an earlier use are still there."""
        raise NotImplementedError

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_leaves(self) -> None:
        """Make the unsharded parameters, once the values are there."""
        group = self._group
        for section, full in zip(group.sections, self.views, strict=True):
            for index, whole in whole_views(group.params, section, full):
                # ``.data`` has a version of its own: a gather that writes the buffer is no write in place to autograd.
                group.params[index].make_unsharded(whole.data)
        if self._extensions is not None:
            self._extensions.arrive()
        leaves = {index: param.unsharded for index, param in enumerate(group.params) if param.unsharded is not None}
        register(group, leaves.items())
        inside = [part for leaf in leaves.values() for part in private.plain_parts(leaf) if part is not leaf]
        self._leaves = (*leaves.values(), *(part for part in inside if not part.is_inference()))
        self._versions = tuple(map(private.version_of, self._leaves))
        self._released = (RELEASED,) * len(self._leaves)

    def arrive(self) -> bool:
        """The values are there: let autograd read what it saved of them. Returns whether the leaves are new."""
        self._post_forward = None  # not before: until here the gather reads it
        is_first = not self._leaves and bool(self._group.params)
        if is_first:
            self._make_leaves()
        elif self._extensions is not None:
            self._extensions.arrive()
        private.set_versions(self._leaves, self._versions)
        return is_first

    def let_read(self, may: bool) -> None:
        """Let autograd read what it saved of the leaves, or refuse it. It ``may`` while the buffer has their values."""
        private.set_versions(self._leaves, self._versions if may else self._released)

    def accept_writes(self) -> None:
        """Accept the writes to the leaves so far: they cause no gather."""
        self._versions = tuple(map(private.version_of, self._leaves))

    def release(self) -> None:
        """Let the buffer go, and discard the writes to the leaves."""
        if self._group.is_unsharded:
            versions = tuple(map(private.version_of, self._leaves))
            if versions != self._versions:
                # What autograd saved after a write is gone with it: the versions of these leaves never come again.
                changed = zip(self._versions, versions, strict=True)
                self._versions = tuple(now + (now != before) for before, now in changed)
                self._discard_writes()
        self._post_forward = None
        if self._extensions is not None:
            self._extensions.leave()
            self._values = None
        if self._memory.poisons and self.buffer.in_use:
            self.buffer.poison()
            self._values = None
        self.buffer.give_back()
        if self._memory.shared is None or not self._group.clock.reading:
            private.set_versions(self._leaves, self._released)

    def give_up(self) -> None:
        """Know of no values: their gather failed."""
        self._values = None

    def rest(self, mesh: DataMesh) -> dict[int, nn.Parameter] | None:
        """Let the values rest on a smaller mesh, if they can; returns what stands for parameters there, by index."""
        if self._extensions is not None:
            return None
        small = PostForwardShard(self._group, mesh, self.views)
        register(self._group, small.shown.items())
        self.release()
        self._post_forward, self._values = small, None
        return small.shown

    def _discard_writes(self) -> None:
        self._values = None

    def join(self) -> None:
        """Take memory from the pool that the group has now, where it comes from one."""


class GatheredBuffer(FullBuffer):
    """A full buffer in a slot, which is gathered."""

    buffer: SlotBuffer

    def __init__(self, group: GroupContext, memory: Memory) -> None:
        super().__init__(group, memory)
        self.buffer = SlotBuffer(group.parameter_pool, full_bytes(group.sections, group.compute_dtypes))
        self._route: Route | None = None
        self._staging: SlotBuffer | None = None

    def is_current(self) -> bool:
        return self._values is None or self._values[1] == self.version()

    def fill(self) -> Mark | None:
        clock, memory = self._group.clock, self._memory
        values = clock.epoch, self.version()
        # Between two uses in one forward nothing is reused: writes through ``.data`` leave no trace and must not last.
        reuses = self.buffer.slot is not None and self._values == values and private.running_backward() >= 0
        ready = self.buffer.take()
        if reuses:
            return None
        if clock.announce is not None:
            clock.announce(self._group, frozenset())
        self._values = values
        filled = self._post_forward.filled if self._post_forward is not None else PASSED
        then = self._end_gather if memory.needs_staging else None
        start: Callable[[], Pending] = self._start
        if self._extensions is not None:
            start = partial(self._extensions.start, start)
        elif self._route is not None and self._post_forward is None and then is None:
            start = self._route.start
        return self._group.comm.lanes.gather.run(start, then, (ready, filled, clock.written))

    def _start(self) -> Pending:
        """Start to gather the parameters that have no gather of their own."""
        if self._post_forward is not None:
            return self._post_forward.route.start()
        group, memory = self._group, self._memory
        over = group.data.shard_group
        if over is None:
            with torch.no_grad():
                for full, shard in zip(self.views, memory.views, strict=True):
                    full.copy_(shard, non_blocking=True)
            return Done()
        if memory.needs_staging:
            self._staging = self._staging or memory.make_staging()
            memory.stage(self._staging)
        if self._route is None:
            shards = memory.staged_views if memory.needs_staging else memory.views
            transfers = list(map(Transfer, [section.plan for section in group.sections], self.views, shards))
            self._route = group.transport.private.gather_route(transfers, over, group.tag)
        return self._route.start()

    def _end_gather(self) -> None:
        if self._staging is not None:
            self._staging.give_back()

    def give_up(self) -> None:
        super().give_up()
        self._end_gather()

    def join(self) -> None:
        self.buffer.change_pool(self._group.parameter_pool)
        self._staging, self._memory.staged_views, self._route = None, (), None


class MappedBuffer(FullBuffer):
    """A full buffer in memory that the ranks of a host share; ``shared`` has this rank's chunks in it."""

    buffer: SharedBuffer

    def __init__(self, group: GroupContext, memory: Memory, shared: SharedChunks) -> None:
        super().__init__(group, memory)
        self._shared = shared
        nbytes = full_bytes(group.sections, group.compute_dtypes)
        self.buffer = SharedBuffer(shared.memory.view, shared.memory.start, nbytes)

    def is_current(self) -> bool:
        if not self._group.clock.reading or self._values is None or self._values[1] != self.version():
            return False
        if self._versions == tuple(map(private.version_of, self._leaves)):
            self.buffer.be_shared()  # otherwise what was written shows until it is resharded
        return True

    def fill(self) -> Mark | None:
        """Nothing is gathered; but between passes, when other ranks may write to the buffer, the leaves show a copy."""
        if not self._group.clock.reading:
            self._shared.publish(self.version, whatever=True)
            barrier, doing = self._shared.memory.barrier, f"unshard() of {self._group.title}"
            barrier.enter(doing)
            try:
                self.buffer.be_private()
            finally:
                barrier.leave(doing)
        self.buffer.take()
        self._values = self._group.clock.epoch, self.version()
        return PASSED

    def _discard_writes(self) -> None:
        self._values = None
        self.buffer.discard_writes()
        self.let_read(True)
