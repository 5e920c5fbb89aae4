"""A group: the parameters that travel together, and the states they go through.

Owns the buffers of its parameters (shard, full, gradients), what the modules show in each state, and the transitions of
:class:`~fullshard.group.context.State`. It leaves to the schedule when each happens and what is gathered next, and to
its :class:`Gradients` how gradients are reduced.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from fullshard.comm.transport import Transport
from fullshard.device import PASSED, Mark
from fullshard.group.context import LEGAL, CommContext, State
from fullshard.group.flat import FlatModuleParameters
from fullshard.group.full_buffer import FullBuffer, GatheredBuffer, MappedBuffer
from fullshard.group.gradients import Gradients, TrainedGroup
from fullshard.group.memory import Memory
from fullshard.group.module_parameters import ModuleParameters
from fullshard.group.owners import register_sharded
from fullshard.group.parameter import Location, ShardedParameter

_TAGS_APART = 1 << 16


class Group(TrainedGroup):
    """A group, made of its parts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        #: The tags of copies, and of copies of these: every rank copies alike, so that they agree by themselves.
        self._copy_tags = itertools.count(self.tag + _TAGS_APART, _TAGS_APART)
        self.has_custom_communication = False
        #: The units that need it now: several where parameters are tied across groups. It stays unsharded meanwhile.
        self.users: set[object] = set()
        self._build()

    def _build(self) -> None:
        """Lay the parameters out and move what they hold into the group's shard."""
        self.lay_out()
        memory = self.memory = Memory(self)
        shared = memory.shared
        self.full: FullBuffer = MappedBuffer(self, memory, shared) if shared else GatheredBuffer(self, memory)
        self.full.buffer.keep_memory(self.options.keep_unsharded_storage)
        self._gather: Mark | None = None
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

    def to_state(self, state: State) -> None:
        """Make a transition; raise RuntimeError if it is not legal."""
        if state not in LEGAL[self.state]:
            raise RuntimeError(f"{self} cannot go from {self.state.name} to {state.name}")
        self.state = state
        self.is_unsharded = state is State.UNSHARDED or state is State.LEFT
        self.shows_unsharded = self.is_unsharded and (state is State.UNSHARDED or not self.is_flat)

    def check_in(self) -> None:
        """Notice what users did to the modules since the last step. Called before the root's forward."""
        if self.summoned is not None and self.summoned.is_left_by_errors:
            self.summoned.close()
        changed = self.summoned is None and not self.module_params.check_in()
        replaced = changed and self.module_params.take_in()  # before others are shown
        # Parameters may have been written since an earlier forward: without a trace, or with a trace only on the ranks
        # that have elements of a fragment. All ranks must decide alike, so each reshards.
        if self.is_flat or self.state is State.LEFT or self.state is State.SHARDED_POST_FORWARD:
            self.reshard()
        if self.memory.shared is None and self.is_unsharded:
            # Older writes cause no gather: a rank that wrote would gather, and a rank that did not would not.
            self.full.accept_writes()
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
        if self.shows_unsharded:
            self.module_params.show(self.module_params.as_unsharded)
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
        self.full.join()
        self.gradients.move()

    def unshard(self) -> bool:
        """Start to gather, unless the values are there; returns whether communication was started."""
        if self.state is State.GATHERING:
            return False
        if self.summoned:
            raise RuntimeError(f"{self} was used inside summon_full_params: leave it before forward or backward")
        if self.memory.is_apart:
            self.meet()
        if self.is_unsharded:
            if self.full.is_current():
                if not self.shows_unsharded:
                    self.to_state(State.UNSHARDED)
                    self.module_params.show(self.module_params.as_unsharded)
                return False
            self.reshard()  # the shard was written since: gather again
        if self.memory.has_meta:
            self.memory.refuse_meta()
        self.to_state(State.GATHERING)
        try:
            gather = self.full.fill()
        except BaseException:
            self._give_up()
            raise
        self._gather = gather or PASSED
        if gather is None:
            self.wait_for_unshard()
        return gather is not None

    def wait_for_unshard(self) -> None:
        """Wait for the gather, if one was started, and let the modules show the unsharded parameters."""
        if self._gather is not None:
            try:
                self._gather.wait()
                is_first = self.full.arrive()
            except BaseException:
                self._give_up()
                raise
            self._gather = None
            self.to_state(State.UNSHARDED)
            if is_first:
                for index, param in enumerate(self.params):
                    self.gradients.listen(index, param)
                self.module_params.prepare()
            self.module_params.show(self.module_params.as_unsharded)

    def _give_up(self) -> None:
        """Back to SHARDED after an error in a gather, which gives back all that it took."""
        self._gather = None
        self.full.give_up()
        self.reshard()

    def reshard(self) -> None:
        """Show the sharded parameters and let the full buffer go."""
        if self._gather is not None:
            try:
                self._gather.wait()
            except BaseException:
                self._give_up()
                raise
            self._gather = None
        if self.module_params.stand_ins:
            self.module_params.show_sharded()
        elif self.state is not State.SHARDED:
            self.module_params.show(self.module_params.as_sharded)
        if self.state is not State.SHARDED:
            self.full.release()
            self.to_state(State.SHARDED)

    def reshard_after_forward(self) -> None:
        """Do with the parameters what the user chose for the time between forward and backward."""
        if self.state is not State.UNSHARDED:
            return
        mesh = self.options.post_forward_mesh
        small = self.full.rest(mesh) if mesh is not None else None
        if small is not None:
            self.module_params.show_post_forward(small)
            self.to_state(State.SHARDED_POST_FORWARD)
        elif self.options.reshard_after_forward:
            self.reshard()

    def leave_unsharded(self) -> None:
        """Note that a forward left the group unsharded unasked, as that of the root does. Nobody has promised that its
        values stay unchanged until the next forward. Modules show flat parameters sharded: these can be written."""
        if self.is_unsharded:
            self.to_state(State.LEFT)
            if self.is_flat:
                self.module_params.show_sharded()

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
        private, tag = self.transport.private, next(self._copy_tags)  # to share memory anew takes all ranks
        twin.__init__(params, modules, self.data, self.device, options, private, tag)  # type: ignore[misc]
        twin.reduce_transport, twin.reduce_process_group = self.reduce_transport, self.reduce_process_group
        twin.name, twin._copy_tags = self.name, self._copy_tags
        return twin

    def reset(self) -> None:
        """Back to SHARDED from wherever an error left the group; gradients on their way are lost."""
        with suppress(Exception):  # an error is being recovered from: what was under way is lost anyway
            self.reshard()
        self.gradients.discard()
