"""What decides, from a whole run: the short tables of the page for those who choose, and the goals that are missed."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures import least, middle, ratio, sockets
from benchmarks.goals import excess
from benchmarks.report import Results, judged, middle_ratio, table

_WORKS = {
    "communication W=2": "mostly moves parameters",
    "compute W=2": "mostly computes",
    "realistic W=2": "realistic",
}


def parts(results: Results) -> dict[str, str]:
    """The tables by the names of their places: ``decision``, ``beside`` and ``missed``."""
    steps = table([*_steps(results)], ["a step", "ranks", "no communication", "fullshard", "FSDP2", "bytes sent, P"])
    beside = table([*_beside(results)], ["", "fullshard", "torch"])
    missed = [row[:3] for row in judged(results) if row[3] != "met"]
    return {"decision": steps, "beside": beside, "missed": table(missed, ["goal", "measured", "to reach"])}


def _steps(results: Results) -> Iterator[list[str]]:
    """Wall times over DDP's, and bytes."""
    for where, pick in (("on one host", lambda _: "fullshard"), ("over sockets", sockets)):
        for name, what in _WORKS.items():
            found = results[name]["contenders"]
            names = ("no communication", pick(found), "torch FSDP2")
            ours, theirs, ddp = (least(found[each]["wire"]) for each in (*names[1:], "DDP"))
            walls = [f"{ratio(found, 'wall', each, 'DDP')[0]:.2f}" for each in names]
            yield [f"{what}, {where}", "2", *walls, f"{ours:.2f}; FSDP2 {theirs:.2f}; DDP {ddp:.2f}"]
    for count, found in results.get("hosts", {}).get("ranks", {}).items():
        walls = [f"{ratio(found, 'wall', each, 'DDP')[0]:.2f}" for each in ("zero_stage=3", "FSDP2")]
        sent = "; ".join(
            f"{name} {found[each]['sent']:.2f}".strip()
            for name, each in (("", "zero_stage=3"), ("FSDP2", "FSDP2"), ("DDP", "DDP"))
        )
        yield [f"mostly moves parameters, 2 hosts, {results['hosts']['rate']}", f"{2 * count}", "-", *walls, sent]


def _beside(results: Results) -> Iterator[list[str]]:
    memory, saves = results["memory"], results["saves"]["models"]["1 GiB"]
    for phase in ("forward", "backward"):
        own, other = (f"{round(excess(memory, name, phase), 1) + 0.0} U" for name in ("fullshard", "torch FSDP2"))
        yield [f"memory in {phase} beyond what a rank keeps, one host", own, other]
    for way in ("save", "load"):
        own, other = (
            middle_ratio(saves[name][f"{way} wall"], saves["raw"][f"{way} wall"]) for name in ("fullshard", "DCP")
        )
        yield [f"{way} a checkpoint of 1 GiB / raw {'write' if way == 'save' else 'read'}", own, other]
    host = results["host"][0]["counts"][8]
    own, other = (f"{1e6 * host[name]['seconds'][0]:.0f} µs" for name in ("fullshard", "torch FSDP2"))
    yield ["host's work for a group of 8 parameters in a step", own, other]
    if jobs := results.get("elastic"):
        yield [
            "from a kill to the next step of 4 processes, beyond a usual step: middle, longest",
            f"{middle(jobs['recoveries']):.2f} s, {max(jobs['recoveries']):.2f} s",
            "-",
        ]
