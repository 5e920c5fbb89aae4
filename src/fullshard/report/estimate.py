"""An estimate of a step's time on hardware that is described by a few numbers.

Runs the events of a predicted step on a timeline. The *computation* goes from group to group and waits where the engine
waits. *Gathers* and *reductions* start when the engine starts them. They use one wire, one after another::

    computation   ....[block 0][block 1]..[block 2]            '.' waits: communication that is exposed
    wire          [g 0][g 1]   [g 2]      ...

An exchange takes ``steps * latency + sent / bandwidth`` seconds. The algorithm decides how many steps follow each
other, and how much of what a rank sends leaves its node. ``W`` ranks exchange, ``m`` of them on each node:

======================  =================  ==========================================================
algorithm               steps              what a node sends to other nodes, for each such group
======================  =================  ==========================================================
ring                    W - 1              what one rank sends: only one of its ranks has its
                                           neighbour on another node
tree                    log2 W, rounded    what the m ranks send to the W - m ranks on other nodes
                        up
messages (``p2p``)      W - 1              the same
messages between hosts  hosts - 1          what its ranks send, each its part
(``hosts``)
======================  =================  ==========================================================

An all-reduce has twice the steps: it is a reduce-scatter and an all-gather. The ranks of a node share the bandwidth of
the node. Where ranks share memory, a rank itself reads the gradients of the other ranks of its host in one step, which
is exposed. An exchange with other hosts follows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fullshard.report.activations import Pass
from fullshard.report.facts import GroupFacts, ModelFacts
from fullshard.report.meta_step import PredictedStep
from fullshard.report.twins import Event
from fullshard.text import counted, percent, quantity_text, seconds_text

Algorithm = Literal["ring", "tree"]
_BY_MESSAGES = ("p2p", "hosts")


@dataclass(frozen=True)
class Hardware:
    """The numbers that describe the hardware and the work of a rank, see
    :meth:`fullshard.report.explain.Explanation.estimate`."""

    bandwidth: float
    peak_flops: float
    count: int
    unit: str = "tokens"
    efficiency: float = 1.0
    latency: float = 0.0
    algorithm: Algorithm = "ring"
    node_bandwidth: float | None = None
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        positive = {"bandwidth": self.bandwidth, "peak_flops": self.peak_flops, self.unit: self.count}
        nodes = {"node_bandwidth": self.node_bandwidth, "ranks_per_node": self.ranks_per_node}
        if None in nodes.values() and set(nodes.values()) != {None}:
            raise ValueError(f"node_bandwidth and ranks_per_node belong together, got {nodes}")
        for name, value in (positive if self.ranks_per_node is None else positive | nodes).items():
            if value is None or not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is a share of peak_flops, above 0 and at most 1, got {self.efficiency!r}")
        if not self.latency >= 0:
            raise ValueError(f"latency must not be negative, got {self.latency!r}")
        if self.algorithm not in ("ring", "tree"):
            raise ValueError(f"algorithm must be 'ring' or 'tree', got {self.algorithm!r}")

    def __str__(self) -> str:
        sends = f"sends {quantity_text(self.bandwidth, 'B/s')}"
        if self.node_bandwidth is not None:
            node = quantity_text(self.node_bandwidth, "B/s")
            sends += f" (the {self.ranks_per_node} ranks of a node together send {node} to other nodes)"
        steps = "W - 1 steps (ring)" if self.algorithm == "ring" else "log2(W) steps (tree), W - 1 by messages"
        return (
            f"each rank processes {counted(self.count, self.unit.removesuffix('s'))}, computes at "
            f"{percent(self.efficiency)} of {quantity_text(self.peak_flops, 'FLOP/s')} and {sends}; an exchange of W "
            f"ranks takes {steps} of {seconds_text(self.latency)} and the time for its bytes"
        )

    def seconds(self, exchange: Event, stride: int, transport: str) -> float:
        """The seconds of an exchange, whose ranks are so far apart in the world."""
        is_tree = self.algorithm == "tree" and transport not in _BY_MESSAGES
        steps = math.ceil(math.log2(exchange.ranks)) if is_tree else exchange.ranks - 1
        seconds = exchange.sent / self.bandwidth
        if self.node_bandwidth is not None:
            seconds = max(seconds, self.leaving(exchange, stride, transport) / self.node_bandwidth)
        return (1 + (exchange.action == "all-reduce")) * steps * self.latency + seconds

    def leaving(self, exchange: Event, stride: int, transport: str) -> float:
        """The bytes of an exchange, and of those that other ranks of the node make at the same time, that leave the
        node; 0 if it is not known which ranks are on a node."""
        if exchange.by_host or transport == "hosts" or self.ranks_per_node is None:
            return exchange.by_host
        here = max(1, self.ranks_per_node // stride)  # of these ranks on one node
        groups, ranks = self.ranks_per_node / here, exchange.ranks  # groups that exchange at the same time
        is_ring = self.algorithm == "ring" and transport not in _BY_MESSAGES
        part = 1 if is_ring else here * (ranks - here) / max(1, ranks - 1)  # of what one rank sends
        return exchange.sent * groups * part if ranks > here else 0.0


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
        step: forward and backward. The optimizer step and the host's own work are not counted.
        forward: the forward alone.
        computing: the FLOPs at ``efficiency * peak_flops``.
        exchanges: all gathers and reductions, hidden or not.
        exposed: the part of the exchanges for which the computation waits.
        flops: the FLOPs of a rank in a step.
        is_counted: whether these were counted in a forward and backward of a batch. If not, they are two for each
            element of a matrix and each token in forward, and up to four in backward; attention's products of
            activations are left out.
        throughput: tokens or samples that all ranks process each second.
        peak_share: the share of ``peak_flops`` that a rank reaches over the whole step.
        groups: the seconds by group, in the order of the model.
        given: the hardware.
        by_host: bytes that all ranks of this rank's host send to other hosts; 0 if it is not known which are there.
    """

    step: float
    forward: float
    computing: float
    exchanges: float
    exposed: float
    flops: float
    is_counted: bool
    throughput: float
    peak_share: float
    groups: tuple[GroupEstimate, ...]
    given: Hardware
    by_host: int = 0


