"""Findings of a trace: which rank the others wait for, which groups are late, and what to try.

Owns the comparison of ranks and the sentences. A communication cannot end before the last rank has started it. Until
then the other ranks wait for that rank; after that, they wait for the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Literal, NamedTuple

from fullshard.report.rank_trace import RankTrace, Span, Work, covered, own_work, shares
from fullshard.text import bytes_text, percent, seconds_text, wrapped

Kind = Literal[
    "slow rank",
    "late gathers",
    "late reductions",
    "between hosts",
    "copies",
    "outside",
    "optimizer",
    "prefetch",
    "balance",
    "disk",
]

#: A share of a step below which a finding is not reported.
_WORTH_SAYING = 0.03
#: A rank is slow if the others wait for it at least this many times longer than for any other rank.
_STANDS_OUT = 2.0
#: A gather was ready in time if the wait for it was below this part of its length, or below these nanoseconds.
_NEARLY_THERE, _AT_ONCE = 0.1, 100_000
#: How many groups a sentence names.
_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """One thing that a trace shows.

    Args:
        kind: its kind.
        text: what was found, in a sentence or two.
        advice: what to try; empty if there is nothing to do.
        share: its cost, as a share of a step. Findings are sorted by it.
        rank: the rank that it concerns, if it concerns one rank.
        group: the group that it concerns most.
    """

    kind: Kind
    text: str
    advice: str = ""
    share: float = 0.0
    rank: int | None = None
    group: str = ""


class Waited(NamedTuple):
    """A wait of one rank, summed up over an average step.

    Args:
        rank: the rank that waited.
        by: the rank that started the communication last, or ``None`` for the time in which only bytes were missing.
        what: ``gather``, ``reduce``, ``all-reduce``, or a description of another wait.
        group: the group whose communication it was.
        length: in nanoseconds.
    """

    rank: int
    by: int | None
    what: str
    group: str
    length: float


def waited(ranks: Sequence[RankTrace]) -> list[Waited]:
    """The waits of all ranks: which rank waited, for which rank, and in which communication."""
    communications: dict[object, dict[int, int]] = {}
    wait_starts: dict[object, dict[int, int]] = {}
    for rank in ranks:
        for span in rank.spans:
            if span.lane in ("gather", "reduce", "all-reduce"):
                communications.setdefault(_key(span), {})[rank.rank] = span.start
            elif span.lane == "wait":
                wait_starts.setdefault(_key(span), {}).setdefault(rank.rank, span.start)
    totals = Counter[tuple[int, int | None, str, str]]()
    for rank in ranks:
        steps = rank.steps()
        for span in rank.of("wait"):
            if span.step not in steps:
                continue
            starts = communications.get(_key(span)) or wait_starts[_key(span)]
            last = max(starts, key=starts.__getitem__)
            late = min(max(0, starts[last] - span.start), span.length) if last != rank.rank else 0
            totals[rank.rank, last, span.what, span.group] += late
            totals[rank.rank, None, span.what, span.group] += span.length - late
    steps_of = {rank.rank: max(1, len(rank.steps())) for rank in ranks}
    return [Waited(*key, total / steps_of[key[0]]) for key, total in totals.items() if total]


def _key(span: Span) -> tuple[object, ...]:
    """A key that is the same on all ranks for one communication or wait."""
    return span.step, span.what, span.group, span.number


def findings(ranks: Sequence[RankTrace]) -> list[Finding]:
    """What traces show, the most important first. There is at least one finding.

    Args:
        ranks: the traces of all ranks of a job, or of some.
    """
    complete = [rank for rank in ranks if rank.steps()]
    if not complete:
        return [Finding("balance", "No step was recorded completely: the trace ended before the first optimizer step.")]
    step = mean(shares(rank).step for rank in complete)
    waits = waited(complete)
    found = [
        *_slow_rank(complete, waits, step),
        *_late(complete, waits, step, "gather"),
        *_late(complete, waits, step, "reduce"),
    ]
    others = *_between_hosts(complete, waits, step), *_parts(complete, step)
    found = sorted([*(found or [_balance(waits, step)]), *others], key=lambda finding: -finding.share)
    return [*found, *_prefetch(complete)]


def findings_text(found: Sequence[Finding]) -> str:
    """Findings as text for people, a paragraph each."""
    costs = (f"{percent(each.share)} of a step: " if each.share else "" for each in found)
    return "".join(wrapped(f"{cost}{each.text} {each.advice}") + "\n" for cost, each in zip(costs, found, strict=True))


def lateness(ranks: Sequence[RankTrace], waits: Sequence[Waited]) -> dict[int, float]:
    """For each rank, how long the other ranks waited for it in an average step, in nanoseconds."""
    late = {rank.rank: 0.0 for rank in ranks}
    for wait in waits:
        if wait.by is not None:
            late[wait.by] += wait.length / max(1, len(ranks) - 1)
    return late


def _slow_rank(ranks: Sequence[RankTrace], waits: Sequence[Waited], step: float) -> list[Finding]:
    late = lateness(ranks, waits)
    slow = max(late, key=late.__getitem__)
    others = max((length for rank, length in late.items() if rank != slow), default=0.0)
    if late[slow] < _WORTH_SAYING * step or late[slow] < _STANDS_OUT * others:
        return []
    text = f"Rank {slow} is slow: the others wait for it {_time(late[slow])} of a step of {_time(step)}."
    most = _most_of(slow, ranks)
    advice = "Its computation takes no longer than theirs: check its host, its network, and what else runs there."
    if most is not None and most[0].length - most[1] > late[slow] / 4:
        work, theirs = most
        text += f" {_named(work)} takes {_time(work.length)} there, and {_time(theirs)} on the others."
        advice = (
            "Check what only this rank does between its passes: its data, logs, checkpoints."
            if work.what == "outside"
            else "Check what differs on this rank: longer inputs, code that only this rank runs, a slower or busier "
            "device."
        )
    return [Finding("slow rank", text, advice, late[slow] / step, slow, most[0].group if most else "")]


def _most_of(slow: int, ranks: Sequence[RankTrace]) -> tuple[Work, float] | None:
    """The work of a slow rank that most exceeds the same work of the others, and the median of theirs."""
    works = {rank.rank: {(work.what, work.group): work for work in own_work(rank)} for rank in ranks}
    mine = works.pop(slow)
    usual = {key: median(each[key].length if key in each else 0.0 for each in works.values()) for key in mine}
    key = max(mine, key=lambda key: mine[key].length - usual[key], default=None)
    return None if key is None else (mine[key], usual[key])


def _balance(waits: Sequence[Waited], step: float) -> Finding:
    """The longest wait of a rank, where no rank is slow."""
    totals = Counter[tuple[int, int | None]]()
    for wait in waits:
        totals[wait.rank, wait.by] += wait.length  # type: ignore[assignment]
    (rank, by), most = max(totals.items(), key=lambda item: item[1], default=((0, None), 0))
    if most < _WORTH_SAYING * step:
        text = (
            f"No rank waits {percent(_WORTH_SAYING)} or more of a step of {_time(step)} for another rank, or for bytes."
        )
        return Finding("balance", text)
    whom = "the bytes of communication" if by is None else f"rank {by}"
    text = f"No rank stands out. The longest wait is that of rank {rank} for {whom}: {_time(most)} of a step of "
    advice = "Ranks that are late in turns have steps of different lengths: check their inputs." * (by is not None)
    return Finding("balance", f"{text}{_time(step)}.", advice, most / step)


def _late(ranks: Sequence[RankTrace], waits: Sequence[Waited], step: float, what: str) -> list[Finding]:
    """Finds groups for whose gathered bytes, or reduced bytes, ranks wait."""
    by_group = Counter[str]()
    for wait in waits:
        if wait.by is None and (wait.what == what or (what == "reduce" and wait.what == "all-reduce")):
            by_group[wait.group] += wait.length / len(ranks)  # type: ignore[assignment]
    total = sum(by_group.values())
    if total < _WORTH_SAYING * step:
        return []
    most = by_group.most_common(_NAMED)
    groups = ", ".join(f"'{group}' {_time(length)}" for group, length in most)
    thing = "gathers" if what == "gather" else "reductions of gradients"
    text = f"A rank waits {_time(total)} of a step of {_time(step)} for the bytes of {thing}, most for {groups}."
    if what == "gather":
        advice = (
            "Gather further ahead (set_prefetch_limit(2) costs one more buffer), or keep groups whole after forward "
            "(reshard_after_forward=False). The first gather of a forward is never hidden."
        )
        return [Finding("late gathers", text, advice, total / step, group=most[0][0])]
    advice = (
        "Let more reductions run at once (set_reduce_scatter_max_input_buffers(2) costs one more buffer), or reduce in "
        "a lower precision (reduce_dtype). The last reduction of a backward is never hidden."
    )
    return [Finding("late reductions", text, advice, total / step, group=most[0][0])]


def _between_hosts(ranks: Sequence[RankTrace], waits: Sequence[Waited], step: float) -> list[Finding]:
    """Finds how fast a host gets bytes from others, and what fewer of them would give."""
    received, lengths, hosts = 0.0, list[float](), Counter(rank.host for rank in ranks)
    for rank in ranks:
        steps = rank.steps()
        spans = [span for span in rank.spans if span.step in steps]
        moving = [span for span in spans if span.lane == "network"]
        moving = moving or [span for span in spans if hosts[rank.host] == 1 and span.nbytes]
        lengths.append(covered(moving) / len(steps))
        received += sum(span.nbytes for span in spans) / len(steps) / len(hosts)
    length, waiting = mean(lengths), sum(wait.length for wait in waits if wait.by is None) / len(ranks)
    if not length or waiting < _WORTH_SAYING * step:
        return []
    saved = min(waiting, 7 / 8 * length)
    text = f"A host gets {bytes_text(received)} in a step from the others, in {_time(length)} "
    text += f"({received / length:.2f} GB/s), and its ranks wait {_time(waiting)} for bytes. With an eighth of these "
    text += f"a step would take about {_time(step - saved)} instead of {_time(step)}."
    advice = "Send fewer: encode messages (wire_policy), replicate over hosts (a mesh of two dimensions), or use more "
    return [Finding("between hosts", text, f"{advice}micro-batches in each step.", saved / step)]


def _parts(ranks: Sequence[RankTrace], step: float) -> list[Finding]:
    """Finds what else takes a large share of a step."""
    found: list[Finding] = []
    each = [(rank.rank, shares(rank)) for rank in ranks]
    rank, most = max(each, key=lambda pair: pair[1].outside)
    if most.outside > 0.1 * step:
        text = f"Rank {rank} spends {_time(most.outside)} of a step of {_time(step)} outside of passes and optimizer "
        text += "steps."
        advice = "Prepare batches beside training (a DataLoader with workers), and read losses and log less often."
        found.append(Finding("outside", text, advice, most.outside / step, rank))
    stepping = mean(share.optimizer for _, share in each)
    if stepping > 0.2 * step:
        text = f"The optimizer takes {_time(stepping)} of a step of {_time(step)}."
        advice = "Let it update many parameters at once (foreach=True or fused=True), or use more micro-batches."
        found.append(Finding("optimizer", text, advice, stepping / step))
    rank, most = max(each, key=lambda pair: pair[1].disk)
    if most.disk > 0.05 * step:
        text = f"Rank {rank} waits {_time(most.disk)} of a step of {_time(step)} for its disk."
        advice = "Offload a smaller share (DiskOffloadPolicy), compute more in each step, or use a faster disk."
        found.append(Finding("disk", text, advice, most.disk / step, rank))
    copying = mean(share.copying for _, share in each)
    if copying > 0.1 * step:
        text = f"The host copies and adds communicated bytes for {_time(copying)} of a step of {_time(step)}."
        advice = "Use more micro-batches in each step, or larger batches: this time does not grow with them."
        found.append(Finding("copies", text, advice, copying / step))
    return found


def _prefetch(ranks: Sequence[RankTrace]) -> list[Finding]:
    """Counts the gathers that were complete when they were needed."""
    gathers = there = 0
    for rank in ranks:
        waits = Counter[tuple[object, ...]]()
        for span in rank.of("wait"):
            waits[_key(span)] += span.length
        for span in rank.of("gather"):
            gathers += 1
            there += waits[_key(span)] <= max(_AT_ONCE, _NEARLY_THERE * span.length)
    if not gathers:
        return [Finding("prefetch", "Nothing was gathered: the ranks share memory, or all groups stayed whole.")]
    return [Finding("prefetch", f"{there} of {gathers} gathers were complete when they were needed.")]


def _named(work: Work) -> str:
    if work.what == "outside":
        return "The time between its passes"
    if work.what == "optimizer":
        return "The step of the optimizer"
    return f"The {work.what} of '{work.group}'"


def _time(nanoseconds: float) -> str:
    return seconds_text(nanoseconds / 1e9)
