"""Converts optimizer state between shards and original parameters: to their names and shapes, and back.

The parameters of an optimizer are shards, fragments or flat parameters. A state of one of these is either a *part*,
with the layout of this rank's part of the parameter (momenta), or a value for the whole parameter (``step``, numbers).
Owns both directions::

    save    split what belongs to flat parameters ─▶ agree on who has what ─▶ gather parts ─▶ whole, or as DTensors
    load    whole tensors, DTensors of any placement, or those of the first rank ─▶ cut ─▶ join for flat parameters

A rank without elements of a fragment has no state of it. So no rank alone knows which states exist: the ranks exchange
one object to agree on that, and then gather once for each group and each name of a state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, NAdam, Optimizer, Rprop

from fullshard.comm.process_group import broadcast, broadcast_object, gather_objects
from fullshard.full_params import gather
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import ShardedParameter, local_tensor
from fullshard.meshes import group_of
from fullshard.optim.local_step import NUMBERS
from fullshard.original_parameters import OriginalParameter, expect, shown_parameters
from fullshard.policies import warn
from fullshard.schedule.unit import unit_of
from fullshard.torch_private import altered_spec, is_sharded_tensor, make_dtensor, pytree, spec_of
from fullshard.tree import tensors
from fullshard.wrapper.flat import FlatParameter, Fragment
from fullshard.wrapper.settings import FullOptimStateDictConfig, OptimStateDictConfig
from fullshard.wrapper.state_dict import all_of, own_copy, state_dict_entry, whole_as_before
from fullshard.wrapper.unit import WrappedUnit

tree_map_only = pytree.tree_map_only

#: How a state dict identifies a parameter: by its number in the optimizer, or by a name.
Key = int | str
State = dict[str, Any]

#: States that are not zeros before the first step: a number, or ``None`` for the learning rate.
_NOT_ZEROS: dict[type[Optimizer], dict[str, float | None]] = {
    ASGD: {"eta": None, "mu": 1.0},
    NAdam: {"mu_product": 1.0},
    Rprop: {"step_size": None},
}


class _StatePart(NamedTuple):
    """Describes a rank's part of a state to the other ranks."""

    dtype: torch.dtype
    fits: bool


def _is_part(key: str, value: object, shape: Sequence[int]) -> bool:
    """Whether a state has one element for each element of a parameter. For a scalar: all states but the numbers."""
    return isinstance(value, torch.Tensor) and (value.ndim > 0 or (len(shape) == 0 and key not in NUMBERS))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _ranks_of(shown: Mapping[nn.Parameter, list[OriginalParameter]]) -> dist.ProcessGroup | None:
    """A process group of a model's ranks; ``None`` for all ranks. Each of these ranks must call it."""
    meshes = {
        original.param.spec.mesh for inside in shown.values() for original in inside if original.param is not None
    }
    return group_of(rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()) if meshes else None


def _is_flat(model: nn.Module) -> bool:
    """Whether a model's wrappers show flat parameters."""
    kinds = {module._use_orig_params for module in model.modules() if isinstance(unit_of(module), WrappedUnit)}
    assert len(kinds) < 2, "the wrappers in one model must all have use_orig_params, or none"
    return kinds == {False}


def with_groups(
    state_dict: Mapping[str, Any], state: Any, known: Mapping[Any, Sequence[Any]], problem: str, sort: bool = True
) -> dict[str, Any]:
    """A state dict of ``state`` with the parameter groups of ``state_dict``, if it has any. Replaces each key in them
    by the keys that are ``known`` for it. Raises KeyError with ``problem`` for a key that has none."""
    if "param_groups" not in state_dict:
        return {"state": state}
    groups = copy.deepcopy(state_dict["param_groups"])
    for options in groups:
        expect(known, options["params"], problem)
        keys = dict.fromkeys(new for key in options["params"] for new in known[key])
        options["params"] = sorted(keys) if sort else list(keys)
    return {"state": state, "param_groups": groups}


