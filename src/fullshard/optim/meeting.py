"""The meeting of replicas that train apart: what they exchange, and what becomes of it.

Owns the *anchors*, the parameters on which all replicas have agreed last, and the outer optimizers that step on them. A
:class:`ModelFragment` has those of the parameters that meet at the same steps, and a :class:`ChangesExchange` is one of
its meetings on the way::

    anchor - parameters ─▶ changes ──reduce-scatter──▶ a part of their mean ──all-gather──▶ the mean, as a gradient

:mod:`fullshard.optim.local_steps` decides when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.buffer.plan import ParamShape, make_plan
from fullshard.comm.process_group import encoded, has_peers
from fullshard.comm.transport import Feedback, Reduction, Transfer, Transport, make_wire
from fullshard.comm.waits import waiting
from fullshard.device import CPU, Lane, Pending
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import ShardedParameter, local_tensor
from fullshard.optim.local_step import NOT_ELEMENTWISE, NUMBERS
from fullshard.policies import expect
from fullshard.torch_private import all_gather_single, altered_spec, make_dtensor
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


class ModelFragment:
    """Parameters that meet at the same steps.

    Attributes:
        phase: their number of steps, modulo the steps from one meeting to the next.
        anchors: this rank's part of each, on which all replicas agree.
        outer: steps on the anchors; ``None``: they become the mean.
        differs: whether replicas have changed the parameters since their last meeting.
        exchange: the meeting that is under way.
        lost: what encodings have lost of the changes, by their dtype, to be added at the next meeting.
    """

    def __init__(
        self, members: Sequence[FragmentMember], phase: int, make_outer: OuterOptimizer | None, offload: bool
    ) -> None:
        self.members, self.phase, self.differs = members, phase, False
        self.exchange: ChangesExchange | None = None
        self.lost: dict[torch.dtype, torch.Tensor] = {}
        self.anchors: list[nn.Parameter] = []
        for values in (each.param.values for each in members):
            dtype = torch.promote_types(values.dtype, torch.float32)
            anchor = torch.empty_like(values, dtype=dtype, device=CPU if offload else values.device)
            self.anchors.append(nn.Parameter(anchor, requires_grad=False))
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
    def show(self, tensors: Iterable[torch.Tensor], kept: float = 0.0) -> None:
        """Set the parameters to these values, or to the mean of both in which their own value is ``kept``."""
        for each, wanted in zip(self.members, tensors, strict=True):
            values = each.param.values
            wanted = wanted.detach().to(values.device)
            values.copy_(wanted.lerp(values.to(wanted.dtype), kept) if kept else wanted)
        for group in {id(each.group): each.group for each in self.members}.values():
            group.writes += 1

    @torch.no_grad()
    def merge(self, kept: float) -> None:
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
        self.show(self.anchors, kept)
        self.differs = bool(kept)

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

    def check(self, outer: Mapping[str, Any]) -> None:
        """Raise ValueError if the outer optimizer has other state than was saved."""
        for each, expected in zip(self.members, self._expected, strict=True):
            saved = outer[each.name]
            if self.outer is not None and saved["has_stepped"] and saved["state"].keys() != expected.keys():
                raise ValueError(
                    f"the state of LocalSteps has {sorted(saved['state'])} for parameter '{each.name}', but the outer "
                    f"optimizer {type(self.outer).__name__} needs {sorted(expected)}: give LocalSteps the same outer"
                )

    def load(self, anchors: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
        """Take over anchors and outer state, by the names of parameters, and set the parameters to the anchor."""
        if self.exchange is not None:
            self.exchange.wait()
        self.exchange, self.differs = None, False
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
        self, fragment: ModelFragment, transport: Transport, over: dist.ProcessGroup, device: torch.device,
        wires: WirePolicy, said: tuple[int, int],
    ) -> None:  # fmt: skip
        self._process_group, self._said = over, said
        self._means: list[torch.Tensor] = []
        sizes: dict[torch.dtype, int] = {}
        for anchor in fragment.anchors:
            sizes[anchor.dtype] = sizes.get(anchor.dtype, 0) + anchor.numel()
        transfers: list[Transfer] = []
        rest: dict[torch.dtype, torch.Tensor] = {}
        for dtype, numel in sizes.items():
            plan = make_plan([ParamShape(f"changes in {dtype}", (numel,))], over.size(), "flat")
            full, shard = (
                transport.allocate(each * dtype.itemsize, device).view(dtype)
                for each in (plan.full_numel, plan.shard_numel)
            )
            rest[dtype] = full
            transfers += [Transfer(plan, full, shard)] if numel else []
        for each, anchor in zip(fragment.members, fragment.anchors, strict=True):
            change, rest[anchor.dtype] = rest[anchor.dtype].tensor_split([anchor.numel()])
            self._means.append(change.view(anchor.shape).copy_(anchor).sub_(each.param.values.to(device)))
        self._shards = [transfer.shard for transfer in transfers]
        if wires.error_feedback and wires.reduce != "exact":
            for _, full, _ in transfers:
                fragment.lost.setdefault(full.dtype, torch.zeros_like(full, dtype=torch.bfloat16))
        feedback = Feedback([fragment.lost[full.dtype] for _, full, _ in transfers]) if fragment.lost else None
        # Nothing else travels between replicas that train apart, so the tag of any group of theirs will do.
        given = transfers, over, fragment.members[0].group.tag
        self._reduce = transport.reduce_route(*given, make_wire(wires, "reduce", feedback))
        self._gather = transport.gather_route(*given, make_wire(wires, "gather"))
        self._reducing: Pending | None = None
        self._gathering: Pending | None = None
        self._heard: tuple[dist.Work, torch.Tensor] | None = None

    def start(self, lane: Lane) -> None:
        """Start to exchange, and to compare what the replicas exchange."""
        if has_peers(self._process_group):
            mine = encoded(None, self._process_group).new_tensor(self._said, dtype=torch.int64)
            every = mine.new_empty(self._process_group.size() * len(mine))
            with waiting("the meeting of replicas", self._process_group):
                self._heard = all_gather_single(every, mine, group=self._process_group, async_op=True), every
        self._mark = lane.run(self._start)

    def _start(self) -> Pending:
        self._reducing = self._reduce.start(self._shards, Reduction(self._process_group.size()))
        return self

    def finish(self) -> None:
        self._gather_means()
        assert self._gathering is not None
        self._gathering.finish()

    def _gather_means(self) -> None:
        reducing, self._reducing = self._reducing, None
        if reducing is not None:
            reducing.finish()
            self._gathering = self._gather.start()

    def advance(self) -> None:
        """Wait for the first half on the host, and start the second."""
        self._check()
        self._gather_means()

    def _check(self) -> None:
        """Wait until all replicas have come, and raise RuntimeError if some exchange different things."""
        heard, self._heard = self._heard, None
        if heard is None:
            return
        with waiting("the meeting of replicas", self._process_group):
            heard[0].wait()
            said = heard[1].tolist()
        pairs = list(zip(said[::2], said[1::2], strict=True))
        for rank, pair in zip(dist.get_process_group_ranks(self._process_group), pairs, strict=True):
            if pair != self._said:
                raise RuntimeError(
                    f"replicas meet at different steps: rank {dist.get_rank()} brings fragment {self._said[1]} after "
                    f"step {self._said[0]}, and rank {rank} brings fragment {pair[1]} after step {pair[0]}. Load the "
                    f"same state into LocalSteps on all ranks"
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
