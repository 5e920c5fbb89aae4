"""The full buffer of a group: its states, how it is filled with the values of all ranks, and how it is let go.

Owns the memory of the unsharded parameters, which are views of it, and the versions that tell autograd whether values
that it saved are still there. A transition that fails leaves the buffer SHARDED, and gives back all that it took.
:class:`GatheredBuffer` gathers into a slot. :class:`WholeBuffer` is the shard of a rank that has all of it, and
:class:`MappedBuffer` is in memory that the ranks of a host share: both have nothing to gather. The group decides when
to gather, and what the modules show.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import Replicate, Shard

from fullshard import torch_private as private
from fullshard.buffer.sections import full_bytes, full_views, shard_bytes, shard_views
from fullshard.buffer.shared import SharedBuffer
from fullshard.buffer.slots import OwnBuffer, SlotBuffer
from fullshard.comm.transport import Route, Transfer
from fullshard.device import PASSED, Pending, mark_now
from fullshard.group.context import GroupContext
from fullshard.group.extension import ExtensionGather
from fullshard.group.mesh import DataMesh
from fullshard.group.owners import register
from fullshard.group.parameter import chunk_views, whole_views
from fullshard.group.replica import ReplicaShard
from fullshard.group.shard import ShardBuffer, SharedChunks

#: The version of leaves whose memory another group may have. Autograd refuses to read what it saved of them.
RELEASED = 1 << 31


class State(Enum):
    """Where the values of a group are; ``LEGAL`` says which state may follow which.

    LEFT: a pass left the values there for the next one. Meanwhile modules show the sharded parameters, so that nothing
    that users do to these is lost.
    """

    SHARDED = 0, False
    GATHERING = 1, False
    UNSHARDED = 2, True
    LEFT = 3, True
    SHARDED_POST_FORWARD = 4, False  # over a smaller mesh

    def __init__(self, number: int, is_unsharded: bool) -> None:
        self.is_unsharded = is_unsharded  # whether the values of all ranks are there

    __hash__ = object.__hash__  # members are compared by identity; that of Enum is a function of Python


LEGAL = {
    State.SHARDED: {State.GATHERING},
    State.GATHERING: {State.UNSHARDED, State.SHARDED},
    State.UNSHARDED: {State.SHARDED, State.LEFT, State.SHARDED_POST_FORWARD},
    State.LEFT: {State.UNSHARDED, State.LEFT, State.SHARDED},
    State.SHARDED_POST_FORWARD: {State.GATHERING, State.SHARDED},
}


class PostForwardShard:
    """The parts of the gathered values of ``group`` that the ranks of a smaller mesh keep."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, group: GroupContext, mesh: DataMesh, full_views: tuple[torch.Tensor, ...]) -> None:
        sections = [section.over(mesh.shard_size) for section in group.sections]
        nbytes = shard_bytes(sections, group.compute_dtypes)
        views = shard_views(group.transport.private.allocate(nbytes, group.device), sections, group.compute_dtypes)
        transfers = []
        #: What the modules show of it, by index. With tensor parallel there is no DTensor on the small mesh.
        self.shown: dict[int, nn.Parameter] = {}
        for section, full, part in zip(sections, full_views, views, strict=True):
            transfers.append(Transfer(section.plan, full, part))
            pieces = section.plan.pieces(mesh.shard_rank)
            if pieces:
                private.foreach_copy(
                    [piece.of_shard(part) for piece in pieces], [piece.of_full(full) for piece in pieces]
                )
            for index, local in chunk_views(group.params, section.members, section.plan, part, mesh.shard_rank):
                param = group.params[index]
                if param.unsharded_spec is None:
                    placements = Replicate(), Replicate() if param.dim is None else Shard(param.dim)
                    spec = private.altered_spec(param.spec, mesh.mesh, placements, local.dtype)
                    shown = private.make_dtensor(local, spec)
                    self.shown[index] = nn.Parameter(shown, requires_grad=param.sharded.requires_grad)
        assert mesh.shard_group is not None
        self.route = group.transport.private.gather_route(transfers, mesh.shard_group, group.tag)
        #: The gather from this shard waits for these copies. The slot that it takes is usually given back later.
        self.filled = mark_now(group.device)


