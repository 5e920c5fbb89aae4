"""How the gradients of a group are taken from autograd, kept, and passed to a reduction.

Owns the buffer into which each gradient is copied when autograd has it, and the choice of those that a reduction takes.
The schedule decides when a group's backward has ended, and the reduction does what follows.

A gradient exists once: in the buffer, in the dtype in which it will travel. Small gradients wait until one call copies
several. Between micro-batches without reduction the buffer stays with the group, and gradients accumulate in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from fullshard.buffer.messages import zero_copy_in
from fullshard.buffer.plan import BufferPlan
from fullshard.buffer.sections import Section, full_bytes, full_views
from fullshard.buffer.slots import SlotBuffer
from fullshard.device import HoldingMark
from fullshard.group.context import GroupContext
from fullshard.group.feedback import GradientFeedback
from fullshard.group.full_buffer import FullBuffer
from fullshard.group.gradient_dtypes import GradientDtypes
from fullshard.group.gradient_views import MessageViews, WholeViews
from fullshard.group.module_parameters import ModuleParameters
from fullshard.group.parameter import IndexedTensor, ShardedParameter
from fullshard.group.reduction import Hop, Part, PendingReduction, ReductionPlan, ScatterHop, make_part
from fullshard.group.strategy import Placement
from fullshard.torch_private import foreach_add
from fullshard.waiting_grad import ShownGrads

#: Plans of reductions that a group keeps: programs that drop layers at random have a set of parameters for each step.
MOST_PLANS = 16
MOST_WAITING = 1 << 20  # bytes of gradients that wait for one copy, in the dtype in which they will travel


class HasGradients(Protocol):
    """The part of a group that the hooks on its leaves use."""

    gradients: Gradients


class Gradients:
    """The gradients of one group."""

    def __init__(self, group: GroupContext, full: FullBuffer, module_params: ModuleParameters) -> None:
        self._group = group
        self.attach(full, module_params)
        self._dtypes_of = GradientDtypes(group)
        self._trainable: tuple[bool, ...] = ()  # the parameters that the layout is made for
        self._keeps_whole = True  # whether replicas may add up large gradients where autograd made them
        self._nothing: list[torch.Tensor | None] = [None] * len(group.params)
        self._expected = self._nothing  # leaves whose gradients are still to come, once one has come
        self._writes = False  # whether the buffer takes gradients; while a reduction reads it, it does not
        self._waiting: dict[int, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._arrived: set[int] = set()
        self.shown = ShownGrads(group.params)  # what users see of those that wait after a backward
        self._partial: dict[int, torch.Tensor] = {}
        self.feedback = GradientFeedback(group)
        self._lay_out((False,) * len(group.params))  # what is trained is known when gradients come

    def attach(self, full: FullBuffer, module_params: ModuleParameters) -> None:
        """Take the gradients of the values in ``full`` from now on, for the parameters that modules show."""
        self._full, self._module_params = full, module_params

    def forget_layout(self) -> None:
        """Make a new layout for gradients: the routes of reductions, or the pool of the buffer, have changed."""
        if self._arrived or self._waiting:
            self._begin_anew()
        else:
            self._trainable = ()

    def listen(self, owner: HasGradients, index: int, param: ShardedParameter) -> None:
        """Take the gradient of an unsharded parameter of ``owner`` whenever autograd has it."""
        leaf = param.unsharded
        assert leaf is not None
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return
        leaf.requires_grad_(True)  # of a frozen parameter too, until ``prepare()``: the hook stays when it is unfrozen
        # The hook must not keep alive what the leaf belongs to: autograd hides such a cycle from Python.
        leaf.register_post_accumulate_grad_hook(partial(Gradients.receive, weakref.ref(owner), index))
        self._dtypes_of.tell_autograd(index, leaf)

    @property
    def pending(self) -> bool:
        """Whether gradients wait to be reduced."""
        if self.shown.grads:
            self._drop_cleared()
        return bool(self._arrived or self._waiting or (self._partial and self._group.options.strategy.all_reduces))

    @property
    def has_any(self) -> bool:
        """Whether there are gradients that are not in ``param.grad`` yet, waiting or kept."""
        return self.pending or bool(self._partial)

    @property
    def may_come_in_parts(self) -> bool:
        """Whether a backward may reduce those that came first before the others: if it adds to none, and those that do
        not come are not reduced."""
        options = self._group.options
        reduces = options.strategy.reduces and options.strategy.all_reduces
        return reduces and not (options.reduce_unused or self._group.is_flat or self.has_any)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that wait to be reduced, in the dtypes in which they travel."""
        params, dtypes = self._group.params, self._views.dtypes
        return sum(params[i].shape.numel() * dtypes[i].itemsize for i in self._arrived.union(self._waiting))

    def unreduced(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The gradients of this rank that wait to be reduced, by the index of their parameter."""
        yield from self._waiting.items()
        yield from ((index, self._views.read(index)) for index in self._arrived)

    @staticmethod
    def receive(reference: weakref.ref[HasGradients], index: int, leaf: torch.Tensor) -> None:
        """Take the gradient from a leaf. Runs once for each parameter and backward."""
        owner, grad = reference(), leaf.grad
        if owner is None or grad is None:
            return
        leaf.grad = None
        self = owner.gradients
        if self._expected[index] is leaf and self._full.state.is_unsharded:  # nearly all: without a call
            self._waiting[index], self._expected[index] = grad, None
            if self._nbytes:
                self._limit_waiting(index)
            return
        group = self._group
        param = group.params[index]
        if leaf is not param.unsharded:
            raise RuntimeError(
                f"between the forward and the backward of {group!r} the dtype or the way in which it is gathered was "
                f"changed (to evaluate in full precision, too): the gradient of parameter '{param.name}' was computed "
                f"with memory that is gone. Change it after the backward"
            )
        if not (self._waiting or group.step.now.has_backward):
            group.step.begin_backward()  # a module without a hook on its outputs tells of its backward only here
        if not self._full.state.is_unsharded and group.options.unshard_in_backward:
            raise RuntimeError(
                f"a gradient of parameter '{param.name}' was computed while its group was {self._full.state.name}: the "
                f"backward of {group!r} read memory that was not its own. The output of the module must carry tensors "
                f"that require gradients (in tuples, dicts, dataclasses or containers known to pytree), or the "
                f"parameter was used outside the forward of the module that was given to fully_shard"
            )
        self._take(index, grad)

    @torch.no_grad()
    def take_left(self) -> None:
        """Take the gradients that were left on the leaves, as by a pipeline stage that computes gradients by hand."""
        for index, param in enumerate(self._group.params):
            leaf = param.unsharded
            if leaf is not None and leaf.grad is not None:
                grad, leaf.grad = leaf.grad, None
                self._take(index, grad)

    def _take(self, index: int, grad: torch.Tensor) -> None:
        param = self._group.params[index]
        if not self._waiting:
            if self.shown.grads:
                self._drop_cleared()
            if not self._arrived and self._module_params.trainable != self._trainable:
                self._lay_out(self._module_params.trainable)
        if index not in self._trained:
            raise RuntimeError(f"parameter '{param.name}' began to require gradients in the middle of a step")
        if param.unsharded_spec is not None:
            grad = param.local_gradient(grad)
        if grad.dtype != self._views.dtypes[index] and self._dtypes_of.widens(index, grad.dtype):
            self._begin_anew()
        if index in self._waiting:
            self.copy_waiting()
        if not self._waiting:
            self._expected = self._plain[:]
        self._waiting[index], self._expected[index] = grad, None
        if self._nbytes:
            self._limit_waiting(index)

    def _limit_waiting(self, index: int) -> None:
        grad, views = self._waiting[index], self._views
        is_kept = index in views.kept and self._buffer.pool.is_host
        if is_kept and len(self._waiting) > 1:
            buffers = self._group.options.max_gradient_buffers or self._most_buffers
            self._group.comm.reductions.wait_for_oldest(buffers - 1, buffers)  # or there are those of two groups
        self._waiting_bytes += self._nbytes[index]
        if self._waiting_bytes >= MOST_WAITING:
            self.copy_waiting()
        elif is_kept and (index in self._arrived or grad.dtype != views.dtypes[index]):
            views.write({index: self._waiting.pop(index)})  # a zero-copy one that waited would exist twice when copied
            self._arrived.add(index)

    @torch.no_grad()
    def _begin_anew(self) -> None:
        """Continue in another buffer, of a wider dtype or with another layout, with the gradients that have arrived."""
        self.copy_waiting()
        before, arrived = self._buffer if self._writes else None, dict(self.unreduced())
        self._writes = False
        self._lay_out(self._module_params.trainable)
        if arrived:
            self._take_buffer()
            self._views.write(arrived)
        if before is not None:
            before.give_back()

    @staticmethod
    def receive_outside(reference: weakref.ref[HasGradients], index: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Runs before autograd adds to the gradient of a parameter that every rank always shows whole, and that a
        different module has read. The gradient is reduced like any other; autograd gets zeros to add instead."""
        owner = reference()
        if owner is None:
            return None
        group = owner.gradients._group
        if group.step.forwards == 0:
            raise RuntimeError(
                f"a gradient of parameter '{group.params[index].name}' was computed outside of any wrapped module, and "
                f"would not be reduced: wrap the module that reads the parameter too"
            )
        group.step.begin_backward()
        owner.gradients._take(index, grad)
        return torch.zeros_like(grad)

    def copy_waiting(self) -> None:
        """Copy waiting gradients into the buffer, in one call: small ones cost more by their number than by size."""
        if not self._waiting:
            return
        if torch.is_grad_enabled():  # the backward is to be differentiated
            with torch.no_grad():
                return self.copy_waiting()
        waiting, self._waiting, self._waiting_bytes, self._expected = self._waiting, {}, 0, self._nothing
        if self._arrived and (again := self._arrived & waiting.keys()):
            self._views.write({index: waiting.pop(index) for index in again}, foreach_add)
        if not (self._writes or ((kept := self._views.kept) and waiting.keys() <= kept)):
            self._take_buffer()
        if waiting:
            self._views.write(waiting)
        self._arrived.update(waiting)

    def wait_for_more(self) -> None:
        """End a backward without reduction. What is to be reduced later is shown meanwhile, so that users can clear it.
        No rank could show the gradients themselves."""
        self.copy_waiting()
        if self._arrived and not self._group.options.strategy.reduces:
            self.shown.show(self._sections, self._arrived)

    def _drop_cleared(self) -> None:
        """Drop gradients that were cleared while they waited. No others: an optimizer clears only its own."""
        if (cleared := self.shown.take_cleared()) and self._partial:
            self._group.comm.reductions.wait_for_oldest()
        for index in cleared:
            self._arrived.discard(index)
            self._partial.pop(index, None)
            self._views.zero_copy.pop(index, None)
        if cleared and not self._arrived:
            self._writes = False
            self._buffer.give_back()

    def hide(self) -> None:
        """Stop showing that gradients wait, and drop those that were cleared."""
        self._drop_cleared()
        self.shown.hide()

    def _take_buffer(self) -> None:
        """Get the buffer to write to, once few enough reductions read theirs."""
        group = self._group
        # Modules of one group may run at different times. Then an earlier reduction may still read this buffer.
        buffers = group.options.max_gradient_buffers or self._most_buffers
        group.comm.reductions.wait_for_oldest(0 if self._buffer.in_use else buffers - 1, buffers)
        self._buffer.take().wait()
        self._writes = True

    def size_slots(self) -> None:
        """Make ordinary slots large enough before a smaller group makes the first ones."""
        group, pool = self._group, self._group.gradient_pool
        self._buffer.takes_turns = group.options.strategy.after_forward is not Placement.REPLICATED
        if self._buffer.takes_turns:
            trainable = self._module_params.trainable
            found = self._dtypes_of.sections(trainable, self._keeps_whole and group.keeps_whole)
            pool.ordinary = max(pool.ordinary, full_bytes(*found))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _lay_out(self, trainable: tuple[bool, ...]) -> None:
        """Make the sections of what is trained, a buffer for them, and the views of gradients in it."""
        group = self._group
        if self._writes:
            self._buffer.give_back()
        self._trainable = ()  # until all of it is done
        self._most_buffers, self._is_alone = group.gradient_buffers, group.is_alone(group.reduce_transport)
        self._sections, dtypes = self._dtypes_of.sections(trainable, self._keeps_whole and group.keeps_whole)
        pool = group.gradient_pool
        self._buffer: SlotBuffer = SlotBuffer(pool, full_bytes(self._sections, dtypes))
        self._buffer.takes_turns = group.options.strategy.after_forward is not Placement.REPLICATED
        if self._buffer.takes_turns:
            pool.ordinary = max(pool.ordinary, self._buffer.nbytes)
        if self._sections:
            self._take_buffer()  # views need memory when they are made
        fulls = self._fulls = full_views(self._buffer.memory, self._sections, dtypes)
        make = MessageViews if any(section.plan.is_messages for section in self._sections) else WholeViews
        kept = self._dtypes_of.kept(self._sections, dtypes) if self._keeps_whole else frozenset[int]()
        views = self._views = make(group.params, self._sections, fulls, kept)
        self.feedback.lay_out(views, self._sections, fulls)
        self._plans: dict[tuple[frozenset[int], bool, bool], ReductionPlan] = {}
        self._gaps: list[torch.Tensor] = []  # parts that travel although no gradient fills them
        if group.is_flat:
            self._gaps += [view for index, view in views.views.items() if not trainable[index]]
            for section, full in zip(self._sections, fulls, strict=True):
                self._gaps += [full[start:stop] for start, stop in section.plan.gaps]
        self._trained = frozenset(index for index in views.dtypes if trainable[index])
        sizes = {i: group.params[i].shape.numel() * views.dtypes[i].itemsize for i in self._trained}
        nbytes = sizes | dict.fromkeys(views.kept, 0)
        #: Bytes to copy, by index (0: zero-copy); empty: waiting has no bound. A device casts all in one launch.
        is_bounded = (pool.is_host or make is MessageViews) and sum(nbytes.values()) >= MOST_WAITING
        self._nbytes = nbytes if views.kept or is_bounded else {}
        leaves = [param.unsharded if param.unsharded_spec is None else None for param in group.params]
        plain = self._trained - self._dtypes_of.found.keys()
        #: Leaves whose gradients are taken as they are.
        self._plain: list[torch.Tensor | None] = [leaf if i in plain else None for i, leaf in enumerate(leaves)]
        self._writes, self._trainable = False, trainable
        self._buffer.give_back()

    def reduce(self) -> None:
        """Start to reduce the gradients that have arrived. The reduced chunks are in ``sharded.grad`` once somebody has
        waited for the reductions."""
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.reduce()
        group = self._group
        if self.shown.grads:
            self.hide()
        self.copy_waiting()
        if not self._arrived and self._module_params.trainable != self._trainable:
            self._lay_out(self._module_params.trainable)
        alone = self._is_alone  # the options may have changed since gradients were laid out
        sums = alone and group.adds_whole and group.options.strategy.all_reduces and not self._partial
        if alone and not sums and self._views.kept:
            self._keeps_whole = False
            self._begin_anew()
        if not self._writes:
            self._take_buffer()
        if group.options.reduce_unused:
            self._dtypes_of.refuse_unknown()
        if self._partial and (lost := self._partial.keys() - self._trained):
            names = sorted(group.params[index].name for index in lost)
            raise RuntimeError(
                f"gradients of {names} were summed over some of the ranks only (set_requires_all_reduce(False)), and "
                f"then they stopped requiring gradients: freeze parameters after a backward with all-reduce"
            )
        arrived, self._arrived = self._arrived, set()
        self._writes = False
        wanted = self._trained
        if arrived != wanted:
            if not (group.options.reduce_unused or group.is_flat):
                wanted = frozenset(arrived.union(self._partial))
            for index in wanted - arrived:
                self._views.zero(index)
        for gap in self._gaps:
            gap.zero_()
        is_final = sums or (group.data.replicate_group is None and group.options.all_reduce_hook is None)
        plan = self._plans.get((wanted, is_final, sums)) or self._plan_reduction(wanted, is_final, sums)
        if plan.on_delivery is not None:
            self.feedback.forget_given_up()
        reductions, lane = group.comm.reductions, group.comm.lanes.reduce
        zero_copy = list(map(self._views.zero_copy.pop, plan.zero_copy))
        dropped = reductions, reductions.drops
        reducing = PendingReduction(group, self._module_params, self._partial, plan, self._buffer, zero_copy, *dropped)
        logged = group.step.log("reduce", group, wanted)
        if logged is None:
            mark = lane.run(reducing.start, reducing.scattered)
        else:
            with logged:
                mark = lane.run(reducing.start, reducing.scattered)
        reductions.add(mark if self._buffer.pool.is_host else HoldingMark(mark, zero_copy, self._buffer.give_back))
        if not (group.data.replicate_group is None or group.options.strategy.all_reduces):
            self.shown.show(self._sections, wanted)

    @torch.inference_mode(False)
    @torch.no_grad()
    def lost(self) -> dict[int, torch.Tensor]:
        """What the next gradients lack, see :meth:`GradientFeedback.summed`. Ranks: all ranks of the group, between
        steps."""
        self.feedback.forget_given_up()
        if not self.feedback.has_lost:
            return self.feedback.summed(None)
        if not self._arrived and self._module_params.trainable != self._trainable:
            self._lay_out(self._module_params.trainable)
        is_final = self._group.data.replicate_group is None and self._group.options.all_reduce_hook is None
        plan = self._plans.get((self._trained, is_final, False)) or self._plan_reduction(self._trained, is_final)
        return self.feedback.summed(plan)

    def load_lost(self, chunks: Mapping[int, torch.Tensor]) -> None:
        """Load what :meth:`lost` returned, perhaps on other ranks, in place of what there is."""
        self.feedback.load(chunks)
        self._plans.clear()

    def _plan_reduction(self, wanted: frozenset[int], is_final: bool, sums: bool = False) -> ReductionPlan:
        """Make the plan of a reduction of these parameters. Usually every step has the same."""
        if len(self._plans) == MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        group, parts, own = self._group, list[Part](), list[Part]()
        chosen = list[tuple[Section, torch.Tensor, tuple[int, ...]]]()
        for section, full in zip(self._sections, self._fulls, strict=True):
            positions = tuple(position for position, index in enumerate(section.members) if index in wanted)
            # Whole gradients are tensors of their own: the heap keeps no freed memory of more than 32 MiB in one piece.
            apart = [(each,) for each in positions] if sums and not group.is_flat else [positions]
            chosen += [(section, full, each) for each in apart if each]
        kept = self._views.kept if sums else frozenset[int]()
        chosen.sort(key=lambda each: each[0].members[each[2][0]] in kept)
        for section, full, positions in chosen:
            plan = section.plan.select(positions)
            members = section.members if group.is_flat else [section.members[position] for position in positions]
            home = section.dtype
            if group.options.keep_computed_dtype:
                computed = group.compute_dtype(group.params[section.members[0]])
                home = computed if group.data.shard_group is not None else full.dtype
            dtype, rank = home if is_final else full.dtype, group.data.shard_rank
            gradients = self._gradients_in(plan, rank, members, wanted)
            parts.append(make_part(gradients, plan, full, dtype, home))
            if group.data.shards_replicas:
                plan = plan.inside(rank, group.data.replicate_size)
                gradients = self._gradients_in(plan, group.own_rank, members, wanted)
                own.append(make_part(gradients, plan, full, dtype, home))
        packed = parts
        if sums:
            zero_copy = [index for part in parts for index in part.indices if index in kept]
            packed = parts[: len(parts) - len(zero_copy)]
        else:
            beside = zero_copy_in(part.plan for part in parts if part.plan.is_messages)
            zero_copy = [parts[each.section].indices[each.param] for each in beside]
        wire = None if sums else self.feedback.wire(parts, zero_copy, own)
        hop: Hop | None = None
        if own:
            hop = ScatterHop(group, own, parts, self.feedback.between_replicas)
        elif not is_final:
            hop = Hop(group, parts)
        encodes = group.wire("reduce") is not None or group.wire("reduce", outer=True) is not None
        on_delivery = self.feedback.note_delivery if encodes else None
        made = ReductionPlan(parts, sums, packed, zero_copy, wire, hop, on_delivery)
        self._plans[wanted, is_final, sums] = made
        return made

    def _gradients_in(
        self, plan: BufferPlan, rank: int, members: Sequence[int], wanted: frozenset[int]
    ) -> list[IndexedTensor]:
        """The gradients that are wanted, in the shard that ``rank`` has by a plan, on meta."""
        shard = torch.empty(plan.shard_numel, device="meta")
        return [(i, part) for i, part in self._module_params.gradient_views(members, plan, shard, rank) if i in wanted]

    def discard(self) -> None:
        """Drop all gradients that are not in ``param.grad`` yet."""
        self._waiting, self._waiting_bytes, self._expected = {}, 0, self._nothing
        self._arrived.clear()
        self._partial.clear()
        self.hide()
        for plan in self._plans.values():
            if plan.hop is not None:
                plan.hop.release()
        self._views.zero_copy.clear()
        self.feedback.scale(0.0)  # it may be of gradients that are dropped
        self._writes = False
        self._buffer.give_back()
