"""Several hosts of several ranks: memory that the ranks of a host share, and messages between hosts.

A full buffer is a slot in which all ranks of a host see the same values, so that a host needs each shard of the others
once. Its ranks share this work out: each fetches what one rank of every other host has. A reduction adds up inside the
host first, in place, and only that sum leaves it::

    host A    rank 0 ◀──── shards; sums of the host ────▶ rank 2    host B
              rank 1 ◀──── shards; sums of the host ────▶ rank 3

    gather    shard ─▶ slot of this host, and to one rank of every other host ─▶ slot of that host
    reduce    gradients of a host's ranks, each in a slot ─ added up ─▶ sums for its peers and for itself
              sums that come, and its own ─▶ shard

Owns who exchanges what with whom (:func:`peers_of`), and the order of these exchanges on the ranks of a host. Messages
are those of :mod:`fullshard.comm.point_to_point`, with a wire or without; :mod:`fullshard.comm.shm` adds up.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from fullshard import platforms
from fullshard.buffer.host_slots import HostSlot, HostSlotPool, NothingToShareError
from fullshard.buffer.plan import BufferPlan, Cut, Piece, Share
from fullshard.buffer.shared_memory import LINE, ROUND, Counters, Segment
from fullshard.buffer.slots import SlotPool
from fullshard.comm.local_ranks import LocalRanks, find_local_ranks
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.shm import PendingSharedReduction, SharedReduceRoute, ShmTransport, address_space, shifts_of
from fullshard.comm.sums import SUM_DTYPES, Sources
from fullshard.comm.transport import PLAIN_SUM, Peers, Reduction, Request, Route, Shards, Transfer
from fullshard.comm.waits import named
from fullshard.device import Pending, Started
from fullshard.torch_private import CAN_SWAP_MEMORY, foreach_copy

_AHEAD = 64  # events that a rank may be ahead of the slowest one of its host
#: Integers that say what a rank does: the number of the event, its kind, the tag of a group or -1, and a slot or the
#: bytes of a new one.
_EVENT = 4
_KINDS = "makes a slot", "gathers", "waits for"
_NEW_SLOT, _GATHER, _WAIT = range(3)


def peers_of(hosts: Sequence[Sequence[int]], rank: int) -> Peers:
    """With whom ``rank`` exchanges messages. The shard of each rank goes to the rank at the same position on each other
    host, modulo the number of ranks there."""
    here = next(host for host in hosts if rank in host)
    away = [host for host in hosts if host is not here]
    fetched = [[each for i, each in enumerate(host) if i % len(here) == here.index(rank)] for host in away]
    targets = [host[here.index(rank) % len(host)] for host in away]
    most = max(sum(-(-len(host) // size) for host in hosts) - 1 for size in {*map(len, hosts)})
    return Peers([*chain(*fetched)], targets, max(1, most), here.index(rank) == 0)


class HostsTransport(ShmTransport):
    """Gathers to slots that the ranks of this host share, which map ``control`` for it, and reduces in their memory."""

    name = "hosts"
    shares_all = False
    peers: Peers

    def __init__(self, local_ranks: LocalRanks, control: Segment, messages: PointToPointTransport) -> None:
        super().__init__(local_ranks, control, messages)
        rank, size = local_ranks.rank, local_ranks.size
        self.peers = peers_of(local_ranks.hosts, local_ranks.members[rank])
        first = super().control_bytes(size)
        self.begun, self.read = (Counters(control, first + n * LINE * size, rank, size) for n in range(2))
        starts = range(first + 2 * LINE * size, control.address.nbytes, 8 * _EVENT * _AHEAD)
        self.events = [control.numbers(start, _EVENT * _AHEAD) for start in starts]
        counts = " and ".join(map(str, sorted({len(host) for host in local_ranks.hosts})))
        self.why = f"they run on {len(local_ranks.hosts)} hosts, on each of which {counts} share memory"
        self.reduce_kind, self.sum_kind = HostsReduceRoute, HostsSumRoute
        self.host_slots: weakref.WeakValueDictionary[int, HostSlot] = weakref.WeakValueDictionary()

    @classmethod
    def control_bytes(cls, size: int) -> int:
        return super().control_bytes(size) + (2 * LINE + 8 * _EVENT * _AHEAD) * size

    def pool(self, kind: str, device: torch.device) -> SlotPool:
        if kind != "parameters":
            return super().pool(kind, device)
        return HostSlotPool(device, self._share, self.host_slots, self.local_ranks.rank, self.local_ranks.size)

    def _route(self, request: Request) -> Route:
        is_in_slot = request.transfers[0].full.untyped_storage().data_ptr() in self.host_slots
        return HostsGatherRoute(self, request) if is_in_slot else super()._route(request)

    def begin(self, kind: int, tag: int, what: int) -> int:
        """Tell the other ranks of this host what this one begins; returns its number."""
        number = self.begun.value + 1
        self.local_ranks.wait(self.begun, number - _AHEAD, "an earlier gather, for the slowest rank of this host")
        at = number % _AHEAD * _EVENT
        self.events[self.local_ranks.rank][at : at + _EVENT] = [number, kind, tag, what]
        self.begun.set(number)
        return number

    def compare(self, number: int) -> None:
        """Wait until the others have begun the same. Raises RuntimeError if a rank does something else."""
        at, here, ranks = number % _AHEAD * _EVENT, self.local_ranks.rank, self.local_ranks.global_ranks
        mine = self.events[here][at : at + _EVENT]
        self.local_ranks.wait(self.begun, number, "the beginning of a gather", mine[2])
        for rank, events in enumerate(self.events):
            theirs = events[at : at + _EVENT]
            is_over = theirs[0] > number and theirs[0] // ROUND == number // ROUND  # all have begun it, if so
            if theirs != mine and not is_over:
                one, other = (f"{_KINDS[k]} {named(t) if t >= 0 else ''}".strip() for _, k, t, _ in (mine, theirs))
                raise RuntimeError(
                    f"rank {ranks[here]} {one}{' in other memory' * (one == other)} where rank {ranks[rank]} {other} "
                    f"on the same host, or has given up after an error: all ranks must run the same sharded modules in "
                    f"the same order, free buffers together, and call reset_iter_state() together after an error"
                )

    def _share(self, nbytes: int) -> tuple[Segment, Segment]:
        """Memory for a slot of this host. All ranks raise NothingToShareError if one of them has none."""
        self.compare(self.begin(_NEW_SLOT, -1, nbytes))
        segment, view = address_space(nbytes)
        if not self.local_ranks.map_together(segment, view):
            raise NothingToShareError(f"no {nbytes} bytes of shared memory for parameters")
        return segment, view

    def reset(self) -> None:
        super().reset()
        for counters in (self.begun, self.read, *chain(*((s.filled, s.read) for s in self.host_slots.values()))):
            counters.skip_round()


class HostsGatherRoute:
    """A gather to the slot that the full buffer has at the time."""

    def __init__(self, transport: HostsTransport, request: Request) -> None:
        self._transport, self._request = transport, request
        self._starts = [int(each.full.storage_offset()) * each.full.itemsize for each in request.transfers]
        self.tag = request.tag
        self._known: weakref.WeakKeyDictionary[HostSlot, Route] = weakref.WeakKeyDictionary()
        route = self._find()[1]
        self.staging, self.sent = route.staging, route.sent

    def _find(self) -> tuple[HostSlot, Route]:
        """The slot, and the route to it. Both are the same ones again in later steps."""
        transfers = self._request.transfers
        slot = self._transport.host_slots[transfers[0].full.untyped_storage().data_ptr()]
        route = self._known.get(slot)
        if route is None:
            pairs = zip(transfers, self._starts, strict=True)
            there = [each._replace(full=slot.writable(at, each.full.numel(), each.full.dtype)) for each, at in pairs]
            route = self._known[slot] = self._transport.between(self._request._replace(transfers=there))
        return slot, route

    def start(self, shards: Shards = (), reduction: Reduction = PLAIN_SUM, *_: torch.Tensor) -> Pending:
        transport, (slot, route) = self._transport, self._find()
        number = transport.begin(_GATHER, self.tag, slot.inode)
        transport.local_ranks.wait(slot.read, slot.read.value, "the memory for a gather", self.tag)
        return Started(partial(self._finish, slot, number, route.start()))

    def _finish(self, slot: HostSlot, number: int, part: Pending) -> None:
        """Complete this rank's part, and wait for those of the others."""
        part.finish()
        transport, use = self._transport, slot.use
        if transport.begun.value // ROUND != number // ROUND:
            return  # an error has ended the step: the others may not come
        slot.filled.set(use)
        for event in (number, transport.begin(_WAIT, self.tag, slot.inode)):
            transport.compare(event)
        transport.local_ranks.wait(slot.filled, use, "an all-gather", self.tag)


