"""What sharding will do to a model: how it is cut, the memory and bytes that a step takes, and what could be better.

Owns the :class:`Explanation`, what it advises, and the pretended world in which models of any number of ranks are
explained on one machine. The facts come from :mod:`fullshard.report.facts`, what a step does from
:mod:`fullshard.report.replay`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.fully_shard import fully_shard_blocks
from fullshard.report.estimate import Estimate, estimate_step
from fullshard.report.facts import GroupFacts, ModelFacts, facts_of
from fullshard.report.replay import Exchanged, Phase, Replay
from fullshard.report.tables import (
    groups_text,
    memory_text,
    order_text,
    parameters_text,
    settings_text,
    totals_text,
    traffic_text,
    wrapped,
)
from fullshard.schedule.unit import unit_of
from fullshard.torch_private import pretended_world
from fullshard.wrap import repeated_blocks

#: Bytes of an optimizer's state for an element: AdamW keeps two moments in fp32.
ADAM = 8.0
#: Bytes of a group whose three exchanges take, at 10 GB/s, as long as what a group costs the host in a step: 0.3 ms on
#: a slow core (``docs/performance.md``).
SMALL = 2**20
#: Shares from which there is advice: a group of all parameters, padding of the parameters.
LARGE_SHARE, PADDING_SHARE = 0.25, 0.03
#: What the root keeps whole, as a share of all parameters, from which there is advice.
ROOT_SHARE = 0.1


@dataclass(frozen=True)
class Advice:
    """Something that could be better.

    Args:
        problem: what was found, and where.
        remedy: what to do.
    """

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}."


@dataclass(frozen=True)
class Explanation:
    """What sharding will do: made by :func:`explain`, plain data, the same after the model is gone.

    ``str()`` is a table for people, :meth:`as_dict` and :meth:`to_json` are for programs, :meth:`picture` draws.

    Attributes:
        model: the class of the model.
        ranks: of the world.
        rank: whose shards, memory and bytes are told.
        facts: groups, their parameters, and the order in which they run.
        optimizer_bytes: of an optimizer's state, for each element that it steps on.
        outer: advice that only the model could tell.
    """

    model: str
    ranks: int
    rank: int
    facts: ModelFacts
    optimizer_bytes: float
    outer: tuple[Advice, ...] = ()

    @property
    def groups(self) -> tuple[GroupFacts, ...]:
        return self.facts.groups

    @cached_property
    def replay(self) -> Replay:
        return Replay(self.facts)

    @property
    def order(self) -> tuple[str, ...]:
        """The groups as forward runs and gathers them; backward goes the other way."""
        return tuple(self.groups[at].title for unit in self.facts.units for at in unit.groups)

    @cached_property
    def memory(self) -> tuple[Phase, ...]:
        """The memory of this rank by phase, in bytes, beside activations."""
        rest = [
            ("shards", 1, sum(group.shard for group in self.groups)),
            ("optimizer state", 1, round(self.optimizer_bytes * sum(group.trained for group in self.groups))),
            ("outside of groups", 1, self.facts.outside),
        ]
        rest = [part for part in rest if part[2]]
        gradients = [("gradients", 1, sum(group.reduced for group in self.groups))]
        phases = {
            "at rest": rest,
            "forward, at its peak": [*rest, *_parts(self.replay.forward.pieces)],
            "backward, at its peak": [*rest, *gradients, *_parts(self.replay.backward.pieces)],
            "between steps": [*rest, *_parts(self.replay.kept.pieces)],
            "after free_buffers()": rest,
        }
        return tuple(
            Phase(name, sum(count * size for _, count, size in parts), tuple(parts)) for name, parts in phases.items()
        )

    @cached_property
    def traffic(self) -> tuple[Exchanged, ...]:
        """What a step exchanges, by kind."""
        kinds: dict[str, list[int]] = {}
        for happening in self.replay.happenings:
            if happening.action in ("gather", "reduce", "all-reduce"):
                kind = f"{happening.action} in {happening.during}" if happening.action == "gather" else happening.action
                kinds.setdefault(kind, []).append(happening.sent)
                if happening.action == "reduce" and (read := self.groups[happening.group].reduce_read):
                    kinds.setdefault("reduce, read in shared memory", []).append(read)
                    kinds["reduce"].pop()
        return tuple(Exchanged(kind, len(sent), sum(sent)) for kind, sent in kinds.items() if sent)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What could be better, with what to do."""
        return (*self.outer, *_advice(self))

    def estimate(self, *, bandwidth: float, flops: float, tokens: int, latency: float = 0.0) -> Estimate:
        """Estimates how long a forward and backward take.

        Args:
            bandwidth: bytes a second that a rank sends, or reads where ranks share memory.
            flops: operations a second that a rank computes.
            tokens: how many tokens a rank sees in a step.
            latency: seconds of an exchange beside its bytes.

        Raises:
            ValueError: a number that makes no sense.
        """
        return estimate_step(self.facts, self.replay, bandwidth, latency, flops, tokens)

    def as_dict(self) -> dict[str, Any]:
        """All of it as numbers, strings, lists and dicts. Sizes are in bytes."""
        return {
            "model": self.model,
            "ranks": self.ranks,
            "rank": self.rank,
            "groups": [asdict(group) for group in self.groups],
            "order": list(self.order),
            "order_is_recorded": self.facts.is_recorded,
            "prefetch": self.facts.prefetch,
            "memory": [asdict(phase) for phase in self.memory],
            "traffic": [asdict(traffic) for traffic in self.traffic],
            "advice": [asdict(advice) for advice in self.advice],
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)

    def picture(self, path: str | PathLike[str]) -> None:
        """Draws who lies where in the groups' buffers, into a PNG, SVG or PDF by the name of the file.

        Needs matplotlib: ``pip install fullshard[report]``.
        """
        from fullshard.report.pictures import draw_groups

        draw_groups(f"{self.model} over {self.ranks:,} ranks", self.groups, path)

    def __str__(self) -> str:
        groups = self.groups
        parts = [
            wrapped(f"{self.model} over {self.ranks:,} ranks, seen from rank {self.rank}: {totals_text(groups)}"),
            groups_text(groups),
            settings_text(groups),
            parameters_text(groups),
            f"Memory of a rank beside activations ({self.optimizer_bytes:g} bytes of optimizer state an element)\n"
            + memory_text(self.memory),
            traffic_text(self.traffic),
            order_text([groups[at] for unit in self.facts.units for at in unit.groups], self.facts),
        ]
        advice = [wrapped(f"- {each}") for each in self.advice]
        return "\n\n".join([*parts, "\n".join(["Advice", *advice])] if advice else parts)


