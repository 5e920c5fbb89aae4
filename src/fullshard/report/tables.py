"""Explanations as plain text for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise

from fullshard.report.estimate import Estimate
from fullshard.report.facts import GroupFacts, ModelFacts
from fullshard.report.meta_step import READ, SHARED_BUFFERS, ExchangeTotal, Phase
from fullshard.text import (
    WIDTH,
    bytes_text,
    counted,
    percent,
    quantity_text,
    seconds_text,
    shape_text,
    table,
    wrapped,
)


def runs(groups: Sequence[GroupFacts]) -> list[list[GroupFacts]]:
    """Runs of consecutive groups that differ only in their names, such as the blocks of a model."""
    return [list(alike) for _, alike in groupby(groups, key=_signature)]


def _signature(group: GroupFacts) -> tuple[object, ...]:
    shapes = tuple((param.shape, param.dim, param.dtype) for param in group.parameters)
    return (group.module, group.layout, group.whole, group.shard, group.transport, group.reshards, shapes)


def name_of_run(alike: Sequence[GroupFacts]) -> str:
    first, last = alike[0].title, alike[-1].title
    if len(alike) == 1:
        return first
    where, _, number = last.rpartition(".")
    return f"{first} .. {number if first.rpartition('.')[0] == where else last} (x{len(alike)})"


def totals_text(groups: Sequence[GroupFacts]) -> str:
    """The totals of all groups."""
    elements, content = sum(group.elements for group in groups), sum(group.content for group in groups)
    padding = sum(group.padding for group in groups)
    return (
        f"{counted(len(groups), 'group')}, {elements:,} elements, {bytes_text(content)}, padding {bytes_text(padding)} "
        f"({percent(padding / max(1, content), 2)})"
    )


def groups_text(groups: Sequence[GroupFacts]) -> str:
    """A table with a row for each run of groups."""
    head = ["group", "module", "params", "elements", "whole (U)", "shard", "padding", "after forward"]
    rows = []
    for alike in runs(groups):
        each = alike[0]
        kept = f"on {each.post_forward} ranks" if each.post_forward else "freed" if each.reshards else "kept whole"
        rows.append(
            [
                name_of_run(alike),
                each.module,
                str(len(each.parameters)),
                f"{each.elements:,}",
                bytes_text(each.whole),
                bytes_text(each.shard),
                percent(each.padding_share, 2),
                kept,
            ]
        )
    return table(head, rows)


def settings_text(groups: Sequence[GroupFacts]) -> str:
    """The settings of the groups: layout, dtypes, transport. Groups with the same settings share a paragraph."""
    found: dict[str, list[str]] = {}
    for alike in runs(groups):
        each = alike[0]
        stored, compute, reduce = ("/".join(dtypes) or "nothing" for dtypes in (each.stored, each.compute, each.reduce))
        over = counted(each.ranks, "rank") + (f" x {each.replicas:,} replicas" if each.replicas > 1 else "")
        over += ", which shard it again between steps" if each.shards_replicas else ""
        shared = ", one buffer for the host" if each.shares else ""
        text = (
            f"{each.layout} over {over}; stored {stored}, computed {compute}, reduced {reduce}; moved by "
            f"'{each.transport}'{shared}: {each.why}"
        )
        text += f"; encoded: {each.wire}" if each.wire else ""
        text += f"; {each.offloaded.text(each.shard, each.trained)}" if each.offloaded.what else ""
        extended = [param.name for param in each.parameters if param.extends]
        text += f"; {counted(len(extended), 'parameter')} gathered in a different form" if extended else ""
        text += _evenness(each)
        found.setdefault(text, []).append(name_of_run(alike))
    every = len(found) == 1
    return "\n".join(wrapped(f"{'All groups' if every else ', '.join(names)}: {text}") for text, names in found.items())


def _evenness(group: GroupFacts) -> str:
    """How even the parts of ragged parameters are; empty if there are none."""
    ragged = [param for param in group.parameters if param.cuts]
    parts = [[(stop - start) * math.prod(each.shape[1:]) for start, stop in pairwise(each.cuts)] for each in ragged]
    if not (total := sum(map(sum, parts))):
        return ""
    ratio = max(map(sum, zip(*parts, strict=True))) * group.ranks / total
    return f"; {counted(len(ragged), 'ragged parameter')}: the largest rank has {ratio:.2f} times the mean"


def parameters_text(groups: Sequence[GroupFacts]) -> str:
    """A table with a row for each parameter. For a run of groups it has the parameters of the first group."""
    head, rows = ["parameter", "shape", "cut", "here", "most"], list[list[str]]()
    for alike in runs(groups):
        inside = f"{alike[0].name}." if alike[0].name else ""
        rows.append([name_of_run(alike), "", "", "", ""])
        for param in alike[0].parameters:
            first, stop = param.rows
            here = "whole" if param.dim is None and alike[0].layout == "even" else f"{first:,}:{stop:,}"
            cut = "elements" if alike[0].layout == "flat" else "-" if param.dim is None else f"dim {param.dim}"
            name = f"  {param.name.removeprefix(inside)}" + "".join(
                f" = {other_name}" for other_name in param.places[1:]
            )
            rows.append([name, shape_text(param.shape), cut, here, f"{param.chunk:,}"])
    return table(head, rows)


def memory_text(phases: Sequence[Phase]) -> str:
    """The bytes of each phase, and their parts."""
    labels = [(phase.name, bytes_text(phase.nbytes)) for phase in phases]
    room = WIDTH - sum(max(map(len, column)) + 2 for column in zip(*labels, strict=True))
    rows = []
    for phase, label in zip(phases, labels, strict=True):
        found: dict[str, list[str]] = {}
        for what, count, size in phase.parts:
            found.setdefault(what, []).append(bytes_text(size) if count == 1 else f"{count} x {bytes_text(size)}")
        formula = " + ".join(f"{what} {' + '.join(sizes)}" for what, sizes in found.items())
        rows.append([*label, wrapped(formula, "", room)])
    return table((), rows, "lrl")


def host_text(phases: Sequence[Phase], ranks: int) -> str:
    """The memory of a host at its peak, if so many ranks have full buffers in common there."""
    if not any(kind == SHARED_BUFFERS for phase in phases for kind, *_ in phase.parts):
        return ""
    most = bytes_text(ranks * max(phase.nbytes for phase in phases))
    text = (
        f"Its host, with {ranks} such ranks: {most} at the peak, in which the full buffers that they share count once"
    )
    return f"\n{wrapped(text)}"


def traffic_text(traffic: Sequence[ExchangeTotal]) -> str:
    """A table of the exchanges of a step, by kind."""
    if not traffic:
        return "A step exchanges nothing."
    head, rows = ["a step exchanges", "times", "sent by a rank"], []
    sent = [each for each in traffic if not each.kind.endswith(READ)]
    for each in traffic:
        rows.append([each.kind, f"{each.count:,}", bytes_text(each.nbytes), bytes_text(each.by_host)])
        rows[-1][3:] = rows[-1][3:] if each in sent else [""]
    sums = (sum(getattr(each, name) for each in sent or traffic) for name in ("nbytes", "by_host"))
    rows.append(["in all that is sent" if len(sent) < len(traffic) else "in all", "", *map(bytes_text, sums)])
    if any(each.by_host for each in traffic):
        return table([*head, "by its host"], rows)
    return table(head, [row[:3] for row in rows])


def order_text(facts: ModelFacts) -> str:
    """The order in which the groups run, and whether it was recorded."""
    known = {
        "step": "recorded in a step",
        "batch": "of a forward of the batch",
        "modules": "of the modules; the first step records its own",
    }[facts.order_of]
    names = " > ".join(name_of_run(alike) for alike in runs(facts.in_order))
    ahead = str(facts.prefetch) if facts.prefetch_bytes is None else bytes_text(facts.prefetch_bytes)
    return wrapped(f"Order ({known}; {ahead} gathered ahead): {names}")


def over_hosts_text(rows: Sequence[tuple[int, int, Estimate]]) -> str:
    """A table of estimates of the same model on different numbers of hosts, with so many ranks on each."""
    given = rows[0][-1].given
    head = ["hosts", "ranks on each", "a host sends", "exchanges", "exposed", "a step", f"{given.unit}/s"]
    lines = [
        [
            f"{hosts:,}",
            f"{ranks:,}",
            bytes_text(estimate.by_host),
            *map(seconds_text, (estimate.exchanges, estimate.exposed, estimate.step)),
            f"{estimate.throughput:,.0f}",
        ]
        for hosts, ranks, estimate in rows
    ]
    return f"{wrapped(f'Assumed: {given}')}\n\n{table(head, lines, 'r' * len(head))}"


def estimate_text(estimate: Estimate) -> str:
    """An estimate as text."""
    rows, given = [], estimate.given
    for key, alike in groupby(
        estimate.groups, key=lambda each: (each.forward, each.backward, each.name.rpartition(".")[0])
    ):
        members = list(alike)
        name = members[0].name if len(members) == 1 else f"{members[0].name} .. {members[-1].name.rpartition('.')[2]}"
        exchanges, exposed = (sum(getattr(each, what) for each in members) for what in ("exchanges", "exposed"))
        times = [len(members) * key[0], len(members) * key[1], exchanges, exposed]
        rows.append([name, *map(seconds_text, times)])
    share = percent(estimate.exposed / max(estimate.step, 1e-12))
    left_out = "" if estimate.is_counted else ", attention's products of activations, recomputation (give a batch)"
    lines = [
        f"A step (forward and backward): {seconds_text(estimate.step)}, of which {seconds_text(estimate.computing)} "
        f"compute and {seconds_text(estimate.exposed)} ({share}) wait for communication",
        f"{estimate.throughput:,.0f} {given.unit}/s on all ranks together; each rank computes "
        f"{quantity_text(estimate.flops, 'FLOP')}{', recomputation included' * estimate.is_counted}: "
        f"{percent(estimate.peak_share, 1)} of its peak",
        f"In a step a host sends {bytes_text(estimate.by_host)} to other hosts" if estimate.by_host else "",
        f"Assumed: {given}",
        f"Not counted: the optimizer step, the input of data, the host's own work{left_out}",
    ]
    seconds = table(["group", "forward", "backward", "exchanges", "exposed"], rows)
    return "\n".join([*map(wrapped, filter(None, lines)), "", seconds])
