"""What fullshard has to reach, as numbers, and where a run's results stand against them.

A goal that a run did not measure is left out. Sizes are in U, the bytes of a block's group, and P, those of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import nan
from typing import Any

from benchmarks.figures import Spread, exact, least, ratio, sockets, spread
from benchmarks.optimizer import PLAIN

Results = dict[str, Any]

#: What the kernel's count of memory cannot tell apart, in U: page tables, a thread's stack, the interpreter's own.
RESOLUTION = 0.05


@dataclass(frozen=True)
class Goal:
    """A limit that a figure must not exceed.

    Args:
        what: the figure, in words.
        benchmark: the results it comes from.
        limit: the largest value that is good enough.
        unit: of the value and the limit; empty for a multiple of something that ``what`` names.
        value: the figure with its quartiles, from the results.
        resolution: by how much the value may exceed the limit because it cannot be measured better.
    """

    what: str
    benchmark: str
    limit: float
    unit: str
    value: Callable[[Any], Spread]
    resolution: float = 0.0

    def is_met(self, value: Spread) -> bool:
        return round(value[0], 2) <= self.limit + self.resolution


def excess(found: Any, name: str, phase: str) -> float:
    """A phase's bytes of a contender above its parameters (in backward: and gradients), in U.

    What the same phase takes where nothing is sharded (activations, what the interpreter has loaded meanwhile) is
    subtracted.
    """
    states = 2 if phase == "backward" else 1
    own, alone = (
        each[phase] - states * each["state"]
        for each in (found["contenders"][name], found["contenders"]["no communication"])
    )
    return float((own - (alone if name != "no communication" else 0.0)) / found["group_bytes"])


def _checked(transport: str) -> Callable[[Any], Spread]:
    return lambda found: ratio(found["steps"][transport]["default"], "wall", "with", "without")


def _over(what: str, base: str, pick: Callable[[Any], str] = lambda found: "fullshard") -> Callable[[Any], Spread]:
    return lambda found: ratio(found["contenders"], what, pick(found["contenders"]), base)


def _wire(pick: Callable[[Any], str] = lambda found: "fullshard") -> Callable[[Any], Spread]:
    return lambda found: exact(least(found["contenders"][pick(found["contenders"])]["wire"]))


def _each(what: str) -> Callable[[Any], Spread]:
    return lambda found: spread(found["contenders"]["fullshard"][what] or [nan])


def _host(count: int) -> Callable[[Any], Spread]:
    def value(found: Any) -> Spread:
        each = found[0]["counts"][count]
        return exact(each["fullshard"]["seconds"][0] / each["torch FSDP2"]["seconds"][0])

    return value


def _peak(name: str) -> Callable[[Any], Spread]:
    """The peak of a contender over that of torch's FSDP2."""
    return lambda found: exact(found["contenders"][name]["peak"] / found["contenders"]["torch FSDP2"]["peak"])


def _copied(name: str) -> Callable[[Any], Spread]:
    return lambda found: exact(found["contenders"][name]["copied"])


def _launches(what: str, is_ratio: bool = True) -> Callable[[Any], Spread]:
    """The most for any number of ranks and of parameters, over that of torch's FSDP2 if it is a ratio."""

    def value(found: Any) -> Spread:
        pairs = [(each["fullshard"], each["torch FSDP2"]) for size in found for each in size["counts"].values()]
        return exact(max(ours[what] / theirs[what] if is_ratio else ours[what] for ours, theirs in pairs))

    return value


def _growth(found: Any) -> Spread:
    """The host time at the largest number of ranks over that at the smallest."""
    first, last = (each["counts"][4]["fullshard"]["seconds"][0] for each in (found[0], found[-1]))
    return exact(last / first)


def _memory(what: str, limit: float, phase: str, name: str = "fullshard") -> Goal:
    return Goal(
        what, "memory", limit, "U", lambda found: exact(excess(found, _present(found, name), phase)), RESOLUTION
    )