def estimate_step(
    facts: ModelFacts, step: PredictedStep, given: Hardware, measured: Mapping[tuple[Pass, int], int] | None = None
) -> Estimate:
    """Runs the events of a step on the timeline. ``measured`` are FLOPs by pass and position of a group, if known."""
    lanes = _EstimatedLanes(facts.groups, given, measured)
    for event in step.events:
        lanes.run(event)
    computed, exchanged, waited = lanes.computed, lanes.exchanged, lanes.waited
    rows = tuple(
        GroupEstimate(group.title, computed["forward", at], computed["backward", at], exchanged[at], waited[at])
        for at, group in enumerate(facts.groups)
    )
    data_ranks = max(group.summed for group in facts.groups)
    return Estimate(
        step=lanes.now,
        forward=lanes.forward,
        computing=sum(computed.values()),
        exchanges=sum(exchanged.values()),
        exposed=sum(waited.values()),
        flops=lanes.flops,
        is_counted=measured is not None,
        throughput=data_ranks * given.count / lanes.now if lanes.now else math.inf,
        peak_share=lanes.flops / (lanes.now * given.peak_flops) if lanes.now else 0.0,
        groups=rows,
        given=given,
        by_host=round(lanes.by_host),
    )


class _EstimatedLanes:
    def __init__(
        self, groups: tuple[GroupFacts, ...], given: Hardware, measured: Mapping[tuple[Pass, int], int] | None
    ) -> None:
        self._groups, self._given, self._measured = groups, given, measured
        self.now = self.forward = self._wire = self.flops = self.by_host = 0.0
        self._gathered: dict[int, float] = {}
        self._reduced: defaultdict[int, float] = defaultdict(float)
        self.computed: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.exchanged: defaultdict[int, float] = defaultdict(float)
        self.waited: defaultdict[int, float] = defaultdict(float)

    def run(self, event: Event) -> None:
        at = event.group
        if event.action == "compute":
            flops = self._flops(at, event.during)
            seconds = flops / (self._given.efficiency * self._given.peak_flops)
            self.flops += flops
            self.computed[event.during, at] += seconds
            self.now += seconds
        elif event.action == "gather":
            self._gathered[at] = self._exchange(event)
        elif event.action == "wait":
            self._wait(at, self._gathered[at])
        elif event.action == "wait-reduce":
            if event.read:
                self._reduced[at] = self._occupy(at, self._given.latency + event.read / self._given.bandwidth)
            self._wait(at, self._reduced[at])
        elif event.sent or event.by_host:
            if event.read:  # a host adds up before it sends
                seconds = event.read / self._given.bandwidth
                self.exchanged[at] += seconds
                self._wait(at, self.now + seconds)
            self._reduced[at] = self._exchange(event)
        if event.during == "forward":
            self.forward = self.now

    def _exchange(self, event: Event) -> float:
        """Run an exchange on the wire; returns when it ends."""
        group, is_all_reduce = self._groups[event.group], event.action == "all-reduce"
        over_replicas = is_all_reduce or event.action.endswith("over replicas")
        stride = group.replica_stride if over_replicas else group.stride
        transport = "" if is_all_reduce else group.transport
        self.by_host += self._given.leaving(event, stride, transport)
        return self._occupy(event.group, self._given.seconds(event, stride, transport))

    def _occupy(self, at: int, seconds: float) -> float:
        self.exchanged[at] += seconds
        self._wire = max(self.now, self._wire) + seconds
        return self._wire

    def _wait(self, at: int, until: float) -> None:
        self.waited[at] += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def _flops(self, at: int, during: Pass) -> int:
        """The FLOPs of a group in one pass: counted, or those of its matrices.

        Forward takes two for each element of a matrix and each token. Backward takes the same number for the gradient
        of the inputs, and again the same for the gradient of the matrix if it is trained.
        """
        if self._measured is not None:
            return self._measured.get((during, at), 0)
        matrices = [param for param in self._groups[at].parameters if param.is_matrix]
        elements = sum(param.numel * (1 + (during == "backward" and param.is_trainable)) for param in matrices)
        return 2 * elements * self._given.count
