"""The state of an optimizer by the names of the original parameters, and back to what an optimizer of shards can load.

An optimizer knows shards, fragments or flat parameters. What it keeps of one is either a *part*, laid out as this
rank's part of the parameter is (momenta), or a value for all of it (``step``, numbers). Owns both directions::

    save    split what belongs to flat parameters ─▶ agree on who has what ─▶ gather parts ─▶ whole, or as DTensors
    load    whole tensors, DTensors of any placement, or those of the first rank ─▶ cut ─▶ join for flat parameters

A rank without elements of a fragment has no state of it, so that no rank knows alone which states there are: one object
is exchanged to agree, and for each group and each name of a state one gather follows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, NAdam, Optimizer, Rprop

from fullshard.comm.process_group import broadcast_object, gather_objects
from fullshard.comm.waits import waiting
from fullshard.full_params import gather
from fullshard.group.flat import FlatParameter, Fragment
from fullshard.group.group import Group
from fullshard.group.mesh import group_of
from fullshard.group.parameter import ShardedParameter, local_tensor, plain_name
from fullshard.optim.local_step import NUMBERS
from fullshard.policies import warn
from fullshard.schedule.unit import unit_of
from fullshard.torch_private import altered_spec, is_sharded_tensor, make_dtensor, pytree, spec_of
from fullshard.tree import tensors
from fullshard.wrapper.settings import FullOptimStateDictConfig, OptimStateDictConfig
from fullshard.wrapper.state_dict import all_of, given_out, own_copy, whole_as_before
from fullshard.wrapper.unit import WrappedUnit

tree_map_only = pytree.tree_map_only

#: What a state dict calls a parameter: by its place among those of the optimizer, or by a name.
Key = int | str
State = dict[str, Any]

#: States that are not zeros before the first step: a number, or ``None`` for the learning rate.
_NOT_ZEROS: dict[type[Optimizer], dict[str, float | None]] = {
    ASGD: {"eta": None, "mu": 1.0},
    NAdam: {"mu_product": 1.0},
    Rprop: {"step_size": None},
}


@dataclass(eq=False, slots=True)
class Place:
    """One parameter of the original model."""

    name: str  # fully qualified, below the root, without wrappers
    group: Group | None = None  # that shards it; ``None`` for one that is whole on every rank
    index: int = 0  # which of the group's parameters it is
    param: Any = None  # the group's :class:`ShardedParameter`, a :class:`Fragment` in a flat parameter


@dataclass(eq=False, slots=True)
class Found:
    """The parameters of a group, where they stand, and what checkpoints know of them."""

    paths: dict[nn.Module, str | None]  # ``None``: it is not below the root
    shown: dict[nn.Parameter, list[Place]]
    names: list[str]
    saved: Any = None


def shown_parameters(root: nn.Module, found: list[Found] | None = None) -> dict[nn.Parameter, list[Place]]:
    """Every parameter that optimizers of ``root`` may have, with the original ones that lie in it, in their order. That
    is one for each, but for a flat parameter. Tied parameters go by the first of their names. Parameters whose modules
    are not below ``root`` are left out. ``found`` gets those of each group, and at the end those of none."""
    paths = {module: f"{plain}." if (plain := plain_name(path)) else "" for path, module in root.named_modules()}
    groups = dict.fromkeys(group for module in paths if (unit := unit_of(module)) for group in unit.groups)
    for group in groups:
        group.check_in()  # users may have replaced parameters since the last step
    shown: dict[nn.Parameter, list[Place]] = {}
    taken: set[str] = set()  # where a sharded parameter stands, whatever is shown there at present
    found = [] if found is None else found
    for group in groups:
        presentation = group.module_params.as_sharded
        known: Found | None = presentation.found
        if known is None or any(paths.get(module) != path for module, path in known.paths.items()):
            presentation.found = known = Found({}, {}, [])
            for index, param in enumerate(group.params):
                known.paths |= {at.module: paths.get(at.module) for at in param.locations}
                names = [paths[at.module] + at.name for at in param.locations if at.module in paths]
                if names:
                    known.shown.setdefault(param.sharded, []).append(Place(names[0], group, index, param))
                    known.names += names
        found.append(known)
        shown.update(known.shown)
        taken.update(known.names)
    found.append(others := Found({}, {}, []))
    for module, path in paths.items():
        for name, whole in module._parameters.items():
            if whole is not None and path + name not in taken and whole not in shown:
                others.shown[whole] = shown[whole] = [Place(path + name)]
    return shown


class _Part(NamedTuple):
    """What a rank tells the others of its part of a state."""

    dtype: torch.dtype
    fits: bool


def _is_part(key: str, value: object, shape: Sequence[int]) -> bool:
    """Whether a state belongs to a parameter element by element. Of a scalar parameter all but the numbers do."""
    return isinstance(value, torch.Tensor) and (value.ndim > 0 or (len(shape) == 0 and key not in NUMBERS))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _ranks_of(shown: Mapping[nn.Parameter, list[Place]]) -> dist.ProcessGroup | None:
    """The ranks of a model, each of which must call it; ``None`` for all that there are."""
    meshes = {place.param.spec.mesh for inside in shown.values() for place in inside if place.param is not None}
    return group_of(rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()) if meshes else None


def _is_flat(model: nn.Module) -> bool:
    """Whether its wrappers show flat parameters."""
    kinds = {module._use_orig_params for module in model.modules() if isinstance(unit_of(module), WrappedUnit)}
    assert len(kinds) < 2, "the wrappers in one model must all have use_orig_params, or none"
    return kinds == {False}


def expect(known: Collection[Any], keys: Iterable[Any], problem: str = "") -> None:
    """A KeyError unless all keys are known."""
    problem = problem or "the model has no such parameter of the optimizer's"
    if unknown := [tuple(key.shape) if isinstance(key, torch.Tensor) else key for key in keys if key not in known]:
        raise KeyError(f"{problem}: {unknown}. The optimizer must be made from the parameters() of the sharded model")


def with_groups(
    state_dict: Mapping[str, Any], state: Any, known: Mapping[Any, Sequence[Any]], problem: str, sort: bool = True
) -> dict[str, Any]:
    """A state dict of ``state`` with the parameter groups of another, if that has any. Each of their keys becomes those
    that are ``known`` for it; a KeyError if there are none."""
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
    """``state_dict`` with the names and the shapes of the model without sharding, whole or in rows as ``config`` says.

    All ranks of ``process_group`` must call it. What it raises is said in :mod:`fullshard.wrapper.optim_methods`.
    ``params`` are what the keys of ``state_dict`` stand for; ``new`` is the optimizer, if it gets a state as
    before its first step where no rank has made one.
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
    places = {place.name: place for inside in shown.values() for place in inside}
    agreed = _agree(places, mine, _is_flat(model), process_group)
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
        if places[name].group is not None:
            saved[name] = {key: each for key, each in state.items() if not isinstance(each, _Part)}
        elif name in mine:
            saved[name] = mine[name]
    # Nothing is shared with the optimizer, and no ``step`` with another parameter.
    saved = tree_map_only(torch.Tensor, lambda each: own_copy(each.detach(), to_cpu), saved)
    for name, key, whole, sharded in _gathered(places, agreed, mine):
        if saves or sharded.unsharded_spec is not None:  # all ranks of tensor parallel take part
            saved[name][key] = given_out(whole, sharded, as_dtensors, to_cpu)
    if not saves:
        return {}
    for key, value in states.items():
        if key not in params and key not in saved:
            warn(f"the state '{key}' belongs to no parameter: it is saved as this rank has it")
            saved[key] = value
    known = {key: [place.name for place in shown[param]] for key, param in params.items()}
    problem = "the optimizer has no such parameter of its own parameter groups"
    return with_groups(state_dict, saved, known, problem, sort=False)


