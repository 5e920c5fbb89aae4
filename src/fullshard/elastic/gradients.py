"""The gradients of logical replicas, kept apart until those of all replicas are there.

Owns the memory in which a process keeps the reduced gradients of each logical replica for its shard, and their sum in
the order of the replicas: it has the same bits whichever process computed which term. Processes of one host read one
another's memory. It does not communicate: :mod:`fullshard.elastic.session` tells others where gradients lie.

The memory of a step is used again two steps later. Then every member has the gradients of the step between, and so has
added up those of this step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.buffer.shared_memory import Address, Segment
from fullshard.elastic.packed import Packed, copy_of, pack, places_of, unpack
from fullshard.elastic.rows import Row
from fullshard.group.parameter import local_tensor
from fullshard.platforms import host_id

Replica = int | Row  # a logical replica, or a row that trains apart from others


class Kept(NamedTuple):
    """Gradients of one logical replica in a step, for one shard, as told to others."""

    step: int
    replica: Replica
    present: tuple[bool, ...]  # of each parameter, whether there is one
    host: str
    address: Address
    data: memoryview | None = None  # for processes on other hosts
    number: int = 0  # of the membership in which it was told


class _GradientMemory(NamedTuple):
    """A segment, and the tensors in it: one for each parameter and then one for each buffer."""

    segment: Segment
    views: Sequence[torch.Tensor]


class KeptGradients:
    """The gradients of the parameters, and the buffers that a forward changes, on one process.

    Buffers belong to the first replica: after a step, all have what it has computed.
    """

    def __init__(self, params: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor]) -> None:
        self._params, self._buffers = params, buffers
        self._nbytes, self._places = places_of([*map(local_tensor, params), *buffers])
        self._own: dict[tuple[Replica, int], _GradientMemory] = {}  # by the replica and whether the step is odd
        self._opened: dict[Address, _GradientMemory] = {}
        self._of: dict[tuple[int, Replica], tuple[_GradientMemory, tuple[bool, ...]]] = {}  # by step and replica
        self._before = [buffer.clone() for buffer in buffers]
        self._grads: list[Any] = [None] * len(params)

    def replicas_of(self, step: int) -> list[Any]:
        """The replicas whose gradients of a step are here."""
        return sorted(replica for of, replica in self._of if of == step)

    def has_all(self, step: int, replicas: Iterable[Replica]) -> bool:
        return all((step, replica) in self._of for replica in replicas)

    @torch.no_grad()
    def begin(self) -> None:
        """Restores the buffers from before the step, and drops the gradients, as each logical replica begins."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)
        for param in self._params:
            param.grad = None

    @torch.no_grad()
    def keep(self, step: int, replica: Replica) -> Kept:
        """Keeps the gradients that a replica has computed, in place of ``param.grad``."""
        grads = [param.grad for param in self._params]
        present = tuple(grad is not None for grad in grads)
        memory = self._own_memory(step, replica)
        for index, (grad, view) in enumerate(zip(grads, memory.views, strict=False)):
            if grad is not None:
                view.copy_(local_tensor(grad))
                self._grads[index], self._params[index].grad = grad, None
        for buffer, view in zip(self._buffers, memory.views[len(grads) :], strict=True):
            view.copy_(buffer)
        return self._note(step, replica, memory, present)

    def drop(self, step: int, replica: Replica) -> None:
        """Takes back what was kept, before others were told."""
        del self._of[step, replica]

    def tell_again(self, step: int, in_own_memory: bool) -> list[Kept]:
        """What is here of a step; ``in_own_memory`` if a process was lost, because others may not reach that one's."""
        told = []
        for replica in self.replicas_of(step):
            memory, present = self._of[step, replica]
            own = self._own_memory(step, replica) if in_own_memory else memory
            if memory is not own:
                _bytes_of(own)[:] = _bytes_of(memory)
            told.append(self._note(step, replica, own, present))
        return told

    def add(self, kept: Kept) -> None:
        """Notes what another process has kept."""
        if (kept.step, kept.replica) in self._of:
            return
        if kept.host == host_id():
            try:
                memory = self._opened.get(kept.address) or self._laid_out(Segment.open(kept.address))
            except OSError:  # that process has ended since: the gradients are computed again
                return
            self._opened[kept.address] = memory
        else:
            assert kept.data is not None
            memory = self._own_memory(kept.step, kept.replica)
            _bytes_of(memory)[:] = kept.data
        self._of[kept.step, kept.replica] = memory, kept.present

    @torch.no_grad()
    def show_mean(self, step: int, replicas: Sequence[Replica]) -> None:
        """Sets ``param.grad`` to the mean over the replicas, and the buffers to those of the first one."""
        terms = [self._of[step, replica] for replica in replicas]
        for index in range(len(self._params)):
            found = [memory.views[index] for memory, present in terms if present[index]]
            total = self._show_gradient(index, bool(found))
            if total is not None:
                total.copy_(found[0])
                for term in found[1:]:
                    total.add_(term)
                total.div_(len(terms))
        self._show_buffers(terms[0][0].views[len(self._params) :])

    def pack_mean(self) -> tuple[Packed, tuple[bool, ...]]:
        """The gradients that :meth:`show_mean` has just set, and the buffers; and which parameters have one."""
        grads = [local_tensor(param.grad) for param in self._params if param.grad is not None]
        return pack([*grads, *self._buffers]), tuple(param.grad is not None for param in self._params)

    @torch.no_grad()
    def show_packed(self, data: Packed, present: Sequence[bool]) -> None:
        """Sets ``param.grad`` and the buffers to what another process has packed."""
        grads = iter(values := unpack(data))
        for index, is_there in enumerate(present):
            if (shown := self._show_gradient(index, is_there)) is not None:
                shown.copy_(next(grads))
        self._show_buffers(values[sum(present) :])

    def note_start(self) -> None:
        """Notes the values of the buffers as those from before a step; a program may have written to them."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            before.copy_(buffer)

    def _show_gradient(self, index: int, is_there: bool) -> torch.Tensor | None:
        """Gives a parameter a gradient or none. Returns this rank's part of it, which has yet to be written."""
        if is_there and self._grads[index] is None:
            self._grads[index] = torch.empty_like(self._params[index])
        self._params[index].grad = self._grads[index] if is_there else None
        return local_tensor(self._grads[index]) if is_there else None

    def _show_buffers(self, values: Sequence[torch.Tensor]) -> None:
        for buffer, each in zip(self._buffers, values, strict=True):
            buffer.copy_(each)

    def forget(self, step: int) -> None:
        """Forgets the gradients of a step that has been taken."""
        for key in [key for key in self._of if key[0] <= step]:
            del self._of[key]

    def _own_memory(self, step: int, replica: Replica) -> _GradientMemory:
        key = replica, step % 2
        if key not in self._own:
            self._own[key] = self._laid_out(Segment.create(self._nbytes))
        return self._own[key]

    def _note(self, step: int, replica: Replica, memory: _GradientMemory, present: tuple[bool, ...]) -> Kept:
        self._of[step, replica] = memory, present
        return Kept(step, replica, present, host_id(), memory.segment.address)

    def with_data(self, kept: Kept) -> Kept:
        """The message with the gradients themselves, for a process on another host."""
        return kept._replace(data=copy_of(_bytes_of(self._of[kept.step, kept.replica][0])))

    def _laid_out(self, segment: Segment) -> _GradientMemory:
        return _GradientMemory(
            segment, [segment.tensor(at, size.numel(), dtype).view(size) for at, size, dtype in self._places]
        )


def _bytes_of(memory: _GradientMemory) -> memoryview:
    return memoryview(memory.segment.memory).cast("B")