class HostsReduceRoute(SharedReduceRoute):
    """Adds up, in the slots of a host, what this rank sends or keeps, in place. Then hosts exchange these sums."""

    def __init__(self, transport: HostsTransport, request: Request) -> None:
        in_place = [Transfer(plan, full, full) for plan, full, _ in request.transfers]
        super().__init__(transport, request._replace(transfers=in_place))
        self._between = transport.between(request)
        self.staging, self.sent = self._between.staging, self._between.sent
        self._beside = len(self.plans)
        self._owners = [self.rank, *transport.peers.sources]
        self._own = [piece for section, plan in enumerate(self.plans) for piece in plan.pieces(self.rank, section)]
        self._kept = [piece for piece in self._own if piece.is_kept]  # all ranks read these: no sum may lie there
        self._sums: list[torch.Tensor] = []  # of these

    def _divisor(self, divisor: float) -> float:
        """By what sums are divided before hosts exchange them: fp16 could overflow. A power of two loses nothing."""
        return 2.0 ** math.ceil(math.log2(abs(divisor))) if torch.float16 in self.dtypes else 1.0

    def _pieces(self, plan: BufferPlan, section: int) -> Sequence[Piece]:
        return [piece for owner in self._owners for piece in plan.pieces(owner, section) if not piece.is_kept]

    def _in_shard(self, piece: Piece) -> Piece:
        return replace(piece, shard_start=piece.full_start, shard_stride=piece.full_stride)

    def add_up(self, reading: PendingSharedReduction) -> None:
        divisor = self._divisor(reading.divisor)
        for total in self.bind(reading.slots)[0]:
            total.write(self.fulls, divisor)
        self._sums = []
        for piece in self._kept:
            terms = [piece.of_full(each) for each in self._in_slots(piece.section, reading.slots)]
            dtype = SUM_DTYPES[terms[0].dtype]
            self._sums.append(sum((term.to(dtype) for term in terms[1:]), terms[0].to(dtype)) / divisor)

    def exchange(self, reading: PendingSharedReduction) -> Pending:
        if self._kept:
            self.transport.local_ranks.wait(self.transport.done, reading.number, "a reduction", self.tag)
            foreach_copy([piece.of_full(self.fulls[piece.section]) for piece in self._kept], self._sums)
        return self._between.start(reading.shards, Reduction(reading.divisor / self._divisor(reading.divisor)))


