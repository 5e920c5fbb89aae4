"""What the buffers of a group know of it: its parameters, how they are laid out, and the user's options.

The group is made of its buffers (shard, full buffer, gradients) and of what the modules show. These get the context,
not the group. Owns the sections and the dtypes in which they are computed. It has no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn as nn

from fullshard.buffer.plan import BufferPlan, make_plan
from fullshard.buffer.sections import Section
from fullshard.buffer.slots import SlotPool
from fullshard.comm.transport import Direction, Transport, Wire, make_wire
from fullshard.group.comm_context import CommContext
from fullshard.group.home import Home, homes_of
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import ShardedParameter
from fullshard.group.step import Step
from fullshard.group.strategy import FULL_SHARD, Strategy
from fullshard.offload_policy import OffloadPolicy
from fullshard.policies import MixedPrecisionPolicy, place_rows
from fullshard.wire_policy import EXACT, WirePolicy


@dataclass
class GroupOptions:
    """The options that a user chose for a group; each may be changed between steps by the setters of ``FSDPModule``."""

    mp_policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    strategy: Strategy = FULL_SHARD
    post_forward_mesh: DataMesh | None = None  # over which parameters are sharded between forward and backward
    wire: WirePolicy = EXACT  # between the ranks that shard
    outer_wire: WirePolicy = EXACT  # between replicas that shard
    keep_unsharded_storage: bool = False
    reduce_unused: bool = False
    divide_factor: float | None = None
    sum_only: bool = False
    keep_computed_dtype: bool = False
    unshard_in_backward: bool = True
    max_gradient_buffers: int | None = None
    #: A function that sums over replicas in place of the process group's all-reduce.
    all_reduce: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: torch.Stream | None = None


@dataclass(eq=False, repr=False)
class GroupContext:
    """Parameters that are gathered in one call and reduced in one call."""

    params: Sequence[ShardedParameter]
    modules: Sequence[nn.Module]  # sharded in one call
    data: DataMesh
    device: torch.device  # where they compute
    options: GroupOptions
    transport: Transport
    tag: int  # distinguishes its messages from those of other groups; the same on all ranks

    def __post_init__(self) -> None:
        #: The parameters by stored dtype, without those that define how they are gathered.
        self.sections: tuple[Section, ...] = ()
        self.own_sections: tuple[Section, ...] = ()  # the same, with the plans of the shards between steps
        self.compute_dtypes: list[torch.dtype] = []  # in which each section is gathered
        #: Where parameters are between uses: on the device, and where a policy offloads them to.
        self.here, self.offloaded = homes_of(self.options.offload, self.params, self.data, self.device)
        self.gather_transport = self.reduce_transport = self.transport  # the first: to slots
        self.reduce_process_group: dist.ProcessGroup | None = self.data.shard_group
        self.name = ""
        self.sharded: list[nn.Parameter] = []  # what modules show of each parameter between uses
        self.may_share = True
        self.writes = 0  # counts the writes to the shard that were noticed
        self.step = Step()
        self.comm = CommContext(self.device)

    @property
    def title(self) -> str:
        """The name of the group in messages."""
        return f"'{self.name}'" if self.name else "the root"

    def __repr__(self) -> str:
        return f"Group({self.name or '<root>'}, {len(self.params)} parameters)"

    def lay_out(self) -> None:
        """Cut the parameters into sections, each with a plan."""
        place_rows(self.params, self.data.shard_size, self.tag % self.data.shard_size)
        self.own_rank = self.data.replicate_rank if self.data.shards_replicas else self.data.shard_rank
        sections: dict[object, list[int]] = {}
        for index, param in enumerate(self.params):
            if not param.extends:
                kind = param.stored_as, param.dtype, param.overridden_dtype, index in self.offloaded.parameters
                sections.setdefault(kind, []).append(index)
        alike = [(self.params[members[0]], members) for members in sections.values()]
        self.sections = tuple([Section(first.dtype, tuple(each), self.plan(each)) for first, each in alike])
        for section in self.sections:
            for position, index in enumerate(section.members):
                self.params[index].note_plan(section.plan, position)
        self.moves_all = any(section.plan.whole is not None for section in self.sections)
        parts = self.data.shard_rank, self.data.replicate_size
        again = [section.inside(*parts) for section in self.sections if self.data.shards_replicas]
        self.own_sections = tuple(again) or self.sections
        self.compute_dtypes = [self.compute_dtype(first) for first, _ in alike]
        is_plain = self.data.shard_group is not None and self.may_share and self.options.post_forward_mesh is None
        shares_slots = is_plain and not self.transport.shares_all
        self.gather_transport = self.transport if shares_slots else self.transport.private

    def plan(self, members: Sequence[int]) -> BufferPlan:
        """The layout of parameters of one dtype."""
        shapes = [self.params[i].plan_shape for i in members]
        together = self.transport.launches_together(self.data.shard_group, self.device)
        return make_plan(shapes, self.data.shard_size, *self.params[members[0]].layout, together)

    def compute_dtype(self, param: ShardedParameter) -> torch.dtype:
        """The dtype in which a parameter is gathered. Integers and packed formats stay."""
        wanted, dtype = param.overridden_dtype or self.options.mp_policy.param_dtype, param.dtype
        return wanted if wanted is not None and dtype.is_floating_point and dtype.itemsize > 1 else dtype

    def policy_of(self, param: ShardedParameter) -> MixedPrecisionPolicy:
        policy, dtype = self.options.mp_policy, param.overridden_dtype
        return policy if dtype is None else replace(policy, param_dtype=dtype)

    def wire(self, direction: Direction, outer: bool = False) -> Wire | None:
        """How messages between the ranks that shard, or the ``outer`` ones between replicas, are encoded. A rank alone
        and ranks that share memory send nothing, and nothing is encoded."""
        if outer:
            return make_wire(self.options.outer_wire, direction) if self.data.replicate_size > 1 else None
        shares = self.shares_parameters if direction == "gather" else self.reduce_transport.shares_all
        if self.data.shard_size == 1 or shares:
            return None
        return make_wire(self.options.wire, direction)

    @property
    def shares_parameters(self) -> bool:
        """Whether the transport has memory that all ranks see for parameters, and nothing stands in the way."""
        if not (self.params and self.may_share and self.transport.shares_all):
            return False
        if self.data.shard_group is None or self.options.post_forward_mesh is not None or self.data.shards_replicas:
            return False
        is_possible = self.offloaded.may_share or not self.offloaded.parameters
        return is_possible and not any(param.extends for param in self.params)

    @property
    def has_feedback(self) -> bool:
        """Whether what encodings lose of gradients is added to the next ones."""
        return self.options.wire.error_feedback and self.wire("reduce") is not None

    @property
    def divisor(self) -> float:
        """By what sums of gradients are divided."""
        factor = self.options.divide_factor
        return float(self.data.shard_size * self.data.replicate_size) if factor is None else factor

    def home(self, index: int) -> Home:
        """Where a parameter is between uses."""
        return self.here if index in self.here.parameters else self.offloaded

    def is_alone(self, transport: Transport) -> bool:
        """Whether this rank has all parameters, so that ``transport`` exchanges nothing."""
        is_one = self.data.shard_size == 1 and not (transport.is_custom or self.data.shards_replicas)
        return self.data.shard_group is None or is_one

    @property
    def adds_whole(self) -> bool:
        """Whether ranks that have all parameters add up whole gradients, and no function of the user does."""
        is_native = self.options.all_reduce is None and self.options.all_reduce_hook is None
        return is_native and self.is_alone(self.reduce_transport)

    @property
    def keeps_whole(self) -> bool:
        """Whether large ones among these stay where autograd made them."""
        return self.adds_whole and not self.moves_all

    @property
    def gradient_buffers(self) -> int:
        """How many gradient buffers may be in use at once."""
        least = 2 if self.adds_whole and self.data.replicate_size > 1 else 1
        return self.options.max_gradient_buffers or max(least, self.reduce_transport.gradient_buffers)

    @property
    def parameter_pool(self) -> SlotPool:
        return self.comm.pool("parameters", self.gather_transport)

    @property
    def gradient_pool(self) -> SlotPool:
        return self.comm.pool("gradients", self.reduce_transport)
