"""What of a model, an optimizer and other objects goes into a checkpoint, and back: boxes of tensors, and values.

The names are those of ``torch.distributed.checkpoint.state_dict``, without any wrappers::

    model.<name>                         parameters, persistent buffers, extra state
    optimizer.state.<name>.<key>         the optimizer's state of a parameter
    optimizer.param_groups.<n>.<option>  its options, and the names of its parameters
    state.<name>.<n>                     what ranks gave under a name of their own
    sharded.<name>.<path>                DTensors in that
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.checkpoint.layout import Box, Layout, layout_of
from fullshard.checkpoint.reader import Checkpoint, CheckpointError, Target
from fullshard.group.flat import FLAT_NAME, FlatParameter, Fragment
from fullshard.group.parameter import local_tensor, plain_name
from fullshard.policies import warn
from fullshard.torch_private import altered_spec, make_dtensor, spec_of
from fullshard.wrapper.fsdp import FullyShardedDataParallel
from fullshard.wrapper.optim_state import Place, expect, shown_parameters
from fullshard.wrapper.settings import StateDictType

State = dict[str, Any]
Path = tuple[str | int, ...]


@dataclass
class Contents:
    """What this rank has of a checkpoint.

    Attributes:
        boxes: of tensors.
        values: what is no tensor, on ranks that speak for it; the layout says who else does.
        paths: of each name, the keys that lead there in a nested state dict.
    """

    boxes: list[Box] = field(default_factory=list)
    values: dict[str, tuple[Any, Layout]] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def add(self, paths: Iterable[Path], value: Any, layout: Layout | None = None) -> None:
        """Adds what is to be saved under each of ``paths``: a tensor, laid out like a parameter or not, or a value."""
        named = {".".join(map(str, path)): path for path in paths}
        self.paths |= named
        if isinstance(value, torch.Tensor):
            self.boxes += (layout or layout_of(value)).split(tuple(named), local_tensor(value))
        else:
            self.values.update((name, (value, layout or layout_of(torch.empty(0)))) for name in named)


class Parameters:
    """The parameters of a model, as optimizers have them, with what this rank holds of each original one.

    Attributes:
        shown: for each parameter that an optimizer may have, the original ones that lie in it.
        layouts: by place.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shown = shown_parameters(model)
        self.layouts = {
            place: layout_of(place.param or param) for param, places in self.shown.items() for place in places
        }
        prefixes = {module: _clean(f"{path}.*")[:-1] for path, module in model.named_modules()}
        everywhere: dict[nn.Parameter, list[str]] = {}
        if any(place.param is None for place in self.layouts):
            for name, param in model.named_parameters(remove_duplicate=False):
                everywhere.setdefault(param, []).append(_clean(name))
        self.names: dict[Place, list[str]] = {}
        for param, places in self.shown.items():
            for place in places:
                at = () if place.param is None else place.param.locations
                names = [f"{prefixes[each.module]}{each.name}" for each in at if each.module in prefixes]
                self.names[place] = list(dict.fromkeys(names or everywhere.get(param, [place.name])))

    def collect(self, contents: Contents, frozen: bool) -> None:
        """Adds the parameters; the frozen ones if ``frozen``."""
        for param, places in self.shown.items():
            for place in places if frozen or param.requires_grad else ():
                held = param if place.param is None else place.param.held
                if held.is_meta:
                    raise CheckpointError(f"parameter '{place.name}' is on the meta device: call to_empty() first")
                layout = self.layouts[place]
                contents.add((("model", name) for name in self.names[place]), local_tensor(held), layout)

    def collect_state(self, contents: Contents, states: Mapping[Any, State], everyone: bool = False) -> None:
        """Adds states of an optimizer; ``everyone``: also values that belong to all of a parameter, on all ranks."""
        expect(self.shown, states, "the model has no such parameter of the optimizer's")
        for param, state in states.items():
            for place in self.shown[param]:
                layout = self.layouts[place]
                for key, value in state.items():
                    path = ("optimizer", "state", self.names[place][0], key)
                    if isinstance(value, DTensor):
                        contents.add([path], value)
                    elif not isinstance(value, torch.Tensor) or value.ndim == 0 < param.ndim:
                        if everyone or layout.has_first:
                            whole = layout_of(torch.empty(value.shape if isinstance(value, torch.Tensor) else 0))
                            contents.add([path], value, Layout(whole.shape, whole.boxes, layout.copies))
                    elif value.shape == param.shape:
                        part = place.param.part_in(value) if isinstance(param, FlatParameter) else value
                        contents.add([path], part, layout)
                    else:
                        raise ValueError(
                            f"the state '{key}' of parameter '{place.name}' has the shape {tuple(value.shape)}, "
                            f"and the parameter {tuple(param.shape)}: it cannot be saved"
                        )

    def collect_options(self, contents: Contents, optimizer: Optimizer) -> None:
        """Adds the options of an optimizer."""
        for number, options in enumerate(optimizer.param_groups):
            for key, value in {**options, "params": self.names_in(options)}.items():
                contents.add([("optimizer", "param_groups", number, key)], value)

    def names_in(self, options: State) -> list[str]:
        expect(self.shown, options["params"], "the model has no such parameter of the optimizer's")
        return [self.names[place][0] for param in options["params"] for place in self.shown[param]]

    def rest(self) -> State:
        """What the model has beside parameters: persistent buffers, extra state, what hooks add."""
        if is_wrapped := _is_wrapped(self.model):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.LOCAL_STATE_DICT):
                    saved = self.model.state_dict()
        else:
            saved = self.model.state_dict(keep_vars=True)  # in half the time
        known = {name for names in self.names.values() for name in names}
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
        for group in {place.group for place in self.layouts if place.group is not None}:
            group.writes += 1


