"""The groups and parameters of a sharded model as plain data.

Owns the conversion of a sharded model (it may be on meta) into integers, names and dtypes. They need neither the model
nor its process groups any more. :mod:`fullshard.report.meta_step` predicts what a step does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from fullshard import tree
from fullshard.buffer.plan import DEFAULT_LAYOUT
from fullshard.buffer.sections import Section, full_bytes, full_starts, shard_bytes
from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.hosts import HostsTransport
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.select import choose_transport
from fullshard.comm.transport import Transport
from fullshard.device import is_host
from fullshard.group.feedback import feedback_bytes
from fullshard.group.gradient_dtypes import GradientDtypes
from fullshard.group.owners import owner_of
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import ShardedParameter, plain_name
from fullshard.group.strategy import Placement
from fullshard.schedule.unit import Unit, unit_of, units_in
from fullshard.strangers import known_to, strangers_in
from fullshard.text import dtype_name, percent, wire_text
from fullshard.torch_private import plain_parts, storage_id
from fullshard.wrap import repeated_blocks

#: How the names of kinds of memory end that are offloaded.
ON_CPU, ON_DISK = " on the CPU", " on a disk"


@dataclass(frozen=True)
class OffloadedFacts:
    """What of a group is offloaded, on this rank. Sizes are in bytes.

    Attributes:
        what: ``"parameters"`` with their gradients and optimizer state, ``"optimizer state"``, or ``""`` for nothing.
        place: ``" on the CPU"``, ``" on a disk"``, or ``""``.
        shard, reduced: how much of the shard and of the reduced gradients is offloaded.
        trained: the number of elements whose optimizer state is offloaded.
        behind: the most bytes of gradients that are in memory while they are written to a disk, which is half of what
            an optimizer's step may read and write at once.
    """

    what: str = ""
    place: str = ""
    shard: int = 0
    reduced: int = 0
    trained: int = 0
    behind: int = 0

    def split(self, kind: str, nbytes: int, offloaded: int) -> dict[str, int]:
        """Divides ``nbytes`` of a kind of memory into those in place, and those that are offloaded."""
        return {kind: nbytes - offloaded, kind + self.place: offloaded} if self.place else {kind: nbytes}

    def part(self, state: float, parameters: float) -> OffloadedFacts:
        """About what is offloaded with smaller shares of a group."""
        shard, reduced, trained = self.shard * parameters, self.reduced * parameters, self.trained * state
        return replace(self, shard=round(shard), reduced=round(reduced), trained=round(trained))

    def text(self, shard: int, trained: int) -> str:
        """Says how much is offloaded of ``shard`` bytes of parameters, and of the state of ``trained`` elements."""
        shares = {"parameters": self.shard / max(1, shard), "optimizer state": self.trained / max(1, trained)}
        if round(shares["parameters"], 3) in (0, round(shares["optimizer state"], 3)):
            shares = {self.what: shares[self.what]}
        parts = [f"{percent(share, 1)} of the {kind}" if share < 1 else kind for kind, share in shares.items()]
        return " and ".join(parts) + self.place


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter of a group.

    Attributes:
        shape: its unsharded shape. With tensor parallel: the shape of this rank's tensor-parallel part.
        dim: the dimension along which it is cut. ``None`` if every rank keeps it whole, and in the *flat* layout.
        rows: this rank's range along ``dim``: the first index, and one past the last. In *flat*, a range of elements.
        chunk: elements of the largest part on any rank.
        offset: its first element in its section of the full buffer. -1 if it defines its own gather.
        dtype: the dtype in which it is stored.
        section: the index of its section in the group.
        is_matrix: whether tokens are multiplied with it. False for the weight of an embedding: rows are only looked up.
        is_trainable: whether it requires gradients.
        extends: whether it defines its own gather (``fsdp_pre_all_gather``).
        places: all its names in the model, more than one if it is tied.
        cuts: if it is ragged, where the rows of each rank begin, and their number.
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
    cuts: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GroupFacts:
    """A group: the parameters that are gathered and reduced in one call. Sizes are in bytes, for one rank, unless said
    otherwise.

    Attributes:
        name: the name of its module, ``""`` for the root.
        module: the class of the module.
        layout: its name: ``"even"`` or ``"flat"``.
        elements: the number of elements of all its parameters.
        whole: U, its full buffer: all parameters in the compute dtype, padding included.
        shard: this rank's shard, padding included.
        padding: the padding in the shards of all ranks together.
        content: all parameters in the dtype in which they are stored, without padding.
        stored, compute, reduce: dtypes, several if the parameters differ.
        ranks, rank: the number of ranks over which it is sharded, and this rank's number among them.
        replicas: the number of copies of the shards.
        stride, replica_stride: the distance between neighbours among the ranks that shard it, and among its replicas:
            their numbers in the world differ by so much.
        post_forward: the number of ranks that shard it between forward and backward, if that differs from ``ranks``.
        transport: the name of its transport, and in ``why`` the reason for it.
        adds_in_fp32: whether gradients of low precision are added up in fp32.
        shares: whether all ranks share the memory of its full buffer. Then a gather copies nothing.
        sharers: how many ranks share the memory of its full buffer with this one, itself included.
        hosts: the number of hosts on which all ranks are; 0 if it is not known.
        reshards: whether it is resharded after forward.
        offloaded: what of it is offloaded, and where to.
        gradient: its gradient buffer, whole, in the reduce dtype.
        reduced: its reduced gradients, as in ``param.grad``.
        trained: the number of elements of this rank's shard that an optimizer updates.
        wire: how what it sends is encoded, ``""`` if nothing is; ``feedback``: what is kept to correct gradients.
        is_host: whether it computes on the CPU.
        shards_replicas: whether each shard is cut again over the replicas between steps.
        communicates: whether a gather involves other ranks.
        parameters: its parameters, in the order of their memory.
        starts: the offset of each section in the full buffer, and the end of the last one.
        compute_by_section: the compute dtype of each section.
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
    stride: int
    replica_stride: int
    post_forward: int | None
    transport: str
    why: str
    adds_in_fp32: bool
    shares: bool
    sharers: int
    hosts: int
    reshards: bool
    offloaded: OffloadedFacts
    gradient: int
    reduced: int
    trained: int
    wire: str
    feedback: int
    is_host: bool
    shards_replicas: bool
    communicates: bool
    parameters: tuple[ParameterFacts, ...]
    starts: tuple[int, ...]
    compute_by_section: tuple[str, ...]

    @property
    def title(self) -> str:
        return self.name or "(root)"

    @property
    def summed(self) -> int:
        """The number of ranks over which gradients are added up."""
        return self.ranks * self.replicas

    @property
    def padding_share(self) -> float:
        """Padding as a fraction of the parameters."""
        return self.padding / max(1, self.content)


