"""Explains what sharding does to a model: how it is cut, a step's memory and traffic, and what could be better.

Owns the :class:`Explanation`, and the simulated world in which one process explains a model for any number of ranks.
The facts come from :mod:`fullshard.report.facts`, the predicted step from :mod:`fullshard.report.replay`, and the
advice from :mod:`fullshard.report.advice`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.fully_shard import fully_shard_blocks
from fullshard.report import tables
from fullshard.report.advice import Advice, advise
from fullshard.report.estimate import Estimate, Hardware, estimate_step
from fullshard.report.facts import GroupFacts, ModelFacts, facts_of
from fullshard.report.replay import ExchangeTotal, Phase, Replay
from fullshard.report.text import wrapped
from fullshard.schedule.unit import unit_of
from fullshard.torch_private import simulated_world

#: Bytes of optimizer state for each element: AdamW keeps two moments in fp32.
ADAM = 8.0


@dataclass(frozen=True)
class Explanation:
    """What sharding does to a model. Made by :func:`explain`. Plain data, which stays valid after the model is gone.

    ``str()`` gives tables for people, :meth:`as_dict` and :meth:`to_json` are for programs, :meth:`picture` draws.

    Attributes:
        facts: the groups, their parameters, and the order in which they run.
        ranks: the size of the world.
        rank: the rank whose shards, memory and traffic are shown.
        optimizer_bytes: bytes of optimizer state for each element that an optimizer updates.

    Ranks: each for itself.
    """

    facts: ModelFacts
    ranks: int
    rank: int
    optimizer_bytes: float

    @property
    def groups(self) -> tuple[GroupFacts, ...]:
        """The groups, in the order of the model."""
        return self.facts.groups

    @cached_property
    def replay(self) -> Replay:
        """The predicted events of a step."""
        return Replay(self.facts)

    @property
    def order(self) -> tuple[str, ...]:
        """The groups in the order in which forward runs and gathers them. Backward runs in reverse order."""
        return tuple(group.title for group in self.facts.in_order)

    @cached_property
    def memory(self) -> tuple[Phase, ...]:
        """The memory of this rank in each phase, in bytes, without activations."""
        kinds = {
            "shards": sum(group.shard for group in self.groups),
            "optimizer state": round(self.optimizer_bytes * sum(group.trained for group in self.groups)),
            "outside of groups": self.facts.outside,
        }
        at_rest = tuple((kind, 1, nbytes) for kind, nbytes in kinds.items() if nbytes)
        return (
            Phase("at rest", at_rest),
            Phase("forward, at its peak", at_rest + self.replay.peaks["forward"]),
            Phase("backward, at its peak", at_rest + self.replay.peaks["backward"]),
            Phase("between steps", at_rest + self.replay.kept),
            Phase("after free_buffers()", at_rest),
        )

    @cached_property
    def traffic(self) -> tuple[ExchangeTotal, ...]:
        """The exchanges of a step, by kind."""
        return self.replay.exchanged()

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What could be better, and how."""
        return tuple(advise(self.facts))

    def estimate(self, *, bandwidth: float, flops: float, tokens: int, latency: float = 0.0) -> Estimate:
        """Estimates how long a forward and backward take.

        Args:
            bandwidth: bytes that a rank sends each second, or reads where ranks share memory.
            flops: operations that a rank computes each second.
            tokens: tokens that a rank processes in a step.
            latency: seconds that each exchange takes in addition to the time for its bytes.

        Raises:
            ValueError: a number is not positive, or the latency is negative.
        """
        return estimate_step(self.facts, self.replay, Hardware(bandwidth, flops, tokens, latency))

    def as_dict(self) -> dict[str, Any]:
        """All of it as numbers, strings, lists and dicts. Sizes are in bytes."""
        return {
            "model": self.facts.name,
            "ranks": self.ranks,
            "rank": self.rank,
            "groups": [asdict(group) for group in self.groups],
            "order": list(self.order),
            "order_is_recorded": self.facts.is_recorded,
            "prefetch": self.facts.prefetch,
            "memory": [{**asdict(phase), "nbytes": phase.nbytes} for phase in self.memory],
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

        draw_groups(f"{self.facts.name} over {self.ranks:,} ranks", self.groups, path)

    def __str__(self) -> str:
        facts, groups = self.facts, self.groups
        head = f"{facts.name} over {self.ranks:,} ranks, seen from rank {self.rank}: {tables.totals_text(groups)}"
        parts = [
            wrapped(head),
            tables.groups_text(groups),
            tables.settings_text(groups),
            tables.parameters_text(groups),
            f"Memory of a rank beside activations ({self.optimizer_bytes:g} bytes of optimizer state an element)\n"
            + tables.memory_text(self.memory),
            tables.traffic_text(self.traffic),
            tables.order_text(facts),
            "\n".join(["Advice", *(wrapped(f"- {each}") for each in self.advice)] if self.advice else ()),
        ]
        return "\n\n".join(filter(None, parts))


def explain(
    model: nn.Module | Callable[[], nn.Module],
    *,
    ranks: int | None = None,
    rank: int = 0,
    optimizer_bytes: float = ADAM,
) -> Explanation:
    """Explains what sharding does to a model: how it is cut, how much memory and traffic a step needs, and why.

    ::

        print(fullshard.explain(model))                              # a sharded model, also on meta
        print(fullshard.explain(build, ranks=100_000))               # in a simulated world

    With ``ranks`` the function ``build`` is called on the meta device, in a simulated world of that many ranks. The
    simulated world ends with the call. ``build`` makes the model and may shard it. If it does not, the repeated blocks
    are sharded as :func:`~fullshard.fully_shard_blocks` does. This needs no memory for parameters and no other process.

    Args:
        model: a sharded model of either front end, before or after its first step; or a function that makes a model.
        ranks: the number of ranks to simulate.
        rank: the rank whose shards and memory are explained.
        optimizer_bytes: bytes of optimizer state for each element that an optimizer updates. The default is AdamW's.

    Returns:
        plain data about this rank. A call with a model communicates nothing, so any rank may call it alone.

    Raises:
        ValueError: no part of the model is sharded, or ``rank`` is not one of ``ranks``.
        TypeError: ``model`` is a module and ``ranks`` is given, or ``model`` is a function and ``ranks`` is missing.
        RuntimeError: a process group exists already, so another world cannot be simulated in this process.

    Ranks: each for itself.
    """
    if isinstance(model, nn.Module):
        if ranks is not None:
            raise TypeError(
                f"this {type(model).__name__} exists already, for the ranks that exist: to pretend {ranks}, give "
                f"explain() the function that builds it"
            )
        return Explanation(facts_of(model), dist.get_world_size(), dist.get_rank(), optimizer_bytes)
    if ranks is None or not callable(model):
        raise TypeError(f"explain() takes a sharded model, or a function that builds one and ranks=, got {model!r}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks}")
    if dist.is_initialized():
        raise RuntimeError(
            f"this process is one of {dist.get_world_size()} ranks already, and cannot pretend to be one of {ranks}: "
            f"explain in a process of its own, for example by `fullshard explain FILE:FUNCTION --ranks {ranks}`"
        )
    with simulated_world(ranks, rank):
        with torch.device("meta"):
            built = model()
            if not any(unit_of(module) for module in built.modules()):
                fully_shard_blocks(built)
        return Explanation(facts_of(built), ranks, rank, optimizer_bytes)