def _split(param: nn.Parameter, places: Sequence[Place], state: State) -> dict[str, State]:
    """The state of a parameter, split among the original ones that lie in it."""
    split = {place.name: dict(state) for place in places}
    for key, value in state.items() if isinstance(param, FlatParameter) else ():
        if isinstance(value, torch.Tensor) and value.shape == param.shape:
            for place in places:
                split[place.name][key] = place.param.part_in(value)
    return split


def _holds_some(param: ShardedParameter) -> bool:
    """Whether this rank has elements of a parameter, if anybody has."""
    return bool(param.local.numel() or not param.shape.numel())


def _agree(
    places: Mapping[str, Place], mine: Mapping[str, State], flat: bool, process_group: dist.ProcessGroup | None
) -> dict[str, State]:
    """Of each parameter with a state its values, and a :class:`_Part` in place of each part, the same on all ranks."""
    told: dict[str, State] = {}
    for name, state in mine.items():
        param = places[name].param
        if param is None or flat or _holds_some(param):
            told[name] = {} if param is None else {key: _told(key, value, param) for key, value in state.items()}
    everyone: list[dict[str, State]] = gather_objects(told, process_group)
    missing = {rank: sorted(everyone[0].keys() - theirs.keys()) for rank, theirs in enumerate(everyone)}
    if flat and any(missing.values()):
        raise RuntimeError(
            f"every rank must have the states that the first one has, but these are missing, by rank: {missing}. Make "
            f"the same optimizer and the same steps on all ranks"
        )
    agreed: dict[str, State] = {name: {} for name in places if any(name in theirs for theirs in everyone)}
    for name in agreed:
        for rank, theirs in enumerate(everyone):
            for key, value in theirs.get(name, {}).items():
                what = f"the state '{key}' of parameter '{name}' on rank {rank}"
                if isinstance(value, _Part) and not value.fits:
                    raise ValueError(f"{what} has not the shape of the parameter: it cannot be gathered")
                first = agreed[name].setdefault(key, value)
                if not flat and not _equal(first, value):
                    raise AssertionError(f"{what} is {value}, and on a rank before it {first}")
    return agreed


