"""How buffers move between ranks: the interface that every transport fulfils.

A transport decides where buffers live (:meth:`Transport.allocate`) and how they travel. It leaves to its caller which
group moves when, on which lane, and what becomes of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from fullshard.buffer.plan import BufferPlan, Piece
from fullshard.buffer.shared_memory import Segment
from fullshard.buffer.slots import SlotPool
from fullshard.comm.local_ranks import PassBarrier
from fullshard.device import Done, Pending
from fullshard.encodings import Encoding, encoding
from fullshard.wire_policy import WirePolicy

Direction = Literal["gather", "reduce"]  # shards to all ranks, or the values of all ranks to shards
DIRECTIONS: tuple[Direction, Direction] = ("gather", "reduce")
Shards = Sequence[torch.Tensor]  # those of each transfer
Ranks = dist.ProcessGroup | None  # between which something travels; ``None``: this rank alone has all of it


class Transfer(NamedTuple):
    """One typed section of a group on its way: where it lies whole, and where this rank's part of it lies."""

    plan: BufferPlan  # how the two correspond; its ``world_size`` is the size of the process group
    full: torch.Tensor  # 1-D, of ``plan.full_numel`` elements
    shard: torch.Tensor  # 1-D, of ``plan.shard_numel`` elements, contiguous, starting on a 16-byte boundary

    def check(self, direction: Direction, over: Ranks) -> None:
        """Raise ValueError if the tensors do not fit the plan or each other, or the plan does not fit the ranks."""
        plan, full, shard = self
        where = f"of the group of parameter '{plan.params[0].name}'" if plan.params else "of a group without parameters"
        size = 1 if over is None else over.size()
        if plan.world_size != size:
            raise ValueError(f"the plan {where} is for {plan.world_size} ranks, but there are {size}: make a new plan")
        for what, tensor, numel in (("full buffer", full, plan.full_numel), ("shard", shard, plan.shard_numel)):
            if tensor.shape != (numel,) or not tensor.is_contiguous():
                raise ValueError(
                    f"the {what} {where} must be a contiguous 1-D tensor of {numel} elements, "
                    f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
                )
        for what in ("device", "dtype") if direction == "gather" else ("device",):
            one, other = getattr(full, what), getattr(shard, what)
            if over is not None and one != other:  # this rank alone copies, which may cast
                raise ValueError(f"the full buffer {where} has the {what} {one}, but its shard {other}: convert one")


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same storage that counts its versions apart: autograd is not to see copies into its views."""
    return tensor.data


class Reduction(NamedTuple):
    """How the ranks' values are combined: their sum divided by ``divisor``."""

    divisor: float = 1.0
    sum_only: bool = False  # only plain sums on the wire, and scaled apart: some zero-copy collectives can do no more


PLAIN_SUM = Reduction()  # what the ranks bring is added up, and not divided


@dataclass
class Feedback:
    """What encodings have lost of the gradients of this rank, to be added to those of the next step."""

    lost: Sequence[torch.Tensor]  # in bf16, in place of each full buffer and then of each zero-copy gradient
    is_loaded: bool = False  # whether a checkpoint has put something in this rank's own part, which is not sent


class Wire(NamedTuple):
    """How the messages of a route are encoded."""

    encoding: Encoding
    min_numel: int  # parameters of fewer elements travel as they are
    feedback: Feedback | None = None  # of a reduction

    def encodes(self, piece: Piece, dtype: torch.dtype) -> bool:
        return not piece.is_kept and piece.part_of >= self.min_numel and self.encoding.saves(dtype)


def make_wire(policy: WirePolicy, direction: Direction, feedback: Feedback | None = None) -> Wire | None:
    """The wire of a policy in one direction; ``None`` if nothing is encoded."""
    found = encoding(policy.gather if direction == "gather" else policy.reduce, policy.block)
    return None if found is None else Wire(found, policy.min_numel, feedback)


class Peers(NamedTuple):
    """The ranks of a process group with which this rank exchanges messages, if other ranks do so for it too."""

    sources: Sequence[int]  # whose shards this rank gathers, and for which it has values to reduce
    targets: Sequence[int]  # that gather this rank's shard, and have values for it
    most: int  # the largest number of sources that a rank has
    writes_kept: bool = True  # whether this rank writes, for its host, the parameters that each rank has whole


