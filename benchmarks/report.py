"""Results for readers: tables, and the raw numbers.

Every part says what its columns are before it shows them. A ratio is a median over rounds, of pairs within a round,
followed by its quartiles.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks import machine
from benchmarks.figures import Spread, least, middle, ratio, spread
from benchmarks.goals import excess, judge
from benchmarks.optimizer import PLAIN
from benchmarks.plot import draw

Results = dict[str, Any]

#: What transports are, for those who do not know the library.
_TRANSPORTS = {
    "shm": "memory that the ranks of a host share",
    "p2p": "messages between pairs of ranks, over sockets",
    "collective": "the process group's own collectives, over sockets",
}
#: How far two counts of the same bytes may lie apart before the report says so.
_AGREE = 0.1

_KINDS = {"communication": "Communication-bound", "compute": "Compute-bound", "realistic": "Realistic"}

_TITLES = {
    "machine": "The run",
    "goals": "Goals",
    "steps": "Time of a step",
    "moves": "What a step moves",
    "group": "One group's gather and reduction",
    "exchanges": "Messages or collectives",
    "host": "What the host does for a group",
    "launches": "What a step asks of a device",
    "optimizer": "A step of an optimizer",
    "memory": "Memory of a rank",
    "padding": "Padding",
    "initialisation": "Sharding a model",
    "checkpoint": "Checkpoints",
    "saves": "Saves and loads beside raw writes and reads",
    "checks": "Checks",
    "hosts": "Several hosts",
    "elastic": "Elastic jobs",
}


def save(results: Results, folder: Path) -> str:
    """Write ``results.json``, ``results.md`` and ``results.png`` to ``folder``; returns the text of the second."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    sections = "\n".join(f"## {_TITLES.get(name, name)}\n\n{text}" for name, text in parts(results).items())
    text = f"# fullshard beside torch's FSDP and DDP\n\n{sections}"
    (folder / "results.md").write_text(text)
    draw(results, folder / "results.png")
    return text


