"""The synchronization of replicas that train apart: what they exchange, and what becomes of it.

Owns the *anchors*, the parameters on which all replicas have agreed last, and the outer optimizers that step on them. A
:class:`ModelFragment` has those of the parameters that are synchronized at the same steps, and a
:class:`ChangesExchange` is one of its synchronizations on the way::

    anchor - parameters ─▶ changes ──reduce-scatter──▶ a part of their mean ──all-gather──▶ the mean, as a gradient

:mod:`fullshard.optim.local_steps` decides when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from fullshard.buffer.plan import BufferPlan, ParamShape, make_plan
from fullshard.comm.process_group import device_of, has_peers
from fullshard.comm.transport import (
    DIRECTIONS,
    Direction,
    Feedback,
    Reduction,
    Route,
    Transfer,
    Transport,
    Wire,
    make_wire,
)
from fullshard.comm.waits import waiting
from fullshard.device import CPU, Lane, Pending
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import ShardedParameter, local_tensor
from fullshard.optim.local_step import NOT_ELEMENTWISE, NUMBERS
from fullshard.policies import expect
from fullshard.torch_private import all_gather_single, altered_spec, make_dtensor, sharding_spec
from fullshard.wire_policy import WirePolicy

#: Makes an optimizer of a list of parameters.
OuterOptimizer = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class FragmentMember:
    """A parameter that replicas exchange."""

    name: str  # fully qualified
    group: ParamGroup
    index: int

    @property
    def param(self) -> ShardedParameter:
        return self.group.params[self.index]

    def as_dtensor(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape of this rank's part, sharded as the parameter is."""
        return make_dtensor(local, altered_spec(self.param.spec, dtype=local.dtype))

    def as_stack(self, local: torch.Tensor, replicas: int) -> torch.Tensor:
        """The same for a tensor of which each replica has another: they lie along a last dim, which replicas shard."""
        spec, local = self.param.spec, local.unsqueeze(-1)
        shape, placements = torch.Size((*spec.shape, replicas)), [Shard(spec.ndim), *spec.placements[1:]]
        stride = torch.empty(shape, device="meta").stride()
        return make_dtensor(local, sharding_spec(spec.mesh, placements, shape, stride, local.dtype))


class ChangesSection(NamedTuple):
    """Changes of one dtype that travel together.

    Attributes:
        starts: where this rank's part of each lies, by the position of its parameter in the fragment.
        plan: how replicas cut all of it.
        wires: how it is encoded, with the memory of what is lost.
        lost: the parts of this memory, by position.
    """

    starts: Mapping[int, int]
    dtype: torch.dtype
    plan: BufferPlan
    wires: Mapping[Direction, Wire | None]
    lost: Mapping[int, torch.Tensor]


def _sections_of(
    members: Sequence[FragmentMember], anchors: Sequence[torch.Tensor], policy: WirePolicy, replicas: int
) -> list[ChangesSection]:
    """The changes by dtype. Small parameters travel together, and are not encoded. Large parameters are encoded one by
    one. Parameters that each rank of a replica has whole, such as scalars, have a section of their own and are not
    encoded: these ranks must get the same mean, to the bit."""
    wires = {direction: make_wire(policy, direction) for direction in DIRECTIONS}
    kinds, found = dict[tuple[torch.dtype, bool, bool], list[int]](), list[ChangesSection]()
    for at, (each, anchor) in enumerate(zip(members, anchors, strict=True)):
        is_whole, is_large = each.param.dim is None, each.param.shape.numel() >= policy.min_numel
        encoded = (wire is not None and wire.encoding.saves(anchor.dtype) for wire in wires.values())
        kinds.setdefault((anchor.dtype, is_whole, is_large and not is_whole and any(encoded)), []).append(at)
    for (dtype, _, is_encoded), chosen in kinds.items():
        numels, lost = [anchors[at].numel() for at in chosen], dict[int, torch.Tensor]()
        shapes = [ParamShape(members[at].name, (anchors[at].numel(),)) for at in chosen]
        plan = make_plan(shapes if is_encoded else [ParamShape("changes", (sum(numels),))], replicas)
        starts = dict(zip(chosen, plan.full_offsets if is_encoded else accumulate(numels, initial=0), strict=False))
        own = {key: wire and wire._replace(min_numel=0) for key, wire in wires.items() if is_encoded}
        if (wire := own.get("reduce")) is not None and policy.error_feedback:
            memory = torch.zeros(plan.full_numel, dtype=torch.bfloat16, device=members[0].group.device)
            own["reduce"] = wire._replace(feedback=Feedback([memory]))
            lost = {at: memory[start:][: anchors[at].numel()].view(anchors[at].shape) for at, start in starts.items()}
        found.append(ChangesSection(starts, dtype, plan, own, lost))
    return found


