"""The file ``trace.json``: a trace in Chrome's format, which https://ui.perfetto.dev and ``chrome://tracing`` open.

A process of the trace is a rank, and a track is a lane. If spans of a lane overlap and are not nested, the lane has
several tracks. Memory is a counter. An arrow leads from the end of each gather to the computation that needed it. The
data of the ranks follows the events under a name of its own, which other programs skip; :func:`read` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from fullshard.report.rank_trace import LANES, RankTrace, as_data, from_data, tracks

#: The most tracks of a lane.
_TRACKS = 64
#: The name of the data of the ranks, last in the file: Perfetto ignores what follows a name that it does not know.
_DATA = "fullshard"


def write(ranks: Sequence[RankTrace], file: Path) -> None:
    """Write ``trace.json``."""
    data = {"displayTimeUnit": "ms", "traceEvents": events(ranks), _DATA: as_data(ranks)}
    file.write_text(json.dumps(data), encoding="utf-8")


def read(file: Path) -> list[RankTrace]:
    """Read the data of the ranks, which :func:`write` wrote.

    Raises:
        ValueError: the file is not a trace of fullshard, or has a different version.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return from_data(found.get(_DATA) if isinstance(found, dict) else None)
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def events(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """The events of a trace. Times are in microseconds from the first span."""
    origin = min((span.start for rank in ranks for span in rank.spans), default=0)
    numbers = count(1)
    return [event for rank in ranks for event in _of_rank(rank.shifted(origin), numbers)]


def _of_rank(rank: RankTrace, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    pid = rank.rank
    yield _metadata("process_name", pid, 0, name=f"rank {rank.rank} ({rank.host}, {rank.device})")
    yield _metadata("process_sort_index", pid, 0, sort_index=rank.rank)
    uses: dict[str, list[tuple[int, int]]] = {}  # for each group, when its computations began, and on which track
    for index, lane in enumerate(LANES):
        named = set()
        for track, span in tracks(rank.of(lane)):
            tid = index * _TRACKS + track + 1
            if tid not in named:
                named.add(tid)
                yield _metadata("thread_name", pid, tid, name=f"{lane} {track + 1}" if track else lane)
                yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
            if lane == "computation":
                uses.setdefault(span.group, []).append((span.start, tid))
            yield {
                "ph": "X",
                "name": f"{span.what} {span.group}" if span.group else span.what,
                "cat": lane,
                "pid": pid,
                "tid": tid,
                "ts": span.start / 1e3,
                "dur": span.length / 1e3,
                "args": {"step": span.step, "during": span.during, "bytes": span.nbytes},
            }
    gather_lane = LANES.index("gather")
    for track, span in tracks(rank.of("gather")):
        group = span.group.partition(" (")[0]
        use = min((use for use in uses.get(group, ()) if use[0] >= span.end), default=None)
        if use is not None:
            flow = {"cat": "use", "name": "gathered for", "id": next(numbers), "pid": pid}
            before_end = (span.end - 1) / 1e3  # an arrow must begin inside of the span
            yield {"ph": "s", "tid": gather_lane * _TRACKS + track + 1, "ts": before_end, **flow}
            yield {"ph": "f", "bp": "e", "tid": use[1], "ts": use[0] / 1e3, **flow}
    for when, nbytes in rank.memory:
        yield {"ph": "C", "name": "memory", "pid": pid, "tid": 0, "ts": when / 1e3, "args": {rank.memory_of: nbytes}}


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}
