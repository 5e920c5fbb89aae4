"""What sharding makes of a model: its groups and parameters as plain data, taken once.

Owns the step from a sharded model, also on meta, to integers, names and dtypes that need neither the model nor its
process groups any more. What a step then does with the groups is worked out in :mod:`fullshard.report.replay`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fullshard.buffer.plan import make_plan
from fullshard.buffer.sections import Section, full_bytes, full_starts, shard_bytes
from fullshard.comm.select import choose_transport
from fullshard.group.gradient_dtypes import GradientDtypes
from fullshard.group.group import Group
from fullshard.group.parameter import ShardedParameter, plain_name
from fullshard.report.exchange import Exchange
from fullshard.schedule.unit import Unit, unit_of


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter of a group.

    Attributes:
        shape: unsharded; what tensor parallel left of it, if that cut it before.
        dim: along which it is cut; ``None`` where every rank keeps it whole, and in the layout *flat*.
        rows: the first and the past-the-last index along ``dim`` on this rank; in *flat*, elements.
        chunk: elements of the largest part that a rank has.
        offset: where it begins in its section of the full buffer, in elements; -1 if it defines how it is gathered.
        dtype: in which it is stored.
        section: which section of the group it lies in.
        is_matrix: whether a token is multiplied with it: the weight of an embedding is only looked up.
        is_trainable: whether it has gradients.
        extends: whether it defines how it is gathered (``fsdp_pre_all_gather``).
        places: names under which modules have it, more than one if it is tied.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    rows: tuple[int, int]
    chunk: int
    offset: int
    dtype: str
    section: int
    is_matrix: bool
    is_trainable: bool
    extends: bool
    places: tuple[str, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GroupFacts:
    """The parameters that are gathered and reduced in one call. Sizes are in bytes, of one rank, unless they say more.

    Attributes:
        name: of its module, ``""`` for the root.
        module: the class of the module.
        layout: ``"even"`` or ``"flat"``.
        elements: of all its parameters.
        whole: its full buffer, U: all of it in the dtype that is computed in, padding included.
        shard: what this rank keeps, padding included.
        padding: what the shards of all ranks have beside parameters.
        content: what the parameters are, without padding, in the dtype in which they are stored.
        stored, compute, reduce: dtypes; several if its parameters differ.
        ranks, rank: over how many it is sharded, and which of these this rank is.
        replicas: how many copies there are of the shards.
        post_forward: over how many it rests between forward and backward, if that is another number.
        transport: what moves it.
        why: why it is that transport.
        shares: whether the ranks of a host share the memory of its full buffer, so that a gather moves nothing.
        reshards: whether it is resharded after forward.
        offload: what lies on the CPU: ``""``, ``"parameters"`` or ``"optimizer state"``.
        gradient: the buffer of its gradients, whole, in the dtype that travels.
        largest_gradient: of a parameter, as autograd makes it.
        straight_gradients: those that are reduced where autograd made them, and not in the buffer.
        reduced: its reduced gradients, as ``param.grad`` has them.
        trained: elements of this rank's shard that an optimizer steps on.
        staged: the copy of the shard in the dtype and on the device of the computation, if it needs one.
        rested: what it keeps between forward and backward on the smaller mesh.
        gather_staging, reduce_staging: what its transport needs beside these, at most.
        gather_sent: what this rank sends in a gather.
        rest_gather_sent, rest_gather_staging: the same from the smaller mesh.
        reduce_sent: what it sends in a reduction.
        all_reduce_sent: what it sends to add up over replicas.
        reduce_read: what it reads of the other ranks of its host.
        gradient_buffers: how many reductions use a buffer at once.
        communicates: whether a gather takes other ranks.
        parameters: in the order in which they lie.
        starts: where its sections begin in the full buffer, and where the last ends.
        compute_by_section: the dtype of each section there.
    """

    name: str
    module: str
    layout: str
    elements: int
    whole: int
    shard: int
    padding: int
    content: int
    stored: tuple[str, ...]
    compute: tuple[str, ...]
    reduce: tuple[str, ...]
    ranks: int
    rank: int
    replicas: int
    post_forward: int | None
    transport: str
    why: str
    shares: bool
    reshards: bool
    offload: str
    gradient: int
    largest_gradient: int
    straight_gradients: int
    reduced: int
    trained: int
    staged: int
    rested: int
    gather_staging: int
    reduce_staging: int
    gather_sent: int
    rest_gather_sent: int
    rest_gather_staging: int
    reduce_sent: int
    all_reduce_sent: int
    reduce_read: int
    gradient_buffers: int
    communicates: bool
    parameters: tuple[ParameterFacts, ...]
    starts: tuple[int, ...]
    compute_by_section: tuple[str, ...]

    @property
    def title(self) -> str:
        return self.name or "(root)"

    @property
    def padding_share(self) -> float:
        """Padding as a fraction of the parameters."""
        return self.padding / max(1, self.content)


@dataclass(frozen=True)
class UnitFacts:
    """The modules of one call, as a step runs them.

    Attributes:
        groups: positions of the groups that it reduces.
        needed: positions of these and of groups whose parameters are tied to ones of its modules.
        parent: position of the unit around it, -1 for none.
        ahead: in forward, whether the groups that follow are gathered ahead.
        ahead_in_backward: when the next group is gathered in backward: ``"before"``, ``"after"`` or ``"never"``.
    """

    groups: tuple[int, ...]
    needed: tuple[int, ...]
    parent: int
    ahead: bool
    ahead_in_backward: str


@dataclass(frozen=True)
class ModelFacts:
    """A sharded model.

    Attributes:
        groups: by their first place in the model.
        units: in the order in which they begin their forward.
        is_recorded: whether that order was recorded in a step, and is not only that of the modules.
        prefetch: how many groups are gathered ahead.
        left_out: parameters that require gradients and belong to no group, with their bytes.
        outside: bytes of parameters and buffers that are sharded by nobody.
        device: on which it computes.
    """

    groups: tuple[GroupFacts, ...]
    units: tuple[UnitFacts, ...]
    is_recorded: bool
    prefetch: int
    left_out: tuple[tuple[str, int], ...]
    outside: int
    device: str


def facts_of(model: nn.Module) -> ModelFacts:
    """The facts of a sharded model; it communicates nothing and changes nothing.

    Raises:
        ValueError: no part of the model is sharded.
    """
    names = {id(module): plain_name(name) for name, module in model.named_modules()}
    units = list(dict.fromkeys(unit for module in model.modules() if (unit := unit_of(module)) is not None))
    if not units:
        raise ValueError(
            f"no part of this {type(model).__name__} is sharded: apply fully_shard to it first, or give explain() a "
            f"function that builds it and a number of ranks"
        )
    groups = [group for unit in units for group in unit.groups]
    schedule = next((unit.schedule for unit in units if unit.schedule is not None), None)
    recorded = [] if schedule is None else schedule.order.entered
    ordered = _by_use(units, recorded)
    position = {group: at for at, group in enumerate(groups)}
    managed = {id(param.sharded) for group in groups for param in group.params}
    managed |= {id(param) for group in groups for param in group.sharded}
    ignored = {each for unit in units for each in unit.ignored}
    others = {name: param for name, param in model.named_parameters() if id(param) not in managed}
    loose = [*others.values(), *model.buffers()]
    return ModelFacts(
        groups=tuple(_group_facts(group, unit, model, names) for unit in units for group in unit.groups),
        units=tuple(_unit_facts(unit, ordered, position) for unit in ordered),
        is_recorded=bool(recorded),
        prefetch=1 if schedule is None else schedule.prefetch_limit,
        left_out=tuple(
            (plain_name(name), param.nbytes)
            for name, param in others.items()
            if param.requires_grad and id(param) not in ignored
        ),
        outside=sum(tensor.nbytes for tensor in loose),
        device=str(units[0].device),
    )


def _by_use(units: Sequence[Unit], recorded: Iterable[Group]) -> list[Unit]:
    """The units as they were entered, or in the order of the modules; a unit that runs again counts once."""
    unit_by_group = {group: unit for unit in units for group in unit.groups}
    entered = [unit_by_group[group] for group in recorded if group in unit_by_group]
    return list(dict.fromkeys(entered)) if entered else [unit for unit in units if unit.groups]


def _unit_facts(unit: Unit, ordered: Sequence[Unit], position: dict[Group, int]) -> UnitFacts:
    inside = {id(unit): {module for each in unit.modules for module in each.modules()} for unit in ordered}
    around = [at for at, other in enumerate(ordered) if other is not unit and unit.modules[0] in inside[id(other)]]
    return UnitFacts(
        tuple(position[group] for group in unit.groups),
        tuple(position[group] for group in [*unit.groups, *unit.borrowed]),
        min(around, key=lambda at: len(inside[id(ordered[at])]), default=-1),
        unit.prefetches_forward,
        unit.prefetches_backward,
    )


def _group_facts(group: Group, unit: Unit, model: nn.Module, names: dict[int, str]) -> GroupFacts:
    data, sections, memory = group.data, group.sections, group.memory
    dtypes = [section.dtype for section in sections]
    extended = [param for param in group.params if param.extends]
    own = sum(math.prod(param.chunk_shape(0)) * param.dtype.itemsize for param in extended)
    shares = memory.shared is not None or (memory.is_apart and memory.is_meta)
    whole = full_bytes(sections, group.compute_dtypes) + data.shard_size * own
    shard = shard_bytes(sections, dtypes) + own
    content = sum(math.prod(param.shape) * param.dtype.itemsize for param in group.params)
    kept = sum(param.dtype.itemsize for param in group.params if param.dim is None and not group.is_flat)
    is_whole = data.shard_group is None
    padding = shard - content if is_whole else data.shard_size * (shard - kept) - (content - kept)
    trainable = [param.sharded.requires_grad for param in group.params]
    gradients, travelling = GradientDtypes(group).sections(trainable)
    reduced = sum(section.plan.shard_numel * section.dtype.itemsize for section in gradients)
    trained = sum(section.plan.shard_numel for section in gradients)
    gather, reduce = Exchange(group, "gather", data), Exchange(group, "reduce", data)
    rest, rest_sent, rest_staging, over = 0, 0, 0, group.options.post_forward_mesh
    if over is not None:
        small = [Section(each.dtype, each.members, make_plan(each.plan.params, over.shard_size)) for each in sections]
        again = Exchange(group, "gather", over)
        rest, rest_sent = shard_bytes(small, group.compute_dtypes), again.sent(small, group.compute_dtypes)
        rest_staging = again.staging(small, group.compute_dtypes)
    keeps = unit.auto_reshard and unit.schedule is None and unit.modules[0] is model  # the root will
    needs_staging = memory.needs_staging and not shares
    replicas = data.replicate_size
    return GroupFacts(
        name=", ".join(names.get(id(module), "?") for module in unit.modules),
        module=", ".join(dict.fromkeys(map(_class_of, unit.modules))),
        layout="flat" if group.is_flat else "even",
        elements=sum(math.prod(param.shape) for param in group.params),
        whole=whole,
        shard=shard + (whole // data.shard_size if shares and dtypes != group.compute_dtypes else 0),
        padding=padding,
        content=content,
        stored=_names(param.dtype for param in group.params),
        compute=_names(group.compute_dtypes),
        reduce=_names(travelling),
        ranks=data.shard_size,
        rank=data.shard_rank,
        replicas=replicas,
        post_forward=None if over is None or keeps else over.shard_size,
        transport=group.transport.name,
        why=_why(group),
        shares=shares,
        reshards=group.options.reshard_after_forward and not keeps and not is_whole,
        offload="parameters" if group.offloads else "optimizer state" if group.offloads_state else "",
        gradient=full_bytes(gradients, travelling),
        largest_gradient=_largest_gradient(group),
        straight_gradients=_straight_gradients(gradients, travelling),
        reduced=reduced,
        trained=trained,
        staged=shard_bytes(sections, group.compute_dtypes) if needs_staging else 0,
        rested=0 if keeps else rest,
        gather_staging=gather.staging(sections, group.compute_dtypes),
        reduce_staging=reduce.staging(gradients, travelling),
        gather_sent=gather.sent(sections, group.compute_dtypes) + (data.shard_size - 1) * own,
        rest_gather_sent=0 if keeps else rest_sent,
        rest_gather_staging=0 if keeps else rest_staging,
        reduce_sent=reduce.sent(gradients, travelling),
        all_reduce_sent=2 * shard_bytes(gradients, travelling) * (replicas - 1) // replicas,
        reduce_read=reduce.read(gradients, travelling),
        gradient_buffers=group.options.max_gradient_buffers or group.reduce_transport.gradient_buffers,
        communicates=not is_whole and data.shard_size > 1,
        parameters=tuple(_parameters(group, names)),
        starts=tuple(full_starts(sections, group.compute_dtypes)),
        compute_by_section=tuple(map(_name, group.compute_dtypes)),
    )


def _straight_gradients(sections: Sequence[Section], dtypes: Sequence[torch.dtype]) -> int:
    found = 0
    for section, dtype in zip(sections, dtypes, strict=True):
        plan = section.plan
        found += sum(plan.params[at].numel for at in plan.straight if plan.is_messages) * dtype.itemsize
    return found


def _largest_gradient(group: Group) -> int:
    sizes = (
        math.prod(param.shape) * group.compute_dtype(param).itemsize
        for param in group.params
        if param.sharded.requires_grad
    )
    return max(sizes, default=0)


def _why(group: Group) -> str:
    if group.has_custom_communication:
        return "a function of the user's"
    over = group.data.shard_group or group.data.replicate_group
    assert over is not None
    transport, why = choose_transport(over, group.device)
    if dist.get_backend(over) == "fake":
        return "the collectives of the backend, in a world that is pretended"
    return why if transport is group.transport else "chosen for this group"


def _parameters(group: Group, names: dict[int, str]) -> Iterator[ParameterFacts]:
    places = {
        index: (at, position) for at, each in enumerate(group.sections) for position, index in enumerate(each.members)
    }
    for index, param in enumerate(group.params):
        at, position = places.get(index, (-1, -1))
        section = group.sections[at] if at >= 0 else None
        rows, chunk = (0, 1), math.prod(param.shape)
        if section is not None and group.is_flat:
            rows, chunk = section.plan.fragment(position, group.data.shard_rank), section.plan.shard_numel
        elif param.dim is not None:
            step = param.chunk_shape(0)[param.dim]
            size, rank = param.shape[param.dim], group.data.shard_rank
            rows, chunk = (min(rank * step, size), min((rank + 1) * step, size)), math.prod(param.chunk_shape(0))
        users = [location.module for location in param.locations]
        full_names = dict.fromkeys(_full_name(param, number, names) for number in range(len(users)))
        yield ParameterFacts(
            next(iter(full_names)),
            tuple(param.shape),
            None if group.is_flat else param.dim,
            rows,
            chunk,
            section.plan.full_offsets[position] if section is not None else -1,
            _name(param.dtype),
            at,
            len(param.shape) > 1 and not all(isinstance(user, nn.Embedding) for user in users),
            param.sharded.requires_grad,
            param.extends,
            tuple(full_names),
        )


def _full_name(param: ShardedParameter, number: int, names: dict[int, str]) -> str:
    location = param.locations[number]
    prefix = names.get(id(location.module), "")
    return plain_name(f"{prefix}.{location.name}" if prefix else location.name)


def _class_of(module: nn.Module) -> str:
    inner = getattr(module, "_fsdp_wrapped_module", module)
    name = type(inner).__name__
    return name.removeprefix("FSDP") if unit_of(inner) is not None and inner is module else name


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_name, dtypes)))
