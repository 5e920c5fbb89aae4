"""How many bytes an exchange of a group sends and stages on this rank: what its transport would do, on plans alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.buffer.sections import Section, align, full_bytes, starts
from fullshard.comm.messages import Round, plan_rounds
from fullshard.comm.point_to_point import DEPTH, LARGE, LEAST_STAGING, SMALL, STAGING
from fullshard.comm.sums import scratch_bytes
from fullshard.comm.transport import Direction
from fullshard.group.group import Group
from fullshard.group.mesh import DataMesh


class Exchange:
    """How much an exchange of a group sends and stages, by its transport."""

    def __init__(self, group: Group, direction: Direction, over: DataMesh) -> None:
        self._direction = direction
        self._gathers = direction == "gather"
        self._transport = group.transport.private if self._gathers else group.reduce_transport
        if self._transport.name == "host" and not self._transport.compares_reductions:
            self._transport = self._transport.private  # gradients are not in memory that ranks share
        self._size, self._rank = over.shard_size, over.shard_rank
        memory = group.memory
        shares = memory.shared is not None or (memory.is_apart and memory.is_meta)
        self._moves = self._size > 1 and not (self._gathers and shares)

    def _kind(self, sections: Sequence[Section], dtypes: Sequence[torch.dtype]) -> str:
        if not self._moves or not sections:
            return "nothing"
        if self._transport.name != "p2p":
            return self._transport.name if self._transport.name == "host" else "collective"
        exact = self._gathers or all(dtype.itemsize >= 4 for dtype in dtypes)
        small = self._size == 2 and exact and full_bytes(sections, dtypes) <= SMALL
        return "collective" if small and self._transport.ends_processes else "p2p"

    def _message(self, sections: Sequence[Section], dtypes: Sequence[torch.dtype]) -> int:
        """Bytes of a rank that travel together, without what is straight."""
        numels = [section.plan.packed.shard_numel for section in sections]
        if not any(numels):
            return 0
        nbytes = starts(numels, dtypes)[-2] + numels[-1] * dtypes[-1].itemsize
        return nbytes if not self._gathers or self._is_full(sections) else -(-nbytes // 16) * 16

    @staticmethod
    def _is_full(sections: Sequence[Section]) -> bool:
        """Whether the full buffer is the messages of all ranks."""
        return len(sections) == 1 and sections[0].plan.packed.is_rank_major

    def _straight(self, sections: Sequence[Section], dtypes: Sequence[torch.dtype]) -> int:
        """Bytes of a rank that a collective reads and writes where they lie."""
        pairs = zip((section.plan for section in sections), dtypes, strict=True)
        return sum((plan.shard_numel - plan.packed.shard_numel) * dtype.itemsize for plan, dtype in pairs)

    def sent(self, sections: Sequence[Section], dtypes: Sequence[torch.dtype]) -> int:
        """Bytes that this rank sends, with the least that any algorithm needs."""
        kind, peers = self._kind(sections, dtypes), self._size - 1
        if kind == "collective":
            return peers * (self._message(sections, dtypes) + self._straight(sections, dtypes))
        if kind != "p2p":
            return 0
        if self._gathers:
            return peers * self._between(self._rank, sections, dtypes)
        return sum(self._between(rank, sections, dtypes) for rank in range(self._size) if rank != self._rank)

    def _rounds(self, owner: int, sections: Sequence[Section], dtypes: Sequence[torch.dtype]) -> tuple[Round, ...]:
        capacity = max(LEAST_STAGING, STAGING // (DEPTH * (self._size - 1)))
        plans, itemsizes = tuple(each.plan for each in sections), tuple(dtype.itemsize for dtype in dtypes)
        return plan_rounds(plans, itemsizes, owner, min(LARGE, capacity), capacity, self._direction)

    def _between(self, owner: int, sections: Sequence[Section], dtypes: Sequence[torch.dtype]) -> int:
        """Bytes of what ``owner`` owns in the messages between it and another rank."""
        found = 0
        for each in self._rounds(owner, sections, dtypes):
            pieces = [*each.straight, *(piece for piece, _ in each.whole)]
            found += sum(piece.numel * dtypes[piece.section].itemsize for piece in pieces) + each.packed_bytes
        return found

    def read(self, sections: Sequence[Section], dtypes: Sequence[torch.dtype]) -> int:
        """Bytes that this rank reads in the memory of the others of its host."""
        if self._kind(sections, dtypes) != "host":
            return 0
        pairs = zip(sections, dtypes, strict=True)
        return (self._size - 1) * sum(section.plan.held(self._rank) * dtype.itemsize for section, dtype in pairs)

    def staging(self, sections: Sequence[Section], dtypes: Sequence[torch.dtype]) -> int:
        """Bytes of staging."""
        kind, peers = self._kind(sections, dtypes), [rank for rank in range(self._size) if rank != self._rank]
        if kind == "collective":
            casts = not self._gathers and any(each.dtype != dtype for each, dtype in zip(sections, dtypes, strict=True))
            message = self._message(sections, dtypes)
            found = (0 if self._is_full(sections) else align(self._size * message)) + (align(message) if casts else 0)
            return found + (self._straight(sections, dtypes) if casts else 0)
        if kind != "p2p":
            return 0
        exact = not self._gathers and all(dtype.itemsize >= 4 for dtype in dtypes)
        first = int(self._rank == 0) if exact else -1  # whose large pieces come where they are added up
        rounds = [self._rounds(rank, sections, dtypes) for rank in range(self._size)]
        turns = []
        for index in range(max(map(len, rounds))):
            now = [each[index] if index < len(each) else Round() for each in rounds]
            arriving = ((peer, now[peer if self._gathers else self._rank]) for peer in peers)
            received = sum(align(each.nbytes) - (peer == first) * each.packed_start for peer, each in arriving)
            leaving = [self._rank] if self._gathers else peers
            turns.append(received + sum(align(now[owner].packed_bytes) for owner in leaving))
        scratch = 0 if self._gathers else max(map(scratch_bytes, dtypes, (section.dtype for section in sections)))
        return scratch + min(DEPTH, len(turns)) * max(turns, default=0)