class Request(NamedTuple):
    """What a route is worked out for: at least one transfer of one group, which has the tag, and the ranks."""

    direction: Direction
    transfers: Sequence[Transfer]
    process_group: dist.ProcessGroup
    tag: int
    wire: Wire | None = None  # ``None``: everything travels as it is
    peers: Peers | None = None  # ``None``: all other ranks


class Route(Protocol):
    """How shards get to all ranks, or the values of full buffers to shards: worked out once, taken in every step.

    Its buffers may be on meta, if it is never taken.
    """

    staging: int  # bytes of the memory that it takes beside its buffers
    sent: int  # bytes that this rank sends, with the fewest that any algorithm of a collective needs

    def start(self, shards: Shards = (), reduction: Reduction = PLAIN_SUM, *zero_copy: torch.Tensor) -> Pending:
        """Start the transfers. A reduction is given the shards that it writes; a gather is given nothing.

        Full buffers that are messages (``Plan.is_messages``) lack their ``zero_copy`` parameters: these are given here,
        in the order of the transfers and of each plan, 1-D and contiguous, until the end, and may be overwritten.
        """


class LocalRoute:
    """The route of values that this rank alone has: its shards are the whole. Also the route of no transfers."""

    staging = sent = 0

    @torch.inference_mode(False)
    def __init__(self, direction: Direction, transfers: Sequence[Transfer]) -> None:
        self._gathered: list[tuple[torch.Tensor, torch.Tensor]] = []  # parts of full buffers, and what they get
        self._reduced: list[tuple[Piece, torch.Tensor]] = []  # what shards get, and where it lies in full buffers
        for section, (plan, full, shard) in enumerate(transfers):
            full = alias(full)
            if direction == "reduce":
                self._reduced += [(piece, piece.of_full(full)) for piece in plan.pieces(0, section)]
            elif plan.is_rank_major:
                self._gathered.append((full, shard))
            else:
                self._gathered += [(piece.of_full(full), piece.of_shard(shard)) for piece in plan.pieces(0)]

    def start(self, shards: Shards = (), reduction: Reduction = PLAIN_SUM, *zero_copy: torch.Tensor) -> Pending:
        with torch.no_grad():
            for values in zero_copy if reduction.divisor != 1 else ():
                values.div_(reduction.divisor)
            for full, shard in self._gathered:
                full.copy_(shard, non_blocking=True)
            for piece, full in self._reduced:
                values = full if reduction.divisor == 1 else full / reduction.divisor
                piece.of_shard(shards[piece.section]).copy_(values)
        return Done()


class StillRead:
    """Communication (:class:`Pending`) whose buffers other ranks still read after its end."""

    def wait(self) -> None:
        """Return when no rank reads them any more: they may be written again. Called after ``finish``."""
        raise NotImplementedError


class SharedMemory(NamedTuple):
    """Memory that all ranks of a process group map, for a group's full buffer; until they do, of this rank alone."""

    segment: Segment
    view: Segment  # the same, mapped to be read: a write goes to a copy of its page
    start: int  # where in both it begins, in bytes
    barrier: PassBarrier  # when it may be read and written

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor ``start`` bytes into the memory, with a storage and a version of its own."""
        return self.segment.tensor(self.start + start, numel, dtype)

    def own(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same, for a part that only this rank writes. The others see it once all have mapped it."""
        pages = self.segment.pages
        pages.own = [*pages.own, (self.start + start, numel * dtype.itemsize)]
        return self.tensor(start, numel, dtype)


