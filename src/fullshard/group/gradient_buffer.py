"""Where the gradients of a group lie until they are reduced: whole in their buffer, or in the messages to all ranks.

Owns the layout of what is trained, its slot, the views that gradients are copied to, and the zero-copy gradients, which
are kept as autograd made them. It leaves to :mod:`fullshard.group.gradients` which gradients have arrived, and to
:mod:`fullshard.group.reduction` how they travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from fullshard.buffer.messages import Rows, pieces_alone
from fullshard.buffer.plan import BufferPlan, Copies, Piece
from fullshard.buffer.sections import Section, full_bytes, full_views
from fullshard.buffer.slots import SlotBuffer
from fullshard.device import PASSED
from fullshard.group.context import GroupContext
from fullshard.group.gradient_dtypes import GradientDtypes
from fullshard.group.parameter import IndexedTensor, ShardedParameter, whole_views
from fullshard.group.strategy import Placement
from fullshard.torch_private import Tensors, foreach_add, foreach_copy, shares_memory

MOST_WAITING = 1 << 20  # bytes of gradients that wait for one copy, in the dtype in which they will travel

Grads = Mapping[int, torch.Tensor]


class WholeViews:
    """Views of the whole gradients, by the index of their parameter, in the ``fulls`` of the trained sections. Those of
    parameters that are ``kept`` are not copied there."""

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        sections: Sequence[Section],
        fulls: Sequence[torch.Tensor],
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self._params, self.kept = params, kept
        self.views: dict[int, torch.Tensor] = {}
        self.zero_copy: dict[int, torch.Tensor] = {}  # gradients that are not copied
        self.dtypes: dict[int, torch.dtype] = {}  # in which each travels
        for section, full in zip(sections, fulls, strict=True):
            self._device = full.device
            self.dtypes.update(dict.fromkeys(section.members, full.dtype))
            self._lay_out(section, full)

    def _lay_out(self, section: Section, full: torch.Tensor) -> None:
        self.views.update(whole_views(self._params, section, full))

    def write(self, grads: Grads, write: Callable[[Tensors, Tensors], object] = foreach_copy) -> None:
        """Copy gradients into the buffer, or add them to what is there (``foreach_add``)."""
        if self.kept and (kept := self.kept & grads.keys()):
            self._keep(grads, kept)
        copied = [index for index in grads if index not in self.kept] if self.kept else list(grads)
        if copied:
            write([self.views[index] for index in copied], [grads[index] for index in copied])

    def _keep(self, grads: Grads, kept: Iterable[int]) -> None:
        """Add zero-copy gradients to those that are kept. If there is none, keep the gradient, or a copy if it is
        shared or of another dtype. One call makes all copies, and one all sums."""
        copies: Copies = [], []
        sums: Copies = [], []
        for index in kept:
            grad = grads[index]
            is_ours = not (grad.requires_grad or shares_memory(grad))
            values = grad.detach().permute(self._params[index].order)
            if index in self.zero_copy:
                sums[0].append(self.zero_copy[index].view(values.shape))
                sums[1].append(values)
                continue
            if grad.dtype != self.dtypes[index] or not values.is_contiguous() or not is_ours:
                copies[1].append(values)
                values = torch.empty(values.shape, dtype=self.dtypes[index], device=values.device)
                copies[0].append(values)
            self.zero_copy[index] = values.view(-1)
        if copies[0]:
            foreach_copy(*copies)
        if sums[0]:
            foreach_add(*sums)

    def zero(self, index: int) -> None:
        """Set a gradient to zeros."""
        if index in self.kept:
            numel = self._params[index].shape.numel()
            self.zero_copy[index] = torch.zeros(numel, dtype=self.dtypes[index], device=self._device)
        else:
            self._zero_copied(index)

    def _zero_copied(self, index: int) -> None:
        self.views[index].zero_()

    def read(self, index: int) -> torch.Tensor:
        """A gradient as it is now, in the shape of its parameter."""
        if index in self.zero_copy:
            return self._params[index].view(self.zero_copy[index], self._params[index].plan_shape.shape)
        return self._read_copied(index)

    def _read_copied(self, index: int) -> torch.Tensor:
        return self.views[index]


class MessageViews(WholeViews):
    """Views in the messages to all ranks, so that a reduction sends the buffer as it is."""

    def __init__(self, *given: Any) -> None:
        #: For each gradient that is copied: its pieces, and the section of the buffer to which they are copied.
        self._pieces: dict[int, tuple[tuple[Piece, ...], torch.Tensor]] = {}
        self._rows: list[Rows] = []  # sections that one call fills
        super().__init__(*given)
        self.kept = frozenset(self.dtypes.keys() - self._pieces.keys())

    def _lay_out(self, section: Section, full: torch.Tensor) -> None:
        plan, is_row = section.plan, full.numel() > 0
        for at, index in enumerate(section.members):
            if at not in plan.zero_copy:
                pieces = pieces_alone(plan, at, full.numel() // plan.world_size)
                self._pieces[index] = pieces, full[plan.shard_offsets[at] :]
                param = self._params[index]
                is_row = is_row and param.dim == 0 and param.order == (*range(len(param.shape)),)
                is_row = is_row and plan.cuts[at].is_uniform
        if is_row:
            self._rows.append(Rows(plan, section.members, full))

    def write(self, grads: Grads, write: Callable[[Tensors, Tensors], object] = foreach_copy) -> None:
        indices = grads.keys()
        if done := self.kept & indices:
            self._keep(grads, done)
        for rows in self._rows if write is foreach_copy else ():
            if indices >= rows.members and rows.fill(grads):
                done = done | rows.members
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for index in indices - done:
            pieces, target = self._pieces[index]
            values = grads[index].permute(self._params[index].order).contiguous()
            targets += [piece.of_shard(target) for piece in pieces]
            sources += [piece.of_full(values) for piece in pieces]
        if targets:
            write(targets, sources)

    def _zero_copied(self, index: int) -> None:
        pieces, target = self._pieces[index]
        for piece in pieces:
            piece.of_shard(target).zero_()

    def _read_copied(self, index: int) -> torch.Tensor:
        param = self._params[index].plan_shape
        pieces, target = self._pieces[index]
        if param.dim is None:
            return self._params[index].view(target[: param.numel], param.shape)
        whole = target.new_empty(param.numel)
        for piece in pieces:
            piece.of_full(whole).copy_(piece.of_shard(target))
        return self._params[index].view(whole, param.shape)


@dataclass(frozen=True)
class Part:
    """The parameters of one section that take part in a reduction, and how its result has their chunks."""

    indices: tuple[int, ...]
    plan: BufferPlan
    full: torch.Tensor  # where their gradients lie
    allocate: Callable[[], torch.Tensor]  # memory for the reduced values, in the dtype in which they are written
    home_dtype: torch.dtype  # of ``param.grad``
    chunks: tuple[list[torch.Size], list[tuple[int, ...]], list[int]]  # sizes, strides and offsets in the shard
    lengths: list[int]  # of chunks, if all are vectors end to end: then one call finds them

    def locals(self, shard: torch.Tensor, begin: int = 0) -> Iterable[IndexedTensor]:
        """The chunk of each parameter in a ``shard``, which begins at this element of its storage."""
        if self.lengths:
            return zip(self.indices, torch.unsafe_split_with_sizes(shard, self.lengths), strict=True)
        sizes, strides, offsets = self.chunks
        if begin:
            offsets = [begin + offset for offset in offsets]
        return zip(self.indices, map(shard.as_strided, sizes, strides, offsets), strict=True)


class GradientBuffer:
    """The buffer of the gradients of what is ``trainable`` in a group, in a slot.

    Attributes:
        sections: one for each dtype of ``param.grad``; ``fulls``: where each lies in the memory.
        views: where each gradient is written.
        trained: the parameters that have a place.
        gaps: the parts that travel although no gradient fills them.
        nbytes: bytes to copy, by parameter (0: zero-copy); empty if gradients may wait without bound. Otherwise at most
            ``most_waiting`` bytes wait.
        leaves: leaves whose gradients are taken as they are, by parameter.
        most: how many such buffers of all groups may be in use at once.
        is_open: whether it takes gradients; while a reduction reads it, it does not.
    """

    def __init__(
        self, group: GroupContext, dtypes_of: GradientDtypes, trainable: tuple[bool, ...], keeps_whole: bool
    ) -> None:
        self._group, self.most, self.is_alone = group, group.gradient_buffers, group.is_alone(group.reduce_transport)
        self.sections, dtypes = dtypes_of.sections(trainable, keeps_whole and group.keeps_whole)
        pool = group.gradient_pool
        self.slot = SlotBuffer(pool, full_bytes(self.sections, dtypes))
        self.slot.takes_turns = group.options.strategy.after_forward is not Placement.REPLICATED
        if self.slot.takes_turns:
            pool.ordinary = max(pool.ordinary, self.slot.nbytes)
        if self.sections:
            self.take()  # views need memory when they are made
        self.fulls = full_views(self.slot.memory, self.sections, dtypes)
        make = MessageViews if any(section.plan.is_messages for section in self.sections) else WholeViews
        kept = dtypes_of.kept(self.sections, dtypes) if keeps_whole else frozenset[int]()
        views = self.views = make(group.params, self.sections, self.fulls, kept)
        self.gaps: list[torch.Tensor] = []
        if group.moves_all:
            self.gaps += [view for index, view in views.views.items() if not trainable[index]]
            for section, full in zip(self.sections, self.fulls, strict=True):
                self.gaps += [full[start:stop] for start, stop in section.plan.gaps]
        self.trained = frozenset(index for index in views.dtypes if trainable[index])
        sizes = {i: group.params[i].shape.numel() * views.dtypes[i].itemsize for i in self.trained}
        nbytes = sizes | dict.fromkeys(views.kept, 0)
        self.most_waiting = MOST_WAITING
        # A device casts all in one launch.
        is_bounded = (pool.is_host or make is MessageViews) and sum(nbytes.values()) >= MOST_WAITING
        self.nbytes = nbytes if views.kept or is_bounded else {}
        plain = self.trained - dtypes_of.found.keys()
        self.leaves: list[torch.Tensor | None] = [
            param.unsharded if index in plain and param.unsharded_spec is None else None
            for index, param in enumerate(group.params)
        ]
        self.close()

    def take(self) -> None:
        """Get memory to write to, once few enough reductions read theirs."""
        # Modules of one group may run at different times. Then an earlier reduction may still read this buffer.
        self._group.comm.reductions.wait_for_oldest(0 if self.slot.in_use else self.most - 1, self.most)
        if (ready := self.slot.take()) is not PASSED:
            ready.wait()
        self.is_open = True

    def close(self) -> None:
        """Give the memory back."""
        self.is_open = False
        self.slot.give_back()

    def part(
        self, gradients: Sequence[IndexedTensor], plan: BufferPlan, full: torch.Tensor, dtypes: Sequence[torch.dtype]
    ) -> Part:
        """The part with these gradients in the shard of ``plan``. ``dtypes``: of its result, and of ``param.grad``."""
        views = [view for _, view in gradients]
        chunks = [v.shape for v in views], [v.stride() for v in views], [int(v.storage_offset()) for v in views]
        lengths = [view.numel() for view in views if view.ndim == 1]
        if [*accumulate(lengths, initial=0)] != [*chunks[2], plan.shard_numel]:
            lengths = []
        indices, (dtype, home) = tuple(index for index, _ in gradients), dtypes
        allocate = partial(torch.empty, plan.shard_numel, dtype=dtype, device=full.device)
        if self._group.moves_all:  # all of the shard is shown, its padding too
            allocate = partial(_padded, allocate, plan.owned_numel(self._group.data.shard_rank))
        return Part(indices, plan, full, allocate, home, chunks, lengths)


def _padded(allocate: Callable[[], torch.Tensor], end: int) -> torch.Tensor:
    """Memory with zeros from ``end`` on."""
    memory = allocate()
    memory[end:].zero_()
    return memory
