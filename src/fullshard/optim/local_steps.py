"""Replicas that train apart, and synchronize every few optimizer steps.

Between two synchronizations a replica communicates with no other. Only the changes of parameters are exchanged::

    replica 0   anchor ─ step ─ step ─ … ─ step ─▶ parameters ─┐
                                                               ├─▶ mean of (anchor - parameters) ─▶ the next anchor
    replica 1   anchor ─ step ─ step ─ … ─ step ─▶ parameters ─┘

The *anchor* is what all replicas have agreed on last. The mean is the gradient with which the outer optimizer steps on
it, and then the parameters become the anchor. Every rank does this for its shards. Owns the count of steps, the checks,
and what makes groups forget other replicas. :mod:`fullshard.optim.synchronization` owns the anchors and exchanges them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard.comm.select import select_transport
from fullshard.device import Lane
from fullshard.diverging import count_steps, counter_of, let_diverge, replicas_apart
from fullshard.first_values import verify_values
from fullshard.group.context import GroupContext
from fullshard.group.mesh import DataMesh
from fullshard.group.owners import owner_of
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import plain_name
from fullshard.group.step import Pass
from fullshard.group.verify import compare
from fullshard.optim.synchronization import ChangesExchange, FragmentMember, ModelFragment, OuterOptimizer, params_of
from fullshard.policies import expect
from fullshard.schedule.unit import groups_in
from fullshard.torch_private import running_backward
from fullshard.wire_policy import EXACT, WirePolicy

#: The weight of a parameter's own value after an exchange that ran beside steps. The anchor has the rest.
_OWN_WEIGHT = 0.5


class LocalSteps:
    """Let replicas train apart, and average the changes of their parameters every few optimizer steps.

    ::

        optimizer = torch.optim.AdamW(model.parameters())
        local_steps = LocalSteps(model, optimizer, every=100, outer=lambda params: torch.optim.SGD(
            params, lr=0.7, momentum=0.9, nesterov=True))
        for batch in batches:                   # as before
            model(batch).backward()
            optimizer.step()                    # every 100th one synchronizes
            optimizer.zero_grad()

    Inside of a replica nothing changes. Gradients are means over the ranks of a replica, not over all ranks, and
    ``clip_grad_norm_`` finds the norm of the replica's gradients. The inner optimizer's state is never exchanged, and
    buffers are not either.

    To synchronize, each rank takes the change of its parameters since the last time, ``anchor - parameters``. The mean
    of the replicas' changes is the gradient with which the outer optimizer steps on the anchor. The parameters are then
    set to the anchor. A replica that comes late is waited for only then.

    The average is that of local SGD (Stich, "Local SGD Converges Fast and Communicates Little", 2019). The outer step
    is that of DiLoCo (Douillard et al., 2023, arXiv 2311.08105). Fragments, overlap and the mixing of parameters are
    those of Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512).

    Args:
        model: sharded by ``fully_shard`` on a mesh that replicates and shards, with ``zero_stage`` 1 to 3 and
            ``outer_zero_stage=0``. All replicas begin with equal parameters, which the first step checks.
        optimizer: steps on all trainable parameters of the model. Its steps are counted: those that a gradient scaler
            skips do not count.
        every: optimizer steps from one synchronization to the next, for each fragment.
        outer: makes an optimizer of a list of parameters, once for each fragment. It must compute element by element,
            because the parameters are this rank's parts: plain tensors, in fp32 or the parameters' dtype if that is
            wider. ``None`` sets the anchor to the mean of the replicas' parameters.
        wire_policy: how changes are encoded on their way, both to where they are averaged (``reduce``) and back
            (``gather``). What encodings lose on the first way is added to the next changes. Scalars are not encoded.
        fragments: into how many parts the groups of the model are divided. Group ``i`` is in part ``i % fragments``.
            Their steps are evenly spread over ``every``, so that less is exchanged at a time.
        overlap: optimizer steps for which an exchange runs beside training, before its result is used. A parameter then
            becomes the mean of its value and the anchor's. 0: the step waits for the exchange.
        offload: whether anchors and the outer optimizer's state lie on the CPU.

    Attributes:
        steps: optimizer steps so far.
        outer: the outer optimizer of each fragment, for example to change its ``lr``; empty with ``outer=None``.

    A rank needs memory for the anchor and the outer state. During an exchange it also needs memory for the fragment's
    changes and for a part of them. All of these have the size of its shards in the dtype of the anchor. Error feedback
    needs the size of its shards in bf16.

    Raises:
        TypeError: ``every``, ``fragments`` or ``overlap`` is not an int, ``optimizer`` or what ``outer`` returns is not
            an ``Optimizer``.
        ValueError: an argument is out of range; the model is not sharded as described, has parameters on meta, or has
            a ``LocalSteps`` already; the optimizer lacks parameters or has some of no group; the outer optimizer does
            not compute element by element; or the ranks disagree on an argument, and then it says which rank has what.
        RuntimeError: gradients wait to be reduced.

    Ranks: all ranks of the mesh alike, after the optimizer was made and between steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int,
        outer: OuterOptimizer | None = None,
        wire_policy: WirePolicy = EXACT,
        fragments: int = 1,
        overlap: int = 0,
        offload: bool = False,
    ) -> None:
        for name, number in (("every", every), ("fragments", fragments), ("overlap", overlap)):
            expect(isinstance(number, int) and not isinstance(number, bool), name, number, "an int")
        expect(isinstance(optimizer, Optimizer), "optimizer", optimizer, "a torch.optim.Optimizer")
        expect(isinstance(wire_policy, WirePolicy), "wire_policy", wire_policy, "a WirePolicy")
        groups = groups_in(model, recurse=True)
        self._process_group = _replicas_of(groups)
        self._groups, self.optimizer, self._device = groups, optimizer, groups[0].device
        members = _members(model, groups, optimizer)
        expect(every > 0, "every", every, "1 or more optimizer steps", ValueError)
        most = min(every, len(members))
        expect(0 < fragments <= most, "fragments", fragments, f"1 to {most}, by every and the groups", ValueError)
        expect(0 <= overlap < every, "overlap", overlap, "0 or more, and less than every", ValueError)
        self.every, self.overlap, self.steps = every, overlap, 0
        self._has_begun = self._shows_anchor = False
        wires = wire_policy, self._process_group.size()
        self._fragments = [
            ModelFragment(
                [*chain(*members[k::fragments])], every * (k + 1) // fragments % every, outer, offload, *wires
            )
            for k in range(fragments)
        ]
        self.outer = [each.outer for each in self._fragments if each.outer is not None]
        self._wires = wire_policy
        self._compare(offload)
        self._transport = select_transport(self._process_group, self._device).private
        self._lane = Lane(self._device)
        _set_apart(groups, self._process_group)
        for group in groups:
            count_steps(group, self)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _compare(self, offload: bool) -> None:
        """Raise ValueError if the ranks do not have the same arguments."""
        described = [f"every={self.every}", f"wire_policy={self._wires}", f"fragments={len(self._fragments)}"]
        described += [f"overlap={self.overlap}", f"offload={offload}"]
        for fragment in self._fragments:
            described.append("outer=None" if fragment.outer is None else f"outer={_described(fragment.outer)}")
            described += [f"parameter '{each.name}'" for each in fragment.members]
        advice = "Give LocalSteps the same arguments on all ranks"
        for over in (self._process_group, self._groups[0].data.shard_group):
            compare(described, 0, over, "do not take local steps alike", advice)

    @property
    def differing(self) -> list[str]:
        """Names of the parameters that replicas have changed since the last synchronization; empty right after it."""
        apart = (each for each in self._fragments if each.differs and not self._shows_anchor)
        return [param.name for fragment in apart for param in fragment.members]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._shows_anchor:
            raise RuntimeError("the optimizer stepped inside of global_parameters(), which shows the anchor: leave it")
        if running_backward() >= 0:
            raise RuntimeError("LocalSteps counts steps between backwards, but the optimizer stepped inside of one")
        if not self._has_begun:
            self._check_parameters()
            params = [param for group in self._groups for param in group.params]
            verify_values(params, replace(self._groups[0].data, shard_group=None, replicate_group=self._process_group))
            for fragment in self._fragments:
                fragment.take_anchor()
            self._has_begun = True

    def _check_parameters(self) -> None:
        """Raise RuntimeError if the optimizer has other parameters than those that replicas exchange."""
        exchanged = {id(each.param.sharded) for fragment in self._fragments for each in fragment.members}
        if exchanged != {id(param) for param in params_of(self.optimizer) if owner_of(param) is not None}:
            raise RuntimeError(
                "the optimizer has other sharded parameters than when LocalSteps was made, and replicas would not "
                "exchange all of their changes: make LocalSteps after the last parameter was added"
            )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        for number, fragment in enumerate(self._fragments):
            fragment.differs = True
            since = (self.steps - fragment.phase) % self.every  # steps since its exchange was to begin
            if since == 0:
                self._check_parameters()
                said = self.steps, number
                fragment.exchange = ChangesExchange(fragment, self._transport, self._process_group, said)
                fragment.exchange.start(self._lane)
            if fragment.exchange is None:
                continue
            if since == (self.overlap + 1) // 2 and self._lane.is_host:
                fragment.exchange.advance()
            if since == self.overlap:
                fragment.merge(_OWN_WEIGHT if self.overlap else 0.0)

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """A context in which the model has the anchor, on which all replicas agree, to evaluate or to save it.

        Afterwards each replica has its own parameters again. What is written to parameters inside is lost. It needs
        memory for this rank's shards once more.

        Raises:
            RuntimeError: it is entered inside of a forward or a backward, or of itself; or the optimizer steps inside.

        Ranks: all ranks of a replica alike.
        """
        if self._shows_anchor or any(group.step.now is not Pass.NONE for group in self._groups):
            raise RuntimeError("global_parameters() was entered in a forward, a backward or itself: enter it between")
        self._reshard()
        own = [[each.param.values.clone() for each in fragment.members] for fragment in self._fragments]
        if self._has_begun:
            for fragment in self._fragments:
                fragment.show(fragment.anchors)
        self._shows_anchor = True
        try:
            yield
        finally:
            self._shows_anchor = False
            self._reshard()
            for fragment, values in zip(self._fragments, own, strict=True):
                fragment.show(values)

    def _reshard(self) -> None:
        for group in self._groups:
            group.reshard()
            group.notice_changes()

    def state_dict(self) -> dict[str, Any]:
        """The anchor, the outer optimizers' state and the number of steps, for ``checkpoint.save(state={...})``; and
        what encodings have lost of each replica's changes.

        Anchors and outer state of a parameter's shape are DTensors over the same memory, sharded as the parameter is.
        All replicas have the same, so another number of replicas can load it, and other ``fragments`` too. On another
        number of replicas, what encodings have lost begins at zero. It has neither options of the outer optimizers nor
        an exchange that is under way, which it waits for if changes are encoded.
        """
        anchors, outer = dict[str, Any](), dict[str, Any]()
        for fragment in self._fragments:
            if not self._has_begun:
                fragment.take_anchor()
            for index, (each, anchor) in enumerate(zip(fragment.members, fragment.anchors, strict=True)):
                anchors[each.name] = each.as_dtensor(anchor.data)
                outer[each.name] = fragment.outer_state(index)
        state = {"steps": self.steps, "anchor": anchors, "outer": outer}
        lost = {name: value for fragment in self._fragments for name, value in fragment.lost_state().items()}
        return state | ({"wire_feedback": {self._replicas: lost}} if lost else {})

    @property
    def _replicas(self) -> str:
        return f"{self._process_group.size()} replicas"

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, and set the parameters to the anchor. An exchange that is under way is
        waited for, and dropped. A model that is loaded in the middle of a training needs this state too.

        Raises:
            ValueError: it has other parameters than this model, or the state of another kind of outer optimizer.

        Ranks: all alike, between steps.
        """
        names = {each.name for fragment in self._fragments for each in fragment.members}
        if names != set(state_dict["anchor"]):
            odd = sorted(names ^ set(state_dict["anchor"]))[:3]
            raise ValueError(f"the state of LocalSteps is of other parameters: only one of both has {odd}")
        for fragment in self._fragments:
            fragment.check(state_dict["outer"])
        self.steps, self._has_begun = state_dict["steps"], True
        self._reshard()
        for fragment in self._fragments:
            lost = state_dict.get("wire_feedback", {}).get(self._replicas, {})
            fragment.load(state_dict["anchor"], state_dict["outer"], lost)


def _first_dim(group: ParamGroup) -> dist.ProcessGroup:
    return group.params[0].spec.mesh.get_group(0)


def _replicas_of(groups: Sequence[ParamGroup]) -> dist.ProcessGroup:
    """The replicas of this rank's shards. Raises an error if groups are not sharded as local steps need it."""
    if not groups:
        raise ValueError("LocalSteps needs a model that was sharded by fully_shard on a mesh (replicate, shard)")
    found: list[dist.ProcessGroup] = []
    for group in groups:
        data, over = group.data, replicas_apart(group) or group.data.replicate_group
        if any(param.run is not None for param in group.params):
            problem = "is wrapped by FullyShardedDataParallel: shard it with fully_shard"
        elif _still_takes_local_steps(group):
            problem = "takes local steps already: make LocalSteps once for a model"
        elif data.shard_group is None:
            problem = "is not sharded (zero_stage=0): use a 2-D mesh (replicate, shard) and zero_stage=1 or more"
        elif data.shards_replicas:
            problem = "is sharded over the replicas too: use outer_zero_stage=0"
        elif over is None or over.size() == 1:
            problem = "has no replicas: use a 2-D mesh (replicate, shard) with more than one replica"
        elif dist.get_process_group_ranks(_first_dim(group)) != dist.get_process_group_ranks(over):
            problem = "is on a mesh whose first dim is not that of the replicas: let the replicate dim come first"
        elif any(param.extends for param in group.params):
            problem = "has parameters that define how they are gathered, whose changes cannot be averaged: exclude them"
        elif any(param.values.is_meta for param in group.params):
            problem = "has parameters on meta: initialize them first, with to_empty() or by loading"
        elif found and dist.get_process_group_ranks(found[0]) != dist.get_process_group_ranks(over):
            problem = "has other replicas than the groups before: shard all of the model over one mesh"
        else:
            found.append(over)
            continue
        raise ValueError(f"LocalSteps lets the replicas of a model train apart, but {group.title} {problem}")
    if waits := [group.title for group in groups if group.gradients.has_any]:
        raise RuntimeError(f"gradients of {waits[0]} wait to be reduced over replicas: make LocalSteps between steps")
    return found[0]


