"""The full buffer of a group: its states, how it is filled with the values of all ranks, and how it is let go.

Owns the memory of the unsharded parameters, which are views of it, and the versions that tell autograd whether values
that it saved are still there. A transition that fails leaves the buffer SHARDED, and gives back all that it took.
:class:`GatheredBuffer` gathers into a slot. :class:`WholeBuffer` is the shard of a rank that has all of it, and
:class:`MappedBuffer` is in memory that the ranks of a host share: both have nothing to gather. The group decides when
to gather, and what the modules show.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.nn as nn

from fullshard import torch_private as private
from fullshard.buffer.sections import full_bytes, full_views
from fullshard.buffer.shared import SharedBuffer
from fullshard.buffer.slots import OwnBuffer, SlotBuffer
from fullshard.device import PASSED, Pending
from fullshard.group.context import GroupContext
from fullshard.group.extension import ExtensionGather
from fullshard.group.mesh import DataMesh
from fullshard.group.owners import register
from fullshard.group.parameter import whole_views
from fullshard.group.shard import ShardBuffer, SharedChunks
from fullshard.group.source import PostForwardShard, Source, Values, source_of

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


class FullBuffer:
    """The base of all kinds: the states, the leaves, and their versions.

    Attributes:
        state: where the values are.
        source: what is gathered, if anything is.
    """

    buffer: SlotBuffer | SharedBuffer | OwnBuffer

    def __init__(self, group: GroupContext, shard: ShardBuffer) -> None:
        self._group = group
        self._shard = shard
        self.state = State.SHARDED
        self.source = Source(group, shard)
        self._complete = PASSED.wait  # completes the gather, once, while it is GATHERING
        self._extensions = ExtensionGather(group) if any(param.extends for param in group.params) else None
        self._values: tuple[int, int] | None = None  # forward and version of the values that are in the memory
        self._written: list[int] = []  # versions that count the writes to the shard
        self.leaves: tuple[torch.Tensor, ...] = ()  # the unsharded parameters
        self._versions: tuple[int, ...] = ()
        self._released: tuple[int, ...] = ()
        self.versions_set: tuple[int, ...] = ()  # the versions that the leaves were given last
        self._post_forward: PostForwardShard | None = None  # where the values are, if on a smaller mesh

    @cached_property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The sections, once there is memory for them."""
        with torch.inference_mode(False):
            return full_views(self.buffer.memory, self._group.sections, self._group.compute_dtypes)

    def count_writes(self) -> int:
        """A number that grows with writes to the shard or to what modules show. A DTensor has a counter of its own."""
        group = self._group
        with private.PlainAttributes():
            versions = list(map(private.version_of, chain(group.sharded, self._shard.written)))
        if self._shard.stored:
            versions += [chunk.region.writes for chunk in self._shard.stored.values()]
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
        pairs = zip(self.leaves, self.versions_set, strict=True)
        written = {id(leaf) for leaf, before in pairs if private.version_of(leaf) != before}
        names = [param.name for param in self._group.params if id(param.unsharded) in written]
        private.set_versions(self.leaves, self.versions_set)
        raise RuntimeError(
            f"parameters {names} were written while they were sharded, through unsharded tensors that the program has "
            f"kept: their memory may belong to other parameters by now. The values of this step are wrong. Read a "
            f"parameter from its module each time, and write to it between steps"
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
        small = PostForwardShard(self._group, self._shard, mesh, self.views)
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
        """Start what the next gather has to wait for, such as a read from a disk. The gather completes it."""


class GatheredBuffer(FullBuffer):
    """A full buffer in a slot, which is gathered from a source."""

    buffer: SlotBuffer

    def __init__(self, group: GroupContext, shard: ShardBuffer) -> None:
        super().__init__(group, shard)
        self.buffer = group.parameter_pool.buffer(full_bytes(group.sections, group.compute_dtypes))
        self.source = source_of(group, shard)

    def is_current(self) -> bool:
        return self._values is None or self._values[1] == self.count_writes()

    def gather(self) -> None:
        if State.GATHERING not in LEGAL[self.state]:
            self.change_state(State.GATHERING)  # which refuses it
        step, group = self._group.step, self._group
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
            source = self._post_forward or self.source
            if source.ready is not None and self._extensions is None:
                start: Callable[[], Any] = source.ready.start
            else:
                start = partial(self._start_from, source, values)
                start = start if self._extensions is None else partial(self._extensions.start, start)
            lane, then = group.comm.lanes.gather, source.release if source.is_staged else None
            is_direct = lane.is_host and then is None and not lane.observers
            if not is_direct:
                start = partial(lane.run, start, then, (ready, source.filled, step.written))
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

    def _start_from(self, source: Source, values: Values) -> Pending:
        """Start to gather the parameters that have no gather of their own."""
        source.start(values)
        source.finish()
        return source.route(self.views).start()

    def start_early(self) -> None:
        values = self._group.step.forwards, self.count_writes()
        is_there = self.buffer.slot is not None and self._values == values  # a backward uses it again
        # A gather under way still reads its staging.
        self.source.start_ahead(values, is_needed=self.state is State.SHARDED and not is_there)

    def _cancel(self) -> None:
        super()._cancel()
        self.source.release()

    def use_pool(self) -> None:
        self.buffer.change_pool(self._group.parameter_pool)
        self.source = source_of(self._group, self._shard)


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
        if not self._group.step.now.reads_shared or self._values is None or self._values[1] != self.count_writes():
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
