"""What fullshard has to reach, as numbers, and where a run's results stand against them.

A goal that a run did not measure is left out. Sizes are in U, the bytes of a block's group, and P, those of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import middle, ratio, sockets
from benchmarks.optimizer import spread_of_steps

Results = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """A limit that a figure must not exceed.

    Args:
        what: the figure, in words.
        limit: the largest value that is good enough.
        unit: of the value and the limit; empty for a multiple of something that ``what`` names.
        value: the figure, from the results of the benchmark it comes from.
    """

    what: str
    benchmark: str
    limit: float
    unit: str
    value: Callable[[Any], float]


def _over(what: str, base: str, pick: Callable[[Any], str] = lambda found: "fullshard") -> Callable[[Any], float]:
    return lambda found: ratio(found["contenders"], what, pick(found["contenders"]), base)[0]


def _host(count: int) -> Callable[[Any], float]:
    def value(found: Any) -> float:
        each = found[0]["counts"][count]
        return float(each["fullshard"]["seconds"][0] / each["torch FSDP2"]["seconds"][0])

    return value


def _growth(found: Any) -> float:
    """The host time at the largest number of ranks over that at the smallest."""
    first, last = (each["counts"][4]["fullshard"]["seconds"][0] for each in (found[0], found[-1]))
    return float(last / first)


def _units(key: str, states: int) -> Callable[[Any], float]:
    """Bytes above as many times the sharded state, in U."""

    def value(found: Any) -> float:
        ours = found["contenders"]["fullshard"]
        return float((ours[key] - states * ours["state"]) / found["group_bytes"])

    return value


def _forward_units(found: Any) -> float:
    alone = found["contenders"]["no communication"]
    return _units("forward_peak", 1)(found) - (alone["forward_peak"] - alone["state"]) / found["group_bytes"]


def _step(found: Any) -> float:
    """The worst of the optimizers, in the implementations for many parameters."""
    kinds = {name: values for name, values in found["kinds"].items() if "for-loop" not in name}
    return max(spread_of_steps(values, "fullshard")[0] for values in kinds.values())


GOALS = [
    Goal("communication-bound step, one host: wall / DDP's", "communication W=2", 0.65, "", _over("wall", "DDP")),
    Goal("the same / FSDP2's", "communication W=2", 0.18, "", _over("wall", "torch FSDP2")),
    Goal("the same over sockets: CPU / FSDP2's", "communication W=2", 0.35, "", _over("cpu", "torch FSDP2", sockets)),
    Goal("the same over sockets: wall / DDP's", "communication W=2", 1.2, "", _over("wall", "DDP", sockets)),
    Goal("compute-bound step, one host: wall / DDP's", "compute W=2", 0.9, "", _over("wall", "DDP")),
    Goal("the same over sockets", "compute W=2", 1.2, "", _over("wall", "DDP", sockets)),
    Goal(
        "bytes on the wire, sockets, W=2",
        "communication W=2",
        1.5,
        "P",
        lambda found: middle(found["contenders"][sockets(found["contenders"])]["wire"]),
    ),
    Goal(
        "bytes on the wire, sockets, W=4",
        "communication W=4",
        2.25,
        "P",
        lambda found: middle(found["contenders"][sockets(found["contenders"])]["wire"]),
    ),
    Goal(
        "bytes copied within a rank",
        "communication W=2",
        1.0,
        "P",
        lambda found: float(found["contenders"]["fullshard"]["copied"]),
    ),
    Goal("page faults in a step", "memory", 500, "", lambda found: float(found["contenders"]["fullshard"]["faults"])),
    Goal("gather of 48 MiB: CPU", "group", 12, "ms", lambda found: 1e3 * middle(found["gather"]["fullshard"])),
    Goal("reduction of 48 MiB: CPU", "group", 16, "ms", lambda found: 1e3 * middle(found["reduce"]["fullshard"])),
    Goal("host time a group, n=4 / FSDP2's", "host", 0.2, "", _host(4)),
    Goal("host time a group, n=32 / FSDP2's", "host", 0.15, "", _host(32)),
    Goal("host time a group, n=4: most ranks / fewest", "host", 1.1, "", _growth),
    Goal("calls a group, n=8", "host", 350, "", lambda found: float(found[0]["counts"][8]["fullshard"]["calls"])),
    Goal("optimizer step, 200 small parameters / plain tensors", "optimizer", 1.3, "", _step),
    Goal("forward peak above the sharded state", "memory", 2.0, "U", _forward_units),
    Goal("backward peak above parameters and gradients", "memory", 3.5, "U", _units("backward_peak", 2)),
    Goal("kept between steps above the sharded state", "memory", 3.0, "U", _units("rest", 1)),
    Goal(
        "sharding a model: peak above it",
        "memory",
        0.5,
        "U",
        lambda found: float(found["contenders"]["fullshard"]["wrap_peak"] / found["group_bytes"]),
    ),
]


def judge(results: Results) -> Iterator[tuple[Goal, float]]:
    """Each goal whose benchmark was run, and what was measured."""
    for goal in GOALS:
        if goal.benchmark in results:
            yield goal, goal.value(results[goal.benchmark])