@dataclass(frozen=True)
class ModelFacts:
    """A sharded model.

    Attributes:
        name: its class.
        groups: in the order in which the model has them.
        units: the positions of the groups of each unit, in the order in which their forwards begin.
        order_of: what that order is of: a ``"step"`` that was recorded, the forward of a ``"batch"`` on tensors without
            memory, or else the ``"modules"``, as they were registered.
        prefetch: how many groups are gathered ahead; ``None``: as many as have ``prefetch_bytes`` together.
        left_out: names of parameters that require gradients and belong to no group.
        outside: bytes of parameters, buffers and other tensors of modules that belong to no group.
        blocks: the classes of its repeated blocks, one entry for each block.
    """

    name: str
    groups: tuple[GroupFacts, ...]
    units: tuple[tuple[int, ...], ...]
    order_of: Literal["step", "batch", "modules"]
    prefetch: int | None
    prefetch_bytes: int | None
    left_out: tuple[str, ...]
    outside: int
    blocks: tuple[str, ...]

    @property
    def is_recorded(self) -> bool:
        """Whether the order was recorded in a step."""
        return self.order_of == "step"

    @property
    def in_order(self) -> tuple[GroupFacts, ...]:
        """The groups in the order in which forward runs and gathers them. Backward runs in reverse order."""
        return tuple(self.groups[at] for unit in self.units for at in unit)


def facts_of(model: nn.Module, order: Sequence[int] = ()) -> ModelFacts:
    """The facts of a sharded model. Communicates nothing and changes nothing.

    Args:
        order: positions of groups in the order of a forward. It counts until a step was recorded.

    Raises:
        ValueError: no part of the model is sharded, or it has no parameters.
    """
    names = {id(module): plain_name(name) for name, module in model.named_modules()}
    units = units_in(model)
    if not units:
        raise ValueError(
            f"no part of this {type(model).__name__} is sharded: apply fully_shard to it first, or give explain() a "
            f"function that builds it and a number of ranks"
        )
    groups = [group for unit in units for group in unit.groups]
    if not groups:
        raise ValueError(f"this {type(model).__name__} has no parameters: there is nothing to explain")
    schedules = list(dict.fromkeys(unit.schedule for unit in units if unit.schedule is not None))
    recorded = [group for schedule in schedules for group in schedule.order.entered]
    ordered = _by_use(units, recorded or [groups[at] for at in order])
    position = {group: at for at, group in enumerate(groups)}
    inside = {inner for unit in units for each in unit.modules for inner in each.modules() if inner is not each}
    roots = [unit for unit in units if not unit.is_list and unit.modules[0] not in inside]
    return ModelFacts(
        name=_class_of(model),
        groups=tuple(_group_facts(group, unit, unit in roots, names) for unit in units for group in unit.groups),
        units=tuple(tuple(position[group] for group in unit.groups) for unit in ordered),
        order_of="step" if recorded else "batch" if order else "modules",
        prefetch=schedules[0].prefetch_limit if schedules else 1,
        prefetch_bytes=schedules[0].prefetch_bytes if schedules else None,
        left_out=tuple(strangers_in(model)),
        outside=bytes_outside(model, groups),
        blocks=tuple(map(_class_of, repeated_blocks(model))),
    )


