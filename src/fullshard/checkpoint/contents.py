"""What of a model, an optimizer and other objects goes into a checkpoint, and back: boxes of tensors, and values.

The names are those of ``torch.distributed.checkpoint.state_dict``, without any wrappers::

    model.<name>                         parameters, persistent buffers, extra state
    optimizer.state.<name>.<key>         the optimizer's state of a parameter; of lists and dicts, what is in them
    optimizer.outlines.<name>.<key>      such a list or dict, with None in place of tensors
    optimizer.param_groups.<n>.<option>  its options, and the names of its parameters
    state.<name>.<n>                     what ranks gave under a name of their own
    sharded.<name>.<path>                DTensors in that
    <name>.<attribute>                   a tensor inside of a tensor subclass, cut as that is
    <name>.<attribute>.[0:32,0:64]       the same where its shape is another: of the part that a rank has
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.serialization import get_safe_globals

from fullshard.checkpoint.layout import Box, Layout, layout_of
from fullshard.checkpoint.reader import Checkpoint, CheckpointError, Target
from fullshard.group.flat import FLAT_NAME, FlatParameter, Fragment
from fullshard.group.parameter import local_tensor, plain_name
from fullshard.policies import warn
from fullshard.torch_private import altered_spec, is_traceable_subclass, make_dtensor, spec_of
from fullshard.tree import tensors
from fullshard.wrapper.fsdp import FullyShardedDataParallel
from fullshard.wrapper.optim_state import Found, Place, expect, shown_parameters
from fullshard.wrapper.state_dict import in_place

#: In what stands for a tensor subclass in the state of an optimizer: its class.
_KIND = "a tensor subclass"
State = dict[str, Any]
Path = tuple[str | int, ...]


@dataclass
class Contents:
    """What this rank has of a checkpoint.

    Attributes:
        boxes: of tensors, and ``tensors``: the values of each, in the memory in which they are used.
        values: what is no tensor, on ranks that speak for it; the layout says who else does.
        paths: of each name, the keys that lead there in a nested state dict.
    """

    boxes: list[Box] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    values: dict[str, tuple[Any, Layout]] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def add(self, paths: Mapping[str, Path], value: Any, layout: Layout | None = None) -> None:
        """Adds what is to be saved under each name: a tensor, laid out like a parameter or not, or a value."""
        if isinstance(value, torch.Tensor):
            layout, local = layout or layout_of(value), local_tensor(value)
            if type(local) is not torch.Tensor and is_traceable_subclass(local) and layout.order is None:
                self._add_inner(list(paths.values()), local, layout)
                return
            self.boxes += layout.named(names := tuple(paths))
            self.tensors += layout.split(names[0], local)
        else:
            self.values.update((name, (value, layout or layout_of(torch.empty(0)))) for name in paths)
        self.paths |= paths

    def is_partial(self, ranks: int) -> bool:
        """Whether something lies over fewer ranks than that."""
        return any(box.copies.among < ranks for box in self.boxes)

    def held_by_others(self, ranks: int) -> list[str]:
        """What this rank holds, and some of ``ranks`` may hold too that are not known here: what is whole, as buffers
        are, which pipelines have on some ranks only; and what lies over fewer ranks, as parameters do that tensor
        parallel did not cut."""
        copies = {name: layout.copies for name, (_, layout) in self.values.items()}
        names = {name for name, each in copies.items() if each.ranks == "all" or each.among < ranks}
        return sorted(names | {key for box in self.boxes if (key := box.key(ranks))})

    def _add_inner(self, paths: list[Path], local: Any, layout: Layout) -> None:
        """Adds the tensors of which a subclass is made; what has its shape and dtype goes by its name."""
        attributes, inner = inner_tensors(local)
        stated = paths[0][0] == "optimizer"  # which says by itself what it is
        alike = [name for name in attributes if _kind(inner[name]) == _kind(local)]
        for name in attributes:
            is_itself = not stated and name == next(iter(alike), None)
            inside = paths if is_itself else [(*path, name) for path in paths]
            if inner[name].shape == local.shape:
                self.add(named(*inside), inner[name], layout)
            else:
                whole = Layout(
                    tuple(inner[name].shape), (((0,) * inner[name].ndim, tuple(inner[name].shape)),), layout.copies
                )
                for box in layout.boxes:
                    self.add(named(*((*path, _box_name(box)) for path in inside)), inner[name], whole)


def named(*paths: Path) -> dict[str, Path]:
    return {".".join(map(str, path)): path for path in paths}


def inner_tensors(local: Any) -> tuple[list[str], dict[str, torch.Tensor]]:
    names = list(local.__tensor_flatten__()[0])
    return names, {name: getattr(local, name).detach() for name in names}


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype


def _box_name(box: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    return f"[{','.join(f'{at}:{at + size}' for at, size in zip(*box, strict=True))}]"


class Known(NamedTuple):
    """The layout of a parameter, and its names in the plain model, without anything around its modules."""

    layout: Layout
    names: list[str]


class Parameters:
    """The parameters of a model, as optimizers have them, with what this rank holds of each original one.

    Attributes:
        found: the parameters by groups. What is known of a group stays there for the next time.
        shown: for each parameter that an optimizer may have, the original ones that lie in it.
        known: by place, what is known of each.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.found = model, list[Found]()
        self.shown = shown_parameters(model, self.found)
        self.known: dict[Place, Known] = {}
        for found in self.found:
            if found.saved is None:
                found.saved = self._known_of(found), None, []
            self.known |= found.saved[0]

    def _known_of(self, found: Found) -> dict[Place, Known]:
        known, everywhere = dict[Place, Known](), dict[nn.Parameter, list[str]]()
        prefixes = {module: _clean(f"{path}*")[:-1] for module, path in found.paths.items() if path is not None}
        if found.shown and not prefixes:  # they belong to no group
            for name, param in self.model.named_parameters(remove_duplicate=False):
                everywhere.setdefault(param, []).append(_clean(name))
        for param, places in found.shown.items():
            for place in places:
                at = () if place.param is None else place.param.locations
                names = [prefixes[each.module] + each.name for each in at if each.module in prefixes]
                names = list(dict.fromkeys(names or everywhere.get(param, [place.name])))
                known[place] = Known(layout_of(place.param or param), names)
        return known

    def collect(self, contents: Contents, frozen: bool) -> None:
        """Adds the parameters; the frozen ones if ``frozen``."""
        for found in self.found:
            known, part, holders = found.saved
            if part is None or not frozen:
                part, holders = Contents(), []
                for param, places in found.shown.items():
                    for place in places if frozen or param.requires_grad else ():
                        held = param if place.param is None else place.param.values
                        if held.is_meta:
                            raise CheckpointError(f"'{place.name}' is on the meta device: call to_empty() first")
                        paths: dict[str, Path] = {f"model.{name}": ("model", name) for name in known[place].names}
                        part.add(paths, held, known[place].layout)
                        holders += [param] * (len(part.boxes) - len(holders))
                if frozen and all(map(is_, map(local_tensor, holders), part.tensors)):
                    part.tensors.clear()  # which may be others the next time
                    found.saved = known, part, holders
            contents.boxes += part.boxes
            contents.tensors += part.tensors or map(local_tensor, holders)
            contents.paths |= part.paths

    def collect_state(self, contents: Contents, states: Mapping[Any, State], everyone: bool = False) -> None:
        """Adds states of an optimizer; ``everyone``: also values that belong to all of a parameter, on all ranks."""
        expect(self.shown, states)
        for param, state in states.items():
            for place in self.shown[param]:
                for key, value in state.items():
                    path = ("optimizer", "state", self.known[place].names[0], key)
                    self._collect_value(contents, param, place, path, value, everyone)

    def _collect_value(
        self, contents: Contents, param: nn.Parameter, place: Place, path: Path, value: Any, everyone: bool
    ) -> None:
        layout = self.known[place].layout
        if isinstance(value, DTensor) or is_traceable_subclass(value):
            is_alike = not isinstance(value, DTensor) or (
                isinstance(param, DTensor) and spec_of(value) is spec_of(param)
            )
            contents.add(named(path), value, layout if is_alike else None)
            value = _outline(value)
            if value is None or not layout.has_first:
                return
        elif isinstance(value, torch.Tensor) and (value.ndim > 0 or param.ndim == 0):
            if value.shape == param.shape:
                part = place.param.part_in(value) if isinstance(param, FlatParameter) else value
                contents.add(named(path), part, layout)
                return
            is_whole = layout.boxes == (((0,) * len(layout.shape), layout.shape),)  # state may then have any shape
            if isinstance(param, FlatParameter) or not is_whole:
                raise ValueError(
                    f"the state '{'.'.join(map(str, path[3:]))}' of parameter '{place.name}' has the shape "
                    f"{tuple(value.shape)}, and what this rank has of the parameter {tuple(param.shape)}: it cannot be "
                    f"saved, as nobody knows what it would be on other ranks"
                )
        elif isinstance(value, dict) or (isinstance(value, (list, tuple)) and any(True for _ in tensors(value))):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                self._collect_value(contents, param, place, (*path, key), each, everyone)
            if len(path) > 4:
                return
            path, value = ("optimizer", "outlines", *path[2:]), _outline(value)
        if everyone or layout.has_first:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else (0,)
            contents.add(named(path), value, Layout(shape, (((0,) * len(shape), shape),), layout.copies))

    def collect_options(self, contents: Contents, optimizer: Optimizer) -> None:
        """Adds the options of an optimizer."""
        for number, options in enumerate(optimizer.param_groups):
            for key, value in {**options, "params": self.names_in(options)}.items():
                contents.add(named(("optimizer", "param_groups", number, key)), value)

    def names_in(self, options: State) -> list[str]:
        expect(self.shown, options["params"])
        return [self.known[place].names[0] for param in options["params"] for place in self.shown[param]]

    def rest(self) -> State:
        """What the model has beside parameters: persistent buffers, extra state, what hooks add."""
        is_wrapped = _is_wrapped(self.model)
        with in_place(self.model):
            saved = self.model.state_dict(keep_vars=not is_wrapped)  # which takes half the time
        known = {name for each in self.known.values() for name in each.names}
        return {
            name: value
            for name, value in saved.items()
            if name not in known
            and _clean(name) not in known
            and not (is_wrapped and name.rpartition(".")[2].startswith(FLAT_NAME))
        }

    def load_rest(self, rest: State) -> None:
        """Takes over what :meth:`rest` gave, with other values."""
        if not _is_wrapped(self.model):
            if rest:
                self.model.load_state_dict(rest, strict=False)
            return
        buffers = {_clean(name): buffer for name, buffer in self.model.named_buffers(remove_duplicate=False)}
        modules = {_clean(name): module for name, module in self.model.named_modules()}
        for name, value in rest.items():
            path, _, last = name.rpartition(".")
            if name in buffers:
                with torch.no_grad():
                    buffers[name].copy_(value)
            elif last == "_extra_state" and path in modules:
                modules[path].set_extra_state(value)
            else:
                warn(f"'{name}' is in the checkpoint, and no buffer of the wrapped model: it is left as it is")

    def written(self) -> None:
        """Tells the groups that their shards were written to."""
        for group in {place.group for place in self.known if place.group is not None}:
            group.writes += 1