def read(file: Path) -> Results:
    """The results that :func:`save` wrote as ``results.json``."""

    def restore(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
        return {int(key) if key.isdigit() else key: value for key, value in pairs}

    found: Results = json.loads(file.read_text(), object_pairs_hook=restore)
    return found


def parts(results: Results) -> dict[str, str]:
    """The report's parts by name: each what was measured, what the columns are, and the tables."""
    steps = {name: found for name, found in results.items() if name.split()[0] in (*_KINDS, "tiny")}
    made: dict[str, Callable[[], Iterator[str]]] = {"machine": lambda: _machine(results, steps)}
    if not results.get("quick"):
        made["goals"] = lambda: _goals(results)
    if steps:
        made |= {"steps": lambda: _steps(steps, results["machine"]["cores"]), "moves": lambda: _moves(steps)}
    tables = (("group", _group), ("exchanges", _exchanges), ("host", _host), ("launches", _launches))
    others = (
        ("optimizer", _optimizer),
        ("memory", _memory),
        ("padding", _padding),
        ("initialisation", _initialisation),
    )
    last = (("saves", _saves), ("checks", _checks), ("hosts", _hosts), ("elastic", _elastic))
    for name, make in (*tables, *others, ("checkpoint", _checkpoint), *last):
        if name in results:
            made[name] = lambda name=name, make=make: make(results[name])  # type: ignore[misc]
    return {name: "\n".join(make()) for name, make in made.items()}


def _machine(results: Results, steps: Results) -> Iterator[str]:
    facts, watch = results["machine"], results.get("watch")
    yield (
        f"{facts['processor']}, {facts['cores']} cores, {facts['system']}, Python {facts['python']}, torch "
        f"{facts['torch']}, commit {facts.get('commit') or 'unknown'}. fp32, gloo, one thread a rank, all ranks on "
        "this machine.\n"
    )
    if results.get("quick"):
        yield "**A quick run, at sizes at which no number means anything.**\n"
    if watch:
        yield (
            f"The run took {watch['seconds']:.0f} s. The load average before it was {watch['load_before']:.1f}, and "
            f"other programs used {watch['others']:.0%} of the machine meanwhile.\n"
        )
        if watch["others"] > machine.QUIET:
            yield (
                "**The machine was busy with something else. Ratios suffer less than times do, since contenders take "
                "turns, but do not believe a difference that is smaller than the quartiles. Run again when it is "
                "quiet.**\n"
            )
    transports = {
        name: values["transport"]
        for found in steps.values()
        for name, values in found["contenders"].items()
        if values["transport"]
    }
    chosen = {
        "fullshard": "the library with the transport it chooses here,",
        "fullshard, wrapper": "its wrapper `FullyShardedDataParallel`, with",
    }
    yield "Who is compared:\n"
    for name, transport in transports.items():
        yield f"- `{name}`: {chosen.get(name, 'the same with')} {_called(transport)}"
    yield (
        "- `torch FSDP2`, `torch FSDP1`, `DDP`: `fully_shard`, `FullyShardedDataParallel` and "
        "`DistributedDataParallel` of torch, used as their documentation says"
    )
    yield "- `no communication`: each process trains by itself; no contender with the same work can be faster\n"
    yield (
        "P: bytes of all parameters. U: bytes of one group (a block of the model). W: ranks. n: parameters in a group. "
        "Numbers in parentheses are quartiles: half of the rounds lie between them.\n"
    )


def _called(transport: str) -> str:
    return f"`{transport}`, {_TRANSPORTS.get(transport, 'a transport of its own')}"


def _goals(results: Results) -> Iterator[str]:
    yield "What fullshard has to reach, and what this run measured of `fullshard` unless sockets are named.\n"
    yield table(judged(results), ["what", "measured", "goal", ""])


def judged(results: Results) -> list[list[str]]:
    return [
        [
            goal.what,
            _number(value[0], goal.unit) + _quartiles(value),
            f"≤ {_number(goal.limit, goal.unit)}",
            "met" if goal.is_met(value) else "**missed**",
        ]
        for goal, value in judge(results)
    ]


def _steps(steps: Results, cores: int) -> Iterator[str]:
    yield (
        "Forward, backward, SGD and `zero_grad()`. *Wall* is the time of the slowest rank, *CPU* that of all threads "
        "of a rank, mean of the ranks; both are medians in milliseconds. Contenders take turns in the same processes, "
        "in a shuffled order, and see the same batches; a ratio (*/ DDP*, */ FSDP2*) is the median of the ratios of a "
        "round.\n"
    )
    for name, found in steps.items():
        if found["ranks"] > cores:  # a step then mostly measures CPU time
            continue
        contenders = found["contenders"]
        rounds = len(contenders["DDP"]["wall"])
        yield f"**{_described(name, found)}, {rounds} rounds**\n"
        rows = []
        for each, values in contenders.items():
            row = [each]
            for what in ("wall", "cpu"):
                row.append(f"{1e3 * middle(values[what]):.0f}")
                row += [_ratio(ratio(contenders, what, each, base)) for base in ("DDP", "torch FSDP2")]
            rows.append(row)
        yield table(rows, ["", "wall, ms", "/ DDP", "/ FSDP2", "CPU, ms", "/ DDP", "/ FSDP2"])


def _described(name: str, found: Any) -> str:
    kind = _KINDS.get(name.split()[0], "Tiny")
    return f"{kind}, W={found['ranks']}: {found['model_bytes'] / 2**20:.0f} MiB of parameters"


def _moves(steps: Results) -> Iterator[str]:
    yield (
        "For each rank in a step. *Sent* is what the library asked of the process group, counted call by call, each "
        "with the fewest bytes that it can do with; *loopback* is what the network device of the machine carried, "
        "headers included, in the round with the fewest, since other programs only add; "
        "*copied* is what operators that only copy wrote, less those of the model itself. All "
        "three in P. *Page faults* are pages that the kernel had to hand out in a step, and in parentheses the same "
        "where gradients keep their memory, `zero_grad(set_to_none=False)`.\n"
    )
    for name, found in steps.items():
        if name.startswith("compute"):  # the counts are in proportion to the parameters, as in the first model
            continue
        yield f"**{_described(name, found)}**\n"
        rows, apart = [], []
        for each, values in found["contenders"].items():
            wire = least(values["wire"])
            if abs(wire - values["asked"]) > _AGREE * max(values["asked"], 0.1):
                apart.append(f"`{each}` ({values['asked']:.2f} and {wire:.2f})")
            faults = f"{middle(values['faults']):,.0f}"
            if values["kept_faults"]:
                faults += f" ({middle(values['kept_faults']):,.0f})"
            rows.append([each, f"{values['asked']:.2f}", _known(wire), f"{values['copied']:.2f}", faults])
        yield table(rows, ["", "sent, P", "loopback, P", "copied, P", "page faults"])
        if apart:
            yield (
                f"Sent and loopback disagree by more than {_AGREE:.0%}: {', '.join(apart)}. Either the backend moves "
                f"more than the calls need (gloo's reduce-scatter is an all-reduce inside), or another program used "
                f"the device.\n"
            )
        unknown = sorted({each for values in found["contenders"].values() for each in values["unknown"]})
        if unknown:
            yield f"*Sent* is too low by these operators, which are not understood: {', '.join(unknown)}.\n"


def _group(found: Any) -> Iterator[str]:
    yield (
        f"A group of {found['group_bytes'] / 2**20:.0f} MiB, W={found['ranks']}, by itself. *Gather*: a forward "
        f"without gradients after parameters were written, less that of a plain module. *Reduction*: a backward of "
        f"parameters that stayed whole, less that of a plain module. Milliseconds of CPU of a rank, all threads. "
        f"*Copied*: bytes that the gather copies within a rank, in U.\n"
    )
    names = list(dict.fromkeys([*found["gather"], *found["reduce"]]))
    rows = []
    for name in names:
        times = (_milliseconds(found[what][name]) if name in found[what] else "-" for what in ("gather", "reduce"))
        rows.append([name, *times, f"{found['copied'][name]:.2f}" if name in found["copied"] else "-"])
    rows.append(["one copy of it (memcpy)", _milliseconds(found["copy"]["memcpy"]), "-", "1.00"])
    yield table(rows, ["", "gather, ms", "reduction, ms", "copied, U"])


def _exchanges(found: Any) -> Iterator[str]:
    sizes = list(found[0]["sizes"])
    yield (
        "CPU of an exchange by messages between pairs of ranks (`p2p`), over that by gloo's own collectives "
        f"(`collective`), for groups of about {_size(sizes[0])} to {_size(sizes[-1])} whose parameters are those of a "
        "transformer's block; all ranks on this machine, over sockets. Below 1 messages cost less.\n"
    )
    rows = [
        [
            str(each["ranks"]),
            what,
            *(_ratio(ratio(each["sizes"][size][what], "cpu", "p2p", "collective")) for size in sizes),
        ]
        for each in found
        for what in ("gather", "reduction")
    ]
    yield table(rows, ["W", "", *map(_size, sizes)])


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 2**20 else f"{nbytes >> 10} KiB"


def _host(found: Any) -> Iterator[str]:
    counts = list(found[0]["counts"])
    transport = found[0]["counts"][counts[0]]["fullshard"]["transport"]
    yield (
        "One process that believes to be a rank of W, and whose collectives do nothing: only the library's own work to "
        "organize a step is left. Microseconds of CPU for each group in a forward and a backward (quartiles), less "
        f"those of modules that are not sharded. `fullshard` uses {_called(transport)}: the others need real ranks. "
        "`torch's calls alone` (`benchmarks/least.py`) gathers, reduces, shows and hides as a library of DTensors "
        "must, with nothing around it.\n"
    )
    rows = []
    ends = (found[0], found[-1]) if len(found) > 1 else found
    for each in ends:
        for name in each["counts"][counts[0]]:
            cells = (each["counts"][count][name]["seconds"] for count in counts)
            rows.append([f"{each['ranks']:,}", name, *("{:.0f} ({:.0f}-{:.0f})".format(*_micro(c)) for c in cells)])
    yield table(rows, ["W", "", *(f"n={count}" for count in counts)])
    yield "Calls of Python and C functions for each group in a step, which are the same in every run:\n"
    rows = []
    for each in ends:
        for name in each["counts"][counts[0]]:
            calls = (f"{each['counts'][count][name]['calls']:,.0f}" for count in counts)
            rows.append([f"{each['ranks']:,}", name, *calls])
    yield table(rows, ["W", "", *(f"n={count}" for count in counts)])


def _micro(seconds: Spread) -> Spread:
    return 1e6 * seconds[0], 1e6 * seconds[1], 1e6 * seconds[2]


def _launches(found: Any) -> Iterator[str]:
    yield (
        "For each group in a forward and a backward, less what modules do that are not sharded. Counted on a simulated "
        "device, not measured on one. *Launches*: operations that look at elements, without collectives; an operation "
        "on lists of tensors is one. *Kernels*: the same, where an operation on lists whose tensors do not lie alike "
        "counts for each of them. *Copied*: bytes that copies read and write, and fills write. *Allocated*: memory "
        "that lives no longer than the step. *Waits*: of the host for the device. *Sent*: what collectives ask of a "
        "rank. Bytes are in U. n: equal parameters of 1,024 elements in a group, or the 8 of a transformer's block of "
        "width 64 (*large*: 1,024).\n"
    )
    columns = ("launches", "kernels", "copied", "allocated", "synchronizations", "collectives", "sent")
    rows = list[list[str]]()
    for each in found:
        alike: dict[str, list[str]] = {}  # numbers of parameters with the same counts share a row
        for count, costs in each["counts"].items():
            alike.setdefault(repr(costs), []).append(str(count))
            if len(counts := alike[repr(costs)]) > 1:
                for row in rows[-len(costs) :]:
                    row[1] = ", ".join(counts)
                continue
            for name, cost in costs.items():
                rows.append([str(each["ranks"]), str(count), name, *(f"{cost[column]:.2f}" for column in columns)])
    shown = ("launches", "kernels", "copied, U", "allocated, U", "waits", "collectives", "sent, U")
    yield table(rows, ["W", "n", "", *shown])


def _optimizer(found: Any) -> Iterator[str]:
    yield (
        f"{found['count']} parameters of {found['width']} x {found['width']}, W=2. CPU: milliseconds of a step on "
        f"plain tensors as large as the shards, and multiples of it. Nothing where torch cannot do it on DTensors.\n"
    )
    rows = [
        [
            kind,
            _milliseconds(values[PLAIN]["cpu"], 2),
            *(
                _ratio(ratio(values, "cpu", name, PLAIN)) if name in values else "-"
                for name in ("fullshard", "torch FSDP2")
            ),
        ]
        for kind, values in found["kinds"].items()
    ]
    yield table(rows, ["", f"{PLAIN}, ms", "fullshard", "torch FSDP2"])


def _memory(found: Any) -> Iterator[str]:
    yield (
        f"In U = {found['group_bytes'] / 2**20:.0f} MiB, W={found['ranks']}, {found['model_bytes'] / 2**20:.0f} MiB of "
        f"parameters, nearly all of them in blocks. *State*: the parameters that a rank has to keep. Above it: "
        f"*forward* at its peak; *backward* at its peak, above parameters and as many bytes of gradients; *rest*, kept "
        f"between steps after `zero_grad()`, and in parentheses by the count of `malloc`, which also has what was "
        f"never touched; *freed*, the same after `free_buffers()`, from which forward and backward are measured. "
        f"`no prefetch` is `set_prefetch_limit(0)`.\n"
    )
    yield (
        "These are the kernel's counts of a process that returns freed memory at once, so that temporaries inside of "
        "gloo are in them, which torch's profiler does not see. A mapping that ranks share counts for each "
        "rank with its bytes divided by the ranks. What the same phase takes without sharding is subtracted in every "
        "row but the last.\n"
    )
    unit = found["group_bytes"]
    rows = []
    for name, values in found["contenders"].items():
        forward, backward, rest, allocated, freed = (
            f"{round(excess(found, name, phase), 2) + 0.0:.2f}"
            for phase in ("forward", "backward", "rest", "allocated", "freed")
        )
        ours = name.startswith("fullshard")
        row = [
            name,
            f"{values['state'] / unit:.2f}",
            forward,
            backward,
            f"{rest} ({allocated})",
            freed if ours else "-",
        ]
        rows.append(row)
    yield table(rows, ["", "state", "forward", "backward", "rest", "freed"])


def _padding(found: Any) -> Iterator[str]:
    sizes = found["world_sizes"]
    yield "What a gather of one parameter of 3 x 4096 delivers, in multiples of its bytes:\n"
    names = next(iter(sizes.values()))
    rows = [[name, *(f"{values[name]:.1f}" for values in sizes.values())] for name in names]
    yield table(rows, ["", *(f"W={size:,}" for size in sizes)])
    yield (
        f"Padding of the *flat* layout, which cuts a group anywhere, at W={found['flat_world_size']:,}, in percent of "
        f"the group; the most that transformer blocks of any width (a multiple of 8) have. An alignment is in elements "
        f"of fp32: 16 is the plan's, 4 are the 16 bytes that transports need.\n"
    )
    alignments = list(found["flat"][0]["alignments"])
    rows = [
        [each["groups"], *(f"{100 * each['alignments'][alignment]:.2f} %" for alignment in alignments)]
        for each in found["flat"]
    ]
    yield table(rows, ["group", *(f"alignment {alignment}" for alignment in alignments)])


def _initialisation(found: Any) -> Iterator[str]:
    unit, shards = found["group_bytes"], found["model_bytes"] / found["ranks"]
    yield (
        f"{found['model_bytes'] / 2**20:.0f} MiB of parameters, W={found['ranks']}, U = {unit / 2**20:.0f} MiB. *From "
        f"the CPU*: a model with its values is sharded; the memory is the peak above the model, in U. *From meta*: a "
        f"model without memory is sharded, and each rank draws the values of what it keeps; the memory is the peak "
        f"above the rank's {shards / unit:.2f} U of shards. Milliseconds of the slowest rank (quartiles).\n"
    )
    rows = []
    for name, values in found["contenders"].items():
        row = [name]
        for way, base in (("cpu", 0.0), ("meta", shards)):
            row.append(_milliseconds(values[f"{way} seconds"], 0))
            row.append(_known((middle(values[f"{way} bytes"]) - base) / unit))
        rows.append(row)
    yield table(rows, ["", "from the CPU, ms", "peak, U", "from meta, ms", "peak, U"])
    yield "DDP cannot begin on meta: every rank makes the whole model.\n"


def _checkpoint(found: Any) -> Iterator[str]:
    yield (
        f"{found['model_bytes'] / 2**20:.0f} MiB of parameters and twice as much of AdamW's state, W={found['ranks']}, "
        f"with `torch.distributed.checkpoint` where no other way is named. Time is of the slowest rank, state dicts "
        f"included, files not forced to the disk; *peak* is what the rank that needs most takes above what it had.\n"
    )
    rows = []
    for name, values in found["contenders"].items():
        cells = [f"{middle(values['file bytes']) / 2**20:.0f}"]
        for way in ("save", "load"):
            cells += [_milliseconds(values[f"{way} seconds"], 0), _known(middle(values[f"{way} bytes"]) / 2**20, 0)]
        rows.append([name, *cells])
    yield table(rows, ["", "files, MiB", "save, ms", "peak, MiB", "load, ms", "peak, MiB"])


def _saves(found: Any) -> Iterator[str]:
    yield (
        f"`fullshard.checkpoint` and `torch.distributed.checkpoint` (DCP) beside the raw write and read of the same "
        f"bytes, W={found['ranks']}, forced to the disk; wall time of the slowest rank and CPU time of all ranks, as "
        "multiples of the raw ones of the same round. *near* goes to memory of the host. With `wait=False` *save* is "
        "how long training stands, and *load* the rest of the save.\n"
    )
    rows = []
    for model, contenders in found["models"].items():
        for name, values in contenders.items():
            if name != "bytes":
                ratios = [middle_ratio(values[what], contenders["raw"][what]) for what in values]
                rows.append([model, name, _milliseconds(values["save wall"], 0), *ratios])
    yield table(rows, ["", "", "save, ms", "save, wall", "save, CPU", "load, wall", "load, CPU"])


def middle_ratio(values: list[float], raw: list[float]) -> str:
    return f"{middle([one / other for one, other in zip(values, raw, strict=True)]):.2f}"


def _checks(found: Any) -> Iterator[str]:
    yield (
        "A step with the checks that are on by default (the comparison of the ranks after each pass), over one with "
        "`FULLSHARD_CHECKS=0`; and the same with `detect_nan`, which reads every output and gradient. The "
        f"thread that watches over waits took {found['watch']:.2%} of a core.\n"
    )
    rows = [
        [
            _called(transport),
            *(_ratio(ratio(each[check], what, "with", "without")) for check in each for what in ("wall", "cpu")),
        ]
        for transport, each in found["steps"].items()
    ]
    yield table(rows, ["", "with checks, wall", "CPU", "and detect_nan, wall", "CPU"])


def _hosts(found: Any) -> Iterator[str]:
    if "why" in found:
        yield f"Not measured: {found['why']}\n"
        return
    yield (
        f"{found['hosts']} hosts with {found['rate']} between them, namespaces on this machine. *Bytes* are those that "
        "the card of a host sends in a step, in P. 8 blocks of width 512, 16 tokens a rank, SGD.\n"
    )
    rows = [
        [
            f"{count}",
            name.replace("zero_stage=3", "fullshard"),
            f"{each['sent']:.2f}",
            *(_ratio(ratio(contenders, "wall", name, other)) for other in ("DDP", "FSDP2")),
        ]
        for count, contenders in found["ranks"].items()
        for name, each in contenders.items()
    ]
    yield table(rows, ["ranks a host", "", "bytes, P", "wall / DDP", "/ FSDP2"])


def _elastic(found: Any) -> Iterator[str]:
    kills = found["recoveries"]
    yield (
        "Two replicas of two shards, four processes. *Steady*: a step, over one on a mesh of two replicas. "
        "*Recovery*: from a kill to the next step that another process ends, beyond a usual step. *Joining*: a step "
        f"while a new process, on its own core, loads {found['joining MiB']:.0f} MiB and becomes a member, over a "
        "usual one.\n"
    )
    median, most = middle(kills), max(kills)
    row = [_ratio(spread(found["steady"])), f"{median:.2f} s; most of {len(kills)} kills {most:.2f} s"]
    yield table([[*row, _ratio(spread(found["joining"]))]], ["steady", "recovery", "joining"])


def table(rows: list[list[Any]], headers: list[str]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True) + "\n"


def _ratio(value: Spread) -> str:
    return "{:.2f} ({:.2f}-{:.2f})".format(*value)


def _quartiles(value: Spread) -> str:
    digits = 0 if abs(value[0]) >= 100 else 2
    return f" ({value[1]:,.{digits}f}-{value[2]:,.{digits}f})" if value[1] != value[2] else ""


def _milliseconds(values: list[float], digits: int = 1) -> str:
    if any(math.isnan(value) for value in values):
        return "-"
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(*(1e3 * value for value in spread(values)), d=digits)


def _known(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _number(value: float, unit: str) -> str:
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value + 0.0:.2f}"
    return f"{text} {unit}".strip()
