"""Routes whose messages are encoded.

What goes from one rank to another is a *letter*: parcels of encoded numbers, and behind them small parts as they are.
Owns the layout of letters, and when they are encoded, decoded and added up. It leaves to a :class:`Mail` of the
transport how bytes travel, and to :mod:`fullshard.encodings` what they mean::

    letter    parcel 0 | parcel 1 | ... | exact parts       each parcel is sent as soon as it is encoded

    gather    shard ─▶ letter to all ─▶ full buffers of all; this rank decodes its own letter too
    reduce    gradients + what was lost before ─▶ a letter to each owner; what it loses is kept for the next step
              own gradients as they are + all letters ─▶ shard
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch

from fullshard.buffer.messages import vectors, zero_copy_in
from fullshard.buffer.plan import Piece, Plan
from fullshard.buffer.sections import align
from fullshard.buffer.slots import SHARED
from fullshard.comm.sums import SUM_DTYPES, Sum, blocks, check_summable, divide_, scratch_bytes
from fullshard.comm.transport import PLAIN_SUM, Reduction, Request, Wire, alias
from fullshard.comm.waits import WAITS, Wait
from fullshard.device import Pending, is_host
from fullshard.encodings import add_scaled
from fullshard.torch_private import Tensors, foreach_copy

#: Numbers of a parcel, which is a message. Encoding takes 0.8 of the time that it takes in parcels of a quarter, whose
#: calls cost more; larger ones leave the caches, and let the other rank wait.
PARCEL = 2**19

Span = tuple[int, int]  # where something begins and ends, in bytes


class Parcel(NamedTuple):
    """Pieces that are encoded together. Each begins on a boundary of blocks, so many numbers from the first."""

    pieces: tuple[tuple[Piece, int], ...]
    numel: int
    span: Span  # in the letter


class Letter(NamedTuple):
    """What one rank gets from another."""

    parcels: tuple[Parcel, ...]
    exact: tuple[tuple[Piece, int], ...]  # pieces that are not encoded, and where they begin, in bytes
    nbytes: int

    @property
    def messages(self) -> list[Span]:
        """The parts in which it is sent."""
        ends = [parcel.span[1] for parcel in self.parcels]
        return [(start, end) for start, end in pairwise([0, *ends, self.nbytes]) if start < end]


@lru_cache(maxsize=2048)
def write_letter(
    plans: tuple[Plan, ...], dtypes: tuple[torch.dtype, ...], wire: Wire, owner: int, sums: bool
) -> Letter:
    """The letter with the parts of ``owner``: from it to any other rank or, if they are summed up, to it."""
    parcels, exact, pieces = list[Parcel](), list[tuple[Piece, int]](), list[tuple[Piece, int]]()
    numel, start, encoding = 0, 0, wire.encoding
    every = [piece for i, plan in enumerate(plans) for piece in plan.pieces(owner, i) if sums or not piece.is_kept]
    encoded = [each for each in every if wire.encodes(each, dtypes[each.section])]
    for part in [part for piece in encoded for part in blocks(piece, PARCEL)]:
        size = -(-part.numel // encoding.block) * encoding.block
        if pieces and numel + size > PARCEL:
            parcels.append(Parcel(tuple(pieces), numel, (start, start + encoding.nbytes(numel))))
            pieces, numel, start = [], 0, start + encoding.nbytes(numel)
        pieces.append((part, numel))
        numel += size
    if pieces:
        parcels.append(Parcel(tuple(pieces), numel, (start, start + encoding.nbytes(numel))))
        start += encoding.nbytes(numel)
    for piece in every:
        if piece not in encoded:
            exact.append((piece, start))
            start += align(piece.numel * dtypes[piece.section].itemsize)
    return Letter(tuple(parcels), tuple(exact), start)


@dataclass(frozen=True)
class Post:
    """The letters of one exchange in memory, by rank."""

    gathers: bool
    sent: Sequence[torch.Tensor]  # in a gather the same for all
    received: Sequence[torch.Tensor]
    messages: Sequence[Sequence[Span]]  # the parts in which each is received
    outbox: torch.Tensor  # where ``sent`` and ``received`` lie end to end; the own letters are empty in a reduction
    inbox: torch.Tensor


class Mail(Protocol):
    """How the letters of an exchange travel. It is opened before they are written, and starts to receive."""

    waits_for: Wait
    runs_beside: bool  # whether letters may be written and read in another thread, in any order of exchanges

    def send(self, rank: int, span: Span) -> None:
        """A message to ``rank`` (in a gather, to all) is written."""

    def close(self) -> None:
        """All messages are written."""

    def wait(self) -> None:
        """Return when all letters have come, and those sent may be written again; on a device, let the current stream
        wait for that."""


class EncodedRoute:
    """A route with a wire, see :class:`~fullshard.comm.transport.Route`."""

    def __init__(self, request: Request, open_mail: Callable[[Post], Mail]) -> None:
        direction, transfers, group, _, wire = request
        assert wire is not None
        self.wire: Wire = wire
        self.open_mail, self.gathers = open_mail, direction == "gather"
        self.rank, self.size = group.rank(), group.size()
        if not self.gathers:
            check_summable(transfers)
        self.device, plans = transfers[0].full.device, [transfer.plan for transfer in transfers]
        self.fulls = [alias(transfer.full) for transfer in transfers]
        self.shards = [alias(transfer.shard) for transfer in transfers] if self.gathers else []
        #: Gradients that are not in a buffer: each is a section of its own, behind the others.
        self.zero_copy = zero_copy_in(plans) if any(plan.is_messages for plan in plans) else []
        sections = [*range(len(plans)), *(each.section for each in self.zero_copy)]
        self.dtypes = tuple(self.fulls[section].dtype for section in sections)
        self.shard_dtypes = [transfers[section].shard.dtype for section in sections]
        given = vectors(plans, joined=False), self.dtypes, wire._replace(feedback=None)
        self.letters = [write_letter(*given, owner, not self.gathers) for owner in range(self.size)]
        if self.gathers:  # a collective wants letters of one size
            most = max(letter.nbytes for letter in self.letters)
            self.letters = [letter._replace(nbytes=most) for letter in self.letters]
        #: What a gather takes from this rank's own shard.
        pieces = [piece for i, plan in enumerate(plans) for piece in plan.pieces(self.rank, i)] if self.gathers else []
        exact = [piece for piece, _ in self.letters[self.rank].exact]
        self.own = [piece for piece in pieces if piece.is_kept or piece in exact]
        nbytes = [letter.nbytes for letter in self.letters]
        received = [nbytes[self.rank]] * self.size
        sent = [0] * self.size if self.gathers else nbytes
        if not self.gathers:
            received[self.rank] = sent[self.rank] = 0
        self.sent = (self.size - 1) * nbytes[self.rank] if self.gathers else sum(sent)
        scratch = 0 if self.gathers else max(map(scratch_bytes, self.dtypes, self.shard_dtypes))
        #: Where parts of the staging begin: sums, a parcel, the letters received and those sent.
        self.starts = [scratch, *accumulate([*received, *sent], initial=scratch + 4 * PARCEL)]
        self.staging = self.starts[-1]

    def start(
        self, shards: Sequence[torch.Tensor] = (), reduction: Reduction = PLAIN_SUM, *zero_copy: torch.Tensor
    ) -> Pending:
        shards = [*shards, *(shards[each.section][each.chunk] for each in self.zero_copy)]
        exchange = _Exchange(self, shards, [*self.fulls, *zero_copy], reduction.divisor)
        if exchange.mail.runs_beside:
            exchange.running = _threads.submit(exchange.run)
        else:
            exchange.write()
        return exchange


class _Exchange:
    """Letters on their way."""

    running: Future[None] | None = None  # all of it, in another thread

    @torch.inference_mode(False)
    def __init__(
        self, route: EncodedRoute, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], divisor: float
    ) -> None:
        self._route, self._shards, self._fulls, self._divisor = route, shards, fulls, divisor
        self._lease = lease = SHARED.lease(route.staging, route.device)
        scratch, *starts = route.starts
        self._parcel = lease.view(torch.float32, scratch, (PARCEL,))
        letters = [lease.view(torch.uint8, start, (stop - start,)) for start, stop in pairwise(starts)]
        self._received, sent = letters[: route.size], letters[route.size :]
        if route.gathers:
            sent = [self._received[route.rank]] * route.size
        owners = range(route.size) if route.gathers else [route.rank] * route.size
        messages = [[] if rank == route.rank else route.letters[owner].messages for rank, owner in enumerate(owners)]
        bounds = starts[0], starts[route.size], starts[-1]
        inbox, outbox = (lease.view(torch.uint8, start, (stop - start,)) for start, stop in pairwise(bounds))
        self._sent = sent
        self.mail = route.open_mail(Post(route.gathers, sent, self._received, messages, outbox, inbox))

    def finish(self) -> None:
        WAITS.current = self.mail.waits_for
        WAITS.count += 1
        try:
            if self.running is not None:
                self.running.result()
            else:
                self._read()
        finally:
            WAITS.current = None
        self._lease.give_back()

    def run(self) -> None:
        self.write()
        self._read()

    @torch.inference_mode(False)
    @torch.no_grad()
    def write(self) -> None:
        """Write the letters, and send them."""
        route = self._route
        if not is_host(route.device):
            self._write_together()
        elif route.gathers:
            self._write(route.rank)
        else:
            for distance in range(1, route.size):
                self._write((route.rank + distance) % route.size)
        if route.own:
            wholes = [piece.of_full(self._fulls[piece.section]) for piece in route.own]
            foreach_copy(wholes, [self._source(piece) for piece in route.own])
        self.mail.close()

    def _source(self, piece: Piece) -> torch.Tensor:
        """Where this rank has a piece that it sends."""
        shards = self._route.shards
        return piece.of_shard(shards[piece.section]) if shards else piece.of_full(self._fulls[piece.section])

    def _fill(self, parcel: Parcel, lost: Tensors = ()) -> torch.Tensor:
        """The numbers of a parcel in scratch memory, with what was ``lost`` before. What is left of a block repeats the
        last number before it."""
        sources = [self._source(piece) for piece, _ in parcel.pieces]
        values, block = self._parcel[: parcel.numel], self._route.wire.encoding.block
        if lost:
            foreach_copy([*_cut(values, parcel)], lost)
            for each, source in zip(_cut(values, parcel), sources, strict=True):
                each.add_(source)
        else:
            foreach_copy([*_cut(values, parcel)], sources)
        for piece, start in parcel.pieces:
            end = start + piece.numel
            if end % block:
                values[end : end + -end % block] = values[end - 1]
        return values

    def _write(self, owner: int) -> None:
        """Write the letter with the parts of ``owner``, and send it."""
        route, letter, out = self._route, self._route.letters[owner], self._sent[owner]
        feedback, encoding = route.wire.feedback, route.wire.encoding
        ready = list(letter.messages)
        for piece, start in letter.exact:
            _at(out, route.dtypes[piece.section], piece, start).copy_(self._source(piece))
        for parcel in letter.parcels:
            lost = [piece.of_full(feedback.lost[piece.section]) for piece, _ in parcel.pieces] if feedback else []
            encoded, scratch = out[slice(*parcel.span)], self._parcel[: parcel.numel]
            is_finite = encoding.encode(
                self._values(parcel) if not lost else self._fill(parcel, lost), encoded, scratch
            )
            self.mail.send(owner, ready.pop(0))
            if route.gathers or lost:
                decoded, inverse = encoding.decode(encoded, parcel.numel)
            if route.gathers:
                for (piece, _), each in zip(parcel.pieces, _cut(decoded, parcel), strict=True):
                    torch.mul(each, inverse, out=piece.of_full(self._fulls[piece.section]))
            elif lost:
                scratch.sub_(decoded).mul_(inverse)
                if not is_finite:
                    scratch.nan_to_num_(0.0, 0.0, 0.0)  # an infinity is not to stay for ever
                foreach_copy(lost, [*_cut(scratch, parcel)])
        for message in ready:
            self.mail.send(owner, message)

    def _write_together(self) -> None:
        """Write all letters on a device, by a number of kernels that depends on neither ranks nor parameters."""
        route, encoding, feedback = self._route, self._route.wire.encoding, self._route.wire.feedback
        owners = [route.rank] if route.gathers else [rank for rank in range(route.size) if rank != route.rank]
        exact = [(owner, *each) for owner in owners for each in route.letters[owner].exact]
        if exact:
            targets = [
                _at(self._sent[owner], route.dtypes[piece.section], piece, start) for owner, piece, start in exact
            ]
            foreach_copy(targets, [self._source(piece) for _, piece, _ in exact])
        every = [(owner, parcel) for owner in owners for parcel in route.letters[owner].parcels]
        joined = _joined([parcel for _, parcel in every])
        if not every:
            return
        lost = [piece.of_full(feedback.lost[piece.section]) for piece, _ in joined.pieces] if feedback else []
        values = self._gathered(joined, [self._source(piece) for piece, _ in joined.pieces])
        if lost:
            values.add_(self._gathered(joined, lost))
        outs = [self._sent[owner][slice(*parcel.span)] for owner, parcel in every]
        decoded, inverse = encoding.encode_together(values, [parcel.numel for _, parcel in every], outs)
        if lost:
            values.sub_(decoded).mul_(inverse).nan_to_num_(0.0, 0.0, 0.0)
            foreach_copy(lost, [*_cut(values, joined)])

    def _gathered(self, joined: Parcel, sources: Tensors) -> torch.Tensor:
        """The numbers of parcels on a device, and the last of each piece repeated to the end of its block."""
        values = torch.empty(joined.numel, device=self._route.device)
        foreach_copy([*_cut(values, joined)], sources)
        ends = tuple(start + piece.numel for piece, start in joined.pieces)
        gaps, lasts = _gaps(ends, self._route.wire.encoding.block, self._route.device)
        if len(gaps):
            values[gaps] = values[lasts]
        return values

    def _read_together(self) -> None:
        """Read all letters on a device, as they were written."""
        route, encoding, feedback = self._route, self._route.wire.encoding, self._route.wire.feedback
        ranks = [rank for rank in range(route.size) if route.gathers or rank != route.rank]
        owners = ranks if route.gathers else [route.rank] * len(ranks)
        every = [
            (rank, parcel) for rank, owner in zip(ranks, owners, strict=True) for parcel in route.letters[owner].parcels
        ]
        exact = [
            (rank, *each) for rank, owner in zip(ranks, owners, strict=True) for each in route.letters[owner].exact
        ]
        if every:
            parts = [self._received[rank][slice(*parcel.span)] for rank, parcel in every]
            decoded = encoding.decode_together(parts, [parcel.numel for _, parcel in every])
        if route.gathers:
            joined = _joined([parcel for _, parcel in every])
            targets = [piece.of_full(self._fulls[piece.section]) for piece, _ in joined.pieces]
            targets += [piece.of_full(self._fulls[piece.section]) for _, piece, _ in exact]
            sources = [*(_cut(decoded, joined) if every else ()), *(self._exact(*each) for each in exact)]
            if targets:
                foreach_copy(targets, sources)
            return
        joined = _joined(route.letters[route.rank].parcels)
        if every:
            total = self._gathered(joined, [self._source(piece) for piece, _ in joined.pieces])
            if feedback is not None and feedback.is_loaded:
                self._add_loaded(total, joined)
            total.add_(decoded.view(len(ranks), -1).sum(0))
            divide_(total, self._divisor)
            targets = [piece.of_shard(self._shards[piece.section]) for piece, _ in joined.pieces]
            foreach_copy(targets, [*_cut(total, joined)])
        if feedback is not None:
            feedback.is_loaded = False
        for dtype in {route.dtypes[piece.section] for _, piece, _ in exact}:
            self._add_up_exact([each for each in exact if route.dtypes[each[1].section] == dtype], len(ranks))

    def _add_up_exact(self, letters: Sequence[tuple[int, Piece, int]], count: int) -> None:
        """Write the sums of parts of one dtype that came from so many other ranks as they are."""
        pieces = [piece for _, piece, _ in letters[: len(letters) // count]]
        terms = [*map(self._source, pieces), *(self._exact(*each) for each in letters)]
        sum_dtype = SUM_DTYPES[terms[0].dtype]
        values = torch.empty(sum(term.numel() for term in terms), dtype=sum_dtype, device=self._route.device)
        foreach_copy(list(map(torch.Tensor.view_as, values.split([term.numel() for term in terms]), terms)), terms)
        divide_(total := values.view(count + 1, -1).sum(0), self._divisor)
        targets = [piece.of_shard(self._shards[piece.section]) for piece in pieces]
        sums = total.split([piece.numel for piece in pieces])
        foreach_copy(targets, list(map(torch.Tensor.view_as, sums, targets)))

    def _values(self, parcel: Parcel) -> torch.Tensor:
        """The numbers of a parcel, where they lie if that is one run of them."""
        (piece, _), *others = parcel.pieces
        source = self._source(piece)
        is_run = not others and source.dtype == torch.float32 and source.numel() == parcel.numel
        return source if is_run and source.is_contiguous() else self._fill(parcel)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _read(self) -> None:
        """Decode the letters that come."""
        self.mail.wait()
        if not is_host(self._route.device):
            return self._read_together()
        route, encoding = self._route, self._route.wire.encoding
        for rank, letter in enumerate(route.letters) if route.gathers else ():
            if rank == route.rank:
                continue
            for parcel in letter.parcels:
                values, factor = encoding.decode(self._received[rank][slice(*parcel.span)], parcel.numel)
                for (piece, _), each in zip(parcel.pieces, _cut(values, parcel), strict=True):
                    torch.mul(each, factor, out=piece.of_full(self._fulls[piece.section]))
            for piece, start in letter.exact:
                piece.of_full(self._fulls[piece.section]).copy_(self._exact(rank, piece, start))
        if not route.gathers:
            self._add_up(route.letters[route.rank])

    def _exact(self, rank: int, piece: Piece, start: int) -> torch.Tensor:
        """A piece that came as it is."""
        return _at(self._received[rank], self._route.dtypes[piece.section], piece, start)

    def _add_up(self, letter: Letter) -> None:
        """Write the sums of this rank's own gradients and of those that came."""
        route, encoding, feedback = self._route, self._route.wire.encoding, self._route.wire.feedback
        others = [rank for rank in range(route.size) if rank != route.rank]
        for parcel in letter.parcels:
            total = self._fill(parcel)
            if feedback is not None and feedback.is_loaded:
                self._add_loaded(total, parcel)
            for rank in others:
                add_scaled(total, *encoding.decode(self._received[rank][slice(*parcel.span)], parcel.numel))
            divide_(total, self._divisor)
            targets = [piece.of_shard(self._shards[piece.section]) for piece, _ in parcel.pieces]
            foreach_copy(targets, [*_cut(total, parcel)])
        if feedback is not None:
            feedback.is_loaded = False
        for piece, start in letter.exact:
            dtypes = route.dtypes[piece.section], route.shard_dtypes[piece.section]
            for block in blocks(piece):
                at = start + (block.shard_start - piece.shard_start) * dtypes[0].itemsize
                terms = [
                    self._source(block) if rank == route.rank else self._exact(rank, block, at)
                    for rank in range(route.size)
                ]
                Sum(block, terms, *dtypes, self._lease).write(self._shards, self._divisor)

    def _add_loaded(self, total: torch.Tensor, parcel: Parcel) -> None:
        """Add what a checkpoint had, once."""
        assert self._route.wire.feedback is not None
        for (piece, _), each in zip(parcel.pieces, _cut(total, parcel), strict=True):
            each.add_(own := piece.of_full(self._route.wire.feedback.lost[piece.section]))
            own.zero_()


