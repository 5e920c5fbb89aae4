"""What ranks did in some steps: spans of time by lane, memory over time, and the file in which they are kept.

Owns the data and what is worked out of one rank's alone. It leaves to :mod:`fullshard.report.record` how spans are
taken, and to :mod:`fullshard.report.findings` what they mean.

All times are in nanoseconds of the clock of rank 0's host. One rank, one step::

    pass          |        forward         |        backward          | optimizer |
    computation   | a | b |    c    |        | c  |  b  |   a  |                        nested where units are
    gather      |a|   |  c  |                  |  b  |                                  from the start to the end
    reduce                                        |  c  |  b |   a  |
    host          |+|      |+|                   |+|                                    starts and completes these
    wait                   |-|                                   |--|                   for another rank, or its bytes
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

Lane = Literal["pass", "computation", "gather", "reduce", "all-reduce", "host", "wait"]
#: In the order in which they are drawn.
LANES: tuple[Lane, ...] = ("pass", "computation", "gather", "reduce", "all-reduce", "host", "wait")

#: Grows when older files cannot be read any more.
_VERSION = 1


class Span(NamedTuple):
    """A time in which one thing lasted.

    Args:
        lane: where: passes of a step, the computation of units, communication from its start to its end, the host's
            work for communication, or waits.
        what: ``forward``, ``backward``, ``recomputation`` or ``optimizer``; the lane of what was communicated or waited
            for; or, for other waits, words that say for what.
        group: the name of the group or unit; ``""`` where there is none.
        during: the pass in which it began; ``""`` between passes.
        step: the number of the step of training, by the numbers that the user gave.
        start: in nanoseconds.
        end: in nanoseconds.
        number: how many like it (lane or what, group) this rank began before in the step. A wait has the number of
            what it waits for.
        nbytes: bytes that this rank gets from the others by a communication.
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
        """In nanoseconds."""
        return self.end - self.start


@dataclass
class RankRecording:
    """What one rank did.

    Args:
        rank: among all ranks of the job.
        host: the name of its host.
        device: the type of its device.
        memory_of: which memory was measured.
        clock_error: bound on the error of its clock against rank 0's, in nanoseconds; 0 on the same host.
        spans: in the order of their beginnings.
        memory: times and bytes.
        groups: names of the groups, and their bytes when they are whole.
    """

    rank: int
    host: str
    device: str
    memory_of: str
    clock_error: int = 0
    spans: list[Span] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)

    def moved(self, offset: int) -> RankRecording:
        """The same with times that are so much earlier."""
        spans = [span._replace(start=span.start - offset, end=span.end - offset) for span in self.spans]
        memory = [(when - offset, held) for when, held in self.memory]
        return RankRecording(**{**vars(self), "spans": spans, "memory": memory})

    def of(self, lane: Lane, step: int | None = None) -> Iterator[Span]:
        """The spans of a lane, in all steps or one."""
        return (span for span in self.spans if span.lane == lane and step in (None, span.step))

    def steps(self) -> dict[int, tuple[int, int]]:
        """When each step that the recording has whole began and ended. A step begins where the one before has ended,
        the first with its first pass, and ends with its last optimizer, or backward if optimizers step in it."""
        found: dict[int, tuple[int, int]] = {}
        passes = sorted(self.of("pass"), key=lambda span: span.start)
        begin = passes[0].start if passes else 0
        for step in sorted({span.step for span in passes}):
            of_step = [span for span in passes if span.step == step]
            if any(span.what == "optimizer" for span in of_step):
                end = max(span.end for span in of_step)
                found[step], begin = (begin, end), end
        return found


def tracks(spans: Iterable[Span], nests: bool = True) -> list[tuple[int, Span]]:
    """The spans with the number of a track, on which any two are apart or, if it ``nests``, one contains the other."""
    open_spans: list[list[Span]] = []
    found = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for stack in open_spans:
            while stack and stack[-1].end <= span.start:
                stack.pop()
        fits = (at for at, on in enumerate(open_spans) if not on or (nests and span.end <= on[-1].end))
        track = next(fits, len(open_spans))
        open_spans += [[]] * (track == len(open_spans))
        open_spans[track].append(span)
        found.append((track, span))
    return found


@dataclass(frozen=True)
class Shares:
    """How a rank spent its steps, in nanoseconds a step.

    Args:
        step: all of it.
        computing: forward and backward, less what follows.
        moving: the host's own work for communication, such as copies and sums; it computes nothing meanwhile.
        waiting: for other ranks and for what they send.
        optimizer: steps of optimizers.
        outside: between passes and steps of optimizers: data, losses, logs.
    """

    step: float
    computing: float
    moving: float
    waiting: float
    optimizer: float
    outside: float

    @property
    def exposed(self) -> float:
        """Communication beside which nothing was computed."""
        return self.moving + self.waiting


def shares(rank: RankRecording) -> Shares:
    """How a rank spent the steps that were recorded whole; all zero if there is none."""
    sums = [0.0] * 6
    steps = rank.steps()
    for step, (begin, end) in steps.items():
        spans = [span for span in rank.spans if span.step == step and span.end > begin and span.start < end]
        waits = _merged((span.start, span.end) for span in spans if span.lane == "wait")
        host = _merged((span.start, span.end) for span in spans if span.lane == "host")
        passes = _merged((s.start, s.end) for s in spans if s.lane == "pass" and s.what != "optimizer")
        optimizer = _merged((s.start, s.end) for s in spans if s.lane == "pass" and s.what == "optimizer")
        waiting = _total(waits)
        stepping = _total(optimizer) - _total(_common(optimizer, waits))
        moving = _total(host) - _total(_common(host, _merged([*waits, *optimizer])))  # it may step in a backward
        busy = _merged([*waits, *host, *optimizer])
        computing = _total(passes) - _total(_common(passes, busy))
        rest = max(0, end - begin - computing - _total(busy))
        for index, value in enumerate((end - begin, computing, moving, waiting, stepping, rest)):
            sums[index] += value
    return Shares(*(total / max(1, len(steps)) for total in sums))


class Work(NamedTuple):
    """How long one rank computed in one unit, beside what is nested in it or waited for, in nanoseconds a step."""

    what: str
    group: str
    length: float


def own_work(rank: RankRecording) -> list[Work]:
    """How long a rank computed in each unit, in a step on average; steps of optimizers and the time outside too."""
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
    """The same times, without overlaps and in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _common(ones: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The times that are in both; each is merged."""
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


def write(ranks: Sequence[RankRecording], file: Path) -> None:
    """Write ``recording.json``. Times in it are nanoseconds from the first span."""
    origin = min((span.start for rank in ranks for span in rank.spans), default=0)
    moved = [asdict(rank.moved(origin)) for rank in ranks]
    file.write_text(json.dumps({"version": _VERSION, "fields": [*Span.__annotations__], "ranks": moved}))


def read(file: Path) -> list[RankRecording]:
    """Read what :func:`write` wrote.

    Raises:
        ValueError: the file has another format, or is no recording.
    """
    found = json.loads(file.read_text())
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise ValueError(f"{file} is no recording of version {_VERSION}, as this release of fullshard writes them")
    return [as_rank(each) for each in found["ranks"]]


def as_rank(found: dict[str, Any]) -> RankRecording:
    """A rank's recording from what a file has of it."""
    spans = [Span(*span) for span in found["spans"]]
    memory = [(when, held) for when, held in found["memory"]]
    return RankRecording(**{**found, "spans": spans, "memory": memory})
