"""The context that the parts of a group share: its parameters, their layout, and the options that a user chose.

The parts (memory, gradients, what the modules show, extensions) are given this and not the group, which is made of
them. Owns the sections, the dtypes in which they are computed, and the state.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from fullshard.buffer.plan import Plan, make_plan
from fullshard.buffer.sections import Section
from fullshard.buffer.slots import SlotPool
from fullshard.comm.transport import Transport
from fullshard.device import PASSED, Lane, Lanes, Mark, is_capturing, is_host
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import ShardedParameter
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy


@dataclass
class Clock:
    """The clock of a tree of modules. Values gathered in an earlier ``epoch`` may be old: shards may have changed."""

    epoch: int = 0
    begin_backward: Callable[[], None] = lambda: None  # is called when a backward reaches any of its groups
    #: Marks the end of the optimizer's writes. A gather runs in another lane, and waits for it.
    written: Mark = PASSED
    reading: bool = False  # whether a pass runs, in which ranks read the memory that they share
    steps: int = 0  # steps on the groups of the tree; optimizers that take turns between two passes step together
    stepped: Counter[int] = field(
        default_factory=Counter
    )  # how often each optimizer has, by its id, since the last pass
    #: Is called with a group before its gather (no indices), or before a reduction of the parameters of these indices.
    announce: Callable[[Any, frozenset[int]], None] | None = None

    def count_step(self, optimizer: object) -> None:
        """Count a step of an optimizer. Ranks may have different numbers of optimizers, each for some parameters."""
        most = max(self.stepped.values(), default=0)
        self.stepped[id(optimizer)] += 1
        self.steps += self.stepped[id(optimizer)] > most


class Reductions:
    """The reductions that are under way, the oldest first."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque()  # of reduce-scatters, each of which reads a gradient buffer
        self._sums: deque[Mark] = deque()  # of the all-reduces that follow some of them
        self.add: Callable[[Mark], None] = self._marks.append
        self.add_sum: Callable[[Mark], None] = self._sums.append
        self.drops = 0  # how often reductions that were under way were lost
        #: Gradients on their way to the CPU, the oldest first: the event of their arrival, and what hands them over.
        self.arriving: deque[tuple[torch.Event, Callable[[], None]]] = deque()

    def keep_at_most(self, count: int, sums: int = 0) -> None:
        """Wait for the oldest until no more than ``count`` read a gradient buffer, and ``sums`` all-reduces run."""
        while len(self._marks) > count:
            self._marks.popleft().wait()
        while self._sums and len(self._sums) > sums:
            self._sums.popleft().wait()
        if self.arriving:
            self.take_in(waits=False)

    def take_in(self, waits: bool = True) -> None:
        """Hand over the gradients that are on the CPU; if it ``waits``, all. An optimizer may run in a backward."""
        while self.arriving and (waits or self.arriving[0][0].query()):
            arrived, hand_over = self.arriving.popleft()
            arrived.synchronize()
            hand_over()

    def drop(self) -> None:
        """Wait for all reductions, and drop their results."""
        self.drops += 1
        for marks in (self._marks, self._sums):
            while marks:
                with suppress(Exception):  # an error is being recovered from: what was under way is lost anyway
                    marks.popleft().wait()
        while self.arriving:
            self.arriving.popleft()[0].synchronize()