def _by_use(units: Sequence[Unit], recorded: Iterable[ParamGroup]) -> list[Unit]:
    """The units in the order in which a step entered them, or else in the order of the modules. Each unit appears once,
    even if it runs several times."""
    unit_by_group = {group: unit for unit in units for group in unit.groups}
    entered = [unit_by_group[group] for group in recorded if group in unit_by_group]
    return list(dict.fromkeys(entered)) if entered else [unit for unit in units if unit.groups]


def _group_facts(group: ParamGroup, unit: Unit, is_root: bool, names: dict[int, str]) -> GroupFacts:
    data, sections, memory, computed = group.data, group.sections, group.shard, group.compute_dtypes
    dtypes = [section.dtype for section in sections]
    own = sum(math.prod(param.cut.chunk_shape(0)) * param.dtype.itemsize for param in group.params if param.extends)
    shares = memory.shared is not None or (memory.is_unmapped and memory.is_meta)
    whole = full_bytes(sections, computed) + data.shard_size * own
    shard = shard_bytes(group.own_sections, dtypes) + own
    content = sum(math.prod(param.shape) * param.dtype.itemsize for param in group.params)
    kept = sum(param.dtype.itemsize for param in group.params if param.dim is None and param.run is None)
    is_whole, parts = data.shard_group is None, data.shard_size * (data.replicate_size if data.shards_replicas else 1)
    keeps = unit.auto_reshard and unit.schedule is None and is_root  # it will keep its parameters after forward
    smaller = None if keeps else group.options.post_forward_mesh
    trainable = [param.sharded.requires_grad for param in group.params]
    gradients, travelling = GradientDtypes(group).sections(trainable, group.keeps_whole)
    cuts_twice = data.shards_replicas
    kept_gradients = [each.inside(data.shard_rank, data.replicate_size) if cuts_twice else each for each in gradients]
    return GroupFacts(
        name=", ".join(names.get(id(module), "?") for module in unit.modules),
        module=", ".join(dict.fromkeys(map(_class_of, unit.modules))),
        layout=next((param.layout[0] for param in group.params), DEFAULT_LAYOUT[0]),
        elements=sum(math.prod(param.shape) for param in group.params),
        whole=whole,
        shard=shard + (whole // data.shard_size if shares and dtypes != computed else 0),
        padding=shard - content if is_whole else parts * (shard - kept) - (content - kept),
        content=content,
        stored=_dtype_names(param.dtype for param in group.params),
        compute=_dtype_names(computed),
        reduce=_dtype_names(travelling),
        ranks=data.shard_size,
        rank=data.shard_rank,
        replicas=data.replicate_size,
        stride=_stride(data.shard_group),
        replica_stride=_stride(data.replicate_group),
        post_forward=None if smaller is None else smaller.shard_size,
        transport=group.transport.name,
        why=_why(group),
        adds_in_fp32=group.reduce_transport.adds_in_fp32,
        shares=shares,
        sharers=sharers_of(group.transport),
        hosts=_hosts_of(group.transport),
        reshards=group.options.strategy.after_forward is not Placement.REPLICATED and not keeps and not is_whole,
        offloaded=offloaded_facts(group, group.own_sections, kept_gradients),
        gradient=full_bytes(gradients, travelling),
        reduced=sum(section.plan.shard_numel * section.dtype.itemsize for section in kept_gradients),
        trained=sum(section.plan.shard_numel for section in kept_gradients),
        wire=wire_text(group.wire, group.options.wire, group.options.outer_wire),
        feedback=feedback_bytes(group, [section.plan for section in gradients]),
        is_host=is_host(group.device),
        shards_replicas=cuts_twice,
        communicates=not is_whole and data.shard_size > 1,
        parameters=tuple(_parameters(group, names)),
        starts=tuple(full_starts(sections, computed)),
        compute_by_section=tuple(map(dtype_name, computed)),
    )


def sharers_of(transport: Transport) -> int:
    """How many ranks have full buffers of a transport in common, each of which has them whole."""
    return transport.local_ranks.size if isinstance(transport, HostsTransport) else 1


def _hosts_of(transport: Transport) -> int:
    hosts = transport.local_ranks.hosts if isinstance(transport, HostsTransport) else ()
    return len(hosts) if sum(map(len, hosts)) == dist.get_world_size() else 0


def _stride(over: dist.ProcessGroup | None) -> int:
    ranks = [] if over is None else dist.get_process_group_ranks(over)
    return abs(ranks[1] - ranks[0]) if len(ranks) > 1 else 1


def _why(group: ParamGroup) -> str:
    if group.has_custom_communication:
        return "a function that the user set"
    over = group.data.shard_group or group.data.replicate_group
    assert over is not None
    transport, why = choose_transport(over, group.device)
    if dist.get_backend(over) == "fake":
        known = {CollectiveTransport.name: "the collectives of the backend", PointToPointTransport.name: "messages"}
        why = known.get(transport.name) or transport.why  # type: ignore[attr-defined]
        return f"{why}, in a simulated world"
    return why if transport is group.transport else "chosen for this group"


def _parameters(group: ParamGroup, names: dict[int, str]) -> Iterator[ParameterFacts]:
    places = {
        index: (at, position) for at, each in enumerate(group.sections) for position, index in enumerate(each.members)
    }
    for index, param in enumerate(group.params):
        at, position = places.get(index, (-1, -1))
        plan = group.sections[at].plan if at >= 0 else None
        rows, chunk = (0, 1), math.prod(param.shape)
        if plan is not None and param.run is not None:
            rows, chunk = param.run, plan.shard_numel
        elif param.dim is not None:
            shapes = map(param.cut.chunk_shape, range(group.data.shard_size))
            rows, chunk = param.rows, max(map(math.prod, shapes))
            if group.data.shards_replicas:
                chunk = math.prod(group.own_sections[at].plan.locate_chunk(position, 0)[1])
        users = [location.module for location in param.locations]
        full_names = dict.fromkeys(_full_name(param, number, names) for number in range(len(users)))
        yield ParameterFacts(
            next(iter(full_names)),
            tuple(param.shape),
            param.dim if param.run is None else None,
            rows,
            chunk,
            plan.full_offsets[position] if plan is not None else -1,
            dtype_name(param.dtype),
            at,
            len(param.shape) > 1 and not all(isinstance(user, nn.Embedding) for user in users),
            param.sharded.requires_grad,
            param.extends,
            tuple(full_names),
            param.cuts,
        )


def _full_name(param: ShardedParameter, number: int, names: dict[int, str]) -> str:
    location = param.locations[number]
    return plain_name(f"{names.get(id(location.module), '')}.{location.name}")


def _class_of(module: nn.Module) -> str:
    inner = getattr(module, "_fsdp_wrapped_module", module)
    name = type(inner).__name__
    return name.removeprefix("FSDP") if unit_of(inner) is not None and inner is module else name


def _dtype_names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(dtype_name, dtypes)))