def new_states(params: Parameters, optimizer: Optimizer, checkpoint: Checkpoint) -> dict[nn.Parameter, State]:
    """For each parameter of an optimizer the state that a checkpoint has of it, with tensors to read into.

    Tensors of the same shape and dtype that the optimizer has already are taken.
    """
    saved: dict[str, dict[str, str]] = {}
    prefix = "optimizer.state."
    for name in (*checkpoint.tensors, *checkpoint.manifest.objects):
        if name.startswith(prefix):
            param_name, _, key = name.removeprefix(prefix).rpartition(".")
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
                for key, name in saved.get(params.names[place][0], {}).items():
                    if name in checkpoint.manifest.objects:
                        state[key] = checkpoint.value(name)
                    elif key not in state:
                        entry = checkpoint.tensors[name]
                        is_part = entry.shape == params.layouts[place].shape and (entry.shape or key != "step")
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


def _like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that are laid out as a parameter is. (Memory that nobody writes to is not taken.)"""
    if isinstance(param, DTensor):
        local = torch.zeros_like(local_tensor(param.detach()), dtype=dtype)
        return make_dtensor(local, altered_spec(spec_of(param), dtype=dtype))
    return torch.zeros_like(param.detach(), dtype=dtype)


def load_optimizer(
    params: Parameters, optimizer: Optimizer, states: dict[nn.Parameter, State], checkpoint: Checkpoint
) -> None:
    """Lets an optimizer take over states, which were read, and the options that a checkpoint has."""
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
        if found is None:
            raise ValueError(
                f"{checkpoint.path} has no parameter group of {names[:3]}{', ...' if names[3:] else ''}: make the "
                f"optimizer with the same groups of parameters, or leave it out of load()"
            )
        options_to_load.append({**found, "params": [numbers[param] for param in options["params"]]})
    by_number = {numbers[param]: dict(state) for param, state in states.items()}
    optimizer.load_state_dict({"state": by_number, "param_groups": options_to_load})
    for param, state in states.items():
        for key, value in state.items():  # optimizers cast state to the dtype of the parameter
            if isinstance(value, torch.Tensor) and optimizer.state[param][key].dtype != value.dtype:
                optimizer.state[param][key] = value


def targets(contents: Contents) -> Iterator[Target]:
    """Where to read each box: under one of its names, as what is tied was saved under each."""
    return (Target(box.names[0], box.shape, box.offsets, box.tensor) for box in contents.boxes)


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