class CommContext:
    """The context of groups that communicate in turn. Several trees may share one (``share_comm_ctx``).

    It has the slots, in a pool for each kind of buffer and transport. A tree has its own: all ranks must agree on which
    slots still have their values, and a rank may have other models, which would take slots of the same pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reductions = Reductions()
        self.pools: dict[tuple[str, int], SlotPool] = {}
        self._was_captured = False

    @cached_property
    def lanes(self) -> Lanes:
        """The lanes, made at their first use: on a device they are streams."""
        return Lanes(Lane(self._device), Lane(self._device), Lane(self._device))

    def pool(self, kind: str, transport: Transport) -> SlotPool:
        """The pool of buffers of a kind that ``transport`` moves."""
        key = (kind, id(transport))
        if key not in self.pools:
            self.pools[key] = SlotPool(self._device, transport.allocate)
        return self.pools[key]

    def heed_capture(self) -> bool:
        """Forget the marks of before, in a capture of a graph and after it: none may be waited for across its edge, and
        what follows comes after all of them. Called when a forward begins; returns whether they were forgotten."""
        before, self._was_captured = self._was_captured, is_capturing(self._device)
        if not (before or self._was_captured):
            return False
        self.reductions.keep_at_most(0)
        for pool in self.pools.values():
            pool.forget_marks()
        return True


class State(Enum):
    """Where the values of a group are; ``LEGAL`` says which state may follow which.

    LEFT: a forward left the group unsharded, and the user had not asked for it. The next forward reshards it first, as
    its values may have been written without a trace. In this state modules show flat parameters sharded.
    """

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()
    LEFT = auto()
    SHARDED_POST_FORWARD = auto()  # sharded over a smaller mesh

    __hash__ = object.__hash__  # members are compared by identity; that of Enum is a function of Python


LEGAL = {
    State.SHARDED: {State.GATHERING},
    State.GATHERING: {State.UNSHARDED, State.SHARDED},
    State.UNSHARDED: {State.SHARDED, State.LEFT, State.SHARDED_POST_FORWARD},
    State.LEFT: {State.UNSHARDED, State.SHARDED},
    State.SHARDED_POST_FORWARD: {State.GATHERING, State.SHARDED},
}


@dataclass
class GroupOptions:
    """The options that a user chose for a group; each may be changed between steps by the setters of ``FSDPModule``."""

    mp_policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard_after_forward: bool = True
    post_forward_mesh: DataMesh | None = None
    reshard_after_backward: bool = True
    keep_unsharded_storage: bool = False
    reduce_gradients: bool = True
    all_reduce_gradients: bool = True
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
    """Parameters that are gathered in one call and reduced in one call, as each part of their group knows them.

    Attributes:
        is_flat: whether parameters are runs of one shard, see :mod:`fullshard.group.flat`.
        is_unsharded: whether the values of all ranks are there.
        shows_unsharded: whether the modules show the unsharded parameters.
    """

    params: Sequence[ShardedParameter]
    modules: Sequence[nn.Module]  # that were sharded together
    data: DataMesh
    device: torch.device  # where they compute
    options: GroupOptions
    transport: Transport
    tag: int  # tells its messages from those of other groups; the same on all ranks

    def __post_init__(self) -> None:
        #: The parameters by stored dtype, without those that define how they are gathered.
        self.sections: tuple[Section, ...] = ()
        self.compute_dtypes: list[torch.dtype] = []  # in which each section is gathered
        offload = self.options.offload
        #: Whether parameters rest on the CPU.
        self.offloads = isinstance(offload, CPUOffloadPolicy) and offload.parameters
        self.pins_memory = bool(getattr(offload, "pin_memory", False))  # page-locks what rests on the CPU
        self.reduce_transport = self.transport
        self.reduce_process_group: dist.ProcessGroup | None = self.data.shard_group
        self.name = ""
        self.state = State.SHARDED
        self.is_unsharded = self.shows_unsharded = False
        self.sharded: list[nn.Parameter] = []  # what modules show of each parameter between uses
        self.may_share = True
        self.writes = 0  # to the shard, as far as they were noticed
        self.clock = Clock()
        self.comm = CommContext(self.device)

    @property
    def title(self) -> str:
        """Its name, for people."""
        return f"'{self.name}'" if self.name else "the root"

    def __repr__(self) -> str:
        return f"Group({self.name or '<root>'}, {len(self.params)} parameters, {self.state.name})"

    def lay_out(self) -> None:
        """Cut the parameters into sections, each with a plan."""
        self.is_flat = bool(self.params) and self.params[0].is_flat
        sections: dict[object, list[int]] = {}
        for index, param in enumerate(self.params):
            if not param.extends:
                sections.setdefault((param.stored_as, param.dtype, param.overridden_dtype), []).append(index)
        firsts = [self.params[members[0]] for members in sections.values()]
        self.sections = tuple(
            Section(first.dtype, tuple(members), self.plan(members))
            for first, members in zip(firsts, sections.values(), strict=True)
        )
        for section in self.sections:
            for position, index in enumerate(section.members):
                self.params[index].fit(section.plan, position)
        self.compute_dtypes = list(map(self.compute_dtype, firsts))

    def plan(self, members: Sequence[int], casts: bool = False) -> Plan:
        """How parameters of one dtype lie; if the copy to a message ``casts``, only large ones are straight."""
        shapes = [self.params[i].plan_shape for i in members]
        together = not casts and self.transport.launches_together(self.data.shard_group, self.device)
        return make_plan(shapes, self.data.shard_size, *self.params[members[0]].layout, together)

    def compute_dtype(self, param: ShardedParameter) -> torch.dtype:
        """The dtype in which a parameter is gathered. Integers and packed formats stay."""
        wanted, dtype = self.policy_of(param).param_dtype, param.dtype
        return wanted if wanted is not None and dtype.is_floating_point and dtype.itemsize > 1 else dtype

    def policy_of(self, param: ShardedParameter) -> MixedPrecisionPolicy:
        """The mixed precision of one parameter."""
        policy, dtype = self.options.mp_policy, param.overridden_dtype
        return policy if dtype is None else replace(policy, param_dtype=dtype)

    @property
    def offloads_state(self) -> bool:
        """Whether the state of optimizers, and no parameters, is copied to the CPU after each step."""
        offload = self.options.offload
        return isinstance(offload, CPUOffloadPolicy) and not offload.parameters and not is_host(self.device)

    @property
    def parameter_pool(self) -> SlotPool:
        return self.comm.pool("parameters", self.transport.private)

    @property
    def gradient_pool(self) -> SlotPool:
        return self.comm.pool("gradients", self.reduce_transport)

    @property
    def staging_pool(self) -> SlotPool:
        return self.comm.pool("staging", self.transport.private)
