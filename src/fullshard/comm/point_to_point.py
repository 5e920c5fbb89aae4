"""Messages between pairs of ranks, for gloo on the CPU.

A gather receives large pieces where the parameter will be read; a reduction is an all-to-all and a local sum, which
moves half the bytes of gloo's own and adds low precision in fp32. Owns the tensors of the messages, which
:mod:`fullshard.comm.messages` lays out, and their order in time::

    start       round 0, round 1: all receives posted, small pieces packed, all sends posted; own part copied
    finish      wait for round 0, copy or add what came; round 2 posted in its staging
                wait for round 1, copy or add what came; round 3 posted in its staging  ...

No rank waits before everything it has in these rounds is posted, so none waits for ever. Most gathers have one round.
A reduction with more than two goes on in ``finish``, which ranks must therefore call in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from fullshard.buffer.plan import Plan
from fullshard.comm.messages import Piece, Round, gather_rounds, reduce_rounds, whole_extent
from fullshard.comm.routes import Copies, alias, check_transfers
from fullshard.comm.staging import SHARED, Lease, align
from fullshard.comm.sums import Sum, block_sum, blocks, check_summable, scratch_bytes, view_piece
from fullshard.comm.transport import GatherRoute, MovesPrivately, Nowhere, ReduceRoute, Reduction, Transfer, Transport
from fullshard.device import CPU, Pending
from fullshard.torch_private import foreach_copy

#: Bytes of staging for what an exchange receives from all ranks. More is not faster, 2 MiB take half more CPU.
STAGING = 8 * 2**20
#: Bytes from which a piece gets a message of its own. A message costs about 30 us on either side, and more where its
#: arrival stops the thread that sends another; copying so many bytes twice costs about as much.
LARGE = 256 * 2**10
#: Bytes of a group up to which two ranks use the backend's collectives, at a third of the cost: gloo's receiving thread
#: spins while another thread sends to the same rank, which two that exchange little at the same moment hit nearly every
#: time. More ranks, and larger groups, cost less by messages. Measured by ``benchmarks/exchanges.py``.
SMALL = 2**18
#: Bytes of staging for each rank in a round, however many ranks there are.
_LEAST_STAGING = 64 * 2**10
#: Rounds that are under way at once.
_DEPTH = 2
#: Where the tags of our messages begin, so that a user's own on the same group are not taken for them.
_FIRST_TAG = 0x4653_0000

#: A message as the process group wants it, and the rank at its other end.
Message = tuple[list[torch.Tensor], int]
_Where = Callable[[Piece], torch.Tensor]


class PointToPointTransport(MovesPrivately):
    """Moves buffers by messages between ranks.

    Args:
        staging: bytes of staging for what an exchange receives from all ranks together.
        large: bytes from which a piece gets a message of its own.
        native: gathers and reduces small groups of two ranks; ``None`` for messages whatever the size.
    """

    name = "p2p"

    def __init__(self, staging: int = STAGING, large: int = LARGE, native: Transport | None = None) -> None:
        self._limits = (staging, large)
        self._native = native

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def gather_route(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> GatherRoute:
        """See :class:`~fullshard.comm.transport.Transport`; ``tag`` is not used for small groups of two ranks."""
        if self._native is not None and _is_small(transfers, process_group):
            return self._native.gather_route(transfers, process_group, tag)
        check_transfers(transfers, process_group.size(), one_dtype=True)
        return _MessageGatherRoute(transfers, process_group, tag, *self._limits) if transfers else Nowhere()

    def reduce_route(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> ReduceRoute:
        """See :class:`~fullshard.comm.transport.Transport`; ``Reduction.sum_only`` is always so.

        Low precision is added in fp32, in the order of ranks, so that the result depends on no timing.
        """
        full_precision = all(transfer.full.dtype.itemsize >= 4 for transfer in transfers)
        if self._native is not None and full_precision and _is_small(transfers, process_group):
            return self._native.reduce_route(transfers, process_group, tag)
        check_transfers(transfers, process_group.size(), one_dtype=False)
        check_summable(transfers)
        return _MessageReduceRoute(transfers, process_group, tag, *self._limits) if transfers else Nowhere()


def _is_small(transfers: Sequence[Transfer], process_group: dist.ProcessGroup) -> bool:
    return process_group.size() == 2 and sum(transfer.full.nbytes for transfer in transfers) <= SMALL


@dataclass
class _BoundRound:
    """A round as this rank does it, with the tensors of its messages."""

    receives: list[Message] = field(default_factory=list)  # posted first
    before: Copies = field(default_factory=lambda: ([], []))  # make the packed messages
    sends: list[Message] = field(default_factory=list)  # posted when they are made
    after: Copies = field(default_factory=lambda: ([], []))  # of what was received (gather)
    sums: list[Sum] = field(default_factory=list)  # of what was received (reduction)


def _copy_arrived(arrived: _BoundRound) -> None:
    foreach_copy(*arrived.after)


class _Exchange:
    """Rounds of messages on their way; ``complete`` follows the arrival of each, ``what`` is its name in errors."""

    def __init__(
        self,
        what: str,
        process_group: dist.ProcessGroup,
        tag: int,
        rounds: Sequence[_BoundRound],
        lease: Lease | None,
        complete: Callable[[_BoundRound], None],
    ) -> None:
        self._what = what
        self._process_group = process_group
        self._tag = _FIRST_TAG + tag
        self._rounds = rounds
        self._lease = lease
        self._complete = complete
        self._works: list[list[tuple[dist.Work, int]]] = []

    def start(self) -> None:
        for planned in self._rounds[:_DEPTH]:
            self._post(planned)

    def _post(self, planned: _BoundRound) -> None:
        group, tag = self._process_group, self._tag
        works = [(group.recv(tensors, peer, tag), peer) for tensors, peer in planned.receives]
        foreach_copy(*planned.before)
        works += [(group.send(tensors, peer, tag), peer) for tensors, peer in planned.sends]
        self._works.append(works)

    def finish(self) -> None:
        failure: Exception | None = None
        for index, arrived in enumerate(self._rounds):
            self._wait(self._works[index])
            if failure is None:
                try:
                    self._complete(arrived)
                except Exception as error:
                    failure = error  # the peers wait for the other rounds: raised when they have them
            if index + _DEPTH < len(self._rounds):
                self._post(self._rounds[index + _DEPTH])
        if self._lease is not None:
            SHARED.give_back(self._lease)
        if failure is not None:
            raise failure

    def _wait(self, works: list[tuple[dist.Work, int]]) -> None:
        """Staging is not given back if this fails: what is still on its way may be written to it."""
        for work, peer in works:
            try:
                work.wait()
            except RuntimeError as error:
                group = self._process_group
                here, there = dist.get_global_rank(group, group.rank()), dist.get_global_rank(group, peer)
                raise RuntimeError(
                    f"rank {here} lost rank {there} in a point-to-point {self._what} (tag {self._tag - _FIRST_TAG}), "
                    f"look there for the first error: {error}"
                ) from error
        works.clear()


class _MessageRoute:
    """How some sections travel, as ``plan_rounds`` lays them out."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        process_group: dist.ProcessGroup,
        tag: int,
        staging: int,
        large: int,
        plan_rounds: Callable[[tuple[Plan, ...], tuple[int, ...], int, int, int], tuple[Round, ...]],
    ) -> None:
        self._process_group = process_group
        self._tag = tag
        world_size = process_group.size()
        self._rank = process_group.rank()
        self._peers = [(self._rank + distance) % world_size for distance in range(1, world_size)]
        self._fulls = [alias(transfer.full) for transfer in transfers]
        self._dtypes = [full.dtype for full in self._fulls]
        plans = tuple(transfer.plan for transfer in transfers)
        itemsizes = tuple(dtype.itemsize for dtype in self._dtypes)
        capacity = max(_LEAST_STAGING, staging // (_DEPTH * max(1, len(self._peers))))
        large = min(large, capacity)
        self._rounds = [plan_rounds(plans, itemsizes, owner, large, capacity) for owner in range(world_size)]
        self._count = max(map(len, self._rounds))
        self._bound: dict[int, list[_BoundRound]] = {}
        self._scratch = 0
        self._turn = max((self._round_bytes(index) for index in range(self._count)), default=0)

    def _exchange(self, what: str, complete: Callable[[_BoundRound], None]) -> _Exchange:
        """An exchange in staging of its own; its rounds there are the same ones in every step."""
        nbytes = self._scratch + min(_DEPTH, self._count) * self._turn
        lease = SHARED.lease(nbytes, CPU) if nbytes else None
        index = -1 if lease is None else lease.index
        rounds = self._bound.get(index)
        if rounds is None:
            with torch.inference_mode(False):
                starts = [self._scratch + number % _DEPTH * self._turn for number in range(self._count)]
                rounds = self._bound[index] = [self._make(number, lease, at) for number, at in enumerate(starts)]
        return _Exchange(what, self._process_group, self._tag, rounds, lease, complete)

    def _round_bytes(self, index: int) -> int:
        """Bytes of staging of a round on this rank."""
        raise NotImplementedError

    def _make(self, index: int, lease: Lease | None, start: int) -> _BoundRound:
        """A round whose staging begins ``start`` bytes into ``lease``."""
        raise NotImplementedError

    def _round(self, owner: int, index: int) -> Round:
        return self._rounds[owner][index] if index < len(self._rounds[owner]) else Round()

    def _full(self, piece: Piece) -> torch.Tensor:
        """Where a piece lies in the full buffer."""
        return view_piece(self._fulls[piece.section], piece)

    def _staged(self, lease: Lease | None, start: int, piece: Piece) -> torch.Tensor:
        """Where a piece lies in staging, when that of its message begins at ``start``."""
        return _view(lease, self._dtypes[piece.section], start + piece.offset, piece.shape)

    def _receive(self, bound: _BoundRound, arriving: Round, peer: int, lease: Lease | None, start: int) -> None:
        """Receive the pieces that need staging there, from ``start`` on."""
        bound.receives += [([self._staged(lease, start, piece)], peer) for piece in arriving.whole]
        if arriving.packed:
            bound.receives.append(([_bytes(lease, start + arriving.packed_start, arriving.packed_bytes)], peer))

    def _messages(
        self, bound: _BoundRound, leaving: Round, where: _Where, lease: Lease | None, start: int
    ) -> list[list[torch.Tensor]]:
        """The messages of a round. ``where`` finds its pieces; packed ones are copied to staging, from ``start`` on."""
        messages = [[where(piece)] for piece in (*leaving.straight, *leaving.whole)]
        if leaving.packed:
            messages.append([_bytes(lease, start, leaving.packed_bytes)])
            for piece in leaving.packed:
                bound.before[0].append(self._staged(lease, start - leaving.packed_start, piece))
                bound.before[1].append(where(piece))
        return messages


class _MessageGatherRoute(_MessageRoute):
    """How this rank's shards get to all ranks, and theirs to this one."""

    def __init__(
        self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int, staging: int, large: int
    ) -> None:
        super().__init__(transfers, process_group, tag, staging, large, gather_rounds)
        self._shards = [alias(transfer.shard) for transfer in transfers]
        self._own: Copies = ([], [])  # what this rank has, into its own full buffers
        with torch.inference_mode(False):
            for section, transfer in enumerate(transfers):
                for extent in transfer.plan.extents(self._rank):
                    piece = whole_extent(section, extent)
                    self._own[0].append(self._full(piece))
                    self._own[1].append(self._shard(piece))

    def start(self) -> Pending:
        exchange = self._exchange("all-gather", _copy_arrived)
        exchange.start()
        foreach_copy(*self._own)
        return exchange

    def _shard(self, piece: Piece) -> torch.Tensor:
        """Where a piece of this rank lies in its shard."""
        shard = self._shards[piece.section]
        return shard[piece.shard_start : piece.shard_start + piece.numel].view(piece.shape)

    def _round_bytes(self, index: int) -> int:
        received = sum(align(self._round(peer, index).nbytes) for peer in self._peers)
        return received + align(self._round(self._rank, index).packed_bytes)

    def _make(self, index: int, lease: Lease | None, start: int) -> _BoundRound:
        bound = _BoundRound()
        for peer in self._peers:
            arriving = self._round(peer, index)
            bound.receives += [([self._full(piece)], peer) for piece in arriving.straight]
            self._receive(bound, arriving, peer, lease, start)
            for piece in (*arriving.whole, *arriving.packed):
                bound.after[0].append(self._full(piece))
                bound.after[1].append(self._staged(lease, start, piece))
            start += align(arriving.nbytes)
        messages = self._messages(bound, self._round(self._rank, index), self._shard, lease, start)
        bound.sends = [(message, peer) for peer in self._peers for message in messages]
        return bound


class _MessageReduceRoute(_MessageRoute):
    """How this rank's values get to the ranks that own them, and theirs to this one."""

    def __init__(
        self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int, staging: int, large: int
    ) -> None:
        super().__init__(transfers, process_group, tag, staging, large, reduce_rounds)
        self._shard_dtypes = [transfer.shard.dtype for transfer in transfers]
        self._scratch = max(map(scratch_bytes, self._dtypes, self._shard_dtypes))

    def start(self, shards: Sequence[torch.Tensor], reduction: Reduction) -> Pending:
        def add_arrived(arrived: _BoundRound) -> None:
            for total in arrived.sums:
                total.write(shards, reduction.divisor)

        exchange = self._exchange("reduce-scatter", add_arrived)
        exchange.start()
        return exchange

    def _round_bytes(self, index: int) -> int:
        received = len(self._peers) * align(self._round(self._rank, index).nbytes)
        return received + sum(align(self._round(peer, index).packed_bytes) for peer in self._peers)

    def _make(self, index: int, lease: Lease | None, start: int) -> _BoundRound:
        bound = _BoundRound()
        arriving = self._round(self._rank, index)
        starts = {}
        for peer in self._peers:
            starts[peer] = start
            self._receive(bound, arriving, peer, lease, start)
            start += align(arriving.nbytes)
        for peer in self._peers:
            leaving = self._round(peer, index)
            bound.sends += [(each, peer) for each in self._messages(bound, leaving, self._full, lease, start)]
            start += align(leaving.packed_bytes)
        for piece in (*arriving.whole, *arriving.packed):
            for block in blocks(piece, self._dtypes[piece.section].itemsize):
                bound.sums.append(self._sum(block, lease, starts))
        return bound

    def _sum(self, piece: Piece, lease: Lease | None, starts: dict[int, int]) -> Sum:
        """The sum of a piece over all ranks, whose parts lie in staging from ``starts`` on."""
        terms = [
            self._full(piece) if rank == self._rank else self._staged(lease, starts[rank], piece)
            for rank in range(len(self._peers) + 1)
        ]
        return block_sum(piece, terms, self._shard_dtypes[piece.section], partial(_view, lease))


def _bytes(lease: Lease | None, start: int, nbytes: int) -> torch.Tensor:
    return _view(lease, torch.uint8, start, (nbytes,))


def _view(lease: Lease | None, dtype: torch.dtype, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    assert lease is not None, "what needs staging was counted as needing none"
    return lease.view(dtype, start, shape)