@torch.no_grad()
def whole_state(
    model: nn.Module,
    params: Mapping[Key, nn.Parameter],
    state_dict: Mapping[str, Any],
    config: OptimStateDictConfig,
    process_group: dist.ProcessGroup | None = None,
    new: Optimizer | None = None,
) -> dict[str, Any]:
    """Converts ``state_dict`` to the names and the shapes of the plain model, whole or in rows as ``config`` says.

    All ranks of ``process_group`` must call it. :mod:`fullshard.wrapper.optim_methods` lists its errors.

    Args:
        model: the root.
        params: the parameters for the keys of ``state_dict``.
        state_dict: of an optimizer of shards.
        config: the kind of the result.
        process_group: the ranks of the model.
        new: the optimizer. If it is given, and has made no step on any rank, the result has the state before its first.
    """
    shown, states = shown_parameters(model), state_dict["state"]
    process_group = process_group or _ranks_of(shown)
    saves = not config.rank0_only or dist.get_rank(process_group) == 0
    as_dtensors, to_cpu = not isinstance(config, FullOptimStateDictConfig), config.offload_to_cpu
    expect(shown, params.values())
    mine: dict[str, State] = {}
    for key, param in params.items():
        if key in states:
            mine.update(_split(param, shown[param], states[key]))
    originals = {original.name: original for inside in shown.values() for original in inside}
    agreed = _agree(originals, mine, _is_flat(model), process_group)
    if new is not None and as_dtensors and not agreed:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # imports torch's FSDP

        before = dict(new.state)
        get_optimizer_state_dict(model, new)  # gives the optimizer a state, as torch does before it loads one
        made = whole_state(model, params, new.state_dict(), config, process_group)
        new.state.clear()
        new.state.update(before)
        for tensor in tensors(made.get("state")):
            tensor.zero_()
        for options in made.get("param_groups", ()):
            for key, value in _NOT_ZEROS.get(type(new), {}).items():
                for name in options["params"]:
                    if key in (state := made["state"].get(name, {})):
                        state[key].fill_(options["lr"] if value is None else value)
        return made
    saved: dict[Any, Any] = {}
    for name, state in agreed.items():
        if originals[name].group is not None:
            saved[name] = {key: each for key, each in state.items() if not isinstance(each, _StatePart)}
        elif name in mine:
            saved[name] = mine[name]
    # Nothing is shared with the optimizer, and no ``step`` with another parameter.
    saved = tree_map_only(torch.Tensor, lambda each: own_copy(each.detach(), to_cpu), saved)
    for name, key, whole, sharded in _gathered(originals, agreed, mine):
        if saves or sharded.unsharded_spec is not None:  # all ranks of tensor parallel take part
            saved[name][key] = state_dict_entry(whole, sharded, as_dtensors, to_cpu)
    if not saves:
        return {}
    for key, value in states.items():
        if key not in params and key not in saved:
            warn(f"the state '{key}' belongs to no parameter: it is saved as this rank has it")
            saved[key] = value
    known = {key: [original.name for original in shown[param]] for key, param in params.items()}
    problem = "the optimizer lacks these parameters of its own parameter groups"
    return with_groups(state_dict, saved, known, problem, sort=False)


def _split(param: nn.Parameter, originals: Sequence[OriginalParameter], state: State) -> dict[str, State]:
    """The state of a parameter, split into states of the original parameters in it."""
    split = {original.name: dict(state) for original in originals}
    for key, value in state.items() if isinstance(param, FlatParameter) else ():
        if isinstance(value, torch.Tensor) and value.shape == param.shape:
            for original in originals:
                split[original.name][key] = original.param.part_in(value)
    return split


def _holds_some(param: ShardedParameter) -> bool:
    """Whether this rank has elements of a parameter, or the parameter has none at all."""
    return bool(param.local.numel() or not param.shape.numel())


