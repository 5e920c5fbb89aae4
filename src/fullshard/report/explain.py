"""Explains what sharding does to a model: how it is cut, a step's memory and traffic, and what could be better.

Owns the :class:`Explanation`, and the simulated world in which one process explains a model for any number of ranks.
The facts come from :mod:`fullshard.report.facts`, the predicted step from :mod:`fullshard.report.meta_step`,
activations and FLOPs from :mod:`fullshard.report.activations`, and the advice from :mod:`fullshard.report.advice`.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm.collective import CollectiveTransport
from fullshard.device import CPU, PLANNED
from fullshard.fully_shard import fully_shard_blocks
from fullshard.report import tables
from fullshard.report.activations import Activations, Loss, Pass, trace_step
from fullshard.report.advice import Advice, advise
from fullshard.report.estimate import Algorithm, Estimate, Hardware, estimate_step
from fullshard.report.facts import GroupFacts, ModelFacts, facts_of
from fullshard.report.meta_copy import build_on_meta
from fullshard.report.meta_step import WORKSPACES, ExchangeTotal, MetaStep, Part, Phase, PredictedStep
from fullshard.report.simulated import simulated_job
from fullshard.report.values import Values
from fullshard.schedule.unit import unit_of, units_in
from fullshard.text import bytes_of, bytes_text, counted, rehearsal_text, wrapped

#: Bytes of optimizer state for each element in fp32: AdamW keeps two moments in the dtype of the parameter.
ADAM = 8.0


@dataclass(frozen=True)
class Fit:
    """Whether the largest phase of a step fits into the memory of a device. Sizes are in bytes.

    Attributes:
        device_memory: the memory of the device.
        needed: what the largest phase needs there.
        phase: the name of that phase.
        counts_activations: whether activations are in it.
    """

    device_memory: int
    needed: int
    phase: str
    counts_activations: bool

    @property
    def fits(self) -> bool:
        return self.needed <= self.device_memory

    @property
    def missing(self) -> int:
        """The bytes that are missing, 0 if it fits."""
        return max(0, self.needed - self.device_memory)

    def __str__(self) -> str:
        device = f"{self.device_memory / 1e9:.4g} GB ({bytes_text(self.device_memory)})"
        rest = bytes_text(abs(self.device_memory - self.needed))
        answer = f"yes, with {rest} left" if self.fits else f"no, short by {rest}"
        activations = "activations, " if not self.counts_activations else ""
        return (
            f"Fits in {device} of device memory: {answer}. The largest phase ({self.phase}) takes "
            f"{bytes_text(self.needed)}. Not counted: {activations}temporary memory of the optimizer, of kernels and "
            f"of the communication backend, the context of the device, fragmentation"
        )


def fit_into(device_memory: int, phases: Sequence[Phase], counts_activations: bool) -> Fit:
    """Compares the largest phase with the memory of a device."""
    largest = max(phases, key=lambda phase: phase.on_device)
    return Fit(device_memory, largest.on_device, largest.name, counts_activations)


def memory_of(device: torch.device) -> int | None:
    """The memory of an accelerator in bytes; ``None`` for the CPU, and for a GPU that is not here."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.get_memory_info(device)[1]


