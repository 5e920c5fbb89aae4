"""A parameter group: the parameters that are gathered in one call and reduced in one call.

A group is a state machine over its buffers: the shard that it keeps, the full buffer with the unsharded parameters, and
the gradients. Owns what the modules show in each state of the full buffer, and the changes of memory, transport and
parameters between steps. Its strategy says which placements it has at each time of a step. The schedule decides when
each group is gathered.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn

from fullshard.buffer.host_slots import NothingToShareError
from fullshard.comm.transport import Transport
from fullshard.group.comm_context import CommContext
from fullshard.group.context import GroupContext
from fullshard.group.full_buffer import FullBuffer, GatheredBuffer, MappedBuffer, State, WholeBuffer
from fullshard.group.gradients import Gradients
from fullshard.group.module_parameters import ModuleParameters
from fullshard.group.owners import register_sharded
from fullshard.group.parameter import Location, ShardedParameter
from fullshard.group.shard import ShardBuffer
from fullshard.group.strategy import Placement

_TAGS_APART, _MOST_TAG = 1 << 16, 1 << 28  # tags of messages have 31 bits


class Summoned(Protocol):
    """Full parameters that the modules of a group show instead of its own, see :mod:`fullshard.full_params`."""

    is_left_by_errors: bool  # whether an error leaves it open; the next step closes it

    def current(self) -> Mapping[int, nn.Parameter]: ...
    def close(self) -> None: ...


class ParamGroup(GroupContext):
    """A group. Methods that communicate must be called by all its ranks, in the same order.

    Attributes:
        shard: this rank's part, between steps.
        full: the unsharded parameters, and the state of the group.
        gradients: the gradients that are not in ``param.grad`` yet.
        module_params: what the modules show.
        summoned: the full parameters that modules show instead, if ``summon_full_params`` put some there.
        users: the units that need it while they run; several if parameters are tied across groups.
    """

    module_params_class = ModuleParameters

    def __post_init__(self) -> None:
        super().__post_init__()
        #: The tags of deep copies, and of copies of copies. Ranks agree on them without communication, because all make
        #: the same copies. After 4,095 copies the first tag is used again.
        self._copy_tags = itertools.cycle(range(self.tag + _TAGS_APART, _MOST_TAG, _TAGS_APART))
        self.has_custom_communication = False
        self.users: set[Any] = set()
        self.summoned: Summoned | None = None
        #: Whether the last forward left the group unsharded although the user did not ask for that. The next forward
        #: gathers it again: an optimizer may have written the shards, which leaves no trace.
        self.stays_unasked = False
        self.was_evaluated = False  # whether a forward without a backward left its values
        self.first_values: object = None  # until the first forward, see :mod:`fullshard.first_values`
        self._build()

    def _build(self) -> None:
        """Lay the parameters out and copy their values into the group's shard."""
        self.lay_out()
        self.shard = ShardBuffer(self)
        shared, alone = self.shard.shared, WholeBuffer if self.shard.is_full else GatheredBuffer
        self.full: FullBuffer = MappedBuffer(self, self.shard, shared) if shared else alone(self, self.shard)
        self.full.buffer.keep_memory(self.options.keep_unsharded_storage)
        for param in self.params:
            param.unsharded = None
        self.shard.copy_parameters()
        self.module_params = self.module_params_class(self)
        self.gradients = Gradients(self, self.full, self.module_params)
        self.module_params.show_sharded()
        register_sharded(self)

    def unshard(self) -> None:
        """Start to gather, unless the values are there. :meth:`wait_for_unshard` ends it."""
        if self.full.state is State.GATHERING:
            return
        if self.summoned:
            raise RuntimeError(f"{self} was used inside summon_full_params: leave it before forward or backward")
        if self.shard.is_unmapped:
            self.map_shared()
        if self.full.state.is_unsharded:
            if self.full.is_current():
                if not self.module_params.shows_unsharded:
                    self.full.change_state(State.UNSHARDED)
                    self.module_params.show(self.module_params.as_unsharded)
                return
            self.reshard()  # the shard was written since: gather again
        if self.shard.has_meta:
            self.shard.refuse_meta()
        try:
            self.full.gather()
        except NothingToShareError:
            self.use_own_memory()
            self.unshard()
        except BaseException:
            self.module_params.show_sharded()
            raise

    def wait_for_unshard(self) -> None:
        """Wait for the gather, if one was started, and let the modules show the unsharded parameters."""
        if self.full.state is not State.GATHERING:
            return
        try:
            is_first = self.full.wait_for_gather()
        except BaseException:
            self.module_params.show_sharded()
            raise
        if is_first:
            for index, param in enumerate(self.params):
                self.gradients.listen(self, index, param)
            self.module_params.prepare()
        self.module_params.show(self.module_params.as_unsharded)
        if self.step.log.listeners:
            self.step.log("unshard", self)

    def reshard(self) -> None:
        """Show the sharded parameters and let the full buffer go."""
        was_sharded = self.full.state is State.SHARDED
        if self.module_params.left is not None:
            self.keep_writes()
        if self.module_params.substituted:
            self.module_params.show_sharded()
        elif not was_sharded:
            self.module_params.show(self.module_params.as_sharded)
        if not was_sharded:
            self.full.reshard()
            if self.step.log.listeners:
                self.step.log("reshard", self)

    def reshard_after_forward(self) -> None:
        """Bring the parameters to the placement that they have between forward and backward."""
        wanted = self.options.strategy.after_forward
        if wanted is Placement.REPLICATED or self.full.state is not State.UNSHARDED:
            return
        mesh, shown = self.options.post_forward_mesh, None
        if wanted is Placement.SHARDED_LESS and mesh is not None:
            shown = self.full.reshard_to(mesh)
        if shown is None:
            self.reshard()
            return
        self.module_params.show_post_forward(shown)
        if self.step.log.listeners:
            self.step.log("rest", self)

    def reshard_after_backward(self) -> None:
        """Bring the parameters to the placement that they have after a backward."""
        strategy = self.options.strategy
        self.full.source.accumulates = not (strategy.reduces and strategy.all_reduces)
        if strategy.reshards:
            self.reshard()
        elif strategy.after_backward is Placement.SHARDED:  # the next micro-batch uses the values
            self.leave_unsharded()
        else:
            self.module_params.note_left()

    def leave_unsharded(self, was_evaluated: bool = False) -> None:
        """Show the sharded parameters until the next pass, for which the values of an unsharded group stay."""
        if self.full.state is State.UNSHARDED:
            self.was_evaluated = was_evaluated
            self.full.change_state(State.LEFT)
            self.module_params.show_sharded()

    def keep_writes(self) -> None:
        """Keep what users wrote to the unsharded parameters that modules show between passes."""
        self.module_params.keep_writes(self.full.wholes)

    def notice_changes(self) -> None:
        """Notice what users did to the modules since the last step. Called before the root's forward."""
        if self.summoned is not None and self.summoned.is_left_by_errors:
            self.summoned.close()
        if self.module_params.left is not None:
            self.keep_writes()
        changed = self.summoned is None and not self.module_params.are_unchanged()
        replaced = changed and self.module_params.adopt_replaced()  # before others are shown
        # Parameters may have been written since an earlier forward: without a trace, or with a trace only on the ranks
        # that have elements of a fragment. All ranks must decide alike, so each reshards.
        left, trains = self.full.state is State.LEFT and self.was_evaluated, torch.is_grad_enabled()
        if self.moves_all or self.stays_unasked or (left and trains) or self.full.state is State.SHARDED_POST_FORWARD:
            self.reshard()
        if self.shard.shared is None and self.full.state.is_unsharded:
            # Older writes cause no gather: a rank that wrote would gather, and a rank that did not would not.
            self.full.accept_writes()
        if changed:
            self.adopt_parameters(replaced)

    def adopt_parameters(self, replaced: bool) -> None:
        """Adopt the parameters that were found in the modules; ``replaced`` if some have new values."""
        if replaced:
            if any(self._needs_other_memory(param) for param in self.params):
                self.reshard()
                for param in self.params:
                    param.adopt()
                self._build()
            else:
                self.shard.copy_parameters()
                register_sharded(self)
        self.module_params.prepare()
        if self.module_params.shows_unsharded:
            self.module_params.show(self.module_params.as_unsharded)
        else:
            self.module_params.show_sharded()

    def _needs_other_memory(self, param: ShardedParameter) -> bool:
        values = param.values
        differs = param.is_sharded and param.extends != param.defines_gather(values)
        return differs or values.dtype != param.dtype or (self.shard.is_meta and not values.is_meta)

    def map_shared(self) -> None:
        """Map the memory that the ranks of a host share; use private memory if there is not enough."""
        if not self.shard.map_shared():
            self.may_share = False
            self.rebuild()

    def use_own_memory(self) -> None:
        """Gather and reduce by messages from now on: what ranks could share has no memory."""
        self.may_share = False
        self.gather_transport = self.transport.private
        self.use_transport(reduce=self.transport.private)
        self.full.use_pool()

    def use_comm_context(self, comm: CommContext) -> None:
        """From now on share lanes, the limit on reductions, and memory with other groups."""
        self.reshard()
        self.comm = comm
        self.full.use_pool()
        self.gradients.forget_layout()

    def show_also(self, index: int, module: nn.Module, where: str | tuple[Any, ...]) -> None:
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
        """Use new memory from now on, because parameters are gathered in a different way or dtype."""
        self.reshard()
        before = self.gradients
        self._build()
        self.gradients.feedback = before.feedback
        if before.has_any:  # between micro-batches: they stay where they are
            before.attach(self.full, self.module_params)
            self.gradients = before

    def use_transport(self, gather: Transport | None = None, reduce: Transport | None = None) -> None:
        """Gather or reduce with a different transport from now on."""
        self.reshard()
        if gather is not None:
            self.transport = gather
            self.rebuild()
        if reduce is not None:
            self.reduce_transport = reduce
            self.gradients.forget_layout()

    def reduce_over(self, process_group: dist.ProcessGroup | None) -> None:
        """Reduce over a different process group of the same ranks from now on."""
        self.reduce_process_group = process_group
        self.gradients.forget_layout()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamGroup:
        """A group of the copied parameters, in memory of its own."""
        assert self.full.state is State.SHARDED, f"{self} must be sharded to be copied"
        self.notice_changes()
        twin = memo[id(self)] = type(self).__new__(type(self))  # first: modules tied to this group lead back to it
        params = [param.copy(memo) for param in self.params]
        modules = [copy.deepcopy(module, memo) for module in self.modules]
        options = dataclasses.replace(self.options)
        private, tag = self.transport.private, next(self._copy_tags)  # to share memory anew takes all ranks
        twin.__init__(params, modules, self.data, self.device, options, private, tag)  # type: ignore[misc]
        twin.reduce_transport, twin.reduce_process_group = self.reduce_transport, self.reduce_process_group
        twin.name, twin._copy_tags = self.name, self._copy_tags
        return twin

    def reset(self) -> None:
        """Return to SHARDED from any state after an error; gradients under way are lost."""
        with suppress(Exception):  # an error ended the step: what was under way is lost anyway
            self.reshard()
        with suppress(Exception):
            self.full.source.finish()
        self.gradients.discard()