def explain(
    model: nn.Module | Callable[[], nn.Module],
    *,
    ranks: int | None = None,
    rank: int = 0,
    optimizer_bytes: float = ADAM,
) -> Explanation:
    """Explains what sharding does to a model: how it is cut, what memory and how many bytes a step takes, and why.

    ::

        print(fullshard.explain(model))                              # a sharded model, also on meta
        print(fullshard.explain(build, ranks=100_000))               # in a world that is pretended

    With ``ranks`` the function ``build`` is called on the meta device in a pretended world of so many ranks, which ends
    with the call. It makes the model and may shard it; a model that it returns unsharded is sharded by blocks. That
    takes no memory and no other process.

    Args:
        model: a sharded model, of either front end, before or after steps; or a function that makes one.
        ranks: how many ranks to pretend.
        rank: which of them to be.
        optimizer_bytes: of an optimizer's state for an element that it steps on; AdamW's is the default.

    Returns:
        plain data, of this rank. A call on a model communicates nothing: any rank may make it.

    Raises:
        ValueError: no part of the model is sharded, or ``rank`` is not one of ``ranks``.
        TypeError: ``model`` is no module although ``ranks`` is missing, or one although ``ranks`` is there.
        RuntimeError: there is a process group already, so that no other world can be pretended.
    """
    if isinstance(model, nn.Module):
        if ranks is not None:
            raise TypeError(
                f"this {type(model).__name__} exists already, for the ranks that exist: to pretend {ranks}, give "
                f"explain() the function that builds it"
            )
        return _explain(model, dist.get_world_size(), dist.get_rank(), optimizer_bytes, False)
    if ranks is None or not callable(model):
        raise TypeError(f"explain() takes a sharded model, or a function that builds one and ranks=, got {model!r}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks}")
    if dist.is_initialized():
        raise RuntimeError(
            f"this process is one of {dist.get_world_size()} ranks already, and cannot pretend to be one of {ranks}: "
            f"explain in a process of its own, for example by `fullshard explain FILE:FUNCTION --ranks {ranks}`"
        )
    with pretended_world(ranks, rank):
        with torch.device("meta"):
            built = model()
            if not any(unit_of(module) for module in built.modules()):
                fully_shard_blocks(built)
        return _explain(built, ranks, rank, optimizer_bytes, True)


def _explain(model: nn.Module, ranks: int, rank: int, optimizer_bytes: float, pretended: bool) -> Explanation:
    facts = facts_of(model)
    inner = getattr(model, "_fsdp_wrapped_module", model)
    name = type(inner).__name__
    if unit_of(model) is not None and inner is model:
        name = name.removeprefix("FSDP")
    outer = []
    if len([group for group in facts.groups if group.elements]) == 1 and (blocks := repeated_blocks(model)):
        outer.append(
            Advice(
                f"All parameters are one group, so a rank holds the whole model while it runs; there are "
                f"{len(blocks)} repeated blocks ({type(blocks[0]).__name__})",
                "Shard each block first, as fully_shard_blocks(model) does, or give auto_wrap_policy",
            )
        )
    return Explanation(name, ranks, rank, facts, optimizer_bytes, tuple(outer))


