"""Where the gradients of a group lie until they are reduced: whole in their buffer, or in the messages to all ranks.

Owns the views of the buffer that gradients are copied to, and the straight gradients, which are kept as autograd made
them. It leaves to :mod:`fullshard.group.gradients` which gradients have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from fullshard.buffer.plan import Piece, make_plan
from fullshard.buffer.sections import Section
from fullshard.comm.transport import Copies
from fullshard.group.parameter import ShardedParameter, whole_views
from fullshard.torch_private import chunk_cat, foreach_add, foreach_copy, shares_memory

Grads = Mapping[int, torch.Tensor]
_dtype_of = attrgetter("dtype")


class WholePlaces:
    """Places of whole gradients, by the index of their parameter, in the ``fulls`` of the sections that are trained."""

    kept: frozenset[int] = frozenset()  # parameters whose gradients are not copied

    def __init__(
        self, params: Sequence[ShardedParameter], sections: Sequence[Section], fulls: Sequence[torch.Tensor]
    ) -> None:
        self._params = params
        self.views: dict[int, torch.Tensor] = {}
        self.straight: dict[int, torch.Tensor] = {}  # gradients that are not copied
        self.dtypes: dict[int, torch.dtype] = {}  # in which each travels
        for section, full in zip(sections, fulls, strict=True):
            self.dtypes.update(dict.fromkeys(section.members, full.dtype))
            self._lay_out(section, full)

    def _lay_out(self, section: Section, full: torch.Tensor) -> None:
        self.views.update(whole_views(self._params, section, full))

    def write(self, grads: Grads) -> None:
        """Copy gradients to their places."""
        foreach_copy(list(map(self.views.__getitem__, grads)), list(grads.values()))

    def add(self, grads: Grads) -> None:
        """Add gradients to what is there."""
        foreach_add(list(map(self.views.__getitem__, grads)), list(grads.values()))

    def zero(self, index: int) -> None:
        """Let a gradient be zeros."""
        self.views[index].zero_()

    def read(self, index: int) -> torch.Tensor:
        """A gradient as it is now, in the shape of its parameter."""
        return self.views[index]


class MessagePlaces(WholePlaces):
    """Places in the messages to all ranks, so that a reduction sends the buffer as it is."""

    def __init__(self, *given: Any) -> None:
        #: For each gradient that is copied: its pieces, and the section of the buffer to which they are copied.
        self._pieces: dict[int, tuple[tuple[Piece, ...], torch.Tensor]] = {}
        #: For each section that one call fills: the indices of its gradients, the same in order with -1 for gaps, the
        #: zeros for gaps, and the messages.
        self._rows: list[tuple[frozenset[int], list[int], list[Any], torch.Tensor]] = []
        super().__init__(*given)
        self.kept = frozenset(self.dtypes.keys() - self._pieces.keys())

    def _lay_out(self, section: Section, full: torch.Tensor) -> None:
        plan, size = section.plan, section.plan.world_size
        pitch, end, is_row = full.numel() // size, 0, True
        self._device = full.device
        keys, zeros = list[int](), list[Any]()
        for position, (index, param) in enumerate(zip(section.members, plan.params, strict=True)):
            if position in plan.straight:
                continue
            start, chunk = plan.shard_offsets[position], math.prod(param.chunk_shape(0, size))
            self._pieces[index] = make_plan([param], size, "even", plan.alignment).pieces_of_all(pitch), full[start:]
            is_row = is_row and param.dim == 0 and self._params[index].order == (*range(len(param.shape)),)
            keys += [-1] * (end < start) + [index] * (chunk > 0)
            zeros += [full.new_zeros((start - end) * size)] * (end < start) + [None] * (chunk > 0)
            end = start + chunk
        if keys and is_row:
            keys += [-1] * (end < pitch)
            zeros += [full.new_zeros((pitch - end) * size)] * (end < pitch)
            self._rows.append((frozenset(keys) - {-1}, keys, zeros, full.view(size, pitch)))

    def _in_memory(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """A gradient in the order in which its parameter lies in memory."""
        return grad.permute(order) if (order := self._params[index].order) != (*range(grad.ndim),) else grad

    def _copies(self, grads: Grads) -> Copies:
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for index, grad in grads.items():
            pieces, place = self._pieces[index]
            values = self._in_memory(index, grad).contiguous()
            targets += [piece.of_shard(place) for piece in pieces]
            sources += [piece.of_full(values) for piece in pieces]
        return targets, sources

    def write(self, grads: Grads) -> None:
        indices = grads.keys()
        for index in (done := self.kept & indices):
            self._keep(index, grads[index])
        for members, keys, zeros, messages in self._rows:
            if indices >= members:
                parts: list[torch.Tensor] = [*map(grads.get, keys, zeros)]
                _, *others = {*map(_dtype_of, parts)}
                if others:  # several dtypes: zeros for gaps have that of the messages
                    dtype, *others = {grads[index].dtype for index in members}
                    if others or (dtype, messages.dtype) != (torch.bfloat16, torch.float32):
                        continue  # torch has no kernel for these
                    parts = [part.to(dtype) for part in parts]
                if not others:
                    chunk_cat(parts, num_chunks=messages.shape[0], out=messages)
                    done = done | members
        if done != indices:
            copies = self._copies({index: grad for index, grad in grads.items() if index not in done})
            if copies[0]:
                foreach_copy(*copies)

    def _keep(self, index: int, grad: torch.Tensor) -> None:
        """Keep a straight gradient as it is, if it is ours to change, or else a copy, or add it to what was kept."""
        is_ours, values = not (grad.requires_grad or shares_memory(grad)), self._in_memory(index, grad.detach())
        if index in self.straight:
            self.straight[index].view(values.shape).add_(values)
            return
        if grad.dtype != self.dtypes[index] or not values.is_contiguous() or not is_ours:
            values = values.to(self.dtypes[index], memory_format=torch.contiguous_format, copy=True)
        self.straight[index] = values.view(-1)

    def add(self, grads: Grads) -> None:
        for index in grads.keys() - self._pieces.keys():
            self._keep(index, grads[index])
        targets, sources = self._copies({index: grad for index, grad in grads.items() if index in self._pieces})
        if targets:
            foreach_add(targets, sources)

    def zero(self, index: int) -> None:
        if index not in self._pieces:
            numel = self._params[index].plan_shape.numel
            self.straight[index] = torch.zeros(numel, dtype=self.dtypes[index], device=self._device)
            return
        pieces, place = self._pieces[index]
        for piece in pieces:
            piece.of_shard(place).zero_()

    def read(self, index: int) -> torch.Tensor:
        param = self._params[index].plan_shape
        if index in self.straight:
            return self._params[index].view(self.straight[index], param.shape)
        pieces, place = self._pieces[index]
        if param.dim is None:
            return self._params[index].view(place[: param.numel], param.shape)
        whole = place.new_empty(param.numel)
        for piece in pieces:
            piece.of_full(whole).copy_(piece.of_shard(place))
        return self._params[index].view(whole, param.shape)
