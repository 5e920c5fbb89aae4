"""What encodings have lost of a group's gradients, until the gradients of the next step get it back.

Each rank keeps in bf16 what it has lost of the gradients that it sent, in the layout of the gradient buffer. Summed
over the ranks, it is what the next gradients lack::

    kept      rank 0  [ . | b | c | d ]    its own part (.) is not sent, and loses nothing
              rank 1  [ a | . | c | d ]
    saved     each part summed over the ranks, on the rank that owns it
    loaded    rank 0  [ a | 0 | 0 | 0 ]    in the place of its own part, to be added to its own gradients

Owns this memory, and how it is saved and loaded. Routes write what is lost and add it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from fullshard.buffer.messages import vectors, zero_copy_in
from fullshard.buffer.plan import BufferPlan
from fullshard.comm.process_group import all_reduce
from fullshard.comm.transport import Feedback, Wire
from fullshard.group.context import GroupContext
from fullshard.group.gradient_buffer import GradientBuffer, Part, WholeViews
from fullshard.group.parameter import local_tensor

_DTYPE = torch.bfloat16


def feedback_bytes(group: GroupContext, plans: Sequence[BufferPlan]) -> int:
    """Bytes that are kept for gradients with these plans, between replicas too."""
    beside = zero_copy_in(plan for plan in plans if plan.is_messages)
    numel = sum(plan.full_numel for plan in plans) + sum(each.numel for each in beside) * group.data.shard_size
    between = group.options.outer_wire.error_feedback and group.wire("reduce", outer=True) is not None
    numels = numel * group.has_feedback, sum(plan.shard_numel for plan in plans) * between
    return sum(numels) * _DTYPE.itemsize


class GradientFeedback:
    """What encodings have lost of the gradients of one group."""

    def __init__(self, group: GroupContext) -> None:
        self._group = group
        self._lost: WholeViews | None = None  # by parameter, once there is any
        self._lost_by_full: dict[int, torch.Tensor] = {}  # the same, by the id of a section of the gradient buffer
        self._loaded: dict[int, torch.Tensor] = {}  # encoding errors from a checkpoint, until a reduction uses them
        self._was_loaded = False
        #: Encoding errors between replicas, by parameter: in the memory of the parameter's last reduction.
        self.between_replicas: dict[int, torch.Tensor] = {}
        self.delivered = -1  # the count of writes when gradients were last put into ``param.grad``

    def tensors(self) -> list[torch.Tensor]:
        """The memory that it takes."""
        return [] if self._lost is None else [*self._lost_by_full.values(), *self._lost.zero_copy.values()]

    def scale(self, factor: float) -> None:
        """Multiply all encoding errors by a factor: by 0 when the step of their gradients is given up."""
        for lost in (*self.tensors(), *self.between_replicas.values()):
            lost.mul_(factor) if factor else lost.zero_()

    def forget_given_up(self) -> None:
        """Forget the encoding errors of gradients that were reduced, and then cleared before any optimizer stepped."""
        is_counted = self._group.step.optimizer_steps > 0  # else users may step without an optimizer
        if is_counted and self.delivered == self._group.writes:
            grads = (param.sharded.grad for param in self._group.params)
            if not any(grad is not None and bool(local_tensor(grad).any()) for grad in grads):
                self.scale(0.0)
                self.delivered = -1

    def lay_out(self, buffer: GradientBuffer) -> None:
        """Use the layout of this buffer from now on."""
        before, self._lost, self._buffer = self._lost, None, buffer
        if before is not None:
            kept = before.dtypes.keys() & buffer.views.dtypes.keys()
            self._allocated().write({index: before.read(index).clone() for index in kept})

    def wire(self, parts: Sequence[Part], zero_copy: Sequence[int], replica_parts: Sequence[Part]) -> Wire | None:
        """How the messages of a reduction are encoded, and where it keeps what is lost."""
        wire = self._group.wire("reduce")
        if wire is None or not self._group.has_feedback:
            return wire
        feedback = Feedback(self.lost_of(parts, zero_copy), self._was_loaded)
        wire = wire._replace(feedback=feedback)
        if self._loaded:
            self._put_loaded(wire, parts, replica_parts)
        return wire

    def _allocated(self) -> WholeViews:
        if self._lost is None:
            buffer, views = self._buffer, self._buffer.views
            lost = [torch.zeros_like(full, dtype=_DTYPE) for full in buffer.fulls]
            self._lost = type(views)(self._group.params, buffer.sections, lost, views.kept)
            for index in views.kept:
                self._lost.zero(index)
            self._lost_by_full = dict(zip(map(id, buffer.fulls), lost, strict=True))
        return self._lost

    def lost_of(self, parts: Sequence[Part], zero_copy: Sequence[int]) -> list[torch.Tensor]:
        """What was lost of the gradients of some parts, and of ``zero_copy`` gradients, where it lies."""
        views = self._allocated()
        lost = [self._lost_by_full[id(part.full)] for part in parts]
        return [*lost, *map(views.zero_copy.__getitem__, zero_copy)]

    def load(self, chunks: Mapping[int, torch.Tensor]) -> None:
        """Replace everything by this rank's chunks of some parameters, as :meth:`summed` returned them."""
        self._lost, self._loaded, self._was_loaded = None, dict(chunks), bool(chunks)

    def _put_loaded(self, wire: Wire, parts: Sequence[Part], replica_parts: Sequence[Part]) -> None:
        """Put what was loaded for the parameters of a reduction in the place of this rank's own part."""
        assert wire.feedback is not None
        data, plans, shards = self._group.data, [part.plan for part in parts], _shards(parts)
        given = _shards(replica_parts) if replica_parts else shards
        for index, chunk in chain.from_iterable(map(Part.locals, replica_parts or parts, given)):
            loaded = self._loaded.pop(index, None)
            if loaded is not None and (replica_parts or data.replicate_rank == 0):  # replicas have the same
                chunk.copy_(loaded).mul_(self._group.divisor)
        for at, part in enumerate(replica_parts):
            for piece in part.plan.pieces(data.replicate_rank):
                piece.of_full(shards[at]).copy_(piece.of_shard(given[at]))
        if any(plan.is_messages for plan in plans):
            shards += [shards[each.section][each.chunk] for each in zero_copy_in(plans)]
        for at, plan in enumerate(vectors(plans, joined=False)):
            for piece in plan.pieces(data.shard_rank):
                if not piece.is_kept and piece.part_of >= wire.min_numel:  # others travel as they are
                    piece.of_full(wire.feedback.lost[at]).copy_(piece.of_shard(shards[at]))

    def summed(self) -> dict[int, torch.Tensor]:
        """What the next gradients lack: this rank's chunks of the mean over all ranks, in bf16, by parameter."""
        group, found, views = self._group, dict(self._loaded), self._lost
        if views is None:
            return found  # nothing can have been lost, on any rank of the group
        for index in sorted(self._buffer.trained):
            param = group.params[index]
            if param.shape.numel() >= group.options.wire.min_numel:
                lost = views.read(index).float()
                for over in filter(None, (group.reduce_process_group, group.data.replicate_group)):
                    all_reduce(lost, over, f"what was lost of the gradient of '{param.name}'")
                if (chunk := param.chunk_of(lost)).numel():
                    found.setdefault(index, (chunk / group.divisor).to(_DTYPE))
        return found


def _shards(parts: Sequence[Part]) -> list[torch.Tensor]:
    return [torch.zeros(part.plan.shard_numel, dtype=_DTYPE, device=part.full.device) for part in parts]