class FullBuffer:
    """The base of both kinds: the states, the leaves, and their versions.

    Attributes:
        state: where the values are.
    """

    buffer: SlotBuffer | SharedBuffer | OwnBuffer

    def __init__(self, group: GroupContext, shard: ShardBuffer) -> None:
        self._group = group
        self._shard = shard
        self.state = State.SHARDED
        self._complete = PASSED.wait  # completes the gather, once, while it is GATHERING
        self._extensions = ExtensionGather(group) if any(param.extends for param in group.params) else None
        self._views: tuple[torch.Tensor, ...] = ()
        self._values: tuple[int, int] | None = None  # forward and version of the values that are in the memory
        self._written: list[int] = []  # versions that count the writes to the shard
        self.leaves: tuple[torch.Tensor, ...] = ()  # the unsharded parameters
        self._versions: tuple[int, ...] = ()
        self._released: tuple[int, ...] = ()
        self.versions_set: tuple[int, ...] = ()  # the versions that the leaves were given last
        self._post_forward: PostForwardShard | None = None  # where the values are, if on a smaller mesh

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The sections, once there is memory for them."""
        if not self._views:
            with torch.inference_mode(False):
                self._views = full_views(self.buffer.memory, self._group.sections, self._group.compute_dtypes)
        return self._views

    def count_writes(self) -> int:
        """A number that grows with writes to the shard or to what modules show. A DTensor has a counter of its own."""
        group = self._group
        with private.PlainAttributes():
            versions = list(map(private.version_of, chain(group.sharded, self._shard.written)))
        if self._shard.on_disk:
            versions += [chunk.region.writes for chunk in self._shard.on_disk.values()]
        if versions != self._written:
            self._written = versions
            group.writes += 1  # a sum of versions could repeat
        return group.writes

    def change_state(self, state: State) -> None:
        """Make a transition; raise RuntimeError if it is not legal."""
        if state not in LEGAL[self.state]:
            raise RuntimeError(f"{self._group} cannot go from {self.state.name} to {state.name}")
        self.state = state

    def is_current(self) -> bool:
        """Whether the values that are shown are those of the shards."""
        raise NotImplementedError

    def gather(self) -> None:
        """Start to gather, unless the values of an earlier use are still there. Called while it is sharded."""
        raise NotImplementedError

    def wait_for_gather(self) -> bool:
        """Wait for the gather, and let autograd read what it saved of the values. Returns whether leaves were made."""
        try:
            self._complete()
            if self.versions_set != (*map(private.version_of, self.leaves),):
                self.refuse_stale_writes()
            self._post_forward, self._complete = None, PASSED.wait  # not before: until here the gather needs them
            is_first = not self.leaves and bool(self._group.params)
            if is_first:
                self._make_leaves()
            elif self._extensions is not None:
                self._extensions.make_unsharded()
        except BaseException:
            self._cancel()
            raise
        self.versions_set, self.state = self._versions, State.UNSHARDED
        private.set_versions(self.leaves, self._versions)
        return is_first

    def wholes(self) -> dict[int, torch.Tensor]:
        """Each parameter as it lies in the memory, by index."""
        pairs = zip(self._group.sections, self.views, strict=True)
        found = chain.from_iterable(whole_views(self._group.params, section, full) for section, full in pairs)
        # ``.data`` has a version of its own: a gather that writes the buffer is no write in place to autograd.
        return {index: whole.data for index, whole in found}

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_leaves(self) -> None:
        """Make the unsharded parameters, once the values are there."""
        group = self._group
        for index, whole in self.wholes().items():
            group.params[index].make_unsharded(whole)
        if self._extensions is not None:
            self._extensions.make_unsharded()
        leaves = {index: param.unsharded for index, param in enumerate(group.params) if param.unsharded is not None}
        register(group, leaves.items())
        inside = [part for leaf in leaves.values() for part in private.plain_parts(leaf) if part is not leaf]
        self.leaves = (*leaves.values(), *(part for part in inside if not part.is_inference()))
        self._versions = tuple(map(private.version_of, self.leaves))
        self._released = (RELEASED,) * len(self.leaves)

    def _cancel(self) -> None:
        """Return to SHARDED after an error in a gather, and give back all that it took."""
        self._complete, self._values = PASSED.wait, None
        self.reshard()

    def let_read(self, may: bool) -> None:
        """Set whether autograd ``may`` read what it saved of the leaves: while the buffer has their values."""
        if self.versions_set == (*map(private.version_of, self.leaves),):  # else somebody wrote, which is refused later
            self.versions_set = self._versions if may else self._released
            private.set_versions(self.leaves, self.versions_set)

    def refuse_stale_writes(self) -> None:
        """Raise RuntimeError if a leaf was written since it was resharded: its memory may be that of another group."""
        found = tuple(map(private.version_of, self.leaves))
        if self.state.is_unsharded or found == self.versions_set:
            return
        pairs = zip(self.leaves, found, self.versions_set, strict=True)
        written = {id(leaf) for leaf, now, before in pairs if now != before}
        names = [param.name for param in self._group.params if id(param.unsharded) in written]
        private.set_versions(self.leaves, self.versions_set)
        raise RuntimeError(
            f"parameters {names} were written while they were sharded, through tensors that somebody kept from a time "
            f"when they were unsharded: the memory of these may belong to other parameters by now. The values of this "
            f"step are wrong. Read a parameter from its module each time, and write to it between steps"
        )

    def accept_writes(self) -> None:
        """Accept the writes to the leaves so far: they cause no gather."""
        self._versions = tuple(map(private.version_of, self.leaves))

    def reshard(self) -> None:
        """Let the memory go, and discard writes to the leaves. Raises the error of a gather that was under way."""
        if self.state is State.GATHERING:
            try:
                self._complete()
            except BaseException:
                self._cancel()
                raise
        elif self.state.is_unsharded:
            versions = tuple(map(private.version_of, self.leaves))
            if versions != self._versions:
                # Values that autograd saved after a write are discarded too: the versions of these leaves never repeat.
                changed, self.versions_set = zip(self._versions, versions, strict=True), versions
                self._versions = tuple(now + (now != before) for before, now in changed)
                self._discard_writes()
        self._complete, self._post_forward, self.state = PASSED.wait, None, State.SHARDED
        if self._extensions is not None:
            self._extensions.free()
            self._values = None
        if self._shard.poisons and self.buffer.in_use:
            self.buffer.poison()
            self._values = None
        self.buffer.give_back()
        self.versions_set = self._versions
        if self._shard.shared is None or not self._group.step.now.reads_shared:
            self.versions_set = self._released
            private.set_versions(self.leaves, self._released)

    def reshard_to(self, mesh: DataMesh) -> dict[int, nn.Parameter] | None:
        """Keep the values on a smaller mesh, if possible. Returns what stands for parameters there, by index."""
        if self._extensions is not None:
            return None
        small = PostForwardShard(self._group, mesh, self.views)
        register(self._group, small.shown.items())
        self.reshard()
        self._post_forward, self._values, self.state = small, None, State.SHARDED_POST_FORWARD
        return small.shown

    def _discard_writes(self) -> None:
        """Let the next gather begin anew."""
        self._values = None

    def use_pool(self) -> None:
        """Take memory from the group's present pool, if it comes from a pool."""

    def start_early(self) -> None:
        """Start what the next gather waits for first: to gather the shard of the replica, if replicas shard it again,
        or to read what is on a disk. The gather completes it."""