def new_states(params: Parameters, optimizer: Optimizer, checkpoint: Checkpoint) -> dict[nn.Parameter, State]:
    """For each parameter of an optimizer the state that a checkpoint has of it, with tensors to read into: those
    that the optimizer has already, if they have the same shape and dtype."""
    saved: dict[str, dict[str, str]] = {}
    prefix, known = "optimizer.state.", {each.names[0] for each in params.known.values()}
    flattened = _flattened(checkpoint)
    for name in (*checkpoint.manifest.objects, *checkpoint.tensors, *flattened):
        if name.startswith(prefix):
            param_name, _, key = name.removeprefix(prefix).rpartition(".")
            while param_name and param_name not in known:  # the key leads into a list, a dict or a subclass
                param_name, _, last = param_name.rpartition(".")
                key = f"{last}.{key}"
            saved.setdefault(param_name, {})[key] = name
    states: dict[nn.Parameter, State] = {}
    for options in optimizer.param_groups:
        on_device = bool(options.get("capturable") or options.get("fused"))
        for param in options["params"]:
            places = params.shown[param]
            if not isinstance(param, FlatParameter) and isinstance(places[0].param, Fragment) and not param.numel():
                continue  # this rank has nothing of it, and so no state
            state: State = {}
            for place in places:
                for key, name in saved.get(params.known[place].names[0], {}).items():
                    if "." in key:
                        continue
                    if name in flattened or name in checkpoint.manifest.objects:
                        outline = flattened[name] if name in flattened else checkpoint.value(name)
                        state[key] = _filled(outline, name, param, params.known[place].layout, checkpoint)
                    elif key not in state:
                        entry, _ = checkpoint.tensors.places[name]
                        is_part = entry.shape == params.known[place].layout.shape and (entry.shape or key != "step")
                        kept = optimizer.state.get(param, {}).get(key) if param in optimizer.state else None
                        shape = tuple(param.shape) if is_part else entry.shape
                        if isinstance(kept, torch.Tensor) and (tuple(kept.shape), kept.dtype) == (shape, entry.dtype):
                            state[key] = kept
                        elif is_part:
                            state[key] = _like(param, entry.dtype)
                        else:
                            state[key] = torch.zeros(
                                shape, dtype=entry.dtype, device=param.device if on_device else None
                            )
            if state:
                states[param] = state
    return states


