"""Finds out how to shard a model so that a step fits into memory and loses little time: :func:`fit`.

The search begins with the fastest plan: every group stays whole from forward to backward, and nothing is recomputed.
While a moment of the step needs too much, it makes the change that loses the fewest seconds for each byte by which the
step comes nearer to fitting. In the end it takes back the changes that later ones made needless. The plan is then
applied to a copy of the model on meta, which is traced and runs a step; if that needs more than the search had
predicted, the search goes on with less memory.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import tree
from fullshard.comm.process_group import broadcast_object, has_peers
from fullshard.policies import MixedPrecisionPolicy
from fullshard.report.activations import Activations, Loss, trace_step
from fullshard.report.explain import planned_device, state_bytes
from fullshard.report.facts import ModelFacts, facts_of
from fullshard.report.meta_copy import on_meta
from fullshard.report.meta_step import MetaStep
from fullshard.report.plan import Change, Plan, PlannedGroup, shortened
from fullshard.report.predicted import TO_DISK, Need, TracedBlocks, assumed_hardware, need_of, staging_bytes
from fullshard.report.simulated import simulated_job
from fullshard.report.snapshot import Snapshot
from fullshard.report.values import Values
from fullshard.schedule.unit import units_in
from fullshard.text import bytes_of, bytes_text, counted, quantity_text, seconds_text
from fullshard.wrap import repeated_blocks

#: Numbers of blocks that form a group.
_SIZES = (1, 2, 4)
#: Layers outside of the blocks may have a group of their own if they have this share of the parameters.
_LARGE = 0.02
#: Parts in which the optimizer's state, and then the parameters, are offloaded.
_PARTS = 4
#: In which order changes may be taken back.
_TAKEN_BACK = ("offload", "recomputed", "resharded", "prefetch"), ("resharded", "recomputed", "offload", "prefetch")
#: How often a plan that needs more than the search had predicted is searched for again.
_ATTEMPTS = 4


class DoesNotFitError(ValueError):
    """No plan fits into the memory.

    Attributes:
        smallest: the bytes of the smallest memory into which a plan fits, predicted.
    """

    __module__ = "fullshard"

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


#: A size of groups, whether large layers are apart, and what is offloaded.
_Key = tuple[int, bool, int]


@dataclass(frozen=True)
class _Choice:
    """A point of the search.

    Args:
        size: how many blocks form a group.
        apart: whether large layers outside of the blocks have groups of their own.
        offload: how much is offloaded of each group, in quarters: of the optimizer's state, then of the parameters too.
        resharded: how many groups are freed after forward: the first ones.
        recomputed: how many blocks are recomputed: those that lose least.
        prefetch: how many groups are gathered ahead.
    """

    size: int
    apart: bool = False
    offload: int = 0
    resharded: int = 0
    recomputed: int = 0
    prefetch: int = 1

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of the optimizer's state and of the parameters that are offloaded."""
        return min(1.0, self.offload / _PARTS), max(0.0, self.offload / _PARTS - 1)

    @property
    def key(self) -> _Key:
        """Which facts of groups it takes: those with nothing, all state or all parameters offloaded."""
        return self.size, self.apart, -(-self.offload // _PARTS) * _PARTS


def fit(
    model: nn.Module,
    sample_inputs: Any,
    *,
    memory: float | str,
    ranks: int | None = None,
    mesh: DeviceMesh | Sequence[int] | None = None,
    optimizer_bytes: float | None = None,
    loss: Loss | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    hardware: dict[str, float] | None = None,
    offload_directory: str | os.PathLike[str] | None = None,
    values: Values | None = None,
    device: str | torch.device | None = None,
    hosts: int = 1,
) -> Plan:
    """Plans how to shard a model so that a step fits into ``memory`` and takes as little time as possible.

    ::

        plan = fullshard.fit(model, batch, memory="6 GiB")     # in a job: for its ranks
        print(plan)
        plan.apply(model)
        optimizer = torch.optim.AdamW(model.parameters())

        fullshard.fit(model, batch, memory="6 GiB", ranks=64)  # without a job: for ranks that do not exist

    Chooses the groups, which of them are freed between forward and backward, which blocks are recomputed in backward,
    the prefetch limit, and which share of each group is offloaded: to the CPU, on an accelerator, or to a disk.
    Activations are measured by a forward and backward on tensors without memory, not guessed from classes. The model
    stays as it is.

    Args:
        model: the model, on the CPU or on meta, not sharded yet.
        sample_inputs: an example of what one rank's forward gets: a tensor, a tuple of positional arguments, or a dict
            of keyword arguments. Only shapes and dtypes matter.
        memory: what a rank may use, in bytes or as ``"6 GiB"``. On an accelerator: memory of the device. On the CPU:
            what the process takes beside what the interpreter and its libraries need; where ranks share memory, with
            this rank's share of the shared segments, which is their size divided by the ranks.
        ranks: the number of ranks to simulate. By default the ranks of this job.
        mesh: the mesh, as for :func:`~fullshard.fully_shard`; where ranks are simulated, its sizes: ``(2, 4)`` for two
            replicas that shard over four ranks each.
        optimizer_bytes: bytes of optimizer state for each element that an optimizer updates. The default is AdamW's,
            which keeps two moments in the dtype of the parameter: 8 for fp32.
        loss: a function of the model and the inputs that runs the model and returns the loss, if forward does not.
        mp_policy: the mixed precision. Give it to :meth:`Plan.apply` too.
        hardware: the hardware, as :meth:`fullshard.report.explain.Explanation.estimate` takes it: ``peak_flops``,
            ``efficiency``, ``bandwidth``, ``latency`` and others. What is missing is assumed; the plan says which
            numbers.
        offload_directory: where what does not fit may be kept on a disk, see :class:`~fullshard.DiskOffloadPolicy`. By
            default nothing is.
        values: what forward gets where it reads a value of a tensor (``item()``, ``if``, a mask as an index): one
            number, or numbers by line, such as ``{"model.py:31": 4}``.
        device: what simulated ranks compute on, ``"cuda"`` or ``"cpu"``, here or not. The default is what is here.
        hosts: on how many hosts simulated ranks are, the same number on each.

    Returns:
        the plan, the same on all ranks.

    Raises:
        DoesNotFitError: no plan fits. It says how much memory one needs, and for what.
        ValueError: the model is sharded already or has no parameters, or an argument has a value that it cannot have.
        RuntimeError: ``ranks`` is given in a process of a job with a different number, or is missing in a process
            without a job; or forward or backward failed on tensors without values.

    Ranks: with ``ranks``, each for itself; otherwise all alike.
    """
    size, disk = bytes_of(memory), "" if offload_directory is None else os.fspath(offload_directory)
    if units_in(model):
        raise ValueError(f"this {type(model).__name__} is sharded already: fit() takes a model that is not")
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(f"this {type(model).__name__} has no parameters that require gradients: nothing is trained")
    optimizer_bytes, planned = state_bytes(model, optimizer_bytes), planned_device(device)
    if dist.is_initialized():
        if ranks not in (None, dist.get_world_size()):
            raise RuntimeError(
                f"this process is one of {dist.get_world_size()} ranks and cannot plan for {ranks}: leave out ranks=, "
                f"or plan in a different process, for example by `fullshard fit FILE:FUNCTION --ranks {ranks}`"
            )
        if planned is not None:
            raise ValueError(f"a job plans for its own devices, not for {device}: leave out device=")
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise ValueError(f"mesh must be a DeviceMesh in a job, got {mesh!r}")
        given = model, sample_inputs, optimizer_bytes, loss
        return Search(*given, mesh, mp_policy, hardware or {}, disk, values).plan(size)
    if type(ranks) is not int or ranks < 1:
        raise RuntimeError(f"this process is not a rank of a job: give fit() the number of ranks, got ranks={ranks!r}")
    if isinstance(mesh, DeviceMesh):
        raise ValueError("a DeviceMesh belongs to a job: where ranks are simulated, give its sizes, such as (2, 4)")
    if mesh is not None and (len(mesh) not in (1, 2) or math.prod(mesh) != ranks or not all(size > 0 for size in mesh)):
        raise ValueError(f"mesh must be one or two sizes whose product is the number of ranks, {ranks}; got {mesh!r}")
    if hosts < 1 or ranks % hosts:
        raise ValueError(f"hosts have the same number of ranks each, so hosts={hosts} must divide ranks={ranks}")
    program, traces, here = Snapshot(), dict[object, Activations](), ranks // hosts

    def places(ranks: int) -> int:
        return ranks // here if hosts > 1 else 1

    def search(ranks: int, mesh: Sequence[int] | None, mp_policy: MixedPrecisionPolicy) -> Plan:
        with simulated_job(ranks, 0, places(ranks), planned, mesh) as made:
            more = hardware or {}, disk, values, program, traces, places(ranks)
            return Search(model, sample_inputs, optimizer_bytes, loss, made, mp_policy, *more).plan(size)

    others: dict[str, tuple[int, Sequence[int] | None, MixedPrecisionPolicy]] = {}
    larger = None if mesh is None else (*mesh[:-1], 2 * mesh[-1])
    others[f"on {2 * ranks} ranks"] = 2 * ranks, larger, mp_policy
    if mp_policy.param_dtype is None:
        others["computed in bfloat16"] = ranks, mesh, replace(mp_policy, param_dtype=torch.bfloat16)
    notes = []
    for what, options in others.items():
        try:
            found = search(*options)
        except DoesNotFitError as error:
            notes.append(f"{what}: needs at least {bytes_text(error.smallest)}")
        else:
            again = f", {len(found.recomputed)} recomputed" if found.recomputed else ""
            needs = f"needs {bytes_text(found.needed)}, {seconds_text(found.seconds)} a step{again}"
            notes.append(f"{what}: {needs}")
    try:
        plan = search(ranks, mesh, mp_policy)
    except DoesNotFitError as error:
        raise DoesNotFitError(f"{error}. Otherwise: {'; '.join(notes)}", error.smallest) from None
    return replace(plan, notes=(f"Otherwise: {'; '.join(notes)}", *plan.notes))


class Search:
    """The search for one model, on the ranks of this job, which may be simulated. Searches for different numbers of
    ranks share ``traces``: a traced step depends on the modules of groups, on recomputation and on the precision."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        optimizer_bytes: float,
        loss: Loss | None,
        mesh: DeviceMesh | None,
        mp_policy: MixedPrecisionPolicy,
        hardware: dict[str, float],
        offload_directory: str = "",
        values: Values | None = None,
        program: Snapshot | None = None,
        traces: dict[object, Activations] | None = None,
        hosts: int = 0,
    ) -> None:
        self._model, self._inputs, self._loss = model, inputs, loss
        self._values, self._traces = values, {} if traces is None else traces
        self._program = program or Snapshot()
        self._optimizer_bytes, self._options = optimizer_bytes, {"mesh": mesh, "mp_policy": mp_policy}
        self._disk = offload_directory
        self._moves = f"; a disk moves {quantity_text(TO_DISK, 'B/s')}" if self._disk else ""
        trained = sum(param.nbytes for param in model.parameters() if param.requires_grad) / dist.get_world_size()
        self._staging = staging_bytes(trained * (2 + optimizer_bytes / 4))
        self._batch = sum(tensor.nbytes for tensor in tree.tensors(inputs))
        names = {module: name for name, module in reversed(list(model.named_modules()))}
        self.blocks = [names[block] for block in repeated_blocks(model)]
        self._layers = [names[layer] for layer in _large_layers(model, repeated_blocks(model))]
        self._facts: dict[_Key, ModelFacts] = {}
        self._steps: dict[_Key, MetaStep] = {}
        self._groups: dict[_Key, list[PlannedGroup]] = {}
        self._order: list[str] = []  # of the modules in forward
        fine = _Choice(1, apart=True)
        repeatable = [name for name in self.blocks if not _counts(model.get_submodule(name))]
        # Collective, as all that follows in the same order on all ranks.
        again = self._trace(self._as_chosen(fine, repeatable)) if repeatable else None
        plain = self._applied(self._as_chosen(fine))
        found = self._trace(self._as_chosen(fine), plain)
        self._traced = TracedBlocks(facts_of(plain, found.order), found, again, self.blocks, repeatable)
        self._order, self.recomputes = self._traced.order, bool(self._traced.worth)  # whether that makes any smaller
        self._most = 2 * _PARTS if self._disk or units_in(plain)[0].device.type != "cpu" else 0
        for offload in range(0, self._most + 1, _PARTS):
            for size in _SIZES:
                for apart in (False, True) if self._layers else (False,):
                    if size == 1 or len(self.blocks) >= 2 * size:
                        is_fine = size == 1 and offload == 0 and apart is bool(self._layers)
                        self._add(_Choice(size, apart, offload), plain if is_fine else None)
        first = next(iter(self._facts.values())).groups[0]
        hosts = hosts if hosts > 1 else first.hosts
        here = dist.get_world_size() // hosts if hosts else None
        self._transport, self._ranks = first.transport, dist.get_world_size()
        kind = first.transport if first.is_host else "accelerator"
        self._hardware = assumed_hardware(kind, hardware, found.count, found.unit, here)
        self.need = cache(self._need)

    def plan(self, memory: int) -> Plan:
        """The plan that fits into ``memory``; the same on all ranks, by what rank 0 finds."""
        room = memory
        for attempt in range(_ATTEMPTS + 1):
            found = self.agreed(self._found(room, memory) if attempt < _ATTEMPTS else None)
            plan = found or self.agreed(self._planned(self._smallest(), memory, []))
            need = self.agreed(self.checked(plan))
            if need.most <= memory:
                return replace(plan, needed=need.most, seconds=need.seconds)
            if found is None:
                break
            room -= need.most - memory
        raise DoesNotFitError(
            f"no plan fits this {type(self._model).__name__} on {counted(self._ranks, 'rank')} into "
            f"{bytes_text(memory)}: the smallest memory is {bytes_text(need.most)}, for {need.why}",
            need.most,
        )

    def agreed(self, value: Any) -> Any:
        """What rank 0 has."""
        return broadcast_object(value, None) if has_peers(dist.group.WORLD) else value

    def _trace(self, plan: Plan, sharded: nn.Module | None = None) -> Activations:
        """A step of the model as planned; ``sharded`` is a copy that is sharded so, if there is one."""
        key = frozenset(group.modules for group in plan.groups), plan.recomputed, self._options["mp_policy"]
        if key not in self._traces:
            sharded = sharded or self._applied(plan)
            self._traces[key] = trace_step(sharded, self._inputs, self._loss, self._values, self._program)
        return self._traces[key]

    # the models that are looked at

    def _groups_of(self, choice: _Choice) -> list[PlannedGroup]:
        """The groups of a choice, in the order in which forward runs them; the one of the model itself is the last."""
        blocks = sorted(self.blocks, key=self._position)
        chunks = [tuple(blocks[at : at + choice.size]) for at in range(0, len(blocks), choice.size)]
        chunks += [(name,) for name in self._layers if choice.apart]
        chunks.sort(key=lambda names: self._position(names[0]))
        return [PlannedGroup(names, False) for names in [*chunks, ("",)]]

    def _position(self, name: str) -> int:
        """When forward runs a module, if that is known."""
        return self._order.index(name) if name in self._order else len(self._order)

    def _planned(self, choice: _Choice, memory: int, changes: Sequence[Change]) -> Plan:
        groups = [replace(group, reshards=at < choice.resharded) for at, group in enumerate(self._groups[choice.key])]
        need, (state, parameters) = self.need(choice), choice.shares
        return Plan(
            model=type(self._model).__name__,
            ranks=self._ranks,
            transport=self._transport,
            memory=memory,
            needed=need.most,
            seconds=need.seconds,
            zero_stage=3 if choice.resharded else 2,
            groups=tuple(groups),
            recomputed=tuple(name for name in self.blocks if name in self._traced.worth[: choice.recomputed]),
            prefetch=choice.prefetch,
            offloaded_state=state,
            offloaded_parameters=parameters,
            offload_directory=self._disk if choice.offload else "",
            staging_bytes=self._staging,
            changes=shortened(changes),
            notes=(f"Assumed: {self._hardware}{self._moves}",),
            elements=sum(param.numel() for param in self._model.parameters()),
        )

    def _as_chosen(self, choice: _Choice, recomputed: Sequence[str] = ()) -> Plan:
        state, parameters = choice.shares
        groups, again = tuple(self._groups_of(choice)), tuple(recomputed)
        return Plan("", 1, "", 1, 1, 0, 2, groups, again, offloaded_state=state, offloaded_parameters=parameters)

    def _applied(self, plan: Plan) -> nn.Module:
        """A copy of the model, sharded as planned, for which nothing is made in the directory."""
        here = tempfile.gettempdir() if self._disk else ""
        plan = replace(plan, memory=1 << 62, offload_directory=here, staging_bytes=self._staging)
        return plan.apply(on_meta(self._model), **self._options)

    def _add(self, choice: _Choice, sharded: nn.Module | None) -> None:
        """Take the facts of the groups of a choice, of a copy that is ``sharded`` so if there is one. Collective."""
        key = choice.key
        self._groups[key] = self._groups_of(choice)
        sharded = sharded or self._applied(self._as_chosen(choice))
        titles = [each.modules for unit in units_in(sharded) for each in unit.groups]
        owner = {module: at for at, modules in enumerate(titles) for module in modules}
        found = [owner.get(sharded.get_submodule(name), owner.get(sharded)) for name in self._order]
        facts = self._facts[key] = facts_of(sharded, [at for at in found if at is not None])
        self._steps[key] = MetaStep(units_in(sharded), facts)

    def checked(self, plan: Plan) -> Need:
        """What the plan needs, as it is traced and runs. Collective."""
        sharded = self._applied(plan)
        found = self._trace(plan, sharded)
        facts = facts_of(sharded, found.order)
        step = MetaStep(units_in(sharded), facts).run(facts, found.open_ended)
        return need_of(facts, step, found, self._hardware, self._optimizer_bytes, self._batch)

    def _need(self, choice: _Choice) -> Need:
        facts, freed = self._facts[choice.key], self._groups[choice.key][: choice.resharded]
        names = {", ".join(group.modules) for group in freed}
        groups = []
        for each in facts.groups:
            freely, part = each.name in names and each.communicates, each.offloaded.part(*choice.shares)
            groups.append(replace(each, reshards=freely, offloaded=part))
        recomputed = self._traced.worth[: choice.recomputed]
        changed = replace(facts, groups=tuple(groups), prefetch=choice.prefetch)
        traced = self._traced.combined(changed, recomputed)
        step = self._steps[choice.key].run(changed, traced.open_ended)
        return need_of(changed, step, traced, self._hardware, self._optimizer_bytes, self._batch)

    # the search

    def _found(self, room: int, memory: int) -> Plan | None:
        """The plan that the search finds for ``room``, ``None`` if it finds none."""
        choice, changes = self._fastest(), list[Change]()
        while (before := self.need(choice)).above(room):
            options = [
                (*self._loss_of(before, self.need(other), room), number, other, what)
                for number, (other, what) in enumerate(self._changes(choice))
                if self.need(other).above(room) <= before.above(room)
            ]
            if not options:
                return None
            *_, other, what = min(options)
            after = self.need(other)
            changes.append(Change(what, before.most - after.most, after.seconds - before.seconds))
            choice = other
        ends = [choice, choice]
        for at, names in enumerate(_TAKEN_BACK):
            for name in names:
                ends[at] = self._taken_back(ends[at], name, room)
        best = min(ends, key=lambda end: (self.need(end).seconds, self.need(end).most))
        return self._planned(best, memory, changes)

    @staticmethod
    def _loss_of(before: Need, after: Need, room: int) -> tuple[float, float]:
        """The seconds that a change loses for each byte by which the step comes nearer to fitting, and all of them. A
        change that brings it no nearer comes after those that do: the next change may need it."""
        lost, nearer = after.seconds - before.seconds, before.above(room) - after.above(room)
        return round(lost / nearer, 15) if nearer else math.inf, lost

    def _taken_back(self, choice: _Choice, name: str, room: int) -> _Choice:
        """The choice with as few changes of one kind as fit."""
        while True:
            value = getattr(choice, name)
            other = replace(choice, **{name: value + 1 if name == "prefetch" else value - 1})
            if (name == "prefetch" and value >= 1) or (name != "prefetch" and value == 0):
                return choice
            if self.need(other).above(room) or self.need(other).seconds >= self.need(choice).seconds:
                return choice
            choice = other

    def _fastest(self) -> _Choice:
        """The fastest choice; of equal ones the one that needs least."""
        starts = [_Choice(size, apart) for size, apart, offload in self._facts if not offload]
        return min(starts, key=lambda choice: (self.need(choice).seconds, self.need(choice).most))

    def _smallest(self) -> _Choice:
        """The choice that needs least memory, of those to which every change leads."""
        choice = best = self._fastest()
        while True:
            following = [other for other, _ in self._changes(choice)]
            if not following:
                return best
            choice = min(following, key=lambda other: (self.need(other).most, self.need(other).above(0)))
            best = min(best, choice, key=lambda other: self.need(other).most)

    def _changes(self, choice: _Choice) -> Iterator[tuple[_Choice, str]]:
        """The choices that are one change away, each with its words."""
        key = choice.key
        if choice.resharded < len(self._groups[key]) and self._ranks > 1:
            yield replace(choice, resharded=choice.resharded + 1), "free one more group after forward"
        if choice.recomputed < len(self._traced.worth):
            yield replace(choice, recomputed=choice.recomputed + 1), "recompute one more block"
        if choice.prefetch:
            yield replace(choice, prefetch=0), "gather no group ahead"
        if choice.size > 1:
            smaller = replace(choice, size=choice.size // 2)
            groups = len(self._groups[smaller.key])
            every = choice.resharded == len(self._groups[key])
            yield replace(smaller, resharded=groups if every else 2 * choice.resharded), "halve the groups of blocks"
        if not choice.apart and replace(choice, apart=True).key in self._facts:
            more = choice.resharded + len(self._layers) * (choice.resharded == len(self._groups[key]))
            yield replace(choice, apart=True, resharded=more), "large layers outside of the blocks apart"
        where = "a disk" if self._disk else "the CPU"
        for offload in sorted({choice.offload + 1, _PARTS, 2 * _PARTS}):
            if choice.offload < offload <= self._most:
                how = "a quarter more" if offload == choice.offload + 1 else "all"
                what = "parameters" if offload > _PARTS else "optimizer state"
                yield replace(choice, offload=offload), f"{how} of the {what} to {where}"


def _large_layers(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Layers outside of the blocks with many parameters that are theirs alone, such as an embedding and a head."""
    inside = {inner for block in blocks for inner in block.modules()}
    users = Counter(param for module in model.modules() for param in module.parameters(recurse=False))
    least = _LARGE * sum(param.numel() for param in users)
    return [
        module
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.Linear))
        and module not in inside
        and module is not model
        and all(users[param] == 1 for param in module.parameters())
        and sum(param.numel() for param in module.parameters()) >= least
    ]


def _counts(block: nn.Module) -> bool:
    """Whether a block has running statistics, as batch norms have: a second forward would count the batch twice."""
    return any(name.rpartition(".")[2] == "running_mean" for name, _ in block.named_buffers())
