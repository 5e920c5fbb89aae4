"""Which gradients of a group have arrived, and what waits: taken from autograd, kept, and passed to a reduction.

The schedule decides when a group's backward has ended, the gradient buffer has the memory, and the reducer does what
follows.

A gradient exists once: in the buffer, in the dtype in which it will travel. Small gradients wait until one call copies
several. Between micro-batches without reduction the buffer stays with the group, and gradients accumulate in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Protocol

import torch

from fullshard.buffer.sections import full_bytes
from fullshard.group.context import GroupContext
from fullshard.group.feedback import GradientFeedback
from fullshard.group.full_buffer import FullBuffer
from fullshard.group.gradient_buffer import GradientBuffer
from fullshard.group.gradient_dtypes import GradientDtypes
from fullshard.group.module_parameters import ModuleParameters
from fullshard.group.parameter import ShardedParameter
from fullshard.group.reduction import Reducer
from fullshard.group.strategy import Placement
from fullshard.torch_private import foreach_add
from fullshard.waiting_grad import ShownGrads


class HasGradients(Protocol):
    """The part of a group that the hooks on its leaves use."""

    gradients: Gradients


class Gradients:
    """The gradients of one group."""

    def __init__(self, group: GroupContext, full: FullBuffer, module_params: ModuleParameters) -> None:
        self._group, self._full, self._module_params = group, full, module_params
        self._dtypes_of = GradientDtypes(group)
        self._trainable: tuple[bool, ...] = ()  # the parameters that the layout is made for
        self._keeps_whole = True  # whether replicas may add up large gradients where autograd made them
        self._nothing: list[torch.Tensor | None] = [None] * len(group.params)
        self._expected = self._nothing  # leaves whose gradients are still to come, once one has come
        self._waiting: dict[int, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._arrived: set[int] = set()
        self.shown = ShownGrads(group.params)  # what users see of those that wait after a backward
        self._partial: dict[int, torch.Tensor] = {}
        self.feedback = GradientFeedback(group)
        nothing = (False,) * len(group.params)  # what is trained is known when gradients come
        self._use(GradientBuffer(group, self._dtypes_of, nothing, self._keeps_whole))

    def attach(self, full: FullBuffer, module_params: ModuleParameters) -> None:
        """Take the gradients of the values in ``full`` from now on, for the parameters that modules show."""
        self._full, self._module_params = full, module_params
        self._reducer.module_params = module_params
        self._expected = self.buffer.leaves = self._nothing  # these leaves are gone: the next step has a new layout
        self._trainable = ()

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
        """Whether a backward may reduce the first gradients before the others have come. It may if no earlier gradient
        waits, and if gradients that never come are not reduced."""
        options = self._group.options
        reduces = options.strategy.reduces and options.strategy.all_reduces
        return reduces and not (options.reduce_unused or self._group.moves_all or self.has_any)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that wait to be reduced, in the dtypes in which they travel."""
        params, dtypes = self._group.params, self.buffer.views.dtypes
        return sum(params[i].shape.numel() * dtypes[i].itemsize for i in self._arrived.union(self._waiting))

    def unreduced(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The gradients of this rank that wait to be reduced, by the index of their parameter."""
        yield from self._waiting.items()
        yield from ((index, self.buffer.views.read(index)) for index in self._arrived)

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
            if self.buffer.nbytes:
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
                self._lay_out()
        if index not in self.buffer.trained:
            raise RuntimeError(f"parameter '{param.name}' began to require gradients in the middle of a step")
        if param.unsharded_spec is not None:
            grad = param.local_gradient(grad)
        if grad.dtype != self.buffer.views.dtypes[index] and self._dtypes_of.widens(index, grad.dtype):
            self._begin_anew()
        if index in self._waiting:
            self.copy_waiting()
        if not self._waiting:
            self._expected = self.buffer.leaves[:]
        self._waiting[index], self._expected[index] = grad, None
        if self.buffer.nbytes:
            self._limit_waiting(index)

    def _limit_waiting(self, index: int) -> None:
        grad, buffer, views = self._waiting[index], self.buffer, self.buffer.views
        is_kept = index in views.kept and buffer.slot.pool.is_host
        if is_kept and len(self._waiting) > 1:
            # Otherwise the gradients of two groups would be in memory.
            self._group.comm.reductions.wait_for_oldest(buffer.most - 1, buffer.most)
        self._waiting_bytes += buffer.nbytes[index]
        if self._waiting_bytes >= buffer.most_waiting:
            self.copy_waiting()
        elif is_kept and (index in self._arrived or grad.dtype != views.dtypes[index]):
            views.write({index: self._waiting.pop(index)})  # else it would exist twice when all that waits is copied
            self._arrived.add(index)

    @torch.no_grad()
    def _begin_anew(self) -> None:
        """Continue in another buffer, of a wider dtype or with another layout, with the gradients that have arrived."""
        self.copy_waiting()
        before, arrived = self.buffer, dict(self.unreduced())
        was_open, before.is_open = before.is_open, False
        self._lay_out()
        if arrived:
            self.buffer.take()
            self.buffer.views.write(arrived)
        if was_open:
            before.close()

    @staticmethod
    def receive_outside(reference: weakref.ref[HasGradients], index: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Runs before autograd adds to the gradient of a parameter that a different module has read, which is possible
        if every rank always shows it whole. The gradient is reduced like any other; autograd adds zeros instead."""
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
        buffer, views = self.buffer, self.buffer.views
        if self._arrived and (again := self._arrived & waiting.keys()):
            views.write({index: waiting.pop(index) for index in again}, foreach_add)
        if not (buffer.is_open or ((kept := views.kept) and waiting.keys() <= kept)):
            buffer.take()
        if waiting:
            views.write(waiting)
        self._arrived.update(waiting)

    def wait_for_more(self) -> None:
        """End a backward without reduction. Meanwhile ``param.grad`` shows that gradients wait, so that users can clear
        them. It does not have their values: no rank has its part of the reduced gradients yet."""
        self.copy_waiting()
        if self._arrived and not self._group.options.strategy.reduces:
            self.shown.show(self.buffer.sections, self._arrived)

    def _drop_cleared(self) -> None:
        """Drop waiting gradients that were cleared. Others stay: an optimizer clears only those of its parameters."""
        if (cleared := self.shown.take_cleared()) and self._partial:
            self._group.comm.reductions.wait_for_oldest()
        for index in cleared:
            self._arrived.discard(index)
            self._partial.pop(index, None)
            self.buffer.views.zero_copy.pop(index, None)
        if cleared and not self._arrived:
            self.buffer.close()

    def hide(self) -> None:
        """Stop showing that gradients wait, and drop those that were cleared."""
        self._drop_cleared()
        self.shown.hide()

    def size_slots(self) -> None:
        """Make ordinary slots large enough before a smaller group makes the first ones."""
        group, pool, slot = self._group, self._group.gradient_pool, self.buffer.slot
        slot.takes_turns = group.options.strategy.after_forward is not Placement.REPLICATED
        if slot.takes_turns:
            found = self._dtypes_of.sections(self._module_params.trainable, self._keeps_whole and group.keeps_whole)
            pool.ordinary = max(pool.ordinary, full_bytes(*found))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _lay_out(self) -> None:
        """Make a buffer for the gradients of what is trained now, and what reduces them."""
        if self.buffer.is_open:
            self.buffer.close()
        self._trainable, trainable = (), self._module_params.trainable  # until all of it is done
        self._use(GradientBuffer(self._group, self._dtypes_of, trainable, self._keeps_whole))
        self._trainable = trainable

    def _use(self, buffer: GradientBuffer) -> None:
        self.buffer = buffer
        self.feedback.lay_out(buffer)
        self._reducer = Reducer(self._group, self._module_params, buffer, self.feedback, self._partial)

    def reduce(self) -> None:
        """Start to reduce the gradients that have arrived. The reduced chunks are in ``sharded.grad`` once somebody has
        waited for the reductions."""
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.reduce()
        group, options = self._group, self._group.options
        if self.shown.grads:
            self.hide()
        self.copy_waiting()
        if not self._arrived and self._module_params.trainable != self._trainable:
            self._lay_out()
        alone = self.buffer.is_alone  # the options may have changed since gradients were laid out
        sums = alone and group.adds_whole and options.strategy.all_reduces and not self._partial
        if alone and not sums and self.buffer.views.kept:
            self._keeps_whole = False
            self._begin_anew()
        buffer = self.buffer
        if not buffer.is_open:
            buffer.take()
        if options.reduce_unused:
            self._dtypes_of.refuse_unknown()
        if self._partial and (lost := self._partial.keys() - buffer.trained):
            names = sorted(group.params[index].name for index in lost)
            raise RuntimeError(
                f"gradients of {names} were summed over some of the ranks only (set_requires_all_reduce(False)), and "
                f"then they stopped requiring gradients: freeze parameters after a backward with all-reduce"
            )
        arrived, self._arrived = self._arrived, set()
        buffer.is_open = False
        wanted = buffer.trained
        if arrived != wanted:
            if not (options.reduce_unused or group.moves_all):
                wanted = frozenset(arrived.union(self._partial))
            for index in wanted - arrived:
                buffer.views.zero(index)
        for gap in buffer.gaps:
            gap.zero_()
        self._reducer.start(wanted, sums)
        if not (group.data.replicate_group is None or options.strategy.all_reduces):
            self.shown.show(buffer.sections, wanted)

    @torch.inference_mode(False)
    @torch.no_grad()
    def lost(self) -> Mapping[int, torch.Tensor]:
        """What the next gradients lack, see :meth:`GradientFeedback.summed`. Ranks: all ranks of the group, between
        steps."""
        self.feedback.forget_given_up()
        is_old = not self._arrived and self._module_params.trainable != self._trainable
        if is_old and self.feedback.tensors():
            self._lay_out()
        return self.feedback.summed()

    def load_lost(self, chunks: Mapping[int, torch.Tensor]) -> None:
        """Load what :meth:`lost` returned, perhaps on other ranks, in place of what there is."""
        self.feedback.load(chunks)
        self._reducer.plans.clear()

    def discard(self) -> None:
        """Drop all gradients that are not in ``param.grad`` yet."""
        self._waiting, self._waiting_bytes, self._expected = {}, 0, self._nothing
        self._arrived.clear()
        self._partial.clear()
        self.hide()
        self._reducer.release()
        self.buffer.views.zero_copy.clear()
        self.feedback.scale(0.0)  # it may be of gradients that are dropped
        self.buffer.close()
