"""What a step of a planned model needs: the bytes at each of its moments, and seconds.

A moment of the step on meta and the same moment of the traced step are added, so that activations that are gone by the
time gradients are there do not count beside them. The step is one of many: what a step keeps for the next one is there
all the time.

Activations are traced twice, without recomputation and with all blocks recomputed. For plans between the two, each
block brings its own part from one of the traces::

    alive in a block = what the blocks before it keep, recomputed or not  +  its own work, recomputed or not
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fullshard.disk.file import BLOCK, THREADS
from fullshard.report.activations import Activations, Moment, Pass
from fullshard.report.estimate import Hardware, estimate_step
from fullshard.report.facts import ON_CPU, ON_DISK, GroupFacts, ModelFacts
from fullshard.report.meta_step import WORKSPACES, PredictedStep
from fullshard.text import bytes_text

#: The root, where it has no group.
ROOT = "(root)"
#: Bytes/s between an accelerator and the CPU, to and from a disk, and of the state that the CPU updates.
TO_CPU, TO_DISK, ON_CPU_UPDATED = 20e9, 1e9, 10e9
#: The hardware that is assumed: FLOP/s of a rank that computes, bytes/s and seconds of an exchange, by transport.
_COMPUTES = {"cpu": 30e9, "accelerator": 200e12}
_EXCHANGES = {"shm": (10e9, 20e-6), "p2p": (1e9, 200e-6), "collective": (1e9, 500e-6), "accelerator": (50e9, 20e-6)}
_EXCHANGES["hosts"] = _EXCHANGES["shm"][0], _EXCHANGES["p2p"][1]
#: Bytes/s of the card of a host.
_CARD = 1e9
#: Bytes of an element of the optimizer's state and of its temporary results.
_ELEMENT = 4
#: Memory for what is read from a disk and written: this part of what an optimizer's step moves, and its bounds.
_STAGED, _STAGING = 1 / 16, (1 << 21, 1 << 26)
#: Bytes, and a share, for what is not counted: objects of autograd and Python, tables of pages, rounded allocations,
#: what the heap keeps of small pieces, work of kernels.
_UNCOUNTED, _SHARE = 4 * 2**20, 0.03


@dataclass(frozen=True)
class Need:
    """What a step needs.

    Attributes:
        peaks: bytes by what runs, such as ``"backward of layers.3"``.
        seconds: of a forward and backward.
        parts: the bytes of what is there all the time, by kind, and of the activations at the largest peak.
    """

    peaks: Mapping[str, int]
    seconds: float
    parts: Mapping[str, int]

    @property
    def most(self) -> int:
        return max(self.peaks.values())

    def above(self, memory: int) -> int:
        """The bytes above ``memory``, of all peaks together."""
        return sum(max(0, nbytes - memory) for nbytes in self.peaks.values())

    @property
    def why(self) -> str:
        """Which peak is the largest, and what takes most of it."""
        largest = max(self.peaks, key=lambda name: self.peaks[name])
        kind = max(self.parts, key=lambda name: self.parts[name])
        return f"the {largest}, of which {bytes_text(self.parts[kind])} are {kind}"


def need_of(
    facts: ModelFacts,
    step: PredictedStep,
    activations: Activations,
    hardware: Hardware,
    optimizer_bytes: float,
    batch: int,
) -> Need:
    """What a ``step`` of these facts needs. The positions of groups in ``activations`` are those in the facts."""
    groups = facts.groups
    kept = sum(count * size for kind, count, size in step.kept if not kind.endswith((ON_CPU, ON_DISK)))
    freed = [group.whole // group.sharers for group in groups if group.reshards and not group.shares]
    late = [at for at in set(activations.late) if groups[at].reshards and not groups[at].shares]
    kept += max(freed, default=0) * len(late)
    shards = sum(group.shard - group.offloaded.shard for group in groups)
    gradients = sum(group.reduced - group.offloaded.reduced for group in groups)
    trained = sum(group.trained - group.offloaded.trained for group in groups)
    state = round(optimizer_bytes * trained)
    kept += _disk_memory(groups, optimizer_bytes)
    uncounted = _UNCOUNTED if groups[0].is_host else math.prod(WORKSPACES[1:])
    rest = shards + state + facts.outside + batch + kept + activations.workspace + uncounted
    passes, widest = Counter[str](), Counter[tuple[str, int]]()
    for (during, at, _), nbytes in step.beside.items():
        passes[during] = max(passes[during], nbytes)
        widest[during, at] = max(widest[during, at], nbytes)
    peaks = Counter[str]()
    alive = defaultdict[str, int](int)
    for moment, nbytes in activations.peaks.items():
        during, at, _ = moment
        beside = step.beside.get(moment, widest.get((during, at), passes[during]))
        name = f"{during} of {groups[at].title if at >= 0 else ROOT}"
        if rest + beside + nbytes > peaks[name]:
            peaks[name], alive[name] = rest + beside + nbytes, nbytes
    inside = [group for group in groups if group.offloaded.trained < group.trained]
    chunks = [param.chunk * param.is_trainable for group in inside for param in group.parameters]
    updated = 2 * max(chunks, default=0) if groups[0].is_host else trained  # foreach updates all at once
    element = gradients / trained if trained else _ELEMENT  # of a parameter
    peaks["optimizer step"] = rest + gradients + (round(element * updated) if optimizer_bytes > element else 0)
    peaks = Counter({name: round((1 + _SHARE) * nbytes) for name, nbytes in peaks.items()})
    seconds = estimate_step(facts, step, hardware, activations.flops).step
    seconds += sum(_seconds_of(group, optimizer_bytes) for group in groups if group.offloaded.what)
    largest = max(peaks, key=lambda name: peaks[name])
    parts = {"shards": shards, "optimizer state": state, "buffers of parameters and gradients": kept}
    parts |= {"activations": alive[largest], "gradients": 0 if alive[largest] else gradients}
    return Need(dict(peaks), seconds, parts)


def staging_bytes(moved: float) -> int:
    """A good ``DiskOffloadPolicy.staging_bytes`` for an optimizer's step that moves so many bytes."""
    return round(min(max(_STAGED * moved, _STAGING[0]), _STAGING[1]))