class ModelFragment:
    """Parameters that are synchronized at the same steps.

    Attributes:
        phase: the number of steps at which they are synchronized, modulo the steps between two synchronizations.
        anchors: this rank's part of each, on which all replicas agree.
        outer: steps on the anchors; ``None``: they become the mean.
        differs: whether replicas have changed the parameters since they were last synchronized.
        exchange: the synchronization that is under way.
        sections: how the changes travel.
        lost: by position, what encodings have lost of the changes of this replica, to be added the next time.
    """

    def __init__(
        self,
        members: Sequence[FragmentMember],
        phase: int,
        make_outer: OuterOptimizer | None,
        offload: bool,
        wires: WirePolicy,
        replicas: int,
    ) -> None:
        self.members, self.phase, self.differs, self._replicas = members, phase, False, replicas
        self.exchange: ChangesExchange | None = None
        self.anchors: list[nn.Parameter] = []
        for values in (each.param.values for each in members):
            dtype = torch.promote_types(values.dtype, torch.float32)
            anchor = torch.empty_like(values, dtype=dtype, device=CPU if offload else values.device)
            self.anchors.append(nn.Parameter(anchor, requires_grad=False))
        self.sections = _sections_of(members, self.anchors, wires, replicas)
        self.lost = {at: lost for section in self.sections for at, lost in section.lost.items()}
        self.outer = None if make_outer is None else _make(make_outer, self.anchors)
        #: The state that an outer step leaves of each parameter: a checkpoint is loaded before the first one.
        self._expected: list[dict[str, Any]] = [{} for _ in members]
        if make_outer is not None:
            probes = [nn.Parameter(torch.zeros(1, dtype=each.dtype), requires_grad=False) for each in self.anchors]
            probing = make_outer(probes)
            for probe in probes:
                probe.grad = torch.zeros_like(probe)
            probing.step()
            self._expected = [dict(probing.state.get(probe, {})) for probe in probes]

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Set the anchors to the parameters."""
        for each, anchor in zip(self.members, self.anchors, strict=True):
            anchor.copy_(each.param.values)

    @torch.no_grad()
    def show(self, tensors: Iterable[torch.Tensor], own_weight: float = 0.0) -> None:
        """Set each parameter to ``own_weight`` times its value plus (1 - ``own_weight``) times that of its tensor."""
        for each, wanted in zip(self.members, tensors, strict=True):
            values = each.param.values
            wanted = wanted.detach().to(values.device)
            values.copy_(wanted.lerp(values.to(wanted.dtype), own_weight) if own_weight else wanted)
        for group in {id(each.group): each.group for each in self.members}.values():
            group.writes += 1

    @torch.no_grad()
    def merge(self, own_weight: float) -> None:
        """Wait for the exchange, step on the anchor, and set the parameters to it."""
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        for anchor, mean in zip(self.anchors, exchange.wait(), strict=True):
            anchor.grad = mean.to(anchor.device)
        if self.outer is None:
            for anchor in self.anchors:
                anchor.sub_(anchor.grad)  # type: ignore[arg-type]
        else:
            self.outer.step()
        for anchor in self.anchors:
            anchor.grad = None
        self.show(self.anchors, own_weight)
        self.differs = bool(own_weight)

    def outer_state(self, index: int) -> dict[str, Any]:
        """The outer state of one parameter. Before the first outer step it has tensors to load into."""
        each, anchor, shown = self.members[index], self.anchors[index], dict[str, Any]()
        state: dict[str, Any] = {} if self.outer is None else self.outer.state.get(anchor, {})
        for key, like in self._expected[index].items():
            value = state.get(key, like)
            if isinstance(like, torch.Tensor) and like.ndim and key not in NUMBERS:
                value = torch.zeros_like(anchor, dtype=like.dtype) if value is like else value
                value = each.as_dtensor(value.detach())
            shown[key] = value
        return {"has_stepped": bool(state), "state": shown}

    def lost_state(self) -> dict[str, torch.Tensor]:
        """What encodings have lost, by the names of parameters, over the same memory."""
        if self.exchange is not None:
            self.exchange.wait()  # it may write there
        return {
            self.members[at].name: self.members[at].as_stack(lost, self._replicas) for at, lost in self.lost.items()
        }

    def check(self, outer: Mapping[str, Any]) -> None:
        """Raise ValueError if the outer optimizer has other state than was saved."""
        for each, expected in zip(self.members, self._expected, strict=True):
            saved = outer[each.name]
            if self.outer is not None and saved["has_stepped"] and saved["state"].keys() != expected.keys():
                raise ValueError(
                    f"the state of LocalSteps has {sorted(saved['state'])} for parameter '{each.name}', but the outer "
                    f"optimizer {type(self.outer).__name__} needs {sorted(expected)}: give LocalSteps the same outer"
                )

    def load(self, anchors: Mapping[str, Any], outer: Mapping[str, Any], lost: Mapping[str, Any]) -> None:
        """Take over anchors, outer state and what encodings have lost, by the names of parameters, and set the
        parameters to the anchor."""
        if self.exchange is not None:
            self.exchange.wait()
        self.exchange, self.differs = None, False
        for at, own in self.lost.items():
            loaded = lost.get(self.members[at].name)
            own.zero_() if loaded is None else own.copy_(local_tensor(loaded).squeeze(-1))
        for each, anchor in zip(self.members, self.anchors, strict=True):
            anchor.copy_(local_tensor(anchors[each.name]))
            if self.outer is None:
                continue
            self.outer.state.pop(anchor, None)
            if outer[each.name]["has_stepped"]:
                state = outer[each.name]["state"]
                self.outer.state[anchor] = {key: _own(value, anchor.device) for key, value in state.items()}
        self.show(self.anchors)


def _own(value: Any, device: torch.device) -> Any:
    """A copy of loaded state, with this rank's part of a DTensor on a device."""
    return local_tensor(value).to(device, copy=True) if isinstance(value, DTensor) else deepcopy(value)