def _present(found: Any, name: str) -> str:
    """``name``, or where it was not measured without prefetch, the same with it."""
    return name if name in found["contenders"] else name.partition(",")[0]


def _sharding(found: Any) -> Spread:
    return spread([nbytes / found["group_bytes"] for nbytes in found["contenders"]["fullshard"]["cpu bytes"]])


def _sharding_time(found: Any) -> Spread:
    return ratio(found["contenders"], "cpu seconds", "fullshard", "torch FSDP2")


def _from_meta(found: Any) -> Spread:
    shards = found["model_bytes"] / found["ranks"]
    peaks = found["contenders"]["fullshard"]["meta bytes"]
    return spread([(nbytes - shards) / found["group_bytes"] for nbytes in peaks])


def _milli(what: str) -> Callable[[Any], Spread]:
    return lambda found: spread([1e3 * seconds for seconds in found[what]["fullshard"]])


def _flat(alignment: int) -> Callable[[Any], Spread]:
    return lambda found: exact(100 * max(each["alignments"][alignment] for each in found["flat"]))


def _optimizer_step(found: Any) -> Spread:
    """The worst of the optimizers, in the implementations for many parameters."""
    kinds = [values for name, values in found["kinds"].items() if "for-loop" not in name]
    return max(ratio(values, "cpu", "fullshard", PLAIN) for values in kinds)


def _most_sent(found: Any) -> Spread:
    return exact(max((each["zero_stage=3"]["sent"] for each in found["ranks"].values()), default=nan))


def _on_hosts(found: Any) -> Spread:
    return ratio(found["ranks"][max(found["ranks"])], "wall", "zero_stage=3", "DDP")


def _most_seconds(found: Any) -> Spread:
    return exact(max(found["recoveries"]))