def _outline(value: Any) -> Any:
    """What is left of a state without its tensors: ``None`` for each, and of a subclass what makes it again."""
    if isinstance(value, torch.Tensor):
        local: Any = local_tensor(value)
        if not is_traceable_subclass(local):
            return None
        kind = type(local)
        return {_KIND: f"{kind.__module__}.{kind.__qualname__}", "context": local.__tensor_flatten__()[1]}
    if isinstance(value, dict):
        return {key: _outline(each) for key, each in value.items()}
    return type(value)(map(_outline, value)) if isinstance(value, (list, tuple)) else value


def _flattened(checkpoint: Checkpoint) -> State:
    """By name, the outlines of dicts and lists in the state of an optimizer: what they hold is saved under names of its
    own, as DCP does it, which keeps keys instead of an outline."""
    outlines = "optimizer.outlines."
    kept = (name for name in checkpoint.manifest.objects if name.startswith(outlines))
    found = {f"optimizer.state.{name.removeprefix(outlines)}": checkpoint.value(name) for name in kept}
    if found:
        return found
    for name, path in checkpoint.manifest.paths.items():
        if path[:2] == ("optimizer", "state") and len(path) > 4:
            inside = found.setdefault(".".join(map(str, path[:4])), {})
            for key in path[4:-1]:
                inside = inside.setdefault(key, {})
            inside[path[-1]] = checkpoint.value(name) if name in checkpoint.manifest.objects else None
    return {name: _with_lists(each) for name, each in found.items()}