class GatheredBuffer(FullBuffer):
    """A full buffer in a slot, which is gathered."""

    buffer: SlotBuffer

    def __init__(self, group: GroupContext, shard: ShardBuffer) -> None:
        super().__init__(group, shard)
        self.buffer = SlotBuffer(group.parameter_pool, full_bytes(group.sections, group.compute_dtypes))
        self._route: Route | None = None
        self._staging: SlotBuffer | None = None
        self._staged: object = None  # what was staged ahead: the forward, and the writes that it has

    def is_current(self) -> bool:
        return self._values is None or self._values[1] == self.count_writes()

    def gather(self) -> None:
        if State.GATHERING not in LEGAL[self.state]:
            self.change_state(State.GATHERING)  # which refuses it
        step, shard, group = self._group.step, self._shard, self._group
        values, self.state = (step.forwards, self.count_writes()), State.GATHERING
        try:
            # Between two uses in one forward nothing is reused: writes through ``.data`` leave no trace and must not
            # last.
            reuses = self.buffer.slot is not None and self._values == values and private.running_backward() >= 0
            ready = self.buffer.take()
            if reuses:
                step.log("reuse", group)
                return
            self._values = values
            then = self._give_staging_back if shard.needs_staging else None
            start: Callable[[], Any] = self._start_group
            if self._extensions is not None:
                start = partial(self._extensions.start, start)
            elif self._route is not None and self._post_forward is None and then is None and shard.replica is None:
                start = self._route.start
            lane = group.comm.lanes.gather
            is_direct = lane.is_host and then is None and "run" not in lane.__dict__  # where observers override it
            if not is_direct:
                filled = self._post_forward.filled if self._post_forward is not None else PASSED
                start = partial(lane.run, start, then, (ready, filled, step.written))
            logged = step.log("gather", group)
            if logged is None:
                started = start()
            else:
                with logged:
                    started = start()
            self._complete = started.finish if is_direct else started.wait
        except BaseException:
            self._cancel()
            raise

    def _start_group(self) -> Pending:
        """Start to gather the parameters that have no gather of their own."""
        if self._post_forward is not None:
            return self._post_forward.route.start()
        group, shard = self._group, self._shard
        if shard.replica is not None:
            self.start_early()
            shard.replica.finish()
        elif shard.on_disk:
            self._read_ahead(self._values)
            self._staged = None
            shard.finish_reading()
        elif shard.needs_staging:
            self._stage()
        if self._route is None:
            parts = shard.staged_views if shard.needs_staging else shard.views
            parts = parts if shard.replica is None else shard.replica.views
            transfers = list(map(Transfer, [section.plan for section in group.sections], self.views, parts))
            over, wire = group.data.shard_group, group.wire("gather")
            self._route = group.transport.private.gather_route(transfers, over, group.tag, wire)
        return self._route.start()

    def _stage(self) -> None:
        self._staging = self._staging or self._shard.make_staging()
        self._shard.stage(self._staging)

    def start_early(self) -> None:
        values, shard = (self._group.step.forwards, self.count_writes()), self._shard
        if shard.on_disk:
            is_there = self.buffer.slot is not None and self._values == values  # a backward uses it again
            if self.state is State.SHARDED and not is_there:  # a gather under way still reads its staging
                self._read_ahead(values)
            return
        if shard.replica is None or shard.replica.has(values):
            return
        if shard.needs_staging:
            shard.replica.finish()  # a gather for a group that was then not used
            self._give_staging_back()
            self._stage()
        shard.replica.start(shard.staged_views if shard.needs_staging else shard.views, values)

    def _read_ahead(self, values: object) -> None:
        """Start to read the shard from a disk, unless these ``values`` were read ahead."""
        if self._staged == values:
            return
        self._give_staging_back()
        self._stage()
        self._staged = values

    def _give_staging_back(self) -> None:
        if self._staged is not None:  # read ahead, and not used
            self._staged = None
            with suppress(OSError):  # whoever needs the values reads them again
                self._shard.finish_reading()
        if self._staging is not None:
            self._staging.give_back(PASSED)  # nobody takes it outside of this lane

    def _cancel(self) -> None:
        super()._cancel()
        self._give_staging_back()

    def use_pool(self) -> None:
        self.buffer.change_pool(self._group.parameter_pool)
        self._staging, self._shard.staged_views, self._route = None, (), None
        if self._shard.replica is not None:
            self._shard.replica = ReplicaShard(self._group)