def _agree(
    originals: Mapping[str, OriginalParameter],
    mine: Mapping[str, State],
    flat: bool,
    process_group: dist.ProcessGroup | None,
) -> dict[str, State]:
    """The states of all ranks, merged and equal on all ranks, with a :class:`_StatePart` in place of each part."""
    descriptions: dict[str, State] = {}
    for name, state in mine.items():
        param = originals[name].param
        if param is None or flat or _holds_some(param):
            descriptions[name] = (
                {} if param is None else {key: _description(key, value, param) for key, value in state.items()}
            )
    everyone: list[dict[str, State]] = gather_objects(descriptions, process_group)
    missing = {rank: sorted(everyone[0].keys() - described.keys()) for rank, described in enumerate(everyone)}
    if flat and any(missing.values()):
        raise RuntimeError(
            f"every rank must have the states that the first one has, but these are missing, by rank: {missing}. Make "
            f"the same optimizer and the same steps on all ranks"
        )
    agreed: dict[str, State] = {name: {} for name in originals if any(name in described for described in everyone)}
    for name in agreed:
        for rank, described in enumerate(everyone):
            for key, value in described.get(name, {}).items():
                what = f"the state '{key}' of parameter '{name}' on rank {rank}"
                if isinstance(value, _StatePart) and not value.fits:
                    raise ValueError(f"{what} does not have the shape of the parameter: it cannot be gathered")
                first = agreed[name].setdefault(key, value)
                if not flat and not _equal(first, value):
                    raise AssertionError(f"{what} is {value}, and on a rank before it {first}")
    return agreed


def _description(key: str, value: Any, param: ShardedParameter) -> Any:
    if _is_part(key, value, param.local.shape):
        return _StatePart(value.dtype, local_tensor(value).shape == param.local.shape)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _gathered(
    originals: Mapping[str, OriginalParameter], agreed: Mapping[str, State], mine: Mapping[str, State]
) -> Iterator[tuple[str, str, torch.Tensor, ShardedParameter]]:
    """Gathers parts: yields the names of the parameter and of the state, the whole tensor, and the parameter. All
    states with one name in a group are gathered at once."""
    parts: dict[tuple[ParamGroup, str], dict[int, str]] = {}
    for name, state in agreed.items():
        for key, value in state.items():
            if isinstance(value, _StatePart) and (group := originals[name].group) is not None:
                parts.setdefault((group, key), {})[originals[name].index] = name
    for (group, key), names in parts.items():
        dtypes = {index: agreed[name][key].dtype for index, name in names.items()}
        local_parts = [local_tensor(mine.get(names.get(index, ""), {}).get(key)) for index in range(len(group.params))]
        exchange_dtypes = [  # one dtype for each section, which can represent all its states exactly
            reduce(torch.promote_types, [dtypes[i] for i in section.members if i in dtypes] or [section.dtype])
            for section in group.sections
        ]
        wholes = gather(group, local_parts, exchange_dtypes)
        for index, name in names.items():
            yield name, key, wholes[index].to(dtypes[index]), group.params[index]


@torch.no_grad()
def local_state(
    model: nn.Module,
    params: Mapping[Key, nn.Parameter],
    state_dict: Mapping[str, Any],
    rank0_only: bool = False,
    process_group: dist.ProcessGroup | None = None,
    named: Optimizer | None = None,
) -> dict[str, Any]:
    """Converts ``state_dict``, which has original names, so that the optimizer of ``params`` can load it.

    Values may be whole tensors, DTensors or ShardedTensors. Whole tensors are cut without communication. With
    ``rank0_only``, the first rank of ``process_group`` sends its ``state_dict`` to the others, and theirs are ignored.
    ``named`` is an optimizer that needs a state for every parameter: where ``state_dict`` has none, it keeps its own.
    """
    _is_flat(model)
    shown = shown_parameters(model)
    receive: Callable[[Any], Any] = partial(tree_map_only, (), None)  # changes nothing
    if rank0_only:
        state_dict, receive = _from_first_rank(state_dict, shown, process_group or _ranks_of(shown))
    if "state" not in state_dict:
        raise ValueError(f"the state dict has no 'state', but {list(state_dict)}: give one of optim_state_dict()")
    states, loaded = state_dict["state"], dict[Any, Any]()
    keys = {param: key for key, param in params.items()}
    for param, originals in shown.items():
        cut = [_cut(original, states.get(original.name), param, receive) for original in originals]
        if param not in keys or all(each is None for each in cut):
            continue
        first, is_flat = originals[0], isinstance(param, FlatParameter)
        state = _concatenate(param.shape, originals, cut) if is_flat else cut[0]
        if first.param is not None and not is_flat and not _holds_some(first.param):
            state = None if named is None else copy.deepcopy(named.state.get(param))
            if state is None and named is not None:
                warn(f"this rank has no state of '{first.name}' that it could keep")
        if state:
            loaded[keys[param]] = state
    names = {
        original.name: [keys[param]] if param in keys else []
        for param, originals in shown.items()
        for original in originals
    }
    loaded.update((name, receive(state)) for name, state in states.items() if name not in names)
    known = {name: key for name, key in names.items() if key}
    problem = "the optimizer to load into lacks these parameters of a parameter group"
    return with_groups(state_dict, loaded, known, problem)


