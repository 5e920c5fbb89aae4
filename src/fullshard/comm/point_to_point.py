"""Messages between pairs of ranks, for gloo on the CPU.

A gather receives large pieces where the parameter will be read; a reduction is an all-to-all and a local sum, which
moves half the bytes of gloo's own. Owns the tensors of the messages, which :mod:`fullshard.comm.rounds` lays out, and
their order in time::

    start       round 0, round 1: all receives posted, small pieces packed, all sends posted; own part copied
    finish      wait for round 0, copy or add what came; round 2 posted in its staging
                wait for round 1, copy or add what came; round 3 posted in its staging  ...

No rank waits before everything it has in these rounds is posted, so none waits for ever. Most gathers have one round.
A reduction with more than two goes on in ``finish``, which ranks must therefore call in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import repeat, zip_longest
from typing import Any

import torch
import torch.distributed as dist

from fullshard.buffer.messages import vectors
from fullshard.buffer.plan import Copies, Piece
from fullshard.buffer.sections import align
from fullshard.buffer.slots import NO_LEASE, SHARED, Lease
from fullshard.comm.encoded import Carrier, EncodedRoute, ExchangeMemory, Span
from fullshard.comm.rounds import Round, plan_rounds
from fullshard.comm.sums import PieceRoute, Sum, blocks
from fullshard.comm.transport import PLAIN_SUM, Reduction, Request, Route, Shards, Transport
from fullshard.comm.waits import WAITS, Wait, lost
from fullshard.device import CPU, Pending
from fullshard.torch_private import foreach_copy, timeout_of

#: Bytes of staging for what an exchange receives from all ranks. More is not faster, 2 MiB take half more CPU.
STAGING = 8 * 2**20
#: Bytes from which a piece gets a message of its own. A message costs about 30 us on either side, and more where its
#: arrival stops the thread that sends another; to copy this number of bytes twice costs about the same.
LARGE = 256 * 2**10
#: Bytes of a group up to which two ranks use the backend's collectives, which then cost a third of messages. gloo's
#: receiving thread spins while another thread sends to the same rank. That is the rule if both ranks send little at
#: once. For more ranks, and for larger groups, messages cost less. Measured by ``benchmarks/exchanges.py``.
SMALL = 2**18
LEAST_STAGING = 64 * 2**10  # bytes of staging for each rank in a round, however many ranks there are
DEPTH = 2  # rounds that are under way at once
#: Where the tags of our messages begin, so that a user's own on the same group are not taken for them.
_FIRST_TAG = 0x4653_0000

#: What a message is read from or written to, and the other rank. A piece is one of a tensor that each start brings.
Message = tuple[torch.Tensor | Piece, int]


class PointToPointTransport(Transport):
    """Moves buffers by messages between ranks; small groups of two ranks by the transport ``native``, if there is one.
    ``staging`` is for what an exchange receives from all ranks; ``large`` pieces have messages of their own."""

    name = "p2p"
    takes_messages = True
    adds_in_fp32 = True

    def __init__(self, staging: int = STAGING, large: int = LARGE, native: Transport | None = None) -> None:
        self._limits = (staging, large)
        self._native = native
        self.ends_processes = native is not None

    def _route(self, request: Request) -> Route:
        """Low precision is added in fp32, in the order of ranks, so that the result depends on no timing."""
        if request.wire is not None:
            return EncodedRoute(request, _PairCarrier)
        fulls = [transfer.full for transfer in request.transfers]
        exact = request.direction == "gather" or all(full.dtype.itemsize >= 4 for full in fulls)
        nbytes = sum(param.numel * full.itemsize for plan, full, _ in request.transfers for param in plan.params)
        is_small = request.process_group.size() == 2 and nbytes <= SMALL
        if self._native is not None and exact and is_small:
            return self._native._route(request)
        return _MessageRoute(request, *self._limits)


@dataclass
class _BoundRound:
    """A round as this rank does it, with the tensors of its messages."""

    receives: list[Message] = field(default_factory=list)  # pieces: of shards, in which they are added up
    before: Copies = field(default_factory=lambda: ([], []))  # make the packed messages
    sends: list[Message] = field(default_factory=list)  # posted when they are made
    after: Copies = field(default_factory=lambda: ([], []))  # of what was received (gather)
    sums: list[Sum] = field(default_factory=list)  # of what was received (reduction)


class _Works(list[Any]):
    """The works of an exchange. Two that have none are not the same."""

    __eq__ = object.__eq__


#: Messages on their way. An error may end a step before they are waited for; but gloo reads nothing more from a rank
#: once the memory for a message of that rank is gone. So it stays until they came, or as long as the process group.
_posted: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class _Exchange:
    """Rounds of messages on their way."""

    route: _MessageRoute
    rounds: Sequence[_BoundRound]
    lease: Lease  # has their memory
    shards: Sequence[torch.Tensor]  # where a reduction writes its sums, divided by the divisor
    fulls: Sequence[torch.Tensor]  # what it adds up, with the zero-copy gradients
    divisor: float
    works: list[list[tuple[dist.Work, int]]] = field(default_factory=_Works)  # by round, and the other rank of each

    def post(self, planned: _BoundRound) -> None:
        route, group, tag = self.route, self.route.process_group, self.route.tag
        self.works.append(works := [])
        peer: int | None = None
        try:
            for to, peer in planned.receives:
                values = to.of_shard(self.shards[to.section]) if isinstance(to, Piece) else to
                works.append((group.recv([values], peer, tag), peer))
            if planned.before[0]:
                foreach_copy(*planned.before)
            for source, peer in planned.sends:
                values = source.of_full(self.fulls[source.section]) if isinstance(source, Piece) else source
                works.append((group.send([values], peer, tag), peer))
        except RuntimeError as error:
            raise lost(route.wait, error, peer) from error

    def finish(self) -> None:
        """Complete the rounds. Staging is not given back if a rank is lost: what is on its way may be written to it."""
        failure: Exception | None = None
        for index, arrived in enumerate(self.rounds):
            WAITS.current, begin = self.route.wait, WAITS.clock() if WAITS.listeners else 0
            WAITS.count += 1
            try:
                for work, peer in self.works[index]:  # noqa: B007 - for the error
                    work.wait(self.route.timeout)
            except RuntimeError as error:
                raise lost(self.route.wait, error, peer) from error
            finally:
                WAITS.current = None
                if begin:
                    WAITS.tell(self.route.wait, begin)
            self.works[index].clear()
            if failure is None:
                try:
                    if arrived.after[0]:
                        foreach_copy(*arrived.after)
                    for total in arrived.sums:
                        total.write(self.shards, self.divisor, self.fulls)
                except Exception as error:
                    failure = error  # the peers wait for the other rounds: raised when they have them
            if index + DEPTH < len(self.rounds):
                self.post(self.rounds[index + DEPTH])
        self.route.posted.remove(self.works)
        if self.lease is not NO_LEASE:
            self.lease.give_back()
        if failure is not None:
            raise failure


def _message_tag(wait: Wait) -> int:
    """The tag of the messages of a route: a group may gather and reduce at once."""
    return _FIRST_TAG + 2 * wait.tag + (not wait.gathers)


class _PairCarrier(Carrier):
    """Encoded messages, each between two ranks."""

    runs_beside = True

    def __init__(self, process_group: dist.ProcessGroup, wait: Wait, memory: ExchangeMemory) -> None:
        super().__init__(process_group, wait, memory)
        self._tag, self._works = _message_tag(wait), _Works()
        self._posted = _posted.setdefault(process_group, [])
        self._posted.append(self._works)
        for rank, (message, parts) in enumerate(zip(memory.received, memory.parts, strict=True)):
            for span in parts:
                self._start(process_group.recv, message[slice(*span)], rank)

    def send(self, rank: int, span: Span) -> None:
        for peer in self.memory.receivers if self.waits_for.gathers else [rank]:
            self._start(self.process_group.send, self.memory.sent[peer][slice(*span)], peer)

    def _start(self, call: Callable[..., dist.Work], message: torch.Tensor, peer: int) -> None:
        try:
            self._works.append((call([message], peer, self._tag), peer))
        except RuntimeError as error:
            raise lost(self.waits_for, error, peer) from error

    def wait(self) -> None:
        try:
            for work, peer in self._works:  # noqa: B007 - for the error
                work.wait()
        except RuntimeError as error:
            raise lost(self.waits_for, error, peer) from error
        self._posted.remove(self._works)


class _MessageRoute(PieceRoute):
    """The route by which this rank sends its shard to all ranks, or parts of its full buffer to their owners."""

    def __init__(self, request: Request, staging: int, large: int) -> None:
        super().__init__(request)
        direction, _, process_group, tag, *_ = request
        self.process_group = process_group
        self.posted = _posted.setdefault(process_group, [])
        what = "a point-to-point " + ("all-gather" if self.gathers else "reduce-scatter")
        self.wait = Wait(what, process_group, tag, self.gathers)
        self.tag = _message_tag(self.wait)
        #: In which a message must come. A wait without it has the one in which processes connected.
        self.timeout = timedelta(seconds=timeout_of(process_group))
        plans = vectors(self.plans)
        #: The first sender, if its large pieces are received in the shard, where the sum will be; -1 if none are.
        self.first = -1 if self.gathers or self.scratch else min(self.senders, default=-1)
        own = [piece for i, plan in enumerate(plans) for piece in plan.pieces(self.rank, i) if self.gathers]
        own = [piece for piece in own if self.writes_kept or not piece.is_kept]
        with torch.inference_mode(False):  # what this rank has, into its own full buffers
            self._own: Copies = list(map(self._full, own)), list(map(self._source, own))
        itemsizes = tuple(dtype.itemsize for dtype in self.dtypes)
        capacity = max(LEAST_STAGING, staging // (DEPTH * self.most_peers))
        large = min(large, capacity, *(each.numel * self.dtypes[each.section].itemsize for each in self.zero_copy))
        given, ranks = (large, capacity, direction), {self.rank, *self.senders, *self.receivers}
        every = [plan_rounds(plans, itemsizes, i, *given) if i in ranks else () for i in range(self.size)]
        #: Each round has an entry for each owner: the rank whose values travel (gather), or that receives them.
        self._rounds = list(zip_longest(*every, fillvalue=Round()))
        self._turn = max(map(self._round_bytes, self._rounds), default=0)
        self.staging = self.scratch + min(DEPTH, len(self._rounds)) * self._turn
        leaving = (each for rounds in self._rounds for each in self._leaving(rounds))
        self.sent = sum(len(peers) * each.sent_bytes(itemsizes) for peers, each in leaving)
        self._bound: dict[int, list[_BoundRound]] = {}

    def start(self, shards: Shards = (), reduction: Reduction = PLAIN_SUM, *zero_copy: torch.Tensor) -> Pending:
        """Start an exchange in a lease of staging. Its rounds are made once for each lease."""
        lease = SHARED.lease(self.staging, CPU) if self.staging else NO_LEASE
        rounds = self._bound.get(lease.index) or self._bind(lease)
        if self.zero_copy:
            shards = [*shards, *(shards[each.section][each.chunk] for each in self.zero_copy)]
        exchange = _Exchange(self, rounds, lease, shards, [*self.fulls, *zero_copy], reduction.divisor)
        self.posted.append(exchange.works)
        if WAITS.listeners:
            WAITS.begun[self.wait[2:]] = WAITS.clock()
        for planned in rounds[:DEPTH]:
            exchange.post(planned)
        if self._own[0]:
            foreach_copy(*self._own)
        return exchange

    @torch.inference_mode(False)
    def _bind(self, lease: Lease) -> list[_BoundRound]:
        """The rounds in the memory of a lease, kept for the next time that it comes."""
        starts = [self.scratch + number % DEPTH * self._turn for number in range(len(self._rounds))]
        return self._bound.setdefault(lease.index, [*map(self._make, self._rounds, repeat(lease), starts)])

    def _arriving(self, rounds: Sequence[Round]) -> list[tuple[int, Round]]:
        """Which rank sends what in a round."""
        return [(peer, rounds[peer if self.gathers else self.rank]) for peer in self.senders]

    def _leaving(self, rounds: Sequence[Round]) -> list[tuple[Sequence[int], Round]]:
        """What is sent to which ranks."""
        own = [(self.receivers, rounds[self.rank])]
        return own if self.gathers else [([peer], rounds[peer]) for peer in self.receivers]

    def _round_bytes(self, rounds: Sequence[Round]) -> int:
        """Bytes of staging of a round on this rank."""
        arriving, leaving = self._arriving(rounds), self._leaving(rounds)
        received = sum(align(each.nbytes) - (peer == self.first) * each.packed_start for peer, each in arriving)
        return received + sum(align(each.packed_bytes) for _, each in leaving)

    def _make(self, rounds: Sequence[Round], lease: Lease, start: int) -> _BoundRound:
        """A round whose staging begins ``start`` bytes into ``lease``."""
        bound = _BoundRound()
        starts: dict[int, int | None] = {}
        for peer, arriving in self._arriving(rounds):
            messages: list[torch.Tensor | Piece] = [self._full(piece) for piece in arriving.unstaged]
            if peer == self.first:
                messages += [piece for piece, _ in arriving.whole]
                start -= arriving.packed_start
            else:
                messages += [self._staged(lease, start, *each) for each in arriving.whole]
            if arriving.packed:
                messages.append(lease.view(torch.uint8, start + arriving.packed_start, (arriving.packed_bytes,)))
            bound.receives += [(message, peer) for message in messages]
            if self.gathers:
                staged = arriving.whole + arriving.packed
                bound.after[0].extend(self._full(piece) for piece, _ in staged)
                bound.after[1].extend(self._staged(lease, start, *each) for each in staged)
            starts[peer] = start
            start += align(arriving.nbytes)
        for peers, leaving in self._leaving(rounds):
            alone = [*leaving.unstaged, *(piece for piece, _ in leaving.whole)]
            sources = list(map(self._given, alone))
            if leaving.packed:
                sources.append(lease.view(torch.uint8, start, (leaving.packed_bytes,)))
                first = start - leaving.packed_start
                bound.before[0].extend(self._staged(lease, first, *each) for each in leaving.packed)
                bound.before[1].extend(self._source(piece) for piece, _ in leaving.packed)
            bound.sends += [(source, peer) for peer in peers for source in sources]
            start += align(leaving.packed_bytes)
        if not self.gathers:
            mine, of_whole = rounds[self.rank], {**starts, self.first: None}
            for pieces, begins in ((mine.whole, of_whole), (mine.packed, starts)):
                for piece, offset in pieces:
                    bound.sums += [self._sum(piece, block, offset, lease, begins) for block in blocks(piece)]
        return bound

    def _sum(self, piece: Piece, block: Piece, offset: int, lease: Lease, starts: dict[int, int | None]) -> Sum:
        """The sum of a block of a piece over the ranks. The values of another rank lie ``offset`` bytes after its start
        in staging; they lie in the shard if it has no start."""
        offset += (block.shard_start - piece.shard_start) * self.dtypes[piece.section].itemsize
        terms: list[torch.Tensor | Piece | None] = []
        for rank in self.in_order:
            start = starts.get(rank)
            staged = None if start is None else self._staged(lease, start, block, offset)
            terms.append(self._given(block) if rank == self.rank else staged)
        return Sum(self, block, terms, lease)

    def _full(self, piece: Piece) -> torch.Tensor:
        return piece.of_full(self.fulls[piece.section])

    def _source(self, piece: Piece) -> torch.Tensor:
        """Where this rank has a piece that it sends."""
        return piece.of_shard(self.shards[piece.section]) if self.gathers else self._full(piece)

    def _given(self, piece: Piece) -> torch.Tensor | Piece:
        """The same; the piece itself if each start brings another tensor."""
        return piece if piece.section >= len(self.fulls) else self._source(piece)

    def _staged(self, lease: Lease, start: int, piece: Piece, offset: int) -> torch.Tensor:
        """A piece in staging, which begins at ``start``."""
        return lease.view(self.dtypes[piece.section], start + offset, piece.shape)