def _with_lists(outline: Any) -> Any:
    """An outline with a list for each dict whose keys are numbers, as those of dicts are texts."""
    if not isinstance(outline, dict):
        return outline
    inside = {key: _with_lists(each) for key, each in outline.items()}
    is_list = all(type(key) is int for key in inside)
    return [inside[key] for key in sorted(inside)] if is_list else inside


def _filled(outline: Any, name: str, param: nn.Parameter, layout: Layout, checkpoint: Checkpoint) -> Any:
    """The other way round, with tensors to read into."""
    if outline is None and name in checkpoint.tensors:
        entry = checkpoint.tensors[name]
        return _like(param, entry.dtype) if entry.shape == layout.shape else torch.zeros(entry.shape, dtype=entry.dtype)
    if isinstance(outline, dict) and _KIND in outline:
        return _subclass(outline, name, param, layout, checkpoint)
    if isinstance(outline, dict):
        return {key: _filled(each, f"{name}.{key}", param, layout, checkpoint) for key, each in outline.items()}
    if isinstance(outline, (list, tuple)):
        inner = (_filled(each, f"{name}.{at}", param, layout, checkpoint) for at, each in enumerate(outline))
        return type(outline)(inner)
    return outline


def _subclass(outline: State, name: str, param: nn.Parameter, layout: Layout, checkpoint: Checkpoint) -> torch.Tensor:
    kinds: dict[str, Any] = {
        f"{kind.__module__}.{kind.__qualname__}": kind for kind in get_safe_globals() if isinstance(kind, type)
    }
    kind, local = kinds.get(outline[_KIND]), local_tensor(param.detach())
    if kind is None:
        raise ValueError(
            f"'{name}' is a {outline[_KIND]}: import what defines it, which must allow it by torch.serialization."
            f"add_safe_globals()"
        )
    if not layout.boxes:
        return _like(param, param.dtype)  # this rank has nothing of it
    inner, prefix = dict[str, torch.Tensor](), f"{name}."
    for each, entry in checkpoint.tensors.items():
        if each.startswith(prefix):
            attribute, _, box = each.removeprefix(prefix).partition(".")
            if not box:
                inner[attribute] = torch.zeros(local.shape, dtype=entry.dtype, device=local.device)
            elif box == _box_name(layout.boxes[0]):
                inner[attribute] = torch.zeros(entry.shape, dtype=entry.dtype, device=local.device)
            else:
                inner.setdefault(attribute, local)
    if any(each is local for each in inner.values()):
        raise ValueError(
            f"{checkpoint.path} has '{name}', a {outline[_KIND]}, for other parts of the parameter than this rank has: "
            f"load it on as many ranks, sharded alike, as saved it"
        )
    made: torch.Tensor = kind.__tensor_unflatten__(inner, outline["context"], local.shape, local.stride())
    return make_dtensor(made, altered_spec(spec_of(param), dtype=made.dtype)) if isinstance(param, DTensor) else made