class _Threads:
    """Threads that write and read letters beside the training, one for each exchange that is under way: none waits for
    another's letters. A program may end while they wait, which a pool of the standard library would not let it."""

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
os.register_at_fork(after_in_child=_threads.__init__)  # type: ignore[misc]


def _at(letter: torch.Tensor, dtype: torch.dtype, piece: Piece, start: int) -> torch.Tensor:
    """A piece in a letter that has it as it is."""
    return letter[start : start + piece.numel * dtype.itemsize].view(dtype).view(piece.shape)


def _joined(parcels: Sequence[Parcel]) -> Parcel:
    """Parcels end to end, as if they were one."""
    starts = [*accumulate((parcel.numel for parcel in parcels), initial=0)]
    pieces = (
        (piece, at + start) for at, parcel in zip(starts, parcels, strict=False) for piece, start in parcel.pieces
    )
    return Parcel(tuple(pieces), starts[-1], (0, 0))


@lru_cache(maxsize=256)
def _gaps(ends: tuple[int, ...], block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left of the blocks in which pieces end, and the last number before each: made once, since this waits for
    the device."""
    gaps = [at for end in ends for at in range(end, end + -end % block)]
    lasts = [end - 1 for end in ends for _ in range(-end % block)]
    with torch.inference_mode(False):
        return torch.tensor(gaps, dtype=torch.long).to(device), torch.tensor(lasts, dtype=torch.long).to(device)


def _cut(values: torch.Tensor, parcel: Parcel) -> Iterator[torch.Tensor]:
    """The pieces of a parcel."""
    for piece, start in parcel.pieces:
        yield values[start : start + piece.numel].view(piece.shape)