class ChangesExchange:
    """The mean of a fragment's changes over the replicas, on its way. A :class:`~fullshard.device.Pending`."""

    @torch.no_grad()
    def __init__(
        self, fragment: ModelFragment, transport: Transport, over: dist.ProcessGroup, said: tuple[int, int]
    ) -> None:
        self._process_group, self._said = over, said
        means = dict[int, torch.Tensor]()
        self._routes: list[tuple[Route, Route, torch.Tensor]] = []  # a reduction, its shard, and a gather of it
        for number, (starts, dtype, plan, wires, _) in enumerate(fragment.sections):
            device = fragment.members[0].group.device
            numels = plan.full_numel, plan.shard_numel
            full, shard = (transport.allocate(each * dtype.itemsize, device).view(dtype) for each in numels)
            for at, start in starts.items():
                values, anchor = fragment.members[at].param.values, fragment.anchors[at]
                change = full[start:][: anchor.numel()].view(anchor.shape)
                means[at] = change.copy_(anchor).sub_(values.to(device))
            # Nothing else travels between replicas that train apart, so their groups' tags are free.
            given = (
                [Transfer(plan, full, shard)] if plan.end else [],
                over,
                fragment.members[0].group.tag + (number << 16),
            )
            reduce = transport.reduce_route(*given, wires.get("reduce"))
            self._routes.append((reduce, transport.gather_route(*given, wires.get("gather")), shard))
        self._means = [means[at] for at in range(len(means))]
        self._reducing: list[Pending] = []
        self._gathering: list[Pending] = []
        self._heard: tuple[dist.Work, torch.Tensor] | None = None

    def start(self, lane: Lane) -> None:
        """Start to exchange, and to compare what the replicas exchange."""
        if has_peers(self._process_group):
            mine = torch.tensor(self._said, device=device_of(self._process_group))
            every = mine.new_empty(self._process_group.size() * len(mine))
            with waiting("the synchronization of replicas", self._process_group):
                self._heard = all_gather_single(every, mine, group=self._process_group, async_op=True), every
        self._mark = lane.run(self._start)

    def _start(self) -> Pending:
        divided = Reduction(self._process_group.size())
        self._reducing = [reduce.start([shard], divided) for reduce, _, shard in self._routes]
        return self

    def finish(self) -> None:
        self._gather_means()
        for gathering in self._gathering:
            gathering.finish()

    def _gather_means(self) -> None:
        reducing, self._reducing = self._reducing, []
        for pending, (_, gather, _) in zip(reducing, self._routes, strict=False):
            pending.finish()
            self._gathering.append(gather.start())

    def advance(self) -> None:
        """Wait for the first half on the host, and start the second."""
        self._check()
        self._gather_means()

    def _check(self) -> None:
        """Wait until all replicas have come, and raise RuntimeError if some exchange different things."""
        heard, self._heard = self._heard, None
        if heard is None:
            return
        with waiting("the synchronization of replicas", self._process_group):
            heard[0].wait()
            said = heard[1].tolist()
        pairs = list(zip(said[::2], said[1::2], strict=True))
        for rank, pair in zip(dist.get_process_group_ranks(self._process_group), pairs, strict=True):
            if pair != self._said:
                raise RuntimeError(
                    f"replicas synchronize at different steps: rank {dist.get_rank()} brings fragment {self._said[1]} "
                    f"after step {self._said[0]}, and rank {rank} brings fragment {pair[1]} after step {pair[0]}. Load "
                    f"the same state into LocalSteps on all ranks"
                )

    def wait(self) -> list[torch.Tensor]:
        """The mean of each parameter's changes, once it is there."""
        self._check()
        self._mark.wait()
        return self._means


def params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for options in optimizer.param_groups for param in options["params"]]


def _make(outer: OuterOptimizer, anchors: list[nn.Parameter]) -> Optimizer:
    made = outer(anchors)
    expect(isinstance(made, Optimizer), "what outer returns", made, "a torch.optim.Optimizer")
    if isinstance(made, NOT_ELEMENTWISE):
        raise ValueError(
            f"outer returns {type(made).__name__}, which does not compute element by element: each rank has a part of "
            f"the parameters, on which its steps would be wrong. Use SGD with nesterov=True, as DiLoCo does"
        )
    if {*map(id, params_of(made))} != {*map(id, anchors)}:
        raise ValueError(f"outer returns {type(made).__name__} without some of the parameters that it is given")
    return made
