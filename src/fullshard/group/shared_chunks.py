"""The chunks of a group in the full buffer that the ranks of a host share.

A chunk lies in the full buffer, in the very place from which all ranks read it. A chunk that cannot, because it has
another dtype than is computed in, is cut along another dim than the first, or is whole on every rank, lies in memory of
this rank and is *published*: copied to its place in the full buffer when a pass begins.
"""

from __future__ import annotations

import math

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
        rank = group.data.shard_rank
        *starts, _ = full_starts(group.sections, group.compute_dtypes)
        for section, start, dtype in zip(group.sections, starts, group.compute_dtypes, strict=True):
            apart = []
            first = {piece.shard_start: piece.full_start for piece in section.plan.pieces(rank)}
            for position, (index, param) in enumerate(zip(section.members, section.plan.params, strict=True)):
                if group.is_flat or section.dtype != dtype or param.dim != 0:
                    apart.append(position)
                    continue
                at, shape = section.plan.place(position, rank)
                chunk = memory.own(start + first.get(at, 0) * dtype.itemsize, math.prod(shape), dtype)
                self.places[index] = group.params[index].view(chunk, shape)
            plan = section.plan.select(apart)
            numel = plan.shard_numel if apart else 0
            if section.dtype == dtype and group.is_flat:
                shard = memory.own(start + rank * numel * dtype.itemsize, numel, dtype)
            else:
                shard = torch.zeros(numel, dtype=section.dtype, device="cpu")
                full = memory.tensor(start, plan.full_numel, dtype)
                pieces = [piece for piece in plan.pieces(rank) if rank == 0 or not piece.is_kept]
                self._published += [(piece.of_full(full), piece.of_shard(shard)) for piece in pieces]
            self.shards += (shard,) if group.is_flat else ()
            members = [section.members[position] for position in apart]
            self.places.update(chunk_views(group.params, members, plan, shard, rank))

    @property
    def must_publish(self) -> bool:
        return bool(self._published)

    @torch.no_grad()
    def publish(self, version: int, whatever: bool) -> None:
        """Copy the chunks to their places if the ``version`` is a new one, or in any case (``whatever``)."""
        if whatever or version != self._version:
            self._version = version
            foreach_copy([shown for shown, _ in self._published], [own for _, own in self._published])
