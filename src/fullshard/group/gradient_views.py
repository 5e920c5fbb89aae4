"""Where the gradients of a group lie until they are reduced: whole in their buffer, or in the messages to all ranks.

Owns the views of the buffer that gradients are copied to, and the zero-copy gradients, which are kept as autograd made
them. It leaves to :mod:`fullshard.group.gradients` which gradients have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fullshard.buffer.messages import Rows, pieces_alone
from fullshard.buffer.plan import Copies, Piece
from fullshard.buffer.sections import Section
from fullshard.group.parameter import ShardedParameter, whole_views
from fullshard.torch_private import Tensors, foreach_add, foreach_copy, shares_memory

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
