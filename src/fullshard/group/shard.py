"""The shard that a group keeps between uses.

Owns the memory in which every parameter of the group has its chunk: one piece of its own, or parts of memory that ranks
share. Copies values into it. It knows no states.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch.utils.dlpack import from_dlpack

from fullshard.buffer.sections import full_bytes, full_starts, shard_bytes, shard_views
from fullshard.comm.transport import SharedMemory
from fullshard.disk.tensor import DiskTensor
from fullshard.group.context import GroupContext
from fullshard.group.parameter import chunk_views
from fullshard.torch_private import foreach_copy


class ShardBuffer:
    """The shard of a group."""

    def __init__(self, group: GroupContext) -> None:
        self._group = group
        values = [param.values for param in group.params]
        self.is_meta = bool(values) and all(tensor.is_meta for tensor in values)  # then nothing is allocated
        dtypes = [section.dtype for section in group.sections]
        self.nbytes = 0  # of memory
        self.views: tuple[torch.Tensor, ...] = ()  # of the sections; empty where these are stored
        self.stored: dict[int, DiskTensor] = {}  # the chunks that are not in memory, by index in the group
        self.memory: torch.Tensor | None = None  # of the views, if they are the full buffer
        self.is_unmapped = group.shares_parameters  # whether ranks that are to share memory have not mapped it yet
        self.shared: SharedChunks | None = None
        if self.is_unmapped and not self.is_meta:
            memory = group.transport.reserve_shared(full_bytes(group.sections, group.compute_dtypes))
            self.shared = None if memory is None else SharedChunks(group, memory)
        #: The chunk of each parameter, by its index in the group.
        self.chunks = self._allocate(dtypes) if self.shared is None else self.shared.chunks
        self.nbytes = self.nbytes if self.shared is None else shard_bytes(group.own_sections, dtypes)
        for chunk in self.chunks.values() if not group.moves_all else ():
            give_own_storage(chunk)
        self.shards = self.views if self.shared is None else self.shared.shards  # of sections, where contiguous
        self.written = self.views or tuple(self.chunks.values())  # tensors whose versions count the writes
        is_like = dtypes == group.compute_dtypes and not group.offloaded.is_remote and not self.stored
        is_alone = group.is_alone(group.transport)
        self.needs_staging = bool(self.stored) or not (is_alone or is_like)  # without other ranks a gather casts
        #: Whether the shard is the full buffer: it has every parameter, as the modules use it.
        self.is_full = is_alone and is_like and all(section.plan.is_rank_major for section in group.sections)
        self.is_full = self.is_full and self.memory is not None and not any(param.extends for param in group.params)
        self.memory = self.memory if self.is_full else None
        self.poisons = os.environ.get("FULLSHARD_DEBUG", "0") not in ("", "0")

    def map_shared(self) -> bool:
        """Map the memory that ranks share, on every rank. Returns whether there is enough, or nothing to map yet.

        Ranks map it when they first use a group, not when they make it. In between, users may load values or change the
        dtype on one rank after another.
        """
        is_mapped = self._group.transport.map_shared(self.shared.memory if self.shared is not None else None)
        self.is_unmapped = self.shared is None
        return is_mapped or self.is_unmapped

    @torch.inference_mode(False)
    def _allocate(self, dtypes: Sequence[torch.dtype]) -> dict[int, torch.Tensor]:
        """Make the memory of the sections in each home. Padding travels too and is never read: it is zeros."""
        group, views, chunks = self._group, dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for home in (group.here, group.offloaded):
            at = [i for i, section in enumerate(group.own_sections) if group.home(section.members[0]) is home]
            sections, kinds = [group.own_sections[i] for i in at], [dtypes[i] for i in at]
            nbytes = shard_bytes(sections, kinds)
            memory = torch.empty(nbytes, dtype=torch.uint8, device="meta")
            if not self.is_meta:
                memory = home.allocate(nbytes, group.transport)
            is_in_memory = self.is_meta or not memory.is_meta
            for i, section, view in zip(at, sections, shard_views(memory, sections, kinds), strict=True):
                for index, chunk in chunk_views(group.params, section.members, section.plan, view, group.own_rank):
                    chunks[index] = chunk if self.is_meta else home.chunk(group.params[index], chunk)
                views[i] = view if is_in_memory else view[:0]
            self.nbytes += nbytes * is_in_memory
            self.memory = memory if len(at) == len(group.own_sections) else self.memory
        self.views = tuple(views[at] for at in range(len(views)))
        self.stored = {index: chunk for index, chunk in chunks.items() if isinstance(chunk, DiskTensor)}
        return chunks

    @torch.inference_mode(False)
    @torch.no_grad()
    def copy_parameters(self) -> None:
        """Copy the values of each parameter, whole or a chunk, into the shard, and give it its chunk there."""
        group = self._group
        group.writes += 1
        for index, chunk in self.chunks.items():
            param = group.params[index]
            if param.lies_at(chunk):
                continue
            values = param.values
            if values.is_meta and not chunk.is_meta:
                chunk = torch.empty_like(chunk, device="meta")
            else:
                chunk.copy_(values if param.is_sharded else param.chunk_of(values))
            param.set_chunk(chunk)
        for index, param in enumerate(group.params):
            if param.extends and not param.lies_at(param.local):
                param.set_extension_chunk(index in group.offloaded.parameters)
        self.has_meta = any(param.values.is_meta for param in group.params)  # some until they are materialized

    def refuse_meta(self) -> NoReturn:
        names = [param.name for param in self._group.params if param.values.is_meta]
        raise RuntimeError(
            f"parameters are still on the meta device: {names}. Materialize them before the first use, for example "
            f"with module.to_empty(device=...) and then reset_parameters() or load_state_dict()"
        )


class SharedChunks:
    """Where the chunks of this rank lie in the full buffer that the ranks of a host share.

    Most chunks lie in their part of the full buffer, where all ranks read them. Other chunks lie in this rank's own
    memory: those that are cast, those that are not cut along the first dim, and those that every rank has whole. They
    are *published*: copied to their part of the full buffer when a pass begins.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, group: GroupContext, memory: SharedMemory) -> None:
        self.memory = memory
        self.chunks: dict[int, torch.Tensor] = {}  # of each parameter, by its index in the group
        self.shards: tuple[torch.Tensor, ...] = ()  # of each section (*flat*)
        self._published: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._version: int | None = None
        rank = group.data.shard_rank
        *starts, _ = full_starts(group.sections, group.compute_dtypes)
        for section, start, dtype in zip(group.sections, starts, group.compute_dtypes, strict=True):
            apart = []
            first = {piece.shard_start: piece.full_start for piece in section.plan.pieces(rank)}
            for position, (index, param) in enumerate(zip(section.members, section.plan.params, strict=True)):
                if group.moves_all or section.dtype != dtype or param.dim != 0:
                    apart.append(position)
                    continue
                at, shape = section.plan.locate_chunk(position, rank)
                chunk = memory.own(start + first.get(at, 0) * dtype.itemsize, math.prod(shape), dtype)
                self.chunks[index] = group.params[index].view(chunk, shape)
            plan = section.plan.select(apart)
            numel = plan.shard_numel if apart else 0
            if section.dtype == dtype and group.moves_all:
                shard = memory.own(start + rank * numel * dtype.itemsize, numel, dtype)
            else:
                shard = torch.zeros(numel, dtype=section.dtype, device="cpu")
                full = memory.tensor(start, plan.full_numel, dtype)
                pieces = [piece for piece in plan.pieces(rank) if rank == 0 or not piece.is_kept]
                self._published += [(piece.of_full(full), piece.of_shard(shard)) for piece in pieces]
            self.shards += (shard,) if group.moves_all else ()
            members = [section.members[position] for position in apart]
            self.chunks.update(chunk_views(group.params, members, plan, shard, rank))

    def publish(self, version: Callable[[], int], whatever: bool) -> None:
        """Publish the chunks if their ``version`` is new, or with ``whatever`` in any case."""
        if self._published and ((now := version()) != self._version or whatever):
            self._version = now
            with torch.no_grad():
                foreach_copy([shown for shown, _ in self._published], [own for _, own in self._published])


@torch.inference_mode(False)
@torch.no_grad()
def give_own_storage(view: torch.Tensor) -> None:
    """Let a view have a storage that is its part of the memory and no more; it keeps the memory and its version.

    A DTensor has the offset of its local tensor, but no storage. If the offset is not 0, torch assumes a storage, and
    can neither copy the DTensor by ``copy.deepcopy`` nor stage it for an asynchronous checkpoint.
    """
    if view.is_meta or isinstance(view, DiskTensor) or view.untyped_storage().nbytes() == view.nbytes:
        return
    part = torch.empty(0, dtype=torch.uint8, device=view.device)
    part.set_(view.untyped_storage(), view.storage_offset() * view.itemsize, (view.nbytes,), (1,))
    view.set_(from_dlpack(part).untyped_storage(), 0, view.size(), view.stride())
