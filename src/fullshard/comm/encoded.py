"""Routes whose messages are encoded.

What goes from one rank to another is an *encoded message*: chunks of encoded numbers, and behind them small parts as
they are. Owns the layout of messages, and when they are encoded, decoded and added up. It leaves to a :class:`Carrier`
of the transport how bytes travel, and to :mod:`fullshard.encodings` what they mean::

    message    chunk 0 | chunk 1 | ... | exact parts       each chunk is sent as soon as it is encoded

    gather    shard ─▶ message to all ─▶ full buffers of all; this rank decodes its own message too
    reduce    gradients + what was lost before ─▶ a message to each owner; what it loses is kept for the next step
              own gradients as they are + all messages ─▶ shard
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from queue import SimpleQueue
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.buffer.messages import vectors
from fullshard.buffer.plan import BufferPlan, Piece
from fullshard.buffer.sections import align
from fullshard.buffer.slots import SHARED
from fullshard.comm.sums import SUM_DTYPES, PieceRoute, Sum, blocks, divide_
from fullshard.comm.transport import PLAIN_SUM, Reduction, Request, Shards, Wire
from fullshard.comm.waits import WAITS, Wait
from fullshard.device import Pending, is_host
from fullshard.encoded_tensors import EncodedTensors, add_up, decode_tensors, encode_each, encode_together
from fullshard.encodings import Encoding, Unencoded
from fullshard.platforms import after_fork
from fullshard.torch_private import foreach_copy

#: Numbers of a chunk, which is sent as one part. Chunks of a quarter take 1.25 times as long to encode, because of
#: their calls. Larger ones leave the caches, and let the other rank wait.
CHUNK = 2**19

Span = tuple[int, int]  # where something begins and ends, in bytes


class EncodedChunk(NamedTuple):
    """Pieces that are encoded together, each with the position of its first number, which is the first of a block."""

    pieces: tuple[tuple[Piece, int], ...]
    numel: int
    span: Span  # in the message


class EncodedMessage(NamedTuple):
    """What one rank gets from another."""

    chunks: tuple[EncodedChunk, ...]
    exact: tuple[tuple[Piece, int], ...]  # pieces that are not encoded, and where they begin, in bytes
    nbytes: int

    @property
    def parts(self) -> list[Span]:
        """The parts in which it is sent."""
        ends = [chunk.span[1] for chunk in self.chunks]
        return [(start, end) for start, end in pairwise([0, *ends, self.nbytes]) if start < end]


@lru_cache(maxsize=2048)
def lay_out_message(
    plans: tuple[BufferPlan, ...], dtypes: tuple[torch.dtype, ...], wire: Wire, owner: int, sums: bool
) -> EncodedMessage:
    """The message with the parts of ``owner``: from it to any other rank or, if it ``sums`` them, to it."""
    groups, numels, exact = list[list[tuple[Piece, int]]](), list[int](), list[tuple[Piece, int]]()
    every = [piece for i, plan in enumerate(plans) for piece in plan.pieces(owner, i) if sums or not piece.is_kept]
    encoded = [each for each in every if wire.encodes(each, dtypes[each.section])]
    for part in [part for piece in encoded for part in blocks(piece, CHUNK)]:
        size = -(-part.numel // wire.encoding.block) * wire.encoding.block
        if not groups or numels[-1] + size > CHUNK:
            groups.append([])
            numels.append(0)
        groups[-1].append((part, numels[-1]))
        numels[-1] += size
    starts = [*accumulate(map(wire.encoding.nbytes, numels), initial=0)]
    chunks, start = tuple(map(EncodedChunk, map(tuple, groups), numels, pairwise(starts))), starts[-1]
    for piece in every:
        if piece not in encoded:
            exact.append((piece, start))
            start += align(piece.numel * dtypes[piece.section].itemsize)
    return EncodedMessage(chunks, tuple(exact), start)


class ExchangeMemory(NamedTuple):
    """The messages of one exchange in memory, by rank."""

    sent: Sequence[torch.Tensor]  # in a gather the same for all
    received: Sequence[torch.Tensor]
    parts: Sequence[Sequence[Span]]  # the parts in which each is received
    all_received: torch.Tensor  # where they lie end to end; this rank's own is empty in a reduction
    all_sent: torch.Tensor
    receivers: Sequence[int]  # ranks to which it sends


class Carrier:
    """How the messages of an exchange travel. It is opened before they are written, and may start to receive."""

    runs_beside = False  # whether messages may be written and read in another thread, in any order of exchanges

    def __init__(self, process_group: dist.ProcessGroup, wait: Wait, memory: ExchangeMemory) -> None:
        self.process_group, self.waits_for, self.memory = process_group, wait, memory

    def send(self, rank: int, span: Span) -> None:
        """A part of the message to ``rank`` (in a gather, to all) is written."""

    def close(self) -> None:
        """All messages are written."""

    def wait(self) -> None:
        """Return when all messages have come, and those sent may be written again; on a device, let the current stream
        wait for that."""
        raise NotImplementedError


class EncodedRoute(PieceRoute):
    """A route with a wire, see :class:`~fullshard.comm.transport.Route`."""

    def __init__(self, request: Request, carrier: type[Carrier]) -> None:
        super().__init__(request)
        direction, transfers, group, tag, wire, _ = request
        assert wire is not None
        self.wire = wire
        self.wait = Wait(f"an encoded {direction}", group, tag, self.gathers)
        self.open_carrier = partial(carrier, group, self.wait)
        self.device, plans = transfers[0].full.device, [transfer.plan for transfer in transfers]
        given = vectors(plans, joined=False), self.dtypes, wire._replace(feedback=None)
        self.messages = [lay_out_message(*given, owner, not self.gathers) for owner in range(self.size)]
        if self.gathers:  # a collective wants messages of one size
            most = max(message.nbytes for message in self.messages)
            self.messages = [message._replace(nbytes=most) for message in self.messages]
        #: What a gather takes from this rank's own shard.
        pieces = [piece for i, plan in enumerate(plans) for piece in plan.pieces(self.rank, i)] if self.gathers else []
        exact = [piece for piece, _ in self.messages[self.rank].exact]
        self.own = [each for each in pieces if (self.writes_kept and each.is_kept) or each in exact]
        nbytes = [message.nbytes for message in self.messages]
        self.sent = sum(nbytes[self.rank if self.gathers else peer] for peer in self.receivers)
        #: Bytes of the messages received and of those sent, by rank. A gather sends what it has received of itself.
        self.nbytes = [0] * self.size, [0] * self.size
        self.parts: list[list[Span]] = [[] for _ in nbytes]  # in which each message comes
        for peer in self.senders:
            self.parts[peer] = self.messages[peer if self.gathers else self.rank].parts
        for peer in [*self.senders, self.rank] if self.gathers else self.senders:
            self.nbytes[0][peer] = nbytes[self.rank]
        for peer in [] if self.gathers else self.receivers:
            self.nbytes[1][peer] = nbytes[peer]
        #: The staging has memory for sums, a chunk, and these messages.
        self.staging = self.scratch + 4 * CHUNK + sum(map(sum, self.nbytes))

    def start(self, shards: Shards = (), reduction: Reduction = PLAIN_SUM, *zero_copy: torch.Tensor) -> Pending:
        shards = [*shards, *(shards[each.section][each.chunk] for each in self.zero_copy)]
        if WAITS.listeners:
            WAITS.begun[self.wait[2:]] = WAITS.clock()
        exchange = _EncodedExchange(self, shards, [*self.fulls, *zero_copy], reduction.divisor)
        if exchange.carrier.runs_beside:
            exchange.running = _threads.submit(exchange.run)
        else:
            exchange.write()
        return exchange


class _EncodedExchange:
    """Messages on their way."""

    running: Future[None] | None = None  # all of it, in another thread

    @torch.inference_mode(False)
    def __init__(
        self, route: EncodedRoute, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], divisor: float
    ) -> None:
        self._route, self._shards, self._fulls, self._divisor = route, shards, fulls, divisor
        self._lease = lease = SHARED.lease(route.staging, route.device)
        self._chunk = lease.view(torch.float32, route.scratch, (CHUNK,))
        messages = lease.view(torch.uint8, route.scratch + 4 * CHUNK, (sum(map(sum, route.nbytes)),))
        ends = messages.split([*map(sum, route.nbytes)])
        self._received, self._sent = (each.split(nbytes) for each, nbytes in zip(ends, route.nbytes, strict=True))
        if route.gathers:
            self._sent = [self._received[route.rank]] * route.size
        memory = ExchangeMemory(self._sent, self._received, route.parts, ends[0], ends[1], route.receivers)
        self.carrier = route.open_carrier(memory)

    def finish(self) -> None:
        WAITS.current, begin = self._route.wait, WAITS.clock() if WAITS.listeners else 0
        WAITS.count += 1
        try:
            if self.running is not None:
                self.running.result()
            else:
                self._read()
        finally:
            WAITS.current = None
            if begin:
                WAITS.tell(self._route.wait, begin)
        self._lease.give_back()

    def run(self) -> None:
        self.write()
        self._read()

    @torch.inference_mode(False)
    @torch.no_grad()
    def write(self) -> None:
        """Write the messages, and send them: on a device all together, elsewhere one after the other."""
        route = self._route
        owners = [route.rank] if route.gathers else route.receivers
        for some in [[owner] for owner in owners] if is_host(route.device) else [owners]:
            self._write(some)
        if route.own:
            foreach_copy([*map(self._target, route.own)], [*map(self._source, route.own)])
        self.carrier.close()

    def _source(self, piece: Piece) -> torch.Tensor:
        """Where this rank has a piece that it sends."""
        shards = self._route.shards
        return piece.of_shard(shards[piece.section]) if shards else piece.of_full(self._fulls[piece.section])

    def _target(self, piece: Piece) -> torch.Tensor:
        """Where this rank writes a piece that comes."""
        is_gathered = self._route.gathers
        return piece.of_full(self._fulls[piece.section]) if is_gathered else piece.of_shard(self._shards[piece.section])

    def _write(self, owners: Sequence[int]) -> None:
        """Write the messages with the parts of ``owners``, and send them."""
        route, encoding, feedback = self._route, self._route.wire.encoding, self._route.wire.feedback
        exact = [(self._sent[owner], *each) for owner in owners for each in route.messages[owner].exact]
        if exact:
            foreach_copy([self._exact(*each) for each in exact], [self._source(piece) for _, piece, _ in exact])
        lost = feedback.lost if feedback else ()
        chunks = [
            self._tensors(chunk, self._sent[owner], route.gathers, lost)
            for owner in owners
            for chunk in route.messages[owner].chunks
        ]
        ready = [(owner, part) for owner in owners for part in route.messages[owner].parts]
        if is_host(route.device):
            for _ in encode_each(encoding, chunks, self._chunk):
                self.carrier.send(*ready.pop(0))
        else:
            encode_together(encoding, chunks)
        for part in ready:
            self.carrier.send(*part)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _read(self) -> None:
        """Decode the messages that come."""
        self.carrier.wait()
        route = self._route
        if not route.gathers:
            return self._add_up(route.messages[route.rank])
        others = route.senders
        chunks = [
            self._tensors(chunk, self._received[rank], is_own=False)
            for rank in (others if is_host(route.device) else range(route.size))  # a device decodes its own here too
            for chunk in route.messages[rank].chunks
        ]
        decode_tensors(route.wire.encoding, chunks)
        exact = [(self._received[rank], *each) for rank in others for each in route.messages[rank].exact]
        if exact:
            foreach_copy([self._target(piece) for _, piece, _ in exact], [self._exact(*each) for each in exact])

    def _exact(self, message: torch.Tensor, piece: Piece, start: int) -> torch.Tensor:
        """A piece in a message that has it as it is."""
        dtype = self._route.dtypes[piece.section]
        return message[start : start + piece.numel * dtype.itemsize].view(dtype).view(piece.shape)

    def _add_up(self, message: EncodedMessage) -> None:
        """Write the sums of this rank's own gradients and of those that came."""
        route, feedback = self._route, self._route.wire.feedback
        lost = feedback.lost if feedback and feedback.is_loaded else ()
        self._add_up_chunks(route.wire.encoding, message.chunks, lost)
        if feedback is not None:
            feedback.is_loaded = False
        exact = dict[torch.dtype, list[EncodedChunk]]()
        for piece, start in message.exact:
            dtype = route.dtypes[piece.section]
            for block in blocks(piece):
                at = start + (block.shard_start - piece.shard_start) * dtype.itemsize
                if is_host(route.device):
                    terms = [
                        self._source(block) if rank == route.rank else self._exact(self._received[rank], block, at)
                        for rank in route.in_order
                    ]
                    Sum(route, block, terms, self._lease).write(self._shards, self._divisor)
                else:
                    span = at, at + block.numel * dtype.itemsize
                    exact.setdefault(dtype, []).append(EncodedChunk(((block, 0),), block.numel, span))
        for dtype, chunks in exact.items():
            self._add_up_chunks(Unencoded(dtype, SUM_DTYPES[dtype]), chunks)

    def _add_up_chunks(
        self, encoding: Encoding, chunks: Sequence[EncodedChunk], lost: Sequence[torch.Tensor] = ()
    ) -> None:
        """Write the sums of chunks that lie alike in the messages of all other ranks."""
        route = self._route
        tensors = [self._tensors(chunk, self._received[route.rank], True, lost) for chunk in chunks]
        received = [self._received[rank] for rank in route.in_order if rank != route.rank]
        others = [[each[slice(*chunk.span)] for chunk in chunks] for each in received]
        add_up(encoding, tensors, others, partial(divide_, divisor=self._divisor), self._chunk)

    def _tensors(
        self, chunk: EncodedChunk, message: torch.Tensor, is_own: bool, lost: Sequence[torch.Tensor] = ()
    ) -> EncodedTensors:
        """The tensors of a chunk, and their place in a message. Shards only have what is this rank's own."""
        pieces, starts = zip(*chunk.pieces, strict=True)
        sources = [*map(self._source, pieces)] if is_own or not self._route.gathers else []
        targets = [*map(self._target, pieces)] if is_own or self._route.gathers else []
        kept = [piece.of_full(lost[piece.section]) for piece in pieces] if lost else []
        return EncodedTensors(starts, chunk.numel, message[slice(*chunk.span)], sources, targets, kept)


class _Threads:
    """Threads that write and read messages beside the training, one for each exchange that is under way: none waits for
    another's messages. A program may end while they wait, which a pool of the standard library would not let it."""

    def __init__(self) -> None:
        self._idle = list[SimpleQueue[tuple[Future[None], Callable[[], None]]]]()

    def submit(self, function: Callable[[], None]) -> Future[None]:
        if self._idle:
            queue = self._idle.pop()
        else:
            queue = SimpleQueue()
            threading.Thread(target=self._serve, args=(queue,), name="fullshard-wire", daemon=True).start()
        future = Future[None]()
        queue.put((future, function))
        return future

    def _serve(self, queue: SimpleQueue[tuple[Future[None], Callable[[], None]]]) -> None:
        while True:
            future, function = queue.get()
            try:
                function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del future, function  # until the next one comes
            self._idle.append(queue)


_threads = _Threads()
after_fork(_threads.__init__)  # type: ignore[misc]
