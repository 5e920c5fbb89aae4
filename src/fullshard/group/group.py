"""A group: the parameters that travel together, and the states they go through.

Owns the buffers of its parameters (shard, full, gradients), what the modules show in each state, and the transitions of
:class:`~fullshard.group.context.State`. It leaves to the schedule when each happens and what is gathered next, and to
its :class:`Gradients` how gradients are reduced.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from fullshard.buffer.sections import full_bytes, full_views
from fullshard.buffer.shared import SharedBuffer
from fullshard.buffer.slots import SlotBuffer
from fullshard.comm.transport import GatherRoute, Transfer, Transport
from fullshard.device import PASSED, Done, Mark, Pending, mark_now
from fullshard.group.comm_context import CommContext
from fullshard.group.context import State
from fullshard.group.extension import ExtensionGather
from fullshard.group.flat import FlatModuleParameters
from fullshard.group.gradients import Gradients, TrainedGroup
from fullshard.group.memory import Memory
from fullshard.group.mesh import DataMesh
from fullshard.group.module_parameters import ModuleParameters
from fullshard.group.owners import register, register_sharded
from fullshard.group.parameter import Location, ShardedParameter, whole_views
from fullshard.group.post_forward import PostForwardShard
from fullshard.group.shared_chunks import SharedChunks
from fullshard.torch_private import in_backward, is_traceable_subclass, plain_parts, set_versions, version_of

_TAGS_APART = 1 << 16
#: The version of leaves whose memory another group may have. Autograd refuses to read what it saved of them.
RELEASED = 1 << 31


class Group(TrainedGroup):
    """A group, made of its parts; see :class:`GroupContext` for the arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._copies = 0
        self.has_custom_communication = False
        #: Whether it is unsharded only because a forward left it so, as the root's does when nobody asked for it.
        self.left_by_forward = False
        self.summoned: Any = None  # what the modules show while they show private full copies
        self.users = 0  # units of other groups that need this one too: parameters tied across groups
        self._build()

    # -- memory ------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Lay the parameters out and move what they hold into the group's shard."""
        self.lay_out()
        self._private_transport = self.transport.private
        self.memory = Memory(self)
        shared, nbytes = self.memory.shared, full_bytes(self.sections, self.compute_dtypes)
        self.full: SlotBuffer | SharedBuffer
        self._full_views: tuple[torch.Tensor, ...] = ()
        if shared is None:
            self.full = SlotBuffer(self.parameter_pool, nbytes)
        else:
            self.full = SharedBuffer(shared.memory.view, shared.memory.start, nbytes)
            self._view_full()
        self.full.keep_memory(self.options.keep_unsharded_storage)
        self._gather: Mark | None = None
        self._gathered: tuple[int, int] | None = None  # epoch and version of the values that the full buffer has
        self._guarded: tuple[torch.Tensor, ...] = ()  # the leaves, and what they hold
        self._leaf_versions: tuple[int, ...] = ()
        self._released: tuple[int, ...] = ()
        self._route: GatherRoute | None = None
        self._staging: SlotBuffer | None = None
        self._post_forward: PostForwardShard | None = None
        self._extensions = ExtensionGather(self) if any(param.extends for param in self.params) else None
        self.gradients = Gradients(self)
        for param in self.params:
            param.unsharded = None
        self.memory.take_in()
        if self.is_flat:
            receive = partial(Gradients.receive_outside, weakref.ref(self))
            self.module_params = FlatModuleParameters(self, self.memory.shards, receive)
        else:
            self.module_params = ModuleParameters(self)
        self.module_params.show_sharded()
        register_sharded(self)

    @torch.inference_mode(False)
    def _view_full(self) -> None:
        self._full_views = full_views(self.full.memory, self.sections, self.compute_dtypes)

    @property
    def sharded_bytes(self) -> int:
        """Bytes of this rank's shard."""
        return self.memory.nbytes

    def check_in(self) -> None:
        """Notice what users did to the modules since the last step. Called before the root's forward."""
        if self.summoned is not None and self.summoned.is_left_by_errors:
            self.summoned.close()
        changed = self.summoned is None and not self.module_params.check_in()
        replaced = changed and self.module_params.take_in()  # before others are shown
        # Since an earlier forward parameters may have been written without a trace, or with one on some ranks only:
        # those that have elements of a fragment.
        if self.left_by_forward or self.is_flat or self.state is State.SHARDED_POST_FORWARD:
            self.reshard()
        if self.memory.shared is None and self.is_unsharded:
            # Older writes are no reason to gather, or ranks would differ that wrote and did not.
            self._leaf_versions = tuple(map(version_of, self._guarded))
        if changed:
            self.take_over(replaced)

    def take_over(self, replaced: bool) -> None:
        """Take over the parameters that were found in the modules, of which some were ``replaced``."""
        if replaced:
            if any(self._needs_other_memory(param) for param in self.params):
                self.reshard()
                for param in self.params:
                    param.adopt()
                self._build()
            else:
                self.memory.take_in()
                register_sharded(self)
        self.module_params.prepare()
        if self.is_unsharded and not self.hidden:
            self.module_params.show_unsharded()
        else:
            self.module_params.show_sharded()

    def meet(self) -> None:
        """Map the memory that the ranks of a host share; use private memory if there is not enough."""
        if not self.memory.meet():
            self.may_share = False
            self.rebuild()

    def _needs_other_memory(self, param: ShardedParameter) -> bool:
        held = param.held
        if param.placed and param.extends != param.defines_gather(held):
            return True
        return held.dtype != param.dtype or (self.memory.is_meta and not held.is_meta)

    def join(self, comm: CommContext) -> None:
        """Become part of a tree, whose lanes, bound on reductions and memory all its groups share."""
        self.reshard()
        self.comm = comm
        self.full.move(self.parameter_pool)
        self.gradients.move()
        self._staging, self.memory.staged_views, self._route = None, (), None

    # -- transitions -------------------------------------------------------------------------------------------------

    def _current(self) -> tuple[int, int]:
        return self.clock.epoch, self.memory.version(self.module_params.sharded)

    @property
    def _shard_version(self) -> int:
        return self.memory.version(self.module_params.sharded)

    def publish(self, whatever: bool) -> None:
        """Let the ranks that share memory see this rank's chunks; only those that were written, if not ``whatever``."""
        shared = self.memory.shared
        if shared is not None and shared.must_publish:
            shared.publish(self._shard_version, whatever)

    def unshard(self) -> bool:
        """Start to gather, unless the values are there; returns whether communication was started."""
        if self.state is State.GATHERING:
            return False
        if self.summoned:
            raise RuntimeError(f"{self} was used inside summon_full_params: leave it before forward or backward")
        if self.memory.is_apart:
            self.meet()
        if self.memory.shared is not None:
            return self._unshard_shared(self.memory.shared)
        if self.state is State.UNSHARDED:
            if self._gathered is None or self._gathered[1] == self._shard_version:
                if self.hidden:
                    self._show_unsharded()
                return False
            self.reshard()  # the shard was written since: gather again
        if self.memory.has_meta:
            raise RuntimeError(self.memory.meta_message())
        # Between two uses in one forward nothing is reused: writes through ``.data`` leave no trace and must not last.
        if self.full.keeps_values and in_backward() and self._gathered == self._current():
            self.full.take()
            self._arrive()
            return False
        ready = self.full.take()
        if not self._full_views:
            self._view_full()
        self._gathered = self._current()
        filled = self._post_forward.filled if self._post_forward is not None else PASSED
        then = self._end_gather if self.memory.needs_staging else None
        start = self._start_plain if self._extensions is None else partial(self._extensions.start, self._start_plain)
        self._gather = self.comm.lanes.gather.run(start, then, (ready, filled, self.clock.written))
        self.to_state(State.GATHERING)
        return True

    def _unshard_shared(self, shared: SharedChunks) -> bool:
        """Show the shared parameters; between passes, when other ranks may write to them, a copy."""
        full = self.full
        assert isinstance(full, SharedBuffer)
        if self.memory.has_meta:
            raise RuntimeError(self.memory.meta_message())
        if self.clock.reading:
            if self.is_unsharded and self._gathered is not None:
                if self._gathered[1] == self._shard_version:
                    if self._leaf_versions == tuple(map(version_of, self._guarded)):
                        full.be_shared()  # otherwise what was written shows until it is resharded
                    if self.hidden:
                        self._show_unsharded()
                    return False
                self.reshard()  # the shard was written since: what may have been written to the leaves is old too
        else:
            self.reshard()
            self.publish(whatever=True)
            doing = f"unshard() of {self.name or 'the root'}"
            shared.memory.barrier.enter(doing)
            full.be_private()
            shared.memory.barrier.leave(doing)
        full.take()
        self._gathered = self._current()
        self._gather = PASSED
        self.to_state(State.GATHERING)
        return True

    def _start_plain(self) -> Pending:
        """Start to gather the parameters that have no gather of their own."""
        if self._post_forward is not None:
            return self._post_forward.gather()
        if self.data.shard_group is None:
            with torch.no_grad():
                for full, shard in zip(self._full_views, self.memory.views, strict=True):
                    full.copy_(shard, non_blocking=True)
            return Done()
        if self.memory.needs_staging:
            self._staging = self.memory.stage(self._staging)
        return (self._route or self._make_route(self.data.shard_group)).start()

    def _make_route(self, shard_group: dist.ProcessGroup) -> GatherRoute:
        """Make the route of the gather; where dtype or device differ, it reads the shard's copy in staging."""
        shards = self.memory.staged_views if self.memory.needs_staging else self.memory.views
        plans = [section.plan for section in self.sections]
        transfers = list(map(Transfer, plans, self._full_views, shards))
        self._route = self._private_transport.gather_route(transfers, shard_group, 2 * self.tag)
        return self._route

    def _end_gather(self) -> None:
        if self._staging is not None:
            self._staging.give_back(mark_now(self.device))

    def wait_for_unshard(self) -> None:
        """Wait for the gather, and let the modules show the unsharded parameters."""
        if self.state is not State.GATHERING:
            return
        assert self._gather is not None
        self._gather.wait()
        self._gather = None
        self._post_forward = None  # not before: until here the gather reads it
        self._arrive()

    def _arrive(self) -> None:
        self.to_state(State.UNSHARDED)
        self.left_by_forward = False
        if self.params and self.params[0].unsharded is None:
            self._make_leaves()
        elif self._extensions is not None:
            self._extensions.arrive()
        set_versions(self._guarded, self._leaf_versions)
        self._show_unsharded()

    def _show_unsharded(self) -> None:
        self.hidden = False
        self.module_params.show_unsharded()

    def hide(self) -> None:
        """Show the sharded parameters and keep the unsharded ones, until they are needed."""
        self.module_params.show_sharded()
        self.hidden = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_leaves(self) -> None:
        for section, full in zip(self.sections, self._full_views, strict=True):
            for index, whole in whole_views(self.params, section, full):
                # ``.data`` has a version of its own: a gather that writes the buffer is no write in place to autograd.
                self.params[index].make_unsharded(whole.data)
        if self._extensions is not None:
            self._extensions.arrive()
        leaves = {i: param.unsharded for i, param in enumerate(self.params) if param.unsharded is not None}
        inside = [part for leaf in leaves.values() if is_traceable_subclass(leaf) for part in plain_parts(leaf)]
        self._guarded = (*leaves.values(), *(part for part in inside if not part.is_inference()))
        self._leaf_versions = tuple(map(version_of, self._guarded))
        self._released = (RELEASED,) * len(self._guarded)
        for index, param in enumerate(self.params):
            self.gradients.listen(index, param)
        register(self, leaves.items())
        self.module_params.prepare()

    def reshard(self) -> None:
        """Show the sharded parameters and let the full buffer go."""
        if self.state is State.SHARDED:
            return
        if self.state is State.GATHERING:
            self.wait_for_unshard()
        self.module_params.show_sharded()
        self.hidden = False
        self._leave(State.SHARDED)
        self._post_forward = None

    def _leave(self, state: State) -> None:
        if self.is_unsharded:
            versions = tuple(map(version_of, self._guarded))
            if versions != self._leaf_versions:
                self._throw_writes_away(versions)
        self.to_state(state)
        if self._extensions is not None:
            self._extensions.leave()
            self._gathered = None
        if self.memory.poisons and self.full.in_use:
            self.full.poison()
            self._gathered = None
        self.full.give_back(mark_now(self.device))
        if self.memory.shared is None or not self.clock.reading:
            set_versions(self._guarded, self._released)

    def let_read(self, may: bool) -> None:
        """Whether autograd may read what it saved of the leaves: whether the full buffer has their values."""
        set_versions(self._guarded, self._leaf_versions if may else self._released)

    def _throw_writes_away(self, versions: tuple[int, ...]) -> None:
        """Leaves were written in place since they were shown. What autograd saved after that is gone with it, so the
        versions of these leaves never come again."""
        self._leaf_versions = tuple(
            now + (now != before) for before, now in zip(self._leaf_versions, versions, strict=True)
        )
        self._gathered = None
        if isinstance(self.full, SharedBuffer):
            self.full.discard_writes()
            self.let_read(True)

    def reshard_after_forward(self) -> None:
        """Do with the parameters what the user chose for the time between forward and backward."""
        if self.state is not State.UNSHARDED:
            return
        if self.options.post_forward_mesh is not None and self._extensions is None:
            self._rest(self.options.post_forward_mesh)
        elif self.options.reshard_after_forward:
            self.reshard()

    def _rest(self, mesh: DataMesh) -> None:
        self.module_params.show_sharded()
        self._post_forward = PostForwardShard(self, mesh, self._full_views)
        register(self, self._post_forward.shown.items())
        self.module_params.show_post_forward(self._post_forward.shown)
        self._leave(State.SHARDED_POST_FORWARD)
        self._gathered = None

    # -- what may change between steps -------------------------------------------------------------------------------

    def show_too(self, index: int, module: nn.Module, where: str | tuple[Any, ...]) -> None:
        """Show a parameter of this group elsewhere too: under a name in another module (tied across groups), or on a
        path of keys in the attributes of a module."""
        param = self.params[index]
        if isinstance(where, tuple):
            param.kept_apart.append((module, where))
        elif any(at.module is module and at.name == where for at in param.locations):
            return
        else:
            param.locations.append(Location(module, where))
        self.reshard()
        self.module_params.prepare()
        self.module_params.show_sharded()

    def rebuild(self) -> None:
        """Use other memory from now on: how or in which dtype parameters are gathered has changed."""
        self.reshard()
        before = self.gradients
        self._build()
        if before.has_any:  # between micro-batches: they go on where they are
            self.gradients = before

    def use_transport(self, gather: Transport | None = None, reduce: Transport | None = None) -> None:
        """Gather or reduce by another transport from now on."""
        self.reshard()
        if gather is not None:
            self.transport = gather
            self.rebuild()
        if reduce is not None:
            self.reduce_transport = reduce
            self.gradients.forget_routes()

    def reduce_over(self, process_group: dist.ProcessGroup | None) -> None:
        """Reduce over other communicators of the same ranks from now on."""
        self.reduce_process_group = process_group
        self.gradients.forget_routes()

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """A group of the copied parameters, in memory of its own."""
        assert self.state is State.SHARDED, f"{self} must be sharded to be copied"
        self.check_in()
        twin = memo[id(self)] = Group.__new__(Group)  # first: modules tied to this group lead back to it
        params = [param.copy(memo) for param in self.params]
        modules = [copy.deepcopy(module, memo) for module in self.modules]
        options = dataclasses.replace(self.options)
        self._copies += 1  # every rank copies alike, so that the copies' tags agree without communication
        tag = self.tag + self._copies * _TAGS_APART
        private = self.transport.private  # to share memory anew takes all ranks
        twin.__init__(params, modules, self.data, self.device, options, private, tag)  # type: ignore[misc]
        twin.reduce_transport, twin.reduce_process_group = self.reduce_transport, self.reduce_process_group
        twin.name = self.name
        return twin

    def reset(self) -> None:
        """Back to SHARDED from wherever an error left the group; gradients on their way are lost."""
        if self.state is State.GATHERING:
            self.wait_for_unshard()
        self.reshard()
        self.gradients.discard()