def _told(key: str, value: Any, param: ShardedParameter) -> Any:
    if _is_part(key, value, param.local.shape):
        return _Part(value.dtype, local_tensor(value).shape == param.local.shape)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _gathered(
    places: Mapping[str, Place], agreed: Mapping[str, State], mine: Mapping[str, State]
) -> Iterator[tuple[str, str, torch.Tensor, ShardedParameter]]:
    """All of each part of a state, after the names of its parameter and of the state, and before the parameter. One
    gather serves the states of one name of a group."""
    parts: dict[tuple[Group, str], dict[int, str]] = {}
    for name, state in agreed.items():
        for key, value in state.items():
            if isinstance(value, _Part) and (group := places[name].group) is not None:
                parts.setdefault((group, key), {})[places[name].index] = name
    for (group, key), names in parts.items():
        dtypes = {index: agreed[name][key].dtype for index, name in names.items()}
        held = [local_tensor(mine.get(names.get(index, ""), {}).get(key)) for index in range(len(group.params))]
        travels = [  # the states of a section in one dtype, to which all of them can turn and return
            reduce(torch.promote_types, [dtypes[i] for i in section.members if i in dtypes] or [section.dtype])
            for section in group.sections
        ]
        wholes = gather(group, held, travels)
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
    """``state_dict``, by the names of the original parameters, as the optimizer of ``params`` can load it.

    Values may be whole tensors, DTensors or ShardedTensors. Whole ones are cut without communication. With
    ``rank0_only`` the ``state_dict`` of the first rank of ``process_group`` counts, which sends it. ``named`` is an
    optimizer that needs a state of every parameter: it keeps its own where there is none.
    """
    _is_flat(model)
    shown = shown_parameters(model)
    receive: Callable[[Any], Any] = partial(tree_map_only, (), None)  # which receives nothing
    if rank0_only:
        state_dict, receive = _from_first_rank(state_dict, shown, process_group or _ranks_of(shown))
    if "state" not in state_dict:
        raise ValueError(f"the state dict has no 'state', but {list(state_dict)}: give one of optim_state_dict()")
    states, loaded = state_dict["state"], dict[Any, Any]()
    keys = {param: key for key, param in params.items()}
    for param, places in shown.items():
        cut = [_cut(place, states.get(place.name), param, receive) for place in places]
        if param not in keys or all(each is None for each in cut):
            continue
        first, joins = places[0], isinstance(param, FlatParameter)
        state = _join(param.shape, places, cut) if joins else cut[0]
        if first.param is not None and not joins and not _holds_some(first.param):
            state = None if named is None else copy.deepcopy(named.state.get(param))
            if state is None and named is not None:
                warn(f"this rank has no state of '{first.name}' that it could keep")
        if state:
            loaded[keys[param]] = state
    names = {place.name: [keys[param]] if param in keys else [] for param, places in shown.items() for place in places}
    loaded.update((name, receive(state)) for name, state in states.items() if name not in names)
    known = {name: key for name, key in names.items() if key}
    problem = "the optimizer to load into has no such parameter of a parameter group"
    return with_groups(state_dict, loaded, known, problem)