class Transport:
    """The transitions of a buffer that need other ranks. The defaults are for ranks that have memory of their own.

    A route must be started by all ranks of its process group, each with its own of equal plans and tags; to make one
    communicates nothing. From ``start`` on its buffers belong to the transport until ``finish`` returns (on a device
    with streams: until the lane's stream has passed it). A tag is a small non-negative integer, unique to the group, so
    that messages of different groups are never taken for one another.
    """

    name: str
    #: How many gradient buffers a backward uses at once, unless the user says.
    gradient_buffers = 1
    #: Whether it uses collectives, in which a backend may end a process whose size differs from that of the others.
    ends_processes = False
    #: Whether a reduction is best given the messages of all ranks, and zero-copy gradients as they are.
    takes_messages = False
    #: Whether gradients of low precision are added up in fp32.
    adds_in_fp32 = False
    #: Whether ranks compare which parameters they reduce while they wait for one another.
    compares_reductions = False
    #: Whether its memory is registered with a backend.
    registers_memory = False
    #: Whether it calls functions of the user, also if there is only one rank.
    is_custom = False
    #: Whether all ranks share memory, so that nothing is sent.
    shares_all = False
    #: The ranks with which this rank exchanges messages, if it does so for other ranks of its host too.
    peers: Peers | None = None
    _private: Transport | None = None

    @property
    def private(self) -> Transport:
        """The transport for buffers in memory of this rank alone; itself, unless ranks share memory."""
        return self._private or self

    def launches_together(self, over: Ranks, device: torch.device) -> bool:
        """Whether collectives of several tensors are one launch, so that smaller parameters may be zero-copy."""
        return False

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory for buffers that this transport moves: 1-D, ``uint8``, 64-byte aligned, contents undefined."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def pool(self, kind: str, device: torch.device) -> SlotPool:
        """A new pool for buffers of a ``kind`` that this transport moves."""
        return SlotPool(device, self.allocate, self.registers_memory)

    def reserve_shared(self, nbytes: int) -> SharedMemory | None:
        """Memory for a full buffer that all ranks will see after :meth:`map_shared`; ``None`` if each has its own."""
        return None

    def map_shared(self, memory: SharedMemory | None) -> bool:
        """Map one piece of memory on all ranks, each of which must call it, in place of what each has reserved, if it
        has any yet. Returns whether there is enough to share."""
        return False

    def reset(self) -> None:
        """Forget the reductions that an error cut short. Every rank must call it."""

    def close_peers_buffers(self) -> None:
        """Close the buffers of other ranks that were opened here: these may want to give them back to the system."""

    def gather_route(self, transfers: Sequence[Transfer], over: Ranks, tag: int, wire: Wire | None = None) -> Route:
        """The route from sharded to replicated: it writes each ``shard`` to its pieces of every ``full``, of one dtype.

        With a ``wire`` all ranks, this one too, get the numbers that its encoding leaves. Padding is left undefined.
        Parameters that every rank keeps whole (``dim=None``) are taken from this rank's own shard. Where this rank
        alone has the values (``over`` is ``None``), its shard may have another dtype and device.
        Raises ValueError if a tensor does not fit its plan, or a plan does not fit the number of ranks.
        """
        return self._checked_route("gather", transfers, over, tag, wire)

    def reduce_route(self, transfers: Sequence[Transfer], over: Ranks, tag: int, wire: Wire | None = None) -> Route:
        """The route from partial to sharded: it overwrites a shard with the reduced pieces of this rank.

        ``full`` has the dtype that travels and may be overwritten. Only the dtype of each ``shard`` counts here, to
        which the result is cast; every start brings its own shards. Their padding is left undefined. If ``over`` is
        ``None``, this rank's values are the sum. Errors as for a gather; TypeError for a dtype that cannot be added up.
        """
        return self._checked_route("reduce", transfers, over, tag, wire)

    def sum_route(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> Route | None:
        """The route from partial to replicated: the sum over all ranks becomes each rank's shard, which is whole.
        ``None`` if the all-reduce of the backend does that (:mod:`fullshard.comm.all_reduce`)."""
        return None

    def between(self, request: Request) -> Route:
        """The route of those messages that a request takes."""
        return self.private._route(request._replace(peers=self.peers))

    def _checked_route(
        self, direction: Direction, transfers: Sequence[Transfer], over: Ranks, tag: int, wire: Wire | None
    ) -> Route:
        if over is not None and over.size() == 1 and not self.is_custom:
            over = None
        for transfer in transfers:
            transfer.check(direction, over)
        if over is None or not transfers:
            return LocalRoute(direction, transfers)
        return self._route(Request(direction, transfers, over, tag, wire))

    def _route(self, request: Request) -> Route:
        raise NotImplementedError(f"transport '{self.name}' does not {request.direction}")