GOALS = [
    Goal(
        "communication-bound step, one host: wall / that of a process alone",
        "communication W=2",
        1.1,
        "",
        _over("wall", "no communication"),
    ),
    Goal("communication-bound step, one host: wall / DDP's", "communication W=2", 0.65, "", _over("wall", "DDP")),
    Goal(
        "communication-bound step, one host: wall / FSDP2's",
        "communication W=2",
        0.18,
        "",
        _over("wall", "torch FSDP2"),
    ),
    Goal(
        "communication-bound step over sockets: CPU / FSDP2's",
        "communication W=2",
        0.33,
        "",
        _over("cpu", "torch FSDP2", sockets),
    ),
    Goal(
        "communication-bound step over sockets: wall / DDP's",
        "communication W=2",
        1.1,
        "",
        _over("wall", "DDP", sockets),
    ),
    Goal("compute-bound step, one host: wall / DDP's", "compute W=2", 0.8, "", _over("wall", "DDP")),
    Goal("compute-bound step over sockets: wall / DDP's", "compute W=2", 1.2, "", _over("wall", "DDP", sockets)),
    Goal("realistic step, one host: wall / DDP's", "realistic W=2", 1.0, "", _over("wall", "DDP")),
    Goal("realistic step over sockets: wall / DDP's", "realistic W=2", 1.03, "", _over("wall", "DDP", sockets)),
    Goal("page faults in the communication-bound step", "communication W=2", 50, "", _each("faults")),
    Goal("page faults if gradients keep their memory", "communication W=2", 50, "", _each("kept_faults")),
    Goal("bytes on the wire, one host, W=2", "communication W=2", 0.01, "P", _wire()),
    Goal("bytes on the wire, sockets, W=2", "communication W=2", 1.5, "P", _wire(sockets)),
    Goal("bytes on the wire, sockets, W=4", "communication W=4", 2.25, "P", _wire(sockets)),
    Goal("bytes copied within a rank in a step", "communication W=2", 1.0, "P", _copied("fullshard")),
    Goal(
        "bytes copied within a rank in a step, collective",
        "communication W=2",
        2.0,
        "P",
        _copied("fullshard, collective"),
    ),
    Goal("bytes copied by a gather", "group", 0.0, "U", lambda found: exact(found["copied"]["fullshard"])),
    Goal("gather of 48 MiB: CPU", "group", 12, "ms", _milli("gather")),
    Goal("reduction of 48 MiB: CPU", "group", 16, "ms", _milli("reduce")),
    Goal("host time a group, n=4 / FSDP2's", "host", 0.28, "", _host(4)),
    Goal("host time a group, n=32 / FSDP2's", "host", 0.24, "", _host(32)),
    Goal("host time a group, n=4: most ranks / fewest", "host", 1.1, "", _growth),
    Goal("calls a group, n=8", "host", 200, "", lambda found: exact(found[0]["counts"][8]["fullshard"]["calls"])),
    Goal("launches in a step / FSDP2's", "launches", 0.6, "", _launches("launches")),
    Goal("bytes that copies read and write / FSDP2's", "launches", 0.6, "", _launches("copied")),
    Goal("bytes allocated in a step beside gradients", "launches", 0.0, "U", _launches("allocated", False)),
    Goal("waits of the host for a device in a step", "launches", 0, "", _launches("synchronizations", False)),
    Goal("collectives in a step / FSDP2's", "launches", 1.0, "", _launches("collectives")),
    Goal("bytes of collectives in a step / FSDP2's", "launches", 1.0, "", _launches("sent")),
    Goal("optimizer step, 200 small parameters / plain tensors", "optimizer", 1.3, "", _optimizer_step),
    _memory("forward peak above the shards, with prefetch", 2.0, "forward"),
    _memory("forward peak above the shards, without prefetch", 1.0, "forward", "fullshard, no prefetch"),
    _memory("backward peak above shards and gradients, with prefetch", 3.5, "backward"),
    _memory("backward peak above shards and gradients, without prefetch", 2.5, "backward", "fullshard, no prefetch"),
    _memory("kept between steps above the shards", 3.0, "rest"),
    _memory("kept after free_buffers() above the shards", 0.0, "freed"),
    *(
        Goal(f"a step with its checks / without, {name}", "checks", 1.01, "", _checked(name))
        for name in ("shm", "p2p", "collective")
    ),
    Goal("peak of a communication-bound step over sockets / FSDP2's", "peaks", 1.0, "", _peak("fullshard, p2p")),
    Goal("peak of a communication-bound step, collective / FSDP2's", "peaks", 1.0, "", _peak("fullshard, collective")),
    Goal("flat layout, W=1,024, groups from 1 MiB: most padding (alignment 16)", "padding", 3, "%", _flat(16)),
    Goal("flat layout, W=1,024, groups from 1 MiB: most padding (alignment 4)", "padding", 3, "%", _flat(4)),
    Goal("sharding a model on the CPU: time / FSDP2's", "initialisation", 1.0, "", _sharding_time),
    Goal("sharding a model on the CPU: peak above it", "initialisation", 0.5, "U", _sharding, RESOLUTION),
    Goal("sharding a model on meta: peak above the shards", "initialisation", 1.0, "U", _from_meta, RESOLUTION),
    Goal("bytes that a host's card sends, 2 hosts: most of all ranks a host", "hosts", 1.4, "P", _most_sent),
    Goal("two hosts of most ranks, 1 Gbit/s: wall / DDP's", "hosts", 0.85, "", _on_hosts),
    Goal("from a kill to the next step, most of all kills", "elastic", 1.0, "s", _most_seconds),
    Goal("elastic step / one on a mesh", "elastic", 1.01, "", lambda found: spread(found["steady"])),
    Goal(
        "elastic step while a process joins / a usual one", "elastic", 1.1, "", lambda found: spread(found["joining"])
    ),
]


def judge(results: Results) -> Iterator[tuple[Goal, Spread]]:
    """Each goal whose benchmark was run, and what was measured."""
    for goal in GOALS:
        if "why" not in results.get(goal.benchmark, {"why": "not run"}):
            yield goal, goal.value(results[goal.benchmark])
