"""A group: the parameters that travel together, and the states they go through.

Owns the buffers of its parameters (shard, full, gradients), what the modules show in each state, and the transitions::

    SHARDED ──unshard──▶ GATHERING ──wait──▶ UNSHARDED ──reshard──▶ SHARDED
                             ▲                    └────rest────▶ RESTING (sharded over a smaller mesh)
                             └──────────unshard────────────────────┘

It leaves to the schedule when each happens and what is gathered next, and to its :class:`Gradients` how gradients
come home.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.buffer.plan import make_plan
from fullshard.buffer.sections import Section, full_bytes, full_views, shard_bytes, shard_views
from fullshard.buffer.slots import SlotBuffer
from fullshard.comm.transport import Done, Pending, Transfer, Transport
from fullshard.device import PASSED, Lanes, Mark, mark_now
from fullshard.group.extension import ExtensionGather
from fullshard.group.gradients import Flight, Gradients
from fullshard.group.memory import Memory
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import Location, ShardedParameter
from fullshard.group.registry import register
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.torch_private import local_of, make_dtensor, sharding_spec, spec_of

_tags = itertools.count()


class State(Enum):
    """Where the values of a group are."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()
    RESTING = auto()


_LEGAL = {
    State.SHARDED: {State.GATHERING, State.UNSHARDED},
    State.GATHERING: {State.UNSHARDED, State.SHARDED},
    State.UNSHARDED: {State.SHARDED, State.RESTING},
    State.RESTING: {State.GATHERING, State.UNSHARDED, State.SHARDED},
}


@dataclass
class Clock:
    """What a tree of modules agrees on: values gathered in an earlier epoch may have been written since."""

    epoch: int = 0
    #: The optimizer's writes, for gathers that start before the current lane would have come to them.
    written: Mark = PASSED


@dataclass
class GroupOptions:
    """What a user chose for a group; each may be changed between steps by the setters of ``FSDPModule``."""

    mp_policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard_after_forward: bool = True
    resting: DataMesh | None = None
    reshard_after_backward: bool = True
    reduce_gradients: bool = True
    all_reduce_gradients: bool = True
    reduce_unused: bool = False
    divide_factor: float | None = None
    sum_only: bool = False
    unshard_in_backward: bool = True
    max_gradient_buffers: int = 1
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: torch.Stream | None = None


