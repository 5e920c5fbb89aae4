"""The data of a trace: spans of time by lane, and memory over time.

Owns the data, and what can be computed from the data of a single rank. :mod:`fullshard.report.recorder` takes the
spans, and :mod:`fullshard.report.findings` interprets them.

All times are in nanoseconds of the clock of rank 0's host. One rank, one step::

    pass          |        forward         |        backward          | optimizer |
    computation   | a | b |    c    |        | c  |  b  |   a  |                        nested like the units
    gather      |a|   |  c  |                  |  b  |                                  from its start to its end
    reduce                                        |  c  |  b |   a  |
    network      |-|      |-|                     |-|  |-|   |-|                        messages between hosts
    host          |+|      |+|                   |+|                                    starts and completes exchanges
    wait                   |-|                                   |--|                   for another rank, or its bytes
    disk        |-|                                                      |--|           waits for a disk
    change      | agree |form rows|                 train                        |      of an elastic job
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, get_args

Lane = Literal["pass", "computation", "gather", "reduce", "all-reduce", "network", "host", "wait", "disk", "change"]
#: All lanes, in the order in which they are drawn.
LANES: tuple[Lane, ...] = get_args(Lane)

#: Grows when older files cannot be read any more.
_VERSION = 1


class Span(NamedTuple):
    """The time from the start to the end of one activity.

    Args:
        lane: its kind: a pass of a step, the computation of a unit, a communication, its messages between hosts whose
            ranks share memory (``network``), the host's work for it, a wait for other ranks, a wait for a disk, or
            a part of a change of an elastic job.
        what: for passes and computation ``forward``, ``backward``, ``recomputation`` or ``optimizer``. For a
            communication, its messages, and a wait for it, the lane of the communication. For a change ``agree``,
            ``form rows`` or ``train``. For any other wait a description of what is waited for.
        group: the name of the group or unit; ``""`` if there is none.
        during: the pass in which it began; ``""`` between passes.
        step: the number of the training step, counted from the user's ``first_step``.
        start: in nanoseconds.
        end: in nanoseconds.
        number: its number among the spans of this rank and step with the same lane (or ``what``) and group, from 0. A
            wait has the number of the communication that it waits for.
        nbytes: bytes that this rank receives from other ranks by the communication.
    """

    lane: Lane
    what: str
    group: str
    during: str
    step: int
    start: int
    end: int
    number: int = 0
    nbytes: int = 0

    @property
    def length(self) -> int:
        """The length in nanoseconds."""
        return self.end - self.start


@dataclass
class RankTrace:
    """The trace of one rank.

    Args:
        rank: the rank in the world.
        host: the name of its host.
        device: the type of its device.
        memory_of: which memory was measured.
        clock_error: the largest possible error of its clock against rank 0's, in nanoseconds; 0 on the same host.
        spans: in the order of their starts.
        memory: samples, each a time and the bytes in use.
        groups: for the name of each group, the bytes of its full buffer.
    """

    rank: int
    host: str
    device: str
    memory_of: str
    clock_error: int = 0
    spans: list[Span] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)

    def shifted(self, offset: int) -> RankTrace:
        """A copy of the trace with all times earlier by ``offset``."""
        spans = [span._replace(start=span.start - offset, end=span.end - offset) for span in self.spans]
        memory = [(when - offset, nbytes) for when, nbytes in self.memory]
        return RankTrace(**{**vars(self), "spans": spans, "memory": memory})

    def of(self, lane: Lane, step: int | None = None) -> Iterator[Span]:
        """The spans of a lane, in all steps or in one."""
        return (span for span in self.spans if span.lane == lane and step in (None, span.step))

    def steps(self) -> dict[int, tuple[int, int]]:
        """The start and end of each step that was recorded completely.

        A step starts when the step before ends; the first one starts with its first pass. It ends with its last
        optimizer step, or with its backward if optimizers step inside of the backward.
        """
        found: dict[int, tuple[int, int]] = {}
        passes = sorted(self.of("pass"), key=lambda span: span.start)
        begin = passes[0].start if passes else 0
        for step in sorted({span.step for span in passes}):
            of_step = [span for span in passes if span.step == step]
            if any(span.what == "optimizer" for span in of_step):
                end = max(span.end for span in of_step)
                found[step], begin = (begin, end), end
        return found


def tracks(spans: Iterable[Span]) -> list[tuple[int, Span]]:
    """Puts spans on tracks: yields each with the number of its track. Two spans on one track do not overlap, or
    one contains the other."""
    open_spans: list[list[Span]] = []
    found = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for stack in open_spans:
            while stack and stack[-1].end <= span.start:
                stack.pop()
        fits = (at for at, on in enumerate(open_spans) if not on or span.end <= on[-1].end)
        track = next(fits, len(open_spans))
        open_spans += [[]] * (track == len(open_spans))
        open_spans[track].append(span)
        found.append((track, span))
    return found


@dataclass(frozen=True)
class Shares:
    """How a rank spent its time, in nanoseconds of an average step.

    Args:
        step: the whole step.
        computing: forward and backward, without the parts that are counted below.
        copying: the host's own work for communication, such as copies and sums. The host computes nothing meanwhile.
        waiting: waits for other ranks and for the bytes that they send.
        optimizer: steps of optimizers.
        outside: the time between passes and optimizer steps: data, losses, logs.
        disk: waits for values that are read from a disk or written to it.
    """

    step: float
    computing: float
    copying: float
    waiting: float
    optimizer: float
    outside: float
    disk: float = 0.0


def shares(rank: RankTrace) -> Shares:
    """How a rank spent the steps that were recorded completely; all zero if there is none."""
    sums = [0.0] * 7
    steps = rank.steps()
    for step, (begin, end) in steps.items():
        spans = [span for span in rank.spans if span.step == step and span.end > begin and span.start < end]
        waits = _merged((span.start, span.end) for span in spans if span.lane == "wait")
        host = _merged((span.start, span.end) for span in spans if span.lane == "host")
        passes = _merged((s.start, s.end) for s in spans if s.lane == "pass" and s.what != "optimizer")
        optimizer = _merged((s.start, s.end) for s in spans if s.lane == "pass" and s.what == "optimizer")
        disk = _merged((span.start, span.end) for span in spans if span.lane == "disk")
        idle, waiting = _merged([*waits, *disk]), _total(waits)
        stepping = _total(optimizer) - _total(_common(optimizer, idle))
        copying = _total(host) - _total(_common(host, _merged([*idle, *optimizer])))  # it may step in a backward
        busy = _merged([*idle, *host, *optimizer])
        computing = _total(passes) - _total(_common(passes, busy))
        outside_passes = max(0, end - begin - computing - _total(busy))
        parts = end - begin, computing, copying, waiting, stepping, outside_passes, _total(disk)
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return Shares(*(total / max(1, len(steps)) for total in sums))


def covered(spans: Iterable[Span]) -> int:
    """Nanoseconds in which at least one of the spans was under way."""
    return _total(_merged((span.start, span.end) for span in spans))


class Work(NamedTuple):
    """How long one rank computed in one unit in an average step, in nanoseconds, without nested units and waits."""

    what: str
    group: str
    length: float


def own_work(rank: RankTrace) -> list[Work]:
    """How long a rank computed in each unit in an average step. Includes optimizer steps and the time outside of
    passes."""
    totals: dict[tuple[str, str], int] = {}
    steps = rank.steps()
    for step in steps:
        spans = [*rank.of("computation", step), *rank.of("pass", step)]
        busy = _merged((s.start, s.end) for s in rank.spans if s.step == step and s.lane in ("wait", "host"))
        for span in spans:
            inside = [each for each in spans if _is_inside(each, span)]
            hidden = _merged([*busy, *((each.start, each.end) for each in inside)])
            key = span.what, span.group if span.lane == "computation" else ""
            own = span.length - _total(_common([(span.start, span.end)], hidden))
            if span.lane == "computation" or span.what == "optimizer":
                totals[key] = totals.get(key, 0) + own
    found = [Work(what, group, total / len(steps)) for (what, group), total in totals.items()]
    return [*found, Work("outside", "", shares(rank).outside)]


def _is_inside(span: Span, other: Span) -> bool:
    return span is not other and other.start <= span.start and span.end <= other.end and span.length < other.length


Interval = tuple[int, int]


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges overlapping intervals, and sorts them."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _common(ones: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The times that are in both of two lists of merged intervals."""
    found, at = [], 0
    for start, end in ones:
        while at < len(others) and others[at][1] <= start:
            at += 1
        for begin, stop in others[at:]:
            if begin >= end:
                break
            found.append((max(start, begin), min(end, stop)))
    return found


def _total(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def as_data(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """The traces of ranks as dicts, lists and numbers. Times are nanoseconds since the start of the first span."""
    origin = min((span.start for rank in ranks for span in rank.spans), default=0)
    shifted = [asdict(rank.shifted(origin)) for rank in ranks]
    return {"version": _VERSION, "fields": [*Span.__annotations__], "ranks": shifted}


def from_data(data: Any) -> list[RankTrace]:
    """The traces that :func:`as_data` turned into data.

    Raises:
        ValueError: the data is not a trace, or has a different version.
    """
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise ValueError(f"it is not a trace of version {_VERSION}, which this release of fullshard reads")
    try:
        return [as_rank(each) for each in data["ranks"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"its data is damaged: {type(error).__name__}: {error}") from error


def as_rank(found: dict[str, Any]) -> RankTrace:
    """A rank's trace, from its JSON form."""
    spans = [Span(*span) for span in found["spans"]]
    memory = [(when, nbytes) for when, nbytes in found["memory"]]
    return RankTrace(**{**found, "spans": spans, "memory": memory})