def _parts(pieces: Iterable[tuple[str, tuple[tuple[int, int], ...]]]) -> list[tuple[str, int, int]]:
    return [(kind, count, size) for kind, sizes in pieces for size, count in sizes]


def _advice(explanation: Explanation) -> list[Advice]:
    facts, groups = explanation.facts, [group for group in explanation.groups if group.elements]
    every = sum(group.whole for group in groups)
    found = []
    if facts.left_out:
        names = _few([name for name, _ in facts.left_out])
        found.append(
            Advice(
                f"{names} {_is(facts.left_out)} in no group: every rank keeps it whole, and reduces no gradient of it",
                "Apply fully_shard to the root too, or name it in ignored_params if that is what you want",
            )
        )
    small = [each for each in groups if each.reshards and each.communicates and each.whole < SMALL]
    if small and len(groups) > 1:
        found.append(
            Advice(
                f"{_few([each.title for each in small])} {_is(small)} smaller than 1 MiB: its exchanges cost more than "
                f"they move",
                "Let the module around it shard its parameters, or shard several together: fully_shard([a, b])",
            )
        )
    root = [each for each in groups if not each.name]
    for each in groups:
        if each.reshards and len(groups) > 1 and each.whole > LARGE_SHARE * every and each.whole > 64 * SMALL:
            share = round(100 * each.whole / every)
            found.append(
                Advice(
                    f"{each.title} has {share} % of all bytes, and is whole while it runs",
                    "Shard its submodules first",
                )
            )
    found += [each for group in root if len(groups) > 1 for each in _of_the_root(group, every)]
    padded = [each for each in groups if each.padding_share > PADDING_SHARE and each.padding > 2**20]
    if padded:
        worst = max(padded, key=lambda each: each.padding_share)
        bad = max((each for each in worst.parameters if each.dim is not None), key=_waste(worst), default=None)
        where = f", most of it for '{bad.name}' of shape {bad.shape}, cut along dim {bad.dim}" if bad else ""
        found.append(
            Advice(
                f"Padding makes the shards of {_few([each.title for each in padded])} larger, by "
                f"{100 * worst.padding_share:.0f} % in {worst.title}{where}",
                "Cut a dim that the number of ranks divides (shard_placement_fn), shard over fewer ranks and replicate "
                "(a 2-D mesh), or use FullyShardedDataParallel, whose cuts fall anywhere",
            )
        )
    tied = [(each, param) for each in groups for param in each.parameters if len(param.places) > 1]
    for group, param in tied:
        inside = f"{group.name}." if group.name else ""
        foreign = [place for place in param.places if not place.startswith(inside)]
        if foreign and group.whole > 2 * param.numel * 4:
            found.append(
                Advice(
                    f"'{param.name}' is also '{foreign[0]}', so all of {group.title} is gathered for that module too",
                    "Leave it to the module around both: shard that one, and not the one inside",
                )
            )
    low = [each for each in groups if {"bfloat16", "float16"} & set(each.reduce) and each.ranks * each.replicas >= 64]
    if low:
        found.append(
            Advice(
                f"Gradients of {_few([each.title for each in low])} are added up over "
                f"{low[0].ranks * low[0].replicas} ranks in {low[0].reduce[0]}",
                "Set MixedPrecisionPolicy(reduce_dtype=torch.float32) if the loss stalls; it doubles the bytes sent",
            )
        )
    return found


def _of_the_root(root: GroupFacts, every: int) -> list[Advice]:
    """What the root keeps whole from the beginning of forward to the end of backward."""
    if root.reshards or not root.communicates or root.whole < ROOT_SHARE * every or root.whole < 16 * SMALL:
        return []
    largest = max(root.parameters, key=lambda each: each.numel)
    module = largest.name.rpartition(".")[0]
    if len(largest.places) > 1:
        remedy = "It is tied and needed at both ends, so this may be what you want; reshard_after_forward=True frees it"
    else:
        remedy = f"Shard that module by itself before the root: fully_shard(model.{module})"
    share = round(100 * root.whole / every)
    return [
        Advice(
            f"The root's group has {share} % of all bytes, mostly '{largest.name}', and stays whole from the beginning "
            f"of forward to the end of backward",
            remedy,
        )
    ]


def _waste(group: GroupFacts) -> Callable[[Any], int]:
    return lambda param: group.ranks * param.chunk - param.numel


def _few(names: list[str]) -> str:
    """Names for a sentence."""
    shown = ", ".join(f"'{name}'" for name in names[:2])
    return f"{shown} and {len(names) - 2} more" if len(names) > 2 else shown.replace(", ", " and ")


def _is(several: Any) -> str:
    return "is" if len(several) == 1 else "are each"