class Group:
    """Parameters that are gathered in one call and reduced in one call.

    Args:
        params: the parameters, their values and their places.
        modules: the modules that were sharded together.
        data: the mesh over which they are sharded.
        device: where they compute.
        options: what the user chose.
        transport: how their buffers move.
    """

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        modules: Sequence[nn.Module],
        data: DataMesh,
        device: torch.device,
        options: GroupOptions,
        transport: Transport,
    ) -> None:
        self.params = list(params)
        self.modules = tuple(modules)
        self.data = data
        self.device = device
        self.options = options
        self.transport = transport
        self.reduce_transport = transport
        self.reduce_process_group: dist.ProcessGroup | None = data.shard_group
        self.name = ""
        self.tag = next(_tags)
        self.state = State.SHARDED
        self.clock = Clock()
        self.lanes: Lanes | None = None
        self.flight = Flight()
        self._stand_ins: set[tuple[int, str]] = set()
        self.users = 0  # units of other groups that need this one too: parameters tied across groups
        self._build()

    def __repr__(self) -> str:
        return f"Group({self.name or '<root>'}, {len(self.params)} parameters, {self.state.name})"

    # -- memory ------------------------------------------------------------------------------------------------------

    @property
    def offloads(self) -> bool:
        offload = self.options.offload
        return isinstance(offload, CPUOffloadPolicy) and offload.parameters

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which parameters stored as ``dtype`` are gathered. Integers and packed formats stay."""
        wanted = self.options.mp_policy.param_dtype
        return wanted if wanted is not None and dtype.is_floating_point and dtype.itemsize > 1 else dtype

    def _build(self) -> None:
        """Lay the parameters out and move what they hold into the group's shard."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, param in enumerate(self.params):
            if not param.extends:
                by_dtype.setdefault(param.dtype, []).append(index)
        self.sections = tuple(
            Section(
                dtype, tuple(members), make_plan([self.params[i].plan_shape for i in members], self.data.shard_size)
            )
            for dtype, members in by_dtype.items()
        )
        self.compute_dtypes = [self.compute_dtype(section.dtype) for section in self.sections]
        self.memory = Memory(self)
        self.full = SlotBuffer(self.memory.parameter_pool, full_bytes(self.sections, self.compute_dtypes))
        self._full_views: tuple[torch.Tensor, ...] = ()
        self._gather: Mark | None = None
        self._gathered: tuple[int, int] | None = None  # epoch and version of the values that the full buffer has
        self._leaf_versions = 0
        self._transfers: list[Transfer] = []
        self._staging: SlotBuffer | None = None
        self._resting_memory: torch.Tensor | None = None
        self._extensions = ExtensionGather(self) if any(param.extends for param in self.params) else None
        self.gradients = Gradients(self)
        for param in self.params:
            param.unsharded = None
        self.memory.take_in()
        self._prepare()
        self._show(self._sharded)

    @property
    def sharded_bytes(self) -> int:
        """Bytes of this rank's shard."""
        return self.memory.nbytes

    def check_in(self) -> None:
        """Notice what users did to the modules since the last step. Called before the root's forward.

        Parameters that were replaced (``load_state_dict(assign=True)``, ``to()``, ``to_empty()``) are taken in, those
        that moved (parametrization) are followed, and full tensors that stand in for a parameter
        (``torch.func.functional_call``) are left in place.
        """
        changed = False
        for param, module, name in self._places:
            shown = module._parameters.get(name)
            if shown is param.sharded:
                if local_of(shown) is not param.local or self.state is State.UNSHARDED:  # type: ignore[arg-type]
                    changed = True
                if param.unsharded is not None and param.unsharded.requires_grad is not shown.requires_grad:
                    param.unsharded.requires_grad_(shown.requires_grad)
            elif shown is not param.unsharded or shown is None:
                changed = True
        if changed or self._stand_ins:
            self.take_in()

    def take_in(self) -> None:
        """Make the parameters that the modules now hold the group's own."""
        if self.state is State.RESTING:
            self.reshard()
        self._stand_ins.clear()
        replaced = False
        for param in self.params:
            replaced |= self._take_in(param)
        if replaced:
            if any(self._storage_changed(param) for param in self.params):
                if self.state is not State.SHARDED:
                    self.reshard()
                for param in self.params:
                    param.spec = spec_of(param.sharded)  # type: ignore[arg-type]
                    param.dtype = local_of(param.sharded).dtype  # type: ignore[arg-type]
                self._build()
            else:
                self.memory.take_in()
        self._prepare()
        self._show(self._unsharded if self.state is State.UNSHARDED else self._sharded)

    def _storage_changed(self, param: ShardedParameter) -> bool:
        held = local_of(param.sharded)  # type: ignore[arg-type]
        return held.dtype != param.dtype or (self.memory.is_meta and not held.is_meta)

    def _take_in(self, param: ShardedParameter) -> bool:
        replaced = False
        for location in list(param.locations):
            shown = location.module._parameters.get(location.name)
            if shown is param.sharded or (shown is not None and shown is param.unsharded):
                continue
            if shown is None:
                self._follow(param, location)
            elif isinstance(shown, DTensor):
                if not isinstance(shown, nn.Parameter):
                    raise RuntimeError(
                        f"parameter '{param.name}' stands in its module as a sharded tensor and no Parameter, as "
                        f"functional_call puts it: give functional_call full tensors, for example p.full_tensor()"
                    )
                if tuple(local_of(shown).shape) != tuple(self.memory.local_shape(param)):
                    raise RuntimeError(
                        f"parameter '{param.name}' was replaced by a DTensor whose local shape is "
                        f"{tuple(local_of(shown).shape)} where {tuple(self.memory.local_shape(param))} is expected: "
                        f"distribute it over the same mesh along the same dim"
                    )
                param.sharded = shown
                replaced = True
            else:
                self._stand_ins.add((id(location.module), location.name))
        return replaced or local_of(param.sharded) is not param.local  # type: ignore[arg-type]

    def _follow(self, param: ShardedParameter, location: Location) -> None:
        """The parameter left its place: find where it went in the module tree."""
        known = {(id(other.module), other.name) for other in param.locations}
        for root in self.modules:
            for module in root.modules():
                for name, held in module._parameters.items():
                    if held is param.sharded and (id(module), name) not in known:
                        location.module, location.name = module, name
                        return
        param.locations.remove(location)

    # -- what the modules show ---------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Prepare the updates that change what the modules show: one dict a module."""
        self._places = [
            (param, location.module, location.name) for param in self.params for location in param.locations
        ]
        shown = [place for place in self._places if (id(place[1]), place[2]) not in self._stand_ins]
        self._sharded = _updates([(module, name, param.sharded) for param, module, name in shown])
        self._unsharded = _updates([(module, name, param.unsharded) for param, module, name in shown])

    def _show(self, updates: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
        for module, tensors in updates:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters.update(tensors)
            else:
                for name, tensor in tensors.items():
                    setattr(module, name, tensor)

    # -- transitions -------------------------------------------------------------------------------------------------

    def _to(self, state: State) -> None:
        if state not in _LEGAL[self.state]:
            raise RuntimeError(f"{self} cannot go from {self.state.name} to {state.name}")
        self.state = state

    @property
    def is_unsharded(self) -> bool:
        return self.state is State.UNSHARDED

    def _current(self) -> tuple[int, int]:
        return self.clock.epoch, self.memory.version

    def unshard(self) -> bool:
        """Start to gather, unless the values are there; returns whether communication was started."""
        if self.state is State.GATHERING:
            return False
        if self.state is State.UNSHARDED:
            if self._gathered is None or self._gathered[1] == self.memory.version:
                return False
            self.reshard()  # the shard was written since: gather again
        if self.memory.has_meta:
            raise RuntimeError(self.memory.meta_message())
        if self.full.keeps_values and self._gathered == self._current():
            self.full.take()
            self._arrive()
            return False
        ready = self.full.take()
        if not self._full_views:
            with torch.inference_mode(False):
                self._full_views = full_views(self.full.memory, self.sections, self.compute_dtypes)
        self._gathered = self._current()
        lanes = self.lanes or self._own_lanes()
        self._gather = lanes.gather.run(self._start_gather, self._end_gather, (ready, self.clock.written))
        self._to(State.GATHERING)
        return True

    def _own_lanes(self) -> Lanes:
        self.lanes = Lanes(self.device)
        return self.lanes

    def _start_gather(self) -> Pending:
        if self._resting_memory is not None:
            assert self.options.resting is not None
            assert self.options.resting.shard_group is not None
            pending = self.transport.all_gather(self._resting_transfers, self.options.resting.shard_group, 2 * self.tag)
        elif self.data.shard_group is None:
            self.memory.copy_whole(self._full_views)
            pending = Done()
        else:
            pending = self.transport.all_gather(self._gather_transfers(), self.data.shard_group, 2 * self.tag)
        if self._extensions is not None:
            pending = self._extensions.start(pending)
        return pending

    def _gather_transfers(self) -> list[Transfer]:
        """What an all-gather reads and writes; where dtype or device differ, the shard is copied to staging first."""
        if self.memory.needs_staging:
            self._staging = self.memory.stage(self._staging)
        if not self._transfers:
            sources = self.memory.staged_views if self.memory.needs_staging else self.memory.views
            self._transfers = [
                Transfer(section.plan, full, shard)
                for section, full, shard in zip(self.sections, self._full_views, sources, strict=True)
            ]
        return self._transfers

    def _end_gather(self) -> None:
        if self._staging is not None:
            self._staging.give_back(mark_now(self.device))
        self._resting_memory = None

    def wait_for_unshard(self) -> None:
        """What follows on the current lane may read the unsharded parameters, which the modules now show."""
        if self.state is not State.GATHERING:
            return
        assert self._gather is not None
        self._gather.wait()
        self._gather = None
        self._arrive()

    def _arrive(self) -> None:
        self._to(State.UNSHARDED)
        if self.params and self.params[0].unsharded is None:
            self._make_leaves()
        elif self._extensions is not None:
            self._extensions.arrive()
        self._leaf_versions = self._versions()
        self._show(self._unsharded)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_leaves(self) -> None:
        for section, full in zip(self.sections, self._full_views, strict=True):
            for index, shape, offset in zip(
                section.members, section.plan.params, section.plan.full_offsets, strict=True
            ):
                param = self.params[index]
                # ``.data`` has a version of its own: a gather that writes the buffer is no write in place to autograd.
                param.make_unsharded(param.view(full[offset : offset + shape.numel], shape.shape).data)
        if self._extensions is not None:
            self._extensions.make_leaves()
        for index, param in enumerate(self.params):
            self.gradients.listen(index, param)
        register(self, [param.unsharded for param in self.params if param.unsharded is not None])
        self._prepare()

    def reshard(self) -> None:
        """Show the sharded parameters and let the full buffer go."""
        if self.state is State.SHARDED:
            return
        if self.state is State.GATHERING:
            self.wait_for_unshard()
        self._show(self._sharded)
        self._leave(State.SHARDED)
        self._resting_memory = None

    def _leave(self, state: State) -> None:
        self._to(state)
        if self._leaf_versions != self._versions():
            self._gathered = None  # written in place: thrown away, as every reshard does
        if self._extensions is not None:
            self._extensions.leave()
            self._gathered = None
        if self.memory.poisons and self.full.in_use:
            self.full.poison()
            self._gathered = None
        self.full.give_back(mark_now(self.device))

    def _versions(self) -> int:
        """Counts the writes to the unsharded parameters."""
        return sum([param.unsharded._version for param in self.params if param.unsharded is not None])

    def reshard_after_forward(self) -> None:
        """What the user chose to happen to the parameters between forward and backward."""
        if self.state is not State.UNSHARDED:
            return
        if self.options.resting is not None and self._extensions is None:
            self._rest(self.options.resting)
        elif self.options.reshard_after_forward:
            self.reshard()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _rest(self, resting: DataMesh) -> None:
        sections = [
            Section(section.dtype, section.members, make_plan(section.plan.params, resting.shard_size))
            for section in self.sections
        ]
        memory = self.transport.allocate(shard_bytes(sections, self.compute_dtypes), self.device)
        views = shard_views(memory, sections, self.compute_dtypes)
        updates = []
        self._resting_transfers = []
        for section, full, shard in zip(sections, self._full_views, views, strict=True):
            self._resting_transfers.append(Transfer(section.plan, full, shard))
            for position, index in enumerate(section.members):
                param = self.params[index]
                shape = section.plan.params[position].chunk_shape(resting.shard_rank, resting.shard_size)
                offset = section.plan.shard_offsets[position]
                numel = torch.Size(shape).numel()
                local = param.view(shard[offset : offset + numel], shape)
                assert param.unsharded_local is not None
                start, stop = section.plan.params[position].chunk(resting.shard_rank, resting.shard_size)
                whole = param.unsharded_local
                local.copy_(whole if param.dim is None else whole.narrow(param.dim, start, stop - start))
                if param.unsharded_spec is not None:
                    continue  # beside tensor parallel the small mesh has no DTensor: the module shows the sharded one
                spec = sharding_spec(
                    resting.mesh,
                    (Replicate(), Replicate() if param.dim is None else Shard(param.dim)),
                    param.shape,
                    param.unsharded_local.stride(),
                    local.dtype,
                )
                shown = nn.Parameter(make_dtensor(local, spec), requires_grad=param.sharded.requires_grad)
                updates += [(location.module, location.name, shown) for location in param.locations]
        self._show(self._sharded)
        self._show(_updates(updates))
        self._resting_memory = memory
        self._leave(State.RESTING)
        self._gathered = None

    # -- what may change between steps -------------------------------------------------------------------------------

    def add_location(self, index: int, location: Location) -> None:
        """A parameter of this group stands in another module as well (tied across groups)."""
        self.params[index].locations.append(location)
        self.reshard()
        self._prepare()
        self._show(self._sharded)

    def use_transport(self, gather: Transport | None = None, reduce: Transport | None = None) -> None:
        """Move by other means from now on."""
        self.reshard()
        if gather is not None:
            self.transport = gather
            for param in self.params:
                param.unsharded = None
            self._build()
        if reduce is not None:
            self.reduce_transport = reduce

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """A group of the copied parameters, in memory of its own."""
        assert self.state is State.SHARDED, f"{self} must be sharded to be copied"
        params = [param.copy(memo) for param in self.params]
        modules = [copy.deepcopy(module, memo) for module in self.modules]
        options = dataclasses.replace(self.options)
        twin = Group(params, modules, self.data, self.device, options, self.transport)
        twin.reduce_transport, twin.reduce_process_group = self.reduce_transport, self.reduce_process_group
        twin.name = self.name
        memo[id(self)] = twin
        return twin

    def reset(self) -> None:
        """Back to SHARDED from wherever an error left the group; gradients on their way are lost."""
        if self.state is State.GATHERING:
            self.wait_for_unshard()
        self.reshard()
        self.gradients.discard()


def _updates(places: Sequence[tuple[nn.Module, str, Any]]) -> list[tuple[nn.Module, dict[str, Any]]]:
    modules: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
    for module, name, tensor in places:
        modules.setdefault(id(module), (module, {}))[1][name] = tensor
    return list(modules.values())
