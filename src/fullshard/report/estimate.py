"""How long a step would take on hardware of which a few numbers are known.

Runs the happenings of a replay on three lanes. The *computation* goes from group to group and waits where the engine
would. *Gathers* and *reductions* start when the engine starts them, and take turns on one wire::

    computation   ....[block 0][block 1]..[block 2]            '.' waits: communication that is exposed
    wire          [g 0][g 1]   [g 2]      ...

An exchange takes the latency and its bytes over the bandwidth. Where ranks share memory the host reads the gradients of
the others itself, so that nothing of a reduction is hidden.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fullshard.report.facts import GroupFacts, ModelFacts
from fullshard.report.replay import Happening, Replay


@dataclass(frozen=True)
class Hardware:
    """What an estimate is given, see :meth:`fullshard.report.explain.Explanation.estimate`."""

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
    """Seconds of one group in a step: computing, in exchanges, and waiting for them."""

    name: str
    forward: float
    backward: float
    exchanges: float
    exposed: float


@dataclass(frozen=True)
class Estimate:
    """Seconds of a forward and backward, and where they come from.

    Attributes:
        step: forward and backward; an optimizer's step, attention's products of activations and the host's own work
            are not in it.
        forward: the forward alone.
        computing: products of parameters and tokens, at ``flops``.
        exchanges: of all gathers and reductions, whether hidden or not.
        exposed: of these, what the computation waits for.
        groups: the same by group, in the order of the model.
        given: on which hardware.
    """

    step: float
    forward: float
    computing: float
    exchanges: float
    exposed: float
    groups: tuple[GroupEstimate, ...]
    given: Hardware


def estimate_step(facts: ModelFacts, replay: Replay, given: Hardware) -> Estimate:
    """Runs a replay on the lanes."""
    lanes = _Lanes(facts.groups, given)
    for happening in replay.happenings:
        lanes.run(happening)
    computed, moved, waited = lanes.computed, lanes.moved, lanes.waited
    rows = tuple(
        GroupEstimate(group.title, computed["forward", at], computed["backward", at], moved[at], waited[at])
        for at, group in enumerate(facts.groups)
    )
    computing = sum(lanes.computed.values())
    exchanges, exposed = sum(lanes.moved.values()), sum(lanes.waited.values())
    return Estimate(lanes.now, lanes.forward, computing, exchanges, exposed, rows, given)


class _Lanes:
    def __init__(self, groups: tuple[GroupFacts, ...], given: Hardware) -> None:
        self._groups, self._given = groups, given
        self.now = self.forward = self._wire = 0.0
        self._gathered: dict[int, float] = {}
        self._reduced: defaultdict[int, float] = defaultdict(float)
        self.computed: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.moved: defaultdict[int, float] = defaultdict(float)
        self.waited: defaultdict[int, float] = defaultdict(float)

    def run(self, happening: Happening) -> None:
        at, group = happening.group, self._groups[happening.group]
        if happening.action == "compute":
            seconds = self._work(group, happening.during == "backward")
            self.computed[happening.during, at] += seconds
            self.now += seconds
        elif happening.action == "gather":
            self._gathered[at] = self._exchange(at, happening.sent)
        elif happening.action == "wait":
            self._wait(at, self._gathered[at])
        elif happening.action == "settle":
            if group.reduction.read:
                self._reduced[at] = self._exchange(at, group.reduction.read)
            self._wait(at, self._reduced[at])
        elif happening.sent:
            self._reduced[at] = self._exchange(at, happening.sent)
        if happening.during == "forward":
            self.forward = self.now

    def _exchange(self, at: int, sent: int) -> float:
        seconds = self._given.latency + sent / self._given.bandwidth
        self.moved[at] += seconds
        self._wire = max(self.now, self._wire) + seconds
        return self._wire

    def _wait(self, at: int, until: float) -> None:
        self.waited[at] += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def _work(self, group: GroupFacts, in_backward: bool) -> float:
        """Two operations for each element of a matrix and token; in backward as many for the inputs' gradient, and for
        the matrix's if it is trained."""
        matrices = [param for param in group.parameters if param.is_matrix]
        elements = sum(param.numel * (1 + (in_backward and param.is_trainable)) for param in matrices)
        return 2 * elements * self._given.tokens / self._given.flops
