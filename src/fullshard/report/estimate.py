"""An estimate of a step's time on hardware that is described by a few numbers.

Runs the events of a replay on a timeline. The *computation* goes from group to group and waits where the engine would
wait. *Gathers* and *reductions* start when the engine would start them. They use one wire, one after another::

    computation   ....[block 0][block 1]..[block 2]            '.' waits: communication that is exposed
    wire          [g 0][g 1]   [g 2]      ...

An exchange takes the latency plus its bytes divided by the bandwidth. Where ranks share memory, the host itself reads
the gradients of the other ranks, so the whole reduction is exposed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fullshard.report.facts import GroupFacts, ModelFacts
from fullshard.report.replay import Event, Replay


@dataclass(frozen=True)
class Hardware:
    """The numbers that describe the hardware, see :meth:`fullshard.report.explain.Explanation.estimate`."""

    bandwidth: float
    flops: float
    tokens: int
    latency: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops", "tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not self.latency >= 0:
            raise ValueError(f"latency must not be negative, got {self.latency!r}")


@dataclass(frozen=True)
class GroupEstimate:
    """Seconds that one group takes in a step: computation, exchanges, and the waits for exchanges."""

    name: str
    forward: float
    backward: float
    exchanges: float
    exposed: float


@dataclass(frozen=True)
class Estimate:
    """Seconds of a forward and backward, and how they are spent.

    Attributes:
        step: forward and backward. The optimizer step, attention's products of activations and the host's own work are
            not counted.
        forward: the forward alone.
        computing: multiplications of parameters and tokens, at ``flops``.
        exchanges: all gathers and reductions, hidden or not.
        exposed: the part of the exchanges for which the computation waits.
        groups: the same by group, in the order of the model.
        given: the hardware.
    """

    step: float
    forward: float
    computing: float
    exchanges: float
    exposed: float
    groups: tuple[GroupEstimate, ...]
    given: Hardware


def estimate_step(facts: ModelFacts, replay: Replay, given: Hardware) -> Estimate:
    """Runs the events of a replay on the timeline."""
    lanes = _Lanes(facts.groups, given)
    for event in replay.events:
        lanes.run(event)
    computed, exchanged, waited = lanes.computed, lanes.exchanged, lanes.waited
    rows = tuple(
        GroupEstimate(group.title, computed["forward", at], computed["backward", at], exchanged[at], waited[at])
        for at, group in enumerate(facts.groups)
    )
    computing = sum(lanes.computed.values())
    exchanges, exposed = sum(lanes.exchanged.values()), sum(lanes.waited.values())
    return Estimate(lanes.now, lanes.forward, computing, exchanges, exposed, rows, given)


class _Lanes:
    def __init__(self, groups: tuple[GroupFacts, ...], given: Hardware) -> None:
        self._groups, self._given = groups, given
        self.now = self.forward = self._wire = 0.0
        self._gathered: dict[int, float] = {}
        self._reduced: defaultdict[int, float] = defaultdict(float)
        self.computed: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.exchanged: defaultdict[int, float] = defaultdict(float)
        self.waited: defaultdict[int, float] = defaultdict(float)

    def run(self, event: Event) -> None:
        at, group = event.group, self._groups[event.group]
        if event.action == "compute":
            seconds = self._work(group, event.during == "backward")
            self.computed[event.during, at] += seconds
            self.now += seconds
        elif event.action == "gather":
            self._gathered[at] = self._exchange(at, event.sent)
        elif event.action == "wait":
            self._wait(at, self._gathered[at])
        elif event.action == "wait-reduce":
            if group.reduction.read:
                self._reduced[at] = self._exchange(at, group.reduction.read)
            self._wait(at, self._reduced[at])
        elif event.sent:
            self._reduced[at] = self._exchange(at, event.sent)
        if event.during == "forward":
            self.forward = self.now

    def _exchange(self, at: int, sent: int) -> float:
        seconds = self._given.latency + sent / self._given.bandwidth
        self.exchanged[at] += seconds
        self._wire = max(self.now, self._wire) + seconds
        return self._wire

    def _wait(self, at: int, until: float) -> None:
        self.waited[at] += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def _work(self, group: GroupFacts, in_backward: bool) -> float:
        """The seconds of a group's computation in one pass.

        Forward takes two operations for each element of a matrix and each token. Backward takes the same number for the
        gradient of the inputs, and again the same for the gradient of the matrix if it is trained.
        """
        matrices = [param for param in group.parameters if param.is_matrix]
        elements = sum(param.numel * (1 + (in_backward and param.is_trainable)) for param in matrices)
        return 2 * elements * self._given.tokens / self._given.flops