def _like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that are laid out as a parameter is. (Memory that nobody writes to is not taken.)"""
    if isinstance(param, DTensor):
        local = torch.zeros_like(local_tensor(param.detach()), dtype=dtype)
        return make_dtensor(local, altered_spec(spec_of(param), dtype=dtype))
    return torch.zeros_like(param.detach(), dtype=dtype)


def load_optimizer(
    params: Parameters, optimizer: Optimizer, states: dict[nn.Parameter, State], checkpoint: Checkpoint, strict: bool
) -> None:
    """Lets an optimizer take over states, which were read, and the options that a checkpoint has. What it lacks stays
    as it is, unless ``strict``."""
    groups: dict[str, State] = {}
    prefix = "optimizer.param_groups."
    for name in (*checkpoint.tensors, *checkpoint.manifest.objects):
        if name.startswith(prefix):
            number, _, key = name.removeprefix(prefix).partition(".")
            is_value = name in checkpoint.manifest.objects
            groups.setdefault(number, {})[key] = checkpoint.value(name) if is_value else checkpoint.tensor(name)
    numbers = {param: i for i, param in enumerate(p for options in optimizer.param_groups for p in options["params"])}
    options_to_load = []
    for options in optimizer.param_groups:
        names = params.names_in(options)
        found = next((each for each in groups.values() if set(each.get("params", ())) == set(names)), None)
        if found is None and strict:
            raise ValueError(
                f"{checkpoint.path} has no parameter group of {names[:3]}{', ...' if names[3:] else ''}: make the "
                f"optimizer with the same groups of parameters, or leave it out of load()"
            )
        options_to_load.append({**(found or options), "params": [numbers[param] for param in options["params"]]})
    kept: dict[Any, State] = {} if strict else {**optimizer.state}
    states = kept | states
    by_number = {numbers[param]: dict(state) for param, state in states.items()}
    optimizer.load_state_dict({"state": by_number, "param_groups": options_to_load})
    for param, state in states.items():
        for key, value in state.items():  # optimizers cast state to the dtype of the parameter
            if not isinstance(value, torch.Tensor) or optimizer.state[param][key].dtype != value.dtype:
                optimizer.state[param][key] = value


def targets(contents: Contents, names: Container[str]) -> Iterator[Target]:
    """Where to read each box that a checkpoint has: of what is tied, under the first of its names that it has."""
    for box, tensor in zip(contents.boxes, contents.tensors, strict=True):
        if name := next((each for each in box[0] if each in names), None):
            yield name, box[1], box[2], tensor


def without_dtensors(value: Any, path: Path, found: dict[Path, DTensor]) -> Any:
    """A value with ``None`` for each DTensor in it, which is put in ``found`` by its path."""
    if isinstance(value, DTensor):
        found[path] = value
        return None
    if isinstance(value, Mapping):
        whole = copy.copy(value) if isinstance(value, dict) else dict(value)
        whole.update({key: without_dtensors(each, (*path, str(key)), found) for key, each in value.items()})
        return whole
    if type(value) in (list, tuple):
        return type(value)(without_dtensors(each, (*path, number), found) for number, each in enumerate(value))
    return value


def with_dtensors(value: Any, path: Path, found: Mapping[Path, DTensor]) -> Any:
    """The other way round."""
    if path in found:
        return found[path]
    if isinstance(value, dict):
        value.update({key: with_dtensors(each, (*path, str(key)), found) for key, each in value.items()})
    elif type(value) in (list, tuple):
        return type(value)(with_dtensors(each, (*path, number), found) for number, each in enumerate(value))
    return value


def _is_wrapped(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _clean(name: str) -> str:
    """The name in the plain model, not compiled either."""
    return plain_name(name).replace("_orig_mod.", "")