def _from_first_rank(
    state_dict: Mapping[str, Any], shown: Mapping[nn.Parameter, list[Place]], process_group: dist.ProcessGroup | None
) -> tuple[Mapping[str, Any], Callable[[Any], Any]]:
    """What the first rank gave, on others with tensors on the meta device, and a function that all ranks call to
    receive a state, or one value of it."""
    told, is_first = dict(state_dict), dist.get_rank(process_group) == 0
    if "state" in told:
        told["state"] = tree_map_only(torch.Tensor, lambda each: each.to("meta") if each.ndim else each, told["state"])
    received = broadcast_object(told, process_group)
    devices = (place.group.device for inside in shown.values() for place in inside if place.group is not None)
    device = next(devices, torch.device("cpu"))

    def receive(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim:
            tensor = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
            with waiting("the optimizer's state from the first rank", process_group):
                dist.broadcast(tensor := tensor.contiguous(), group=process_group, group_src=0)
        return tensor

    return state_dict if is_first else received, partial(tree_map_only, torch.Tensor, receive)


def _cut(place: Place, state: State | None, shown: nn.Parameter, receive: Callable[[Any], Any]) -> State | None:
    """This rank's part of a state, in memory of its own."""
    if state is None:
        return None
    cut: State = {}
    for key, value in state.items():
        value, param = receive(value), place.param
        value = all_of(value) if is_sharded_tensor(value) else value
        if param is not None and _is_part(key, value, param.shape):
            cut[key] = _part_of(value, param, f"the state '{key}' of parameter '{place.name}'")
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


def _join(shape: torch.Size, places: Sequence[Place], states: Sequence[State | None]) -> State:
    """The state of a flat parameter of this shape. Where one of its parameters has none, its part is zeros."""
    keys = {frozenset(state) for state in states if state is not None}
    if len(keys) > 1:
        raise _unlike(places, f"states of different names: {[sorted(each) for each in keys]}")
    joined: State = {}
    for key in keys.pop():
        values = [None if state is None else state[key] for state in states]
        there = [(place.param, value) for place, value in zip(places, values, strict=True) if value is not None]
        kinds = {(type(value), getattr(value, "dtype", None), _is_part(key, value, at.shape)) for at, value in there}
        if len(kinds) > 1:
            raise _unlike(places, f"values of different kinds for '{key}': {sorted(map(str, kinds))}")
        first: Any = there[0][1] if there else None
        joined[key] = first
        if any(is_part for _, _, is_part in kinds):
            joined[key] = first.new_zeros(shape)
            for param, value in there:
                param.part_in(joined[key]).copy_(value)
        elif there and not all(_equal(first, value) for value in values):
            raise _unlike(places, f"different values of '{key}': {values}")
    return joined


def _unlike(places: Sequence[Place], what: str) -> ValueError:
    return ValueError(f"{[place.name for place in places]} lie in one flat parameter, but have {what}")
