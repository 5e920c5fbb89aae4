"""Memory shared by the ranks of a host, for gloo on the CPU.

A rank's shard is its part of a segment that all ranks map, so that a gather moves nothing. A reduction reads the
gradient buffers of the others in place. Owns the reductions and the order that they need; a
:class:`~fullshard.comm.local_ranks.PassBarrier` keeps the order of parameters::

    rank 0    gradients in a slot ── ready 7 ──▶ adds up its part of all slots 7 ── done 7 ──▶ slot 7 may be written
                                        │ waits for ready 7 of all                     │ waits for done 7 of all
    rank 1    gradients in a slot ── ready 7 ──▶ adds up its part of all slots 7 ── done 7 ──▶ slot 7 may be written

Replicas, which want all of the sum, exchange it through the slots: each writes its part of the sum to its own slot,
where nobody else reads, and waits until all have. Large gradients stay in the tensors that autograd made, and become
the sums there: a slot only has the parts that others add up. Values that must go to memory that is not shared travel
as messages.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from fullshard.buffer.plan import BufferPlan, Piece
from fullshard.buffer.shared_memory import LINE, Address, Counters, File, Segment
from fullshard.buffer.slots import Lease
from fullshard.comm.local_ranks import LocalRanks, PassBarrier
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.sums import BLOCK, PieceRoute, Sources, Sum, blocks
from fullshard.comm.transport import PLAIN_SUM, Reduction, Request, Route, SharedMemory, StillRead, Transfer, Transport
from fullshard.comm.waits import Wait, lost, named
from fullshard.device import Done, Pending
from fullshard.torch_private import CAN_SWAP_MEMORY, foreach_copy

_AHEAD = 64  # reductions that a rank may be ahead of the slowest one
#: Integers that say what a reduction reads: its number, the group's tag, its parameters, and the slot's address.
#: ``_ENTRIES`` is the bytes that each rank has for the entries of all reductions that are under way.
_ENTRY = 8
_ENTRIES = 8 * _ENTRY * _AHEAD


class ShmTransport(Transport):
    """Reduces in memory that ranks share, which all map ``control``, and moves the rest by ``messages``."""

    name = "shm"
    reduce_kind: type[SharedReduceRoute]
    sum_kind: type[SharedReduceRoute]
    why = "all of them share a host"
    gradient_buffers = 2
    adds_in_fp32 = True
    shares_all = True
    compares_reductions = CAN_SWAP_MEMORY  # else gradients are never in memory that ranks share, but travel as messages

    def __init__(self, local_ranks: LocalRanks, control: Segment, messages: PointToPointTransport) -> None:
        self._private = messages
        self.local_ranks = local_ranks
        rank, size = local_ranks.rank, local_ranks.size
        self.ready, self.done, self.summed = (Counters(control, n * LINE * size, rank, size) for n in range(3))
        self.entries = [control.numbers(3 * LINE * size + each * _ENTRIES, _ENTRIES // 8) for each in range(size)]
        self.under_way: deque[PendingSharedReduction] = deque()
        self._slots: dict[int, Address] = {}  # this rank's, by where they begin in memory
        #: Files of slots that are gone, which a slow rank has yet to look for.
        self._files: deque[tuple[int, File | None]] = deque()
        self._opened: list[dict[int, Segment]] = [{} for _ in range(size)]  # slots of the other ranks, by inode
        self._purged = [0] * size
        self.routes: weakref.WeakSet[SharedReduceRoute] = weakref.WeakSet()
        self.scratch = Lease(torch.empty(2 * BLOCK * 8, dtype=torch.uint8, device="cpu"))
        self.reduce_kind, self.sum_kind = SharedReduceRoute, SharedSumRoute

    @classmethod
    def control_bytes(cls, size: int) -> int:
        """Bytes of ``control`` for ``size`` ranks."""
        return (3 * LINE + _ENTRIES) * size

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory for gradient buffers, which the other ranks can read, if there is enough."""
        try:
            segment = Segment.create(nbytes)
        except OSError as error:
            raise RuntimeError(
                f"no {nbytes} bytes of shared memory for gradients ({error}): free memory or allow more open files, or "
                f"set FULLSHARD_TRANSPORT=p2p"
            ) from error
        memory = segment.tensor(0, nbytes, torch.uint8)
        self._slots[memory.data_ptr()] = segment.address
        weakref.finalize(segment.memory, self._forget, memory.data_ptr(), segment.file)
        return memory

    def reserve_shared(self, nbytes: int) -> SharedMemory:
        start = LINE * self.local_ranks.size
        segment, view = address_space(start + nbytes)
        return SharedMemory(segment, view, start, PassBarrier(self.local_ranks, segment))

    def map_shared(self, memory: SharedMemory | None) -> bool:
        return self.local_ranks.map_together(*((memory.segment, memory.view) if memory else (None,)))

    def _route(self, request: Request) -> Route:
        """Full buffers are shared if they lie in one piece of memory that :meth:`allocate` made. Others travel as
        messages, and so does what is gathered: it lies in memory of this rank alone. Ranks start their reductions in
        the same order. If they reduce different groups, or one has ended, ``finish`` raises."""
        fulls = [transfer.full for transfer in request.transfers]
        if request.direction == "gather" or self.address_of(fulls) is None:
            return self.private._route(request)
        return self.reduce_kind(self, request)

    def sum_route(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> Route | None:
        if self.address_of([transfer.full for transfer in transfers]) is None:
            return None
        return self.sum_kind(self, Request("reduce", transfers, process_group, tag))

    def reset(self) -> None:
        self.under_way.clear()
        self.ready.skip_round()
        self.done.set(self.ready.value)
        self.summed.set(self.ready.value)

    def close_peers_buffers(self) -> None:
        for rank in range(self.local_ranks.size):
            self._forget_slots_of(rank)
        self.close_files()

    def read_up_to(self, number: int) -> None:
        """Complete the reductions up to ``number``, in their order: ``done`` is one number for all of them."""
        while self.under_way and self.under_way[0].number <= number:
            reading = self.under_way.popleft()
            self.local_ranks.wait(self.ready, reading.number, "a reduction", reading.route.tag)
            for rank in range(self.local_ranks.size):
                dropped = self.ready.noted(rank)
                if dropped != self._purged[rank]:
                    self._forget_slots_of(rank)
                    self._purged[rank] = dropped
            reading.slots = tuple(self._slot_of(rank, reading) for rank in range(self.local_ranks.size))
            reading.route.add_up(reading)
            self.done.set(reading.number)
            reading.exchange = reading.route.exchange(reading)
            # The shards are gradients now: the mark by which the slot is taken again must not keep them.
            reading.shards = reading.slots = ()

    def _slot_of(self, rank: int, reading: PendingSharedReduction) -> Segment | None:
        """Where ``rank`` has the values to be added up; ``None`` for this one."""
        at = reading.number % _AHEAD * _ENTRY
        number, tag, subject, *address = self.entries[rank][at : at + 7]
        route = reading.route
        there, here = self.local_ranks.global_ranks[rank], dist.get_rank()
        if (number, tag) != (reading.number, route.tag):
            what = f"{named(tag)} where rank {here} reduces {named(route.tag)}"
            raise RuntimeError(
                f"rank {there} reduces {what}, or has given up after an error: all ranks must run the same sharded "
                f"modules in the same order (fullshard.skip_module(module, tensor) in place of one that a rank does "
                f"not need), and call reset_iter_state() together after an error"
            )
        if subject != route.subject:
            raise RuntimeError(
                f"rank {there} has gradients of different parameters of {named(tag)} than rank {here}: where ranks "
                f"may use different parameters, call set_reduce_scatter_unused_params(True)"
            )
        if rank == self.local_ranks.rank:
            return None
        opened, inode = self._opened[rank], address[2]
        if inode not in opened:
            try:
                opened[inode] = Segment.open(Address(*address))
            except OSError as error:  # its memory ended with it
                wait = Wait("a reduction", self.local_ranks.process_group(), route.tag)
                raise lost(wait, error, self.local_ranks.members[rank]) from error
        return opened[inode]

    def _forget_slots_of(self, rank: int) -> None:
        """Let go of slots that a rank gave back to the system."""
        self._opened[rank].clear()
        for route in self.routes:
            route.known.clear()

    def address_of(self, fulls: Iterable[torch.Tensor]) -> Address | None:
        """Where the other ranks find buffers, if they lie in one slot."""
        starts = {full.untyped_storage().data_ptr() for full in fulls}
        return self._slots.get(starts.pop()) if len(starts) == 1 else None

    def _forget(self, start: int, file: File | None) -> None:
        """Tell the other ranks that a slot of this one is gone."""
        self._slots.pop(start, None)
        self.ready.note(self.ready.noted(self.local_ranks.rank) + 1)
        self._files.append((self.ready.value, file))
        self.close_files()

    def close_files(self) -> None:
        """Close the files of slots that all ranks have read for the last time."""
        while self._files and self.done.reached(self._files[0][0]):
            self._files.popleft()


@dataclass(eq=False)
class PendingSharedReduction(StillRead):
    """One reduction: the other ranks' buffers are read when it is finished, and this rank's until it was waited for."""

    route: SharedReduceRoute
    number: int
    shards: Sequence[torch.Tensor]  # none any more once it was read
    divisor: float
    exchange: Pending = field(default_factory=Done)  # what follows when this rank has read its part
    slots: tuple[Segment | None, ...] = ()  # of the ranks, while they are read

    def finish(self) -> None:
        self.route.transport.read_up_to(self.number)
        if self.shards:
            raise RuntimeError(
                f"a reduction of {named(self.route.tag)} was lost when reset_iter_state() was called after an error, "
                f"perhaps in another model on the same ranks: call it on this model too"
            )
        self.exchange.finish()

    def wait(self) -> None:
        transport = self.route.transport
        transport.local_ranks.wait(self.route.over, self.number, "a reduction, to be read by the other ranks")


class SharedReduceRoute(PieceRoute):
    """The parts of some buffers that this rank adds up."""

    staging = sent = 0
    _beside = 0  # the number of last sections for which this rank's values are in its shards, not in its slot

    def __init__(self, transport: ShmTransport, request: Request) -> None:
        super().__init__(request)
        transport.routes.add(self)
        self.transport, self.tag = transport, request.tag
        self.over = transport.done  # where ranks say that they read no slot any more
        self._starts = [int(full.storage_offset()) * full.itemsize for full in self.fulls]
        #: The same on ranks that reduce the same parameters.
        self.subject = hash((*self._starts, *(plan.full_offsets for plan in self.plans)))
        self.known: dict[tuple[Segment | None, ...], tuple[list[Sum], Sources]] = {}

    def start(self, shards: Sequence[torch.Tensor] = (), reduction: Reduction = PLAIN_SUM, *_: torch.Tensor) -> Pending:
        """Tell the other ranks that the values are ready."""
        transport, local_ranks = self.transport, self.transport.local_ranks
        slot = transport.address_of(self.fulls)
        assert slot is not None, "the buffers left the slots of their transport"
        transport.close_files()
        number = transport.ready.value + 1
        local_ranks.wait(transport.done, number - _AHEAD, "a reduction, to be read by the slowest rank")
        at = number % _AHEAD * _ENTRY
        transport.entries[local_ranks.rank][at : at + 7] = [number, self.tag, self.subject, *slot]
        transport.ready.set(number)
        reading = PendingSharedReduction(self, number, shards, reduction.divisor)
        transport.read_up_to(number - 1)  # the others are ready by now, as a rule, and may wait to write to their slots
        transport.under_way.append(reading)
        return reading

    def add_up(self, reading: PendingSharedReduction) -> None:
        """Write this rank's part of the sums to its shards."""
        for total in self.bind(reading.slots)[0]:
            total.write(reading.shards, reading.divisor)

    def exchange(self, reading: PendingSharedReduction) -> Pending:
        """Start what follows, when this rank has read the slots of the others: nothing."""
        return Done()

    @torch.inference_mode(False)
    def bind(self, slots: tuple[Segment | None, ...]) -> tuple[list[Sum], Sources]:
        """The sums of what lies in the ranks' slots, and what is copied from there. Kept for the next time."""
        if slots in self.known:
            return self.known[slots]
        sums = list[Sum]()
        for section, plan in enumerate(self.plans):
            fulls = self._in_slots(section, slots)
            for block in [block for piece in self._pieces(plan, section) for block in blocks(piece)]:
                terms: list[torch.Tensor | None] = [block.of_full(each) for each in fulls]
                if section >= len(self.plans) - self._beside:
                    terms[self.transport.local_ranks.rank] = None
                sums.append(Sum(self, self._in_shard(block), terms, self.transport.scratch))
        return self.known.setdefault(slots, (sums, self._summed_by_others(slots)))

    def _pieces(self, plan: BufferPlan, section: int) -> Sequence[Piece]:
        """What this rank adds up."""
        return plan.pieces(self.rank, section)

    def _summed_by_others(self, slots: tuple[Segment | None, ...]) -> Sources:
        """What this rank gets of the others' sums, and where they have it: nothing."""
        return []

    def _in_slots(self, section: int, slots: tuple[Segment | None, ...]) -> list[torch.Tensor]:
        """A section in the slots of all ranks."""
        full, start = self.fulls[section], self._starts[section]
        return [full if slot is None else slot.tensor(start, full.numel(), full.dtype) for slot in slots]

    def _in_shard(self, piece: Piece) -> Piece:
        """A piece of the full buffer, with its place in a shard."""
        return piece


class SharedSumRoute(SharedReduceRoute):
    """The sums of some buffers, of which every rank gets all."""

    def __init__(self, transport: ShmTransport, request: Request) -> None:
        size = request.process_group.size()
        over = [transfer._replace(plan=transfer.plan.over(size)) for transfer in request.transfers]
        super().__init__(transport, request._replace(transfers=over))
        self._shifts = shifts_of(request.transfers)

    def start(
        self, shards: Sequence[torch.Tensor] = (), reduction: Reduction = PLAIN_SUM, *zero_copy: torch.Tensor
    ) -> Pending:
        """The same. Of ``zero_copy`` values, which become the sums, only what others add up is copied to the slot."""
        self._beside, shards = len(zero_copy), [*shards, *zero_copy]
        if zero_copy:
            pieces = [piece for _, piece in self._pieces_of_others(len(self.plans) - self._beside)]
            targets = [piece.of_full(self.fulls[piece.section]) for piece in pieces]
            foreach_copy(targets, [self._in_shard(piece).of_shard(shards[piece.section]) for piece in pieces])
        return super().start(shards, reduction)

    def _pieces_of_others(self, first: int) -> list[tuple[int, Piece]]:
        """What other ranks add up of the sections from the ``first`` on."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        plans = list(enumerate(self.plans))[first:]
        return [(rank, piece) for i, plan in plans for rank in others for piece in plan.pieces(rank, i)]

    def add_up(self, reading: PendingSharedReduction) -> None:
        """Write this rank's part to its shards and, while it is in a cache, to its slot; then copy those of the others
        from theirs."""
        transport, shards = self.transport, reading.shards
        sums, others = self.bind(reading.slots)
        for total in sums:
            total.write(shards, reading.divisor)
            mine, block = total.block.of_shard(shards[total.block.section]), total.block
            slot = block.of_full(self.fulls[block.section]).copy_(mine)
            if slot.dtype != mine.dtype:
                mine.copy_(slot)  # rounded, as the others see it
        transport.summed.set(reading.number)
        transport.local_ranks.wait(transport.summed, reading.number, "a reduction", self.tag)
        if others:  # else they have no part of parameters as small as these
            targets = [piece.of_shard(shards[piece.section]) for piece, _ in others]
            foreach_copy(targets, [values for _, values in others])

    def _in_shard(self, piece: Piece) -> Piece:
        """The same, where a shard has all of the full buffer."""
        starts = self.plans[piece.section].full_offsets
        shift = self._shifts[piece.section][bisect_right(starts, piece.full_start) - 1]
        return replace(piece, shard_start=piece.full_start + shift, shard_stride=piece.full_stride)

    def _summed_by_others(self, slots: tuple[Segment | None, ...]) -> Sources:
        fulls, others = [self._in_slots(i, slots) for i in range(len(self.plans))], self._pieces_of_others(0)
        return [(self._in_shard(piece), piece.of_full(fulls[piece.section][rank])) for rank, piece in others]


def address_space(nbytes: int) -> tuple[Segment, Segment]:
    """Where parameters that ranks share will lie, and a view of them."""
    try:
        return Segment.reserve(nbytes), Segment.reserve(nbytes)
    except OSError as error:
        raise RuntimeError(
            f"no address space for 2 x {nbytes} bytes of parameters that ranks share ({error}): raise the limit "
            f"of this process (ulimit -v), or set FULLSHARD_TRANSPORT=p2p"
        ) from error


def shifts_of(transfers: Iterable[Transfer]) -> list[list[int]]:
    """How far each parameter lies behind its place in the full buffer when it lies in the shard of a single rank."""
    every = (zip(plan.cuts, plan.full_offsets, strict=True) for plan, _, _ in transfers)
    return [[cut.share(0).place - full for cut, full in both] for both in every]