@dataclass(frozen=True)
class Explanation:
    """What sharding does to a model. Made by :func:`explain`. Plain data, which stays valid after the model is gone.

    ``str()`` gives tables for people, :meth:`as_dict` and :meth:`to_json` are for programs, :meth:`picture` draws.

    Attributes:
        facts: the groups, their parameters, and the order in which they run.
        step: the predicted events and memory of a step.
        ranks: the size of the world.
        rank: the rank whose shards, memory and traffic are shown.
        optimizer_bytes: bytes of optimizer state for each element that an optimizer updates.
        activations: the activations and FLOPs of a batch, ``None`` if no batch was given.
        device_memory: the memory of the device in bytes, ``None`` if unknown.
        rehearsal: the command that measures such a step.
        hosts: the number of hosts, ``None`` if it is not known.

    Ranks: each for itself.
    """

    facts: ModelFacts
    step: PredictedStep
    ranks: int
    rank: int
    optimizer_bytes: float
    activations: Activations | None = None
    device_memory: int | None = None
    rehearsal: str = ""
    hosts: int | None = None

    @property
    def groups(self) -> tuple[GroupFacts, ...]:
        """The groups, in the order of the model."""
        return self.facts.groups

    @property
    def order(self) -> tuple[str, ...]:
        """The groups in the order in which forward runs and gathers them. Backward runs in reverse order."""
        return tuple(group.title for group in self.facts.in_order)

    @cached_property
    def memory(self) -> tuple[Phase, ...]:
        """The memory of this rank in each phase, in bytes. Activations are in it if a batch was given.

        Of forward and backward it is the moment at which buffers and activations together take most.
        """
        shards, trained = Counter[str](), Counter[str]()
        for group in self.groups:
            shards.update(group.offloaded.split("shards", group.shard, group.offloaded.shard))
            trained.update(group.offloaded.split("optimizer state", group.trained, group.offloaded.trained))
        state = {kind: round(self.optimizer_bytes * elements) for kind, elements in trained.items()}
        lost = sum(group.feedback for group in self.groups)
        kinds = {**shards, **state, "what encodings lost": lost, "outside of groups": self.facts.outside}
        always = tuple((kind, 1, nbytes) for kind, nbytes in kinds.items() if nbytes)
        always += () if self.groups[0].is_host else (WORKSPACES,)
        return (
            Phase("at rest", always),
            Phase("forward, at its peak", always + self._peak("forward")),
            Phase("backward, at its peak", always + self._peak("backward")),
            Phase("between steps", always + self.step.kept),
            Phase("after free_buffers()", always),
        )

    def _peak(self, during: Pass) -> tuple[Part, ...]:
        """The buffers and activations at the moment of a pass when they take most."""
        if self.activations is None:
            return self.step.peaks[during]
        alive, last = dict(self.activations.peaks), 0
        for moment in self.step.at:  # at one that the trace does not have, what was alive before
            last = alive.setdefault(moment, last)
        found = ((*self.step.memory_at(each), ("activations", 1, alive[each])) for each in alive if each[0] == during)
        return max(found, key=lambda parts: Phase("", parts).on_device, default=self.step.peaks[during])

    @property
    def _sharers(self) -> int:
        """The ranks of this host that have full buffers in common, each of which counts its share of them."""
        return max(group.sharers for group in self.groups)

    @cached_property
    def traffic(self) -> tuple[ExchangeTotal, ...]:
        """The exchanges of a step, by kind."""
        return self.step.exchanged()

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What could be better, and how."""
        return tuple(advise(self.facts))

    @property
    def fit(self) -> Fit | None:
        """Whether the largest phase fits into the memory of the device, ``None`` if that is unknown."""
        if self.device_memory is None:
            return None
        return fit_into(self.device_memory, self.memory, self.activations is not None)

    def estimate(
        self,
        *,
        bandwidth: float,
        peak_flops: float,
        efficiency: float = 1.0,
        tokens: int | None = None,
        latency: float = 0.0,
        algorithm: Algorithm = "ring",
        node_bandwidth: float | None = None,
        ranks_per_node: int | None = None,
    ) -> Estimate:
        """Estimates how long a forward and backward take.

        Args:
            bandwidth: bytes that one rank sends each second, or reads where ranks share memory.
            peak_flops: the FLOP/s that the device of one rank has at its peak, in the dtype of the computation.
            efficiency: the share of ``peak_flops`` at which the computation runs.
            tokens: tokens that one rank processes in a step. Needed if no batch was given; otherwise it only replaces
                the number of tokens or samples of the batch in the throughput.
            latency: seconds that each step of an exchange takes in addition to the time for its bytes.
            algorithm: ``"ring"``, in which an exchange of W ranks has W - 1 steps, or ``"tree"``, with log2(W).
                Messages between pairs of ranks (``p2p``) have W - 1 steps in any case.
            node_bandwidth: bytes that all ranks of one node together send to other nodes each second.
            ranks_per_node: the number of ranks on a node. Without it, no ranks share a connection, unless the number of
                ``hosts`` is known.

        Raises:
            ValueError: a number is not positive, the latency is negative, ``tokens`` is missing, or only one of
                ``node_bandwidth`` and ``ranks_per_node`` is given.
        """
        count, unit, counted = tokens, "tokens", None
        if self.activations is not None:
            counted = self.activations.flops
            if count is None:
                count, unit = self.activations.count, self.activations.unit
        if count is None:
            raise ValueError("estimate() needs tokens, because explain() was given no batch")
        if ranks_per_node is None and node_bandwidth is not None and self.hosts is not None:
            ranks_per_node = self.ranks // self.hosts
        nodes = node_bandwidth, ranks_per_node
        given = Hardware(bandwidth, peak_flops, count, unit, efficiency, latency, algorithm, *nodes)
        return estimate_step(self.facts, self.step, given, counted)

    def as_dict(self) -> dict[str, Any]:
        """All of it as numbers, strings, lists and dicts. Sizes are in bytes."""
        return {
            "model": self.facts.name,
            "ranks": self.ranks,
            "rank": self.rank,
            "hosts": self.hosts,
            "groups": [asdict(group) for group in self.groups],
            "order": list(self.order),
            "order_is_recorded": self.facts.is_recorded,
            "order_of": self.facts.order_of,
            "prefetch": self.facts.prefetch,
            "prefetch_bytes": self.facts.prefetch_bytes,
            "memory": [
                {**asdict(phase), "nbytes": phase.nbytes, "on_host": self._sharers * phase.nbytes}
                for phase in self.memory
            ],
            "activations": None if self.activations is None else self.activations.as_dict(),
            "device_memory": self.device_memory,
            "fit": None
            if self.fit is None
            else asdict(self.fit) | {"fits": self.fit.fits, "missing": self.fit.missing},
            "traffic": [asdict(traffic) for traffic in self.traffic],
            "advice": [asdict(advice) for advice in self.advice],
        }

    def to_json(self) -> str:
        """:meth:`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def picture(self, path: str | PathLike[str]) -> None:
        """Draws each group's buffer: which parameter is where, and which rank owns which part.

        Needs matplotlib: ``pip install fullshard[report]``.

        Args:
            path: the file; its name selects PNG, SVG or PDF.
        """
        from fullshard.report.pictures import draw_groups

        draw_groups(f"{self.facts.name} over {counted(self.ranks, 'rank')}", self.groups, path)

    def __str__(self) -> str:
        facts, groups = self.facts, self.groups
        found, beside = self.activations, "" if groups[0].is_host else " on a device"
        beside += "" if found else " without activations"
        ranks = counted(self.ranks, "rank") + (f" on {counted(self.hosts, 'host')}" if self.hosts else "")
        head = f"{facts.name} over {ranks}, seen from rank {self.rank}: {tables.totals_text(groups)}"
        parts = [
            wrapped(head),
            tables.groups_text(groups),
            tables.settings_text(groups),
            tables.parameters_text(groups),
            f"Memory of a rank{beside} ({self.optimizer_bytes:g} bytes of optimizer state per element)\n"
            + tables.memory_text(self.memory)
            + tables.host_text(self.memory, self._sharers),
            "" if found is None else wrapped(str(found)),
            "" if self.fit is None else wrapped(str(self.fit)),
            tables.traffic_text(self.traffic),
            tables.order_text(facts),
            "\n".join(["Advice", *(wrapped(f"- {each}") for each in self.advice)] if self.advice else ()),
            f"To measure a step of this rank on one device, or on the CPU:\n  {self.rehearsal}"
            if self.rehearsal
            else "",
        ]
        return "\n\n".join(filter(None, parts))


def state_bytes(model: nn.Module, given: float | None) -> float:
    """Bytes of optimizer state for each element: those of a user, or AdamW's. Raises ValueError if there are none."""
    if given is not None:
        if not 0 <= given < math.inf:
            raise ValueError(f"optimizer_bytes must be bytes for each element, 0 or more, got {given!r}")
        return float(given)
    trained = [param for param in model.parameters() if param.requires_grad]
    elements = sum(param.numel() for param in trained)
    return ADAM / 4 * sum(param.numel() * param.itemsize for param in trained) / elements if elements else ADAM


def planned_device(device: str | torch.device | None) -> torch.device | None:
    """The device for which to shard: the CPU, what stands for a GPU that is not here, or ``None`` for what is here.
    Raises ValueError."""
    kind, transport = str(device).partition(":")[0], os.environ.get("FULLSHARD_TRANSPORT", "")
    if device is None or kind == "cpu":
        return None if device is None else CPU
    if kind != "cuda":
        raise ValueError(f"device must be 'cuda' or 'cpu', got {device!r}")
    if transport not in ("", CollectiveTransport.name):
        raise ValueError(
            f"FULLSHARD_TRANSPORT={transport!r} moves buffers on the CPU, and device='cuda' has none: unset it"
        )
    return PLANNED


def explain(
    model: nn.Module | Callable[[], nn.Module],
    *,
    ranks: int | None = None,
    rank: int = 0,
    hosts: int | None = None,
    optimizer_bytes: float | None = None,
    batch: Any = None,
    loss: Loss | None = None,
    device_memory: float | str | None = None,
    values: Values | None = None,
    device: str | torch.device | None = None,
) -> Explanation:
    """Explains what sharding does to a model: how it is cut, how much memory and traffic a step needs, and why.

    ::

        print(fullshard.explain(model))                              # a sharded model, also on meta
        print(fullshard.explain(build, ranks=100_000))               # in a simulated world
        print(fullshard.explain(build, ranks=64, hosts=8))           # of 8 ranks on each host

    With ``ranks`` the function ``build`` is called on the meta device, in a simulated world of that many ranks. The
    simulated world ends with the call. ``build`` makes the model and may shard it. If it does not, the repeated blocks
    are sharded as :func:`~fullshard.fully_shard_blocks` does. This needs no memory for parameters and no other process.

    Args:
        model: a sharded model of either front end, before or after its first step; or a function that makes a model.
        ranks: the number of ranks to simulate.
        rank: the rank whose shards and memory are explained.
        hosts: on how many hosts the simulated ranks are, the same number on each. On the CPU they then have the
            transports that such a job has. By default that is not known, and they communicate by collectives.
        optimizer_bytes: bytes of optimizer state for each element that an optimizer updates. The default is AdamW's,
            which keeps two moments in the dtype of the parameter: 8 for fp32.
        batch: an example of what one rank's forward gets: a tensor, a tuple of positional arguments, or a dict of
            keyword arguments. Forward and backward then run on tensors that have no memory, to count activations and
            FLOPs. Only the batch's shapes and dtypes matter. The model stays
            as it is.
        loss: a function of the model and the batch that runs the model and returns the loss, if forward does not return
            the loss itself.
        device_memory: the memory of the device of one rank, in bytes or as ``"80GB"``, to say whether a step fits. The
            default is that of the accelerator on which the model computes, if it does.
        values: what forward gets where it reads a value of a tensor (``item()``, ``if``, a mask as an index): one
            number, or numbers by line, such as ``{"model.py:31": 4}``.
        device: what simulated ranks compute on, ``"cuda"`` or ``"cpu"``, here or not. The default is what is here.

    Returns:
        plain data about this rank. A call with a model communicates nothing, so any rank may call it alone.

    Raises:
        ValueError: no part of the model is sharded, ``rank`` is not one of ``ranks``, ``hosts`` does not divide
            ``ranks``, ``loss`` is given without a batch, the batch has no tensor, nothing that forward returns requires
            gradients, ``device_memory`` is not a size, ``optimizer_bytes`` is negative, or ``device`` is neither of
            these, or no device of the transport that ``FULLSHARD_TRANSPORT`` names.
        TypeError: ``model`` is a module, and ``ranks``, ``hosts`` or ``device`` is given; or it is a function, and
            ``ranks`` is missing.
        RuntimeError: a process group exists already, so another world cannot be simulated in this process; or forward
            or backward failed on tensors without values.

    Ranks: each for itself.
    """
    if loss is not None and batch is None:
        raise ValueError("explain() was given a loss and no batch: give it a batch of one rank too")
    size = None if device_memory is None else bytes_of(device_memory)

    def explained(sharded: nn.Module) -> Explanation:
        facts, found = facts_of(sharded), None
        if batch is not None:
            found = trace_step(sharded, batch, loss, values)
            facts = facts_of(sharded, found.order)
        memory = memory_of(units_in(sharded)[0].device) if size is None else size
        kept = state_bytes(sharded, optimizer_bytes)
        rehearsal = rehearsal_text(dist.get_world_size(), dist.get_rank())
        step = MetaStep(units_in(sharded), facts).run(facts, () if found is None else found.open_ended)
        places = hosts or max(group.hosts for group in facts.groups) or None
        return Explanation(facts, step, dist.get_world_size(), dist.get_rank(), kept, found, memory, rehearsal, places)

    if isinstance(model, nn.Module):
        if ranks is not None:
            raise TypeError(
                f"this {type(model).__name__} exists already, for the ranks that exist: to simulate {ranks} ranks, "
                f"give explain() the function that builds it"
            )
        if device is not None or hosts is not None:
            what, there = (device, "devices") if hosts is None else (counted(hosts, "host"), "hosts")
            raise TypeError(
                f"this {type(model).__name__} exists already, for the {there} that exist: to plan for {what}, give "
                f"explain() the function that builds it, and ranks="
            )
        return explained(model)
    if ranks is None or not callable(model):
        raise TypeError(f"explain() takes a sharded model, or a function that builds one and ranks=, got {model!r}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks}")
    if hosts is not None and (hosts < 1 or ranks % hosts):
        raise ValueError(f"hosts have the same number of ranks each, so hosts={hosts} must divide ranks={ranks}")
    if dist.is_initialized():
        raise RuntimeError(
            f"this process is one of {dist.get_world_size()} ranks already, and cannot simulate one of {ranks}: "
            f"explain in a different process, for example by `fullshard explain FILE:FUNCTION --ranks {ranks}`"
        )
    with simulated_job(ranks, rank, hosts, planned_device(device)):
        built = build_on_meta(model)
        with torch.device("meta"):
            if not any(unit_of(module) for module in built.modules()):
                fully_shard_blocks(built)
        return explained(built)