class WholeBuffer(FullBuffer):
    """A full buffer that is the shard itself, where one rank has all of it: nothing is gathered, and writes stay."""

    buffer: OwnBuffer

    def __init__(self, group: GroupContext, shard: ShardBuffer) -> None:
        super().__init__(group, shard)
        assert shard.memory is not None
        self.buffer = OwnBuffer(shard.memory)

    def refuse_stale_writes(self) -> None:
        """Does nothing: the memory of the leaves is the shard."""

    def is_current(self) -> bool:
        if self._was_written():
            self.let_read(True)
        return True

    def _was_written(self) -> bool:
        """Whether the shard was written since the last use. If so, what autograd saved of it is gone."""
        values, before = (self._group.step.forwards, self.count_writes()), self._values
        self._values = values
        if before is None or before[1] == values[1]:
            return False
        self._versions = tuple(version + 1 for version in self._versions)
        return True

    def gather(self) -> None:
        self.change_state(State.GATHERING)
        self.buffer.take()
        self._was_written()
        self._group.step.written.wait()
        with self._group.step.log("gather", self._group, moves=False) or nullcontext():
            pass


class MappedBuffer(FullBuffer):
    """A full buffer in memory that the ranks of a host share; ``shared`` has this rank's chunks in it."""

    buffer: SharedBuffer

    def __init__(self, group: GroupContext, shard: ShardBuffer, shared: SharedChunks) -> None:
        super().__init__(group, shard)
        self._shared = shared
        nbytes = full_bytes(group.sections, group.compute_dtypes)
        self.buffer = SharedBuffer(shared.memory.view, shared.memory.start, nbytes)

    def is_current(self) -> bool:
        reads = self._group.step.now.reads_shared
        if not reads or self._values is None or self._values[1] != self.count_writes():
            return False
        if self._versions == tuple(map(private.version_of, self.leaves)):
            self.buffer.be_shared()  # otherwise modules show what was written until it is resharded
        return True

    def gather(self) -> None:
        """Nothing is gathered; but between passes, when other ranks may write to the buffer, the leaves show a copy."""
        step, group = self._group.step, self._group
        self.change_state(State.GATHERING)
        try:
            if not step.now.reads_shared:
                self._shared.publish(self.count_writes, whatever=True)
                barrier, doing = self._shared.memory.barrier, f"unshard() of {group.title}"
                barrier.enter(doing)
                try:
                    self.buffer.be_private()
                finally:
                    barrier.leave(doing)
            self.buffer.take()
            self._values = step.forwards, self.count_writes()
            with step.log("gather", group, moves=False) or nullcontext():
                pass
        except BaseException:
            self._cancel()
            raise

    def _discard_writes(self) -> None:
        self._values = None
        self.buffer.discard_writes()
        self.let_read(True)