def _members(model: nn.Module, groups: Sequence[ParamGroup], optimizer: Optimizer) -> list[list[FragmentMember]]:
    """The parameters that the optimizer changes, by group. Raises ValueError if replicas would not exchange some."""
    for group in groups:
        group.reshard()
    names = {id(param): plain_name(name) for name, param in model.named_parameters()}
    trained = {id(param): param for param in params_of(optimizer)}
    members = [
        [FragmentMember(names.get(id(p.sharded), p.name), group, i) for i, p in enumerate(group.params)]
        for group in groups
    ]
    sharded = {id(each.param.sharded): each.name for group in members for each in group}
    for number, param in trained.items():
        if param.requires_grad and number not in sharded:
            raise ValueError(
                f"LocalSteps exchanges sharded parameters only, but the optimizer also trains "
                f"'{names.get(number, 'a parameter of another model')}' of shape {tuple(param.shape)}: shard it too, "
                f"or give it to an optimizer of its own"
            )
    lacking = [each.name for group in members for each in group if each.param.sharded.requires_grad]
    lacking = [name for name in lacking if name not in {sharded[number] for number in trained.keys() & sharded.keys()}]
    if lacking:
        raise ValueError(
            f"LocalSteps counts the steps of one optimizer, but this one lacks {len(lacking)} trainable parameters, "
            f"such as '{lacking[0]}': give it all trainable parameters of the model"
        )
    chosen = ([each for each in group if id(each.param.sharded) in trained] for group in members)
    return [group for group in chosen if group]


def _described(optimizer: Optimizer) -> str:
    """An optimizer with its options, for comparison."""
    options = [{key: value for key, value in each.items() if key != "params"} for each in optimizer.param_groups]
    return f"{type(optimizer).__name__} with {options[0] if len(options) == 1 else options}"


def _set_apart(groups: Sequence[ParamGroup], over: dist.ProcessGroup) -> None:
    """Let groups be those of one replica from now on: their gradients are reduced inside of it."""
    made: dict[DataMesh, DataMesh] = {}
    for group in groups:
        if group.data not in made:
            made[group.data] = let_diverge(replace(group.data, replicate_group=None), over)
        group.data = made[group.data]
        for param in group.params:
            param.data = group.data
        group.gradients.forget_layout()


def _still_takes_local_steps(group: GroupContext) -> bool:
    """Whether a LocalSteps of the group is in use. Some ranks may not have collected one that is garbage. So this
    function collects garbage first: all ranks must find the same."""
    if counter_of(group) is None:
        return False
    gc.collect()
    return counter_of(group) is not None