def _disk_memory(groups: Sequence[GroupFacts], optimizer_bytes: float) -> int:
    """The memory of what is read from a disk and written to it."""
    groups = [group for group in groups if group.offloaded.place == ON_DISK]
    piece = min(BLOCK, max((_ELEMENT * param.chunk for group in groups for param in group.parameters), default=0))
    moved = (optimizer_bytes / _ELEMENT + 2) * piece  # by a step, with the parameter and its gradient
    most = sum((optimizer_bytes + 2 * _ELEMENT) * group.offloaded.trained for group in groups)
    staged = 2 * max((group.offloaded.behind for group in groups), default=0)
    return round(min(most, max(staged, 2 * moved)) + 2 * THREADS * piece)


def _seconds_of(group: GroupFacts, optimizer_bytes: float) -> float:
    """The seconds in which what is offloaded of a group is moved, and updated where it is."""
    offloaded = group.offloaded
    parameters = 2 * (offloaded.shard + offloaded.reduced)  # there and back
    if offloaded.place == ON_DISK:
        return (parameters + 2 * optimizer_bytes * offloaded.trained) / TO_DISK
    updated = group.trained * offloaded.reduced / max(1, group.reduced)  # on the CPU: elements of its parameters
    moved = parameters + 2 * optimizer_bytes * (offloaded.trained - updated)
    return moved / TO_CPU + (optimizer_bytes + 12) * updated / ON_CPU_UPDATED


def assumed_hardware(kind: str, given: Mapping[str, float], count: int, unit: str, here: int | None) -> Hardware:
    """The hardware of a user, and for what is not given, that of a transport or an accelerator. Raises ValueError.
    ``count`` is the number of tokens or samples in the batch, and ``here`` that of the ranks of a host, if known."""
    bandwidth, latency = _EXCHANGES[kind]
    if here is not None and (kind == "hosts" or "node_bandwidth" in given):
        given = {"node_bandwidth": _CARD, "ranks_per_node": here, **given}
    assumed = {"bandwidth": bandwidth, "latency": latency, "peak_flops": _COMPUTES.get(kind, _COMPUTES["cpu"])}
    try:
        return Hardware(count=count, unit=unit, **{**assumed, **given})  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"hardware has arguments of Explanation.estimate, got {given}: {error}") from error