def _from_first_rank(
    state_dict: Mapping[str, Any],
    shown: Mapping[nn.Parameter, list[OriginalParameter]],
    process_group: dist.ProcessGroup | None,
) -> tuple[Mapping[str, Any], Callable[[Any], Any]]:
    """Returns the first rank's state dict, whose tensors are on the meta device on other ranks, and a function. All
    ranks call that with a state, or with a value of it, to receive its tensors."""
    descriptions, is_first = dict(state_dict), dist.get_rank(process_group) == 0
    if "state" in descriptions:
        descriptions["state"] = tree_map_only(
            torch.Tensor, lambda each: each.to("meta") if each.ndim else each, descriptions["state"]
        )
    received = broadcast_object(descriptions, process_group)
    devices = (original.group.device for inside in shown.values() for original in inside if original.group is not None)
    device = next(devices, torch.device("cpu"))

    def receive(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim:
            tensor = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
            broadcast(tensor := tensor.contiguous(), process_group, "the optimizer's state from the first rank")
        return tensor

    return state_dict if is_first else received, partial(tree_map_only, torch.Tensor, receive)


def _cut(
    original: OriginalParameter, state: State | None, shown: nn.Parameter, receive: Callable[[Any], Any]
) -> State | None:
    """This rank's part of a state, in memory of its own."""
    if state is None:
        return None
    cut: State = {}
    for key, value in state.items():
        value, param = receive(value), original.param
        value = all_of(value) if is_sharded_tensor(value) else value
        if param is not None and _is_part(key, value, param.shape):
            cut[key] = _part_of(value, param, f"the state '{key}' of parameter '{original.name}'")
        elif isinstance(value, torch.Tensor):
            cut[key] = (value if isinstance(shown, DTensor) else all_of(value)).clone()
        else:
            cut[key] = value
    return cut


def _part_of(value: torch.Tensor, param: ShardedParameter, what: str) -> torch.Tensor:
    if value.shape != param.spec.shape:
        raise ValueError(f"{what} has the shape {tuple(value.shape)}; expected {tuple(param.spec.shape)}")
    spec, shows_dtensor = altered_spec(param.spec, dtype=value.dtype), not isinstance(param, Fragment)
    if shows_dtensor and isinstance(value, DTensor) and spec_of(value) == spec:
        return value.clone()
    part = param.chunk_of(local_tensor(whole_as_before(value, param))).clone()
    return make_dtensor(part, spec) if shows_dtensor else part


def _concatenate(shape: torch.Size, originals: Sequence[OriginalParameter], states: Sequence[State | None]) -> State:
    """Concatenates states of original parameters to that of a flat parameter, with zeros for parameters without one."""
    keys = {frozenset(state) for state in states if state is not None}
    if len(keys) > 1:
        raise _unlike(originals, f"states of different names: {[sorted(each) for each in keys]}")
    result: State = {}
    for key in keys.pop():
        values = [None if state is None else state[key] for state in states]
        present = [
            (original.param, value) for original, value in zip(originals, values, strict=True) if value is not None
        ]
        kinds = {(type(value), getattr(value, "dtype", None), _is_part(key, value, at.shape)) for at, value in present}
        if len(kinds) > 1:
            raise _unlike(originals, f"values of different kinds for '{key}': {sorted(map(str, kinds))}")
        first: Any = present[0][1] if present else None
        result[key] = first
        if any(is_part for _, _, is_part in kinds):
            result[key] = first.new_zeros(shape)
            for param, value in present:
                param.part_in(result[key]).copy_(value)
        elif present and not all(_equal(first, value) for value in values):
            raise _unlike(originals, f"different values of '{key}': {values}")
    return result


def _unlike(originals: Sequence[OriginalParameter], what: str) -> ValueError:
    return ValueError(f"{[original.name for original in originals]} lie in one flat parameter, but have {what}")
