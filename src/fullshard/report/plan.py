"""A plan of how a model is sharded: which groups it has, what stays whole after forward, what is recomputed.

Owns the :class:`Plan` as data, its JSON, and how it is applied to a model. :func:`fullshard.fit` makes it.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from fullshard.buffer.heap import KEPT_BY_ITSELF, return_at_once
from fullshard.fully_shard import fully_shard
from fullshard.offload_policy import CPUOffloadPolicy, DiskOffloadPolicy
from fullshard.schedule.unit import units_in
from fullshard.text import bytes_text, counted, percent, seconds_text, table, wrapped
from fullshard.torch_private import checkpointed


@dataclass(frozen=True)
class PlannedGroup:
    """A group of a plan.

    Args:
        modules: the names of its modules. ``""`` is the model itself, whose group has the parameters of no other group.
        reshards: whether it is freed between forward and backward.
    """

    modules: tuple[str, ...]
    reshards: bool


@dataclass(frozen=True)
class Change:
    """A change that :func:`fullshard.fit` made to the fastest plan.

    Args:
        what: the change, in words.
        saves: the bytes that it saves at the peak of a step.
        costs: the seconds that it costs in each step.
    """

    what: str
    saves: int
    costs: float


@dataclass(frozen=True)
class Plan:
    """How a model is sharded so that a step fits into memory. Made by :func:`fullshard.fit`. Plain data.

    ``str()`` gives tables for people, :meth:`to_json` and :meth:`from_json` keep it in a file, :meth:`apply` shards.

    Attributes:
        model: the class of the model.
        ranks: the number of ranks for which it was made.
        transport: how these ranks communicate.
        memory: the bytes that a rank may use.
        needed: the bytes that a rank needs at the peak of a step, predicted.
        seconds: the seconds of a forward and backward, predicted.
        zero_stage: 3, or 2 if every group stays whole from forward to backward. 1 differs from 2 only with gradient
            accumulation: it then gathers once for each optimizer step, and gradients stay whole until then.
        groups: the groups. The last one is that of the model itself.
        recomputed: the names of the modules that are run again in backward, instead of keeping their activations.
        prefetch: how many groups are gathered ahead.
        offloaded_state, offloaded_parameters: the shares of each group that are offloaded, from 0 to 1, as
            :class:`~fullshard.CPUOffloadPolicy` takes them.
        offload_directory: where a disk keeps what is offloaded. ``""``: the CPU keeps it.
        staging_bytes: the memory for what is read from a disk and written to it.
        changes: how it was found: from the fastest plan on, what each change saves and costs.
        notes: what would fit with more ranks or less precision, and the numbers that were assumed.
        elements: the number of elements of the model's parameters.
    """

    model: str
    ranks: int
    transport: str
    memory: int
    needed: int
    seconds: float
    zero_stage: int
    groups: tuple[PlannedGroup, ...]
    recomputed: tuple[str, ...] = ()
    prefetch: int = 1
    offloaded_state: float = 0.0
    offloaded_parameters: float = 0.0
    offload_directory: str = ""
    staging_bytes: int = 1 << 26
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    elements: int = 0

    def apply(self, model: nn.Module, **options: Any) -> nn.Module:
        """Shards a model as planned, in place: wraps what is recomputed with torch's checkpoint wrapper, and calls
        :func:`fullshard.fully_shard` for each group.

        The keys of state dicts stay as they are. Where the memory is less than about twice what is needed, the C
        library's heap returns from now on at once what is freed: in a container, what it keeps counts too.

        Args:
            model: the model, on any device, not sharded yet.
            **options: further options of ``fully_shard``, such as ``mesh`` and ``mp_policy``: the same as for the fit.

        Returns:
            the model.

        Raises:
            ValueError: the plan was made for a different model or for more ranks, the model is sharded already, a
                module of the plan has no forward, or an option is one that the plan decides; and whatever
                ``fully_shard`` raises. Unless ``fully_shard`` raises for a later group, the model stays as it was.

        Ranks: all alike, with the same plan.
        """
        self._check_use(model, options)
        known = dict(model.named_modules())
        wrappers = {known[name]: checkpointed(known[name]) for name in self.recomputed}
        _replace(model, wrappers)
        try:
            model = self._shard(model, known, wrappers, options)
        except BaseException:
            if not units_in(model):
                _replace(model, {wrapper: module for module, wrapper in wrappers.items()})
            raise
        if self.memory < 2 * self.needed + KEPT_BY_ITSELF:  # what the heap may keep beside what is in use
            return_at_once()  # the memory of the whole parameters too
        return model

    def _shard(
        self,
        model: nn.Module,
        known: Mapping[str, nn.Module],
        wrappers: Mapping[nn.Module, nn.Module],
        options: dict[str, Any],
    ) -> nn.Module:
        if self.offloaded_state:
            shares: dict[str, Any] = {"parameters": self.offloaded_parameters, "optimizer_state": self.offloaded_state}
            if self.offload_directory:
                shares |= {"staging_bytes": self.staging_bytes}
                options["offload_policy"] = DiskOffloadPolicy(self.offload_directory, **shares)
            else:
                options["offload_policy"] = CPUOffloadPolicy(**shares)
        for group in self.groups:
            modules = [wrappers.get(known[name], known[name]) for name in group.modules]
            target: Any = modules if len(modules) > 1 else modules[0]
            after_forward = group.reshards if self.zero_stage == 3 else None
            fully_shard(target, zero_stage=self.zero_stage, reshard_after_forward=after_forward, **options)
        sharded: Any = model
        sharded.set_prefetch_limit(self.prefetch)
        return model

    def _check_use(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        """Raise ValueError where the plan would not be what it says."""
        ranks = dist.get_world_size() if dist.is_initialized() else self.ranks
        if units_in(model):
            raise ValueError(f"this {type(model).__name__} is sharded already: apply the plan to a model that is not")
        if ranks < self.ranks:
            raise ValueError(
                f"the plan was made for {counted(self.ranks, 'rank')}, and this job has {ranks}, on which each rank "
                f"needs more memory: call fullshard.fit again"
            )
        elements = sum(param.numel() for param in model.parameters())
        if self.elements not in (0, elements):
            raise ValueError(
                f"the plan was made for a {self.model} with {self.elements:,} elements in its parameters, and this "
                f"{type(model).__name__} has {elements:,}: call fullshard.fit for it"
            )
        known = dict(model.named_modules())
        names = [name for group in self.groups for name in group.modules if name] + [*self.recomputed]
        for name in names:
            if name not in known:
                raise ValueError(
                    f"the plan names the module '{name}', which this {type(model).__name__} does not have: the plan "
                    f"was made for a {self.model}"
                )
            if type(known[name]).forward is nn.Module.forward:
                raise ValueError(
                    f"the plan names the {type(known[name]).__name__} '{name}', which has no forward: name the modules "
                    f"in it"
                )
        if unknown := set(options) - set(inspect.signature(fully_shard).parameters):
            raise TypeError(f"fully_shard has no option '{min(unknown)}'")
        decided = {"zero_stage", "reshard_after_forward", "auto_wrap_policy", "persistence_threshold"}
        decided |= {"offload_policy"} if self.offloaded_state else set()
        if found := decided & set(options):
            raise ValueError(f"{min(found)} is not an option of a plan, which decides it: change the plan")

    def to_json(self) -> str:
        """The plan as JSON, for :meth:`from_json`.

        Ranks: each for itself.
        """
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from the JSON of :meth:`to_json`, which may have been changed by hand.

        Raises:
            ValueError: the text is no JSON, a field is missing or unknown, or has a value that it cannot have. The
                message names the field.

        Ranks: each for itself.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a plan is JSON, and this is not: {error}") from error
        plan: Plan = _made(cls, data, "the plan", {"groups": PlannedGroup, "changes": Change})
        plan._check()
        return plan

    def _check(self) -> None:
        """Raise ValueError for values that no plan can have."""
        counts = Counter(name for group in self.groups for name in group.modules)
        kept = [group for group in self.groups if group.reshards]
        wrong = {
            "ranks": self.ranks < 1 and "must be 1 or more",
            "memory": self.memory < 1 and "must be 1 or more",
            "zero_stage": self.zero_stage not in (1, 2, 3) and "must be 1, 2 or 3",
            "staging_bytes": self.staging_bytes < 1 and "must be 1 or more",
            "prefetch": self.prefetch < 0 and "must be 0 or more",
            "offloaded_state": not 0 <= self.offloaded_state <= 1 and "must be a share from 0 to 1",
            "offloaded_parameters": not 0 <= self.offloaded_parameters <= self.offloaded_state
            and "must be a share from 0 to offloaded_state",
            "recomputed": "" in self.recomputed and "must not name the model itself",
            "groups": (
                (not self.groups or self.groups[-1].modules != ("",))
                and "must end with the group of the model itself, whose modules are ['']"
            )
            or (not all(group.modules for group in self.groups) and "must each have a module")
            or (max(counts.values()) > 1 and f"must not name a module twice, as {counts.most_common(1)[0][0]!r}")
            or (bool(self.zero_stage < 3 and kept) and f"must not reshard in stage {self.zero_stage}"),
        }
        for name, why in wrong.items():
            if why:
                raise ValueError(f"the plan's '{name}' {why}, got {getattr(self, name)!r}")

    def __str__(self) -> str:
        whole = [group for group in self.groups if not group.reshards]
        sizes = sorted(Counter(len(group.modules) for group in self.groups).items())
        of_size = [f"{count} with {counted(size, 'module')}" for size, count in sizes]
        rows = [
            ["groups", f"{len(self.groups)} ({', '.join(of_size)})"],
            ["stage", str(self.zero_stage)],
            ["whole after forward", f"{len(whole)}: {_names([name for each in whole for name in each.modules])}"],
            ["recomputed", f"{len(self.recomputed)}: {_names(self.recomputed)}"],
            ["gathered ahead", counted(self.prefetch, "group")],
            ["offloaded", self._offloaded()],
        ]
        head = (
            f"{self.model} on {counted(self.ranks, 'rank')} ('{self.transport}') in {bytes_text(self.memory)} each: "
            f"needs {bytes_text(self.needed)}, and {seconds_text(self.seconds)} for a forward and backward"
        )
        changes = [[each.what, bytes_text(each.saves), seconds_text(each.costs)] for each in self.changes]
        parts = [
            wrapped(head),
            table(["choice", "value"], [[name, wrapped(value, "", 88)] for name, value in rows], "ll"),
            table(["change of the fastest plan", "saves", "costs"], changes) if changes else "The fastest plan fits.",
            "\n".join(map(wrapped, self.notes)),
        ]
        return "\n\n".join(filter(None, parts))

    def _offloaded(self) -> str:
        shares = {"optimizer state": self.offloaded_state, "parameters": self.offloaded_parameters}
        parts = [what if share == 1 else f"{percent(share)} of the {what}" for what, share in shares.items() if share]
        where = f"on a disk, in {self.offload_directory}" if self.offload_directory else "on the CPU"
        return f"{' and '.join(parts)} {where}" if parts else "nothing"


def _replace(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Puts other modules in the places of some."""
    for parent in [*model.modules()] if others else ():
        for name, child in [*parent.named_children()]:
            if child in others and parent is not others[child]:
                setattr(parent, name, others[child])