class HostsSumRoute(HostsReduceRoute):
    """The route of sums that all ranks get: hosts gather the sums in their slots, and each rank copies them."""

    def __init__(self, transport: HostsTransport, request: Request) -> None:
        reduces, spreads = halves_of_sum(request)
        super().__init__(transport, reduces)
        self._spread = transport.between(spreads)
        self.over, self.sent = transport.read, self.sent + self._spread.sent
        self.staging = max(self.staging, self._spread.staging)  # one after the other
        self._here = [piece.of_full(self.fulls[piece.section]) for piece in self._own]

    def start(self, shards: Shards = (), reduction: Reduction = PLAIN_SUM, *zero_copy: torch.Tensor) -> Pending:
        apart = list(zip(self.plans, self.fulls, strict=True))[len(self.plans) - len(zero_copy) :]
        if apart:
            places = [full[(at := plan.full_offsets[0]) : at + plan.params[0].numel] for plan, full in apart]
            foreach_copy(places, zero_copy)
        return super().start([*shards, *zero_copy], reduction)

    def exchange(self, reading: PendingSharedReduction) -> Pending:
        others = self.bind(reading.slots)[1]
        return Started(partial(self._complete, super().exchange(reading), reading.number, reading.shards, others))

    def _complete(self, sums: Pending, number: int, shards: Sequence[torch.Tensor], others: Sources) -> None:
        """Complete the sums in the shards: this rank's own sums are there already."""
        sums.finish()
        if there := [piece.of_shard(shards[piece.section]) for piece in self._own]:
            foreach_copy(self._here, there)
            foreach_copy(there, self._here)  # rounded, as the others see them
        self._spread.start().finish()
        self.transport.summed.set(number)
        self.transport.local_ranks.wait(self.transport.summed, number, "a reduction", self.tag)
        if others:
            foreach_copy([at.of_shard(shards[at.section]) for at, _ in others], [values for _, values in others])
        self.over.set(number)

    def _summed_by_others(self, slots: tuple[Segment | None, ...]) -> Sources:
        found, local_ranks = Sources(), self.transport.local_ranks
        fulls = [self._in_slots(i, slots) for i in range(len(self.plans))]
        for at, member in enumerate(local_ranks.members):
            owners = {member, *peers_of(local_ranks.hosts, member).sources} - {self.rank}
            for section, plan in enumerate(self.plans):
                pieces = [piece for owner in sorted(owners) for piece in plan.pieces(owner, section)]
                found += [(piece, piece.of_full(fulls[section][at])) for piece in pieces]
        return found


