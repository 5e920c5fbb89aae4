"""The hooks before and after the steps of optimizers that have parameters of groups.

Owns these hooks. At an optimizer's first step they check that it was built from the sharded parameters, and that all
parameters it trains are sharded. They count writes and steps. With ``CPUOffloadPolicy(parameters=False)`` they move the
optimizer state to the device for the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullshard.device import CPU, streams_of
from fullshard.group.context import GroupContext
from fullshard.group.full_buffer import State
from fullshard.group.owners import owner_of
from fullshard.group.param_group import ParamGroup
from fullshard.optim.disk_step import offload_state
from fullshard.optim.local_step import prepare_step
from fullshard.policies import warn
from fullshard.strangers import strangers_of
from fullshard.torch_private import local_of, only_makes_state, running_backward, set_local

#: For each optimizer that was checked, the ids of its parameters, and their groups. (Parameters may refer to the
#: optimizer by their hooks, and would keep it alive.)
_found: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[weakref.ref[GroupContext]]]] = (
    weakref.WeakKeyDictionary()
)
_params: Callable[[dict[str, Any]], list[torch.Tensor]] = itemgetter("params")


#: Called before each step of an optimizer, with the groups whose parameters it has.
checks: list[Callable[[Optimizer, Sequence[GroupContext]], None]] = []


def watch_steps() -> None:
    """Run the hooks on all steps of all optimizers from now on, and check all optimizers again: a group was made."""
    _found.clear()
    _register()


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    groups = _groups_of(optimizer)
    if not groups:
        return
    for check in [*checks]:  # one may leave
        check(optimizer, groups)
    is_between_passes = running_backward() < 0
    for group in groups:
        if isinstance(group, ParamGroup) and is_between_passes:
            if group.module_params.left is not None:
                group.keep_writes()  # before the step writes too
            if group.full.state is State.UNSHARDED:
                group.leave_unsharded()  # what modules show would be old
            if group.gradients.shown.grads:
                group.gradients.hide()  # the step does not use the gradients that wait, which are kept
        group.writes += 1  # counted here too, because no hook runs after a step that raises
    # In a backward, and where a rank has no state to save, the number of steps differs between ranks.
    if is_between_passes and not only_makes_state(optimizer, kwargs):
        for step in {id(group.step): group.step for group in groups}.values():
            step.count_step(optimizer)
    if any(group.offloaded.state for group in groups):
        _move_state(optimizer, groups, to_device=True)
    prepare_step(optimizer)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    groups = _groups_of(optimizer)
    if not groups:
        return
    params = () if only_makes_state(optimizer, kwargs) else chain.from_iterable(map(_params, optimizer.param_groups))
    changed = {id(param) for param in params if param.grad is not None}
    for group in groups:
        group.writes += 1  # foreach optimizers on DTensors do not change versions when they write
        group.step.updates += bool(changed)
        for param in group.params:
            if id(param.sharded) in changed:
                param.updated = group.step.updates
    if any(group.offloaded.state for group in groups):
        _move_state(optimizer, groups, to_device=False)
    if any(group.offloaded.disk is not None for group in groups):
        offload_state(optimizer)


def _groups_of(optimizer: Optimizer) -> list[GroupContext]:
    """The groups whose parameters an optimizer has. Raises an error if it was not built from sharded parameters."""
    ids = [*map(id, chain.from_iterable(map(_params, optimizer.param_groups)))]
    known = _found.get(optimizer)
    if known is None or known[0] != ids:
        groups: dict[int, GroupContext] = {}
        strangers = []
        for param in (param for options in optimizer.param_groups for param in options["params"]):
            if (owner := owner_of(param)) is None:
                strangers += [param] if param.requires_grad else []
                continue
            group, index = owner
            groups[id(group)] = group
            if param is not (sharded := group.params[index]).sharded:
                when = "while the module was unsharded" if param is sharded.unsharded else "before fully_shard"
                raise RuntimeError(
                    f"this {type(optimizer).__name__} was built {when}: its parameter '{sharded.name}' is not the one "
                    f"that is trained. Build the optimizer after sharding, from model.parameters(), and call "
                    f"model.reshard() first if a forward was run before"
                )
        if isinstance(optimizer, Adafactor):
            _refuse_matrices(optimizer)
        if isinstance(optimizer, LBFGS) or type(optimizer).__name__ == "Adafactor":
            _warn_of_parts(optimizer, groups.values())
        known = _found[optimizer] = ids, [weakref.ref(group) for group in groups.values()]
        for problem, advice in strangers_of(strangers) if strangers else ():
            warn(f"{problem}. {advice}")
    return [alive for reference in known[1] if (alive := reference()) is not None]


def _refuse_matrices(optimizer: Adafactor) -> None:
    """Raise an error if Adafactor has a matrix that is cut: it sums rows and columns in place."""
    for param in (param for options in optimizer.param_groups for param in options["params"]):
        is_cut = isinstance(param, DTensor) and any(each.is_shard() for each in param.placements)
        if is_cut and param.dim() > 1 and (owner := owner_of(param)):
            group, index = owner
            raise RuntimeError(
                f"{type(optimizer).__name__} cannot step on '{group.params[index].name}', which fully_shard has cut: "
                f"it sums over whole rows and columns. Use an optimizer that computes element by element, such as "
                f"AdamW, or shard with zero_stage=0"
            )


def _warn_of_parts(optimizer: Optimizer, groups: Iterable[GroupContext]) -> None:
    """Warn of an optimizer that sums over parameters, if each rank shows it only its part of them as plain tensors."""
    if any(param.run is not None for group in groups if group.data.shard_group is not None for param in group.params):
        warn(
            f"{type(optimizer).__name__} sums over whole parameters, and FullyShardedDataParallel shows it only this "
            f"rank's part of each, so its updates differ from those of unsharded training. Use an optimizer that "
            f"computes element by element, such as AdamW"
        )


def _move_state(optimizer: Optimizer, groups: list[GroupContext], to_device: bool) -> None:
    """Move offloaded state to the device for a step, or back to the CPU."""
    for param, state in optimizer.state.items():
        owner = owner_of(param) if isinstance(param, torch.Tensor) else None
        if owner is None or not owner[0].offloaded.moves_state(owner[1]):
            continue
        device = owner[0].device if to_device else CPU
        for name, value in state.items():
            if isinstance(value, DTensor):
                set_local(value, local_of(value).to(device, non_blocking=True))
            elif isinstance(value, torch.Tensor) and value.ndim > 0:
                state[name] = value.to(device, non_blocking=True)
    if not to_device:
        for device in {group.device for group in groups}:
            if (streams := streams_of(device)) is not None:
                streams.synchronize(device)  # so that the state is complete before anybody reads it