def _names(names: Sequence[str]) -> str:
    """Names, where runs of numbered modules are shortened."""
    runs: list[list[str]] = []
    for name in names:
        where, _, number = name.rpartition(".")
        before = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        follows = number.isdecimal() and before[2].isdecimal() and before[0] == where
        if follows and int(number) == int(before[2]) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    short = [run[0] if len(run) == 1 else f"{run[0]} .. {run[-1].rpartition('.')[2]}" for run in runs]
    return ", ".join(name or "(root)" for name in short) or "none"


def _made(cls: type, data: object, where: str, inner: Mapping[str, type] = {}) -> Any:
    """An object of a dataclass from data of JSON. Raises ValueError that names the field."""
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object, got {data!r}")
    known = {field.name: field for field in fields(cls)}
    for name in data:
        if name not in known:
            raise ValueError(f"{where} has a field '{name}', which is not one of {', '.join(known)}")
    example = _EXAMPLES[cls]
    values: dict[str, Any] = {}
    for name in known:
        if name not in data:
            raise ValueError(f"{where} has no field '{name}'")
        value, kind = data[name], type(getattr(example, name))
        if kind is tuple:
            if not isinstance(value, list):
                raise ValueError(f"{where}'s '{name}' must be a list, got {value!r}")
            if name in inner:
                value = tuple(_made(inner[name], each, f"{where}'s '{name}'[{at}]") for at, each in enumerate(value))
            elif not all(isinstance(each, str) for each in value):
                raise ValueError(f"{where}'s '{name}' must have strings, got {value!r}")
            values[name] = tuple(value)
        elif type(value) is kind or (kind is float and type(value) is int):
            values[name] = value
        else:
            raise ValueError(f"{where}'s '{name}' must be of type {kind.__name__}, got {value!r}")
    return cls(**values)


_EXAMPLES: dict[type, Any] = {
    PlannedGroup: PlannedGroup(("",), True),
    Change: Change("", 0, 0.0),
    Plan: Plan("", 1, "", 1, 1, 0.0, 3, ()),
}


def shortened(changes: Sequence[Change]) -> tuple[Change, ...]:
    """The changes, where those of one kind that follow each other are one."""
    runs: list[tuple[int, Change]] = []
    for change in changes:
        if runs and runs[-1][1].what == change.what:
            count, last = runs[-1]
            runs[-1] = count + 1, replace(last, saves=last.saves + change.saves, costs=last.costs + change.costs)
        else:
            runs.append((1, change))
    return tuple(replace(each, what=f"{each.what} ({count} times)" if count > 1 else each.what) for count, each in runs)