def offloaded_facts(group: ParamGroup, shards: Sequence[Section], gradients: Sequence[Section]) -> OffloadedFacts:
    """What of a group is offloaded, given the sections of its shard and of its reduced gradients."""
    offloaded = group.offloaded
    if not offloaded.state:
        return OffloadedFacts()

    def nbytes(sections: Sequence[Section]) -> int:
        return sum(_elements(group, each, offloaded.parameters) * each.dtype.itemsize for each in sections)

    return OffloadedFacts(
        what="parameters" if offloaded.parameters else "optimizer state",
        place=ON_CPU if offloaded.disk is None else ON_DISK,
        shard=nbytes(shards),
        reduced=nbytes(gradients),
        trained=sum(_elements(group, each, offloaded.state) for each in gradients),
        behind=0 if offloaded.disk is None else offloaded.disk.staging_bytes // 2,
    )


def _elements(group: ParamGroup, section: Section, chosen: frozenset[int]) -> int:
    """The elements of a section's shard that belong to chosen parameters. Padding beside these counts as theirs."""
    others = [group.params[index].local.numel() for index in section.members if index not in chosen]
    return section.plan.shard_numel - sum(others) if len(others) < len(section.members) else 0


def bytes_outside(model: nn.Module, groups: Sequence[ParamGroup]) -> int:
    """The bytes of the tensors that belong to no group, in attributes of the model's modules and in containers there.
    Tensors that share memory count once, with all of it: a view keeps the whole tensor of a parameter alive."""
    params = [param for group in groups for param in group.params]
    known = known_to(groups) | {id(param.hidden) for param in params}
    views = {(place.module, place.name) for param in params for place in param.locations}  # of a flat parameter
    values = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, (torch.Tensor, list, tuple, dict)) and (module, name) not in views
    ]
    found = [each for each in tree.tensors(values) if id(each) not in known and owner_of(each) is None]
    parts = {storage_id(part): part for tensor in found for part in plain_parts(tensor)}
    return sum(part.untyped_storage().nbytes() for key, part in parts.items() if key)
