"""The gradients of logical replicas, kept apart until those of all replicas are there.

Owns the memory in which a process keeps the reduced gradients of each logical replica for its shard, and their sum in
the order of the replicas: it has the same bits whichever process computed which term. Processes of one host read one
another's memory. It does not communicate: :mod:`fullshard.elastic.session` tells others where gradients lie.

The memory of a step is used again two steps later. Then every member has the gradients of the step between, and so has
added up those of this step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.buffer.shared_memory import Address, Segment
from fullshard.group.parameter import local_tensor
from fullshard.platforms import host_id

_ALIGNED = 64


class Kept(NamedTuple):
    """Gradients of one logical replica in a step, for one shard, as told to others."""

    step: int
    replica: int
    present: tuple[bool, ...]  # of each tensor, whether there is one
    host: str
    address: Address
    data: bytes | None = None  # for processes on other hosts


class KeptGradients:
    """The gradients of the parameters, and the buffers that a forward changes, on one process.

    Buffers belong to the first logical replica: after a step, all have what it has computed.
    """

    def __init__(self, params: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor], replicas: int) -> None:
        self._params, self._buffers, self._replicas = params, buffers, replicas
        self._locals = [local_tensor(param) for param in params]
        self._dtypes = [each.dtype for each in (*self._locals, *buffers)]
        sizes = [-(-each.nbytes // _ALIGNED) * _ALIGNED for each in (*self._locals, *buffers)]
        *self._starts, self._nbytes = accumulate(sizes, initial=0)
        self._own: dict[tuple[int, int], Segment] = {}  # by the replica and whether the step is odd
        self._opened: dict[Address, Segment] = {}
        self._of: dict[tuple[int, int], tuple[Segment, tuple[bool, ...]]] = {}  # by the step and the replica
        self._before = [buffer.clone() for buffer in buffers]
        self._grads: list[Any] = [None] * len(params)

    def replicas_of(self, step: int) -> list[int]:
        """The logical replicas whose gradients of a step are here."""
        return [replica for replica in range(self._replicas) if (step, replica) in self._of]

    def has_all(self, step: int) -> bool:
        return all((step, replica) in self._of for replica in range(self._replicas))

    @torch.no_grad()
    def begin(self) -> None:
        """A logical replica begins a step: its buffers are those from before the step, and it has no gradients."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)
        for param in self._params:
            param.grad = None

    @torch.no_grad()
    def keep(self, step: int, replica: int) -> Kept:
        """Keeps the gradients that a logical replica has computed, in place of ``param.grad``."""
        grads = [param.grad for param in self._params]
        present = (*(grad is not None for grad in grads), *[replica == 0] * len(self._buffers))
        segment = self._own_memory(step, replica)
        for index, (grad, view) in enumerate(zip(grads, self._views(segment), strict=False)):
            if grad is not None:
                view.copy_(local_tensor(grad))
                self._grads[index], self._params[index].grad = grad, None
        for buffer, view in zip(
            self._buffers if replica == 0 else (), self._views(segment)[len(grads) :], strict=False
        ):
            view.copy_(buffer)
        return self._note(step, replica, segment, present)

    def tell_again(self, step: int) -> list[Kept]:
        """What is here of a step, in memory of this process: others may have lost the process that had it."""
        told = []
        for replica in self.replicas_of(step):
            segment, present = self._of[step, replica]
            if segment is not self._own.get((replica, step % 2)):
                own = self._own_memory(step, replica)
                _bytes_of(own)[:] = _bytes_of(segment)
                segment = own
            told.append(self._note(step, replica, segment, present))
        return told

    def add(self, kept: Kept) -> None:
        """Notes what another process has kept."""
        if (kept.step, kept.replica) in self._of:
            return
        if kept.host == host_id():
            try:
                segment = self._opened.get(kept.address) or Segment.open(kept.address)
            except OSError:  # that process has ended since: the gradients are computed again
                return
            self._opened[kept.address] = segment
        else:
            assert kept.data is not None
            segment = self._own_memory(kept.step, kept.replica)
            _bytes_of(segment)[:] = kept.data
        self._of[kept.step, kept.replica] = segment, kept.present

    @torch.no_grad()
    def show_mean(self, step: int) -> None:
        """Sets ``param.grad`` to the mean over the logical replicas, and the buffers to those of the first one."""
        terms = [self._of[step, replica] for replica in range(self._replicas)]
        views = [self._views(segment) for segment, _ in terms]
        for index, param in enumerate(self._params):
            found = [each[index] for each, (_, present) in zip(views, terms, strict=True) if present[index]]
            if not found:
                param.grad = None
                continue
            grad = self._grads[index] if self._grads[index] is not None else torch.empty_like(param)
            total = local_tensor(grad)
            total.copy_(found[0])
            for term in found[1:]:
                total.add_(term)
            total.div_(self._replicas)
            param.grad = grad
        for buffer, before, view in zip(self._buffers, self._before, views[0][len(self._params) :], strict=True):
            buffer.copy_(view)
            before.copy_(view)

    @torch.no_grad()
    def pack_mean(self) -> tuple[bytes, tuple[bool, ...]]:
        """The gradients that :meth:`show_mean` has just set, and the buffers; and which parameters have one."""
        segment = Segment.create(self._nbytes)
        present = tuple(param.grad is not None for param in self._params)
        values = [None if param.grad is None else local_tensor(param.grad) for param in self._params]
        for value, view in zip((*values, *self._buffers), self._views(segment), strict=True):
            if value is not None:
                view.copy_(value)
        return bytes(_bytes_of(segment)), present

    @torch.no_grad()
    def show_packed(self, data: bytes, present: Sequence[bool]) -> None:
        """Sets ``param.grad`` and the buffers to what another process has packed."""
        segment = Segment.create(self._nbytes)
        _bytes_of(segment)[:] = data
        views = self._views(segment)
        for param, is_there, view in zip(self._params, present, views, strict=False):
            param.grad = torch.empty_like(param) if is_there else None
            if param.grad is not None:
                local_tensor(param.grad).copy_(view)
        for buffer, before, view in zip(self._buffers, self._before, views[len(self._params) :], strict=True):
            buffer.copy_(view)
            before.copy_(view)

    def note_buffers(self) -> None:
        """The buffers have other values now: those from before the next step."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            before.copy_(buffer)

    def forget(self, step: int) -> None:
        """Forgets the gradients of a step that has been taken."""
        for key in [key for key in self._of if key[0] <= step]:
            del self._of[key]

    def _own_memory(self, step: int, replica: int) -> Segment:
        key = replica, step % 2
        if key not in self._own:
            self._own[key] = Segment.create(self._nbytes)
        return self._own[key]

    def _note(self, step: int, replica: int, segment: Segment, present: tuple[bool, ...]) -> Kept:
        self._of[step, replica] = segment, present
        return Kept(step, replica, present, host_id(), segment.address)

    def with_data(self, kept: Kept) -> Kept:
        """The same, with the gradients themselves, for another host."""
        return kept._replace(data=bytes(_bytes_of(self._of[kept.step, kept.replica][0])))

    def _views(self, segment: Segment) -> list[torch.Tensor]:
        shapes = [each.shape for each in (*self._locals, *self._buffers)]
        return [
            segment.tensor(start, shape.numel(), dtype).view(shape)
            for start, shape, dtype in zip(self._starts, shapes, self._dtypes, strict=True)
        ]


def _bytes_of(segment: Segment) -> memoryview:
    return memoryview(segment.memory).cast("B")