class TracedBlocks:
    """Two traces of a step in which each block, and each large layer outside of the blocks, is a group of its own.

    Args:
        facts: of the model that was traced.
        plain: the trace without recomputation.
        recomputed: the trace in which the repeatable blocks are recomputed, ``None`` if there are none.
        blocks: the names of the blocks.
        repeatable: the names of those that may run twice.
    """

    def __init__(
        self,
        facts: ModelFacts,
        plain: Activations,
        recomputed: Activations | None,
        blocks: Sequence[str],
        repeatable: Sequence[str],
    ) -> None:
        self._plain, self._recomputed = plain, recomputed or plain
        self._names = [group.name for group in facts.groups]
        positions = list(dict.fromkeys(plain.order))
        self._order = {position: number for number, position in enumerate(positions)}
        self.order = [self._names[position] for position in positions]
        self._blocks = [at for at in positions if self._names[at] in blocks]
        costs = {
            at: sum(self._recomputed.flops.get((p, at), 0) - plain.flops.get((p, at), 0) for p in _PASSES)
            for at in self._blocks
        }
        saves = {at: self._kept(at, False) - self._kept(at, True) for at in self._blocks}
        worth = [at for at in self._blocks if saves[at] > 0 and self._names[at] in repeatable]
        worth.sort(key=lambda at: round(costs[at] / saves[at], 6))
        #: The blocks that recomputation makes smaller, those first that lose the fewest FLOPs for a byte.
        self.worth = [self._names[at] for at in worth] if recomputed else []

    def combined(self, facts: ModelFacts, recomputed: Collection[str]) -> Activations:
        """The activations of a model with other groups, where some blocks are recomputed."""
        owner = {name: at for at, group in enumerate(facts.groups) for name in group.name.split(", ")}
        at_in = [owner.get(name, owner.get("", -1)) for name in self._names] + [owner.get("", -1)]  # of -1 too
        again = {at for at in self._blocks if self._names[at] in recomputed}
        peaks: dict[Moment, int] = {}
        for moment, plain in self._plain.peaks.items():
            during, at, ended = moment
            before = self._before(moment)
            nbytes, is_again = plain, at in again
            if is_again:
                nbytes = self._recomputed.peaks.get(moment, plain)
            nbytes += sum(self._kept(each, each in again) - self._kept(each, is_again) for each in before)
            key = during, at_in[at], at_in[ended] if ended >= 0 else -1
            if key[1] == key[2]:  # the group's modules go on
                key = during, at_in[at], -1
            peaks[key] = max(peaks.get(key, 0), nbytes)
        flops: Counter[tuple[Pass, int]] = Counter()
        for at, position in enumerate(at_in[:-1]):
            for during in _PASSES:
                trace = self._recomputed if at in again else self._plain
                flops[during, position] += trace.flops.get((during, at), 0)
        late = tuple(at_in[at] for at in (self._recomputed if again else self._plain).late)
        first: dict[int, int] = {}  # of the modules of each group, the one that runs first: it has the group's inputs
        for at in self._order:
            first.setdefault(at_in[at], at)
        open_ended = tuple(group for group, at in first.items() if at in self._plain.open_ended)
        return replace(self._plain, peaks=peaks, flops=dict(flops), late=late, open_ended=open_ended)

    def _kept(self, at: int, is_recomputed: bool) -> int:
        return (self._recomputed if is_recomputed else self._plain).kept_by.get(at, 0)

    def _before(self, moment: Moment) -> Iterable[int]:
        """The blocks whose activations are alive at a moment, beside those of the block that runs."""
        during, at, ended = moment
        if at >= 0 and self._names[at]:
            end = self._order.get(at, 0)
        elif ended < 0:
            end = 0 if during == "forward" else len(self._order)
        else:
            end = self._order.get(ended, 0) + (during == "forward")
        return [each for each in self._blocks if self._order[each] < end]


_PASSES: tuple[Pass, Pass] = ("forward", "backward")