def halves_of_sum(request: Request) -> tuple[Request, Request]:
    """The reduction, and then the gather, of a sum that all ranks get."""
    placed, in_slots, size = list[Transfer](), list[Transfer](), request.process_group.size()
    for (plan, full, shard), shifts in zip(request.transfers, shifts_of(request.transfers), strict=True):
        placed.append(Transfer(_placed(plan.over(size), shifts), full, shard))
        in_slots.append(Transfer(_placed(plan.over(size), [0] * len(shifts)), full, full))
    return request._replace(transfers=placed), request._replace(direction="gather", transfers=in_slots)


def _placed(plan: BufferPlan, shifts: Sequence[int]) -> BufferPlan:
    """A plan of vectors whose parts lie, in a rank's shard, at their places in the full buffer plus a shift."""
    cuts = list[Cut]()
    for cut, shift in zip(plan.cuts, shifts, strict=True):
        parts = [(rank, *cut.chunk(rank)) for rank in range(plan.world_size)]
        shares = [Share(range(i, i + 1), first, stop - first, cut.start + first + shift) for i, first, stop in parts]
        cuts.append(replace(cut, shares=tuple(shares), is_uniform=False))
    return replace(plan, cuts=tuple(cuts), zero_copy=())


def shared_transport(
    process_group: dist.ProcessGroup, messages: PointToPointTransport, wanted: str = ""
) -> ShmTransport | str:
    """The transport of a process group some of whose ranks share memory, or the reason why there is none. All ranks
    must make the first call together. ``wanted`` is the name of the transport to use, if the user has chosen one."""
    known, key = _known.setdefault(process_group, {}), (wanted, platforms.pretended_host)
    if key not in known:
        known[key] = _share(process_group, messages, wanted)
    return known[key]


def _share(process_group: dist.ProcessGroup, messages: PointToPointTransport, wanted: str) -> ShmTransport | str:
    local_ranks = find_local_ranks(process_group)
    if isinstance(local_ranks, str):
        return local_ranks
    hosts = len(local_ranks.hosts)
    kind = HostsTransport if wanted == HostsTransport.name or (not wanted and hosts > 1) else ShmTransport
    if kind is ShmTransport and hosts > 1:
        return f"its ranks run on {hosts} hosts"
    if not wanted and hosts == process_group.size():
        return "every rank runs on a host of its own"
    if kind is HostsTransport and not CAN_SWAP_MEMORY:
        return "ranks of several hosts share memory from torch 2.12 on"
    control = Segment.reserve(kind.control_bytes(local_ranks.size))
    if not local_ranks.map_together(control):
        return "a rank could not map another rank's memory"
    return kind(local_ranks, control, messages)


_known = weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, str], ShmTransport | str]]()
