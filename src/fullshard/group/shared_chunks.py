"""The chunks of a group in the full buffer that the ranks of a host share.

A chunk lies in the full buffer, in the very place from which all ranks read it. A chunk that cannot, because it has
another dtype than is computed in, is cut along another dim than the first, or is whole on every rank, lies in memory of
this rank and is *published*: copied to its place in the full buffer when a pass begins.
"""

from __future__ import annotations

import torch

from fullshard.buffer.sections import full_starts
from fullshard.comm.transport import SharedMemory
from fullshard.group.context import GroupContext
from fullshard.group.parameter import chunk_views
from fullshard.torch_private import foreach_copy


class SharedChunks:
    """Where the chunks of this rank lie.

    Args:
        group: whose parameters they are.
        memory: of the full buffer.

    Attributes:
        places: of each parameter's chunk, by its index in the group.
        shards: of each section (*flat*).
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, group: GroupContext, memory: SharedMemory) -> None:
        self.memory = memory
        self.places: dict[int, torch.Tensor] = {}
        self.shards: tuple[torch.Tensor, ...] = ()
        self._published: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._version: int | None = None
        rank, size = group.data.shard_rank, group.data.shard_size
        starts = full_starts(group.sections, group.compute_dtypes)
        for section, start, dtype in zip(group.sections, starts, group.compute_dtypes, strict=True):
            if group.is_flat:
                numel = section.plan.shard_numel
                begin = start + rank * numel * dtype.itemsize
                if section.dtype == dtype:
                    shard = memory.own(begin, numel, dtype)
                else:
                    shard = torch.zeros(numel, dtype=section.dtype, device="cpu")
                    self._published.append((memory.tensor(begin, numel, dtype), shard))
                self.shards += (shard,)
                self.places.update(chunk_views(group.params, section.members, section.plan, shard, rank))
                continue
            apart = []
            published: dict[int, torch.Tensor] = {}
            for position, (index, shape) in enumerate(zip(section.members, section.plan.params, strict=True)):
                param, begin = group.params[index], start + section.plan.full_offsets[position] * dtype.itemsize
                if section.dtype == dtype and shape.dim == 0:
                    first, stop = shape.chunk(rank, size)
                    row = dtype.itemsize * shape.numel // max(1, shape.shape[0])
                    chunk = memory.own(begin + first * row, (stop - first) * row // dtype.itemsize, dtype)
                    self.places[index] = param.view(chunk, shape.chunk_shape(rank, size))
                    continue
                apart.append(position)
                if shape.dim is not None or rank == 0:
                    whole = param.view(memory.tensor(begin, shape.numel, dtype), shape.shape)
                    published[index] = param.chunk_of(whole, rank)
            plan = section.plan.select(apart)
            own = torch.zeros(plan.shard_numel if apart else 0, dtype=section.dtype, device="cpu")
            members = [section.members[position] for position in apart]
            self.places.update(chunk_views(group.params, members, plan, own, rank))
            self._published += [(shown, self.places[index]) for index, shown in published.items()]

    @property
    def must_publish(self) -> bool:
        return bool(self._published)

    @torch.no_grad()
    def publish(self, version: int, whatever: bool) -> None:
        """Copy the chunks to their places if the ``version`` is a new one, or in any case (``whatever``)."""
        if whatever or version != self._version:
            self._version = version
            foreach_copy([shown for shown, _ in self._published], [own for _, own in self._published])
