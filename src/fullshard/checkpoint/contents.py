"""The contents of a checkpoint: which tensors and values of a model, an optimizer and other objects are saved.

The names are those of ``torch.distributed.checkpoint.state_dict``, without any wrappers::

    model.<name>                         parameters, persistent buffers, extra state
    optimizer.state.<name>.<key>         optimizer state of a parameter; for lists and dicts, their items
    optimizer.outlines.<name>.<key>      such a list or dict, with None in place of tensors
    optimizer.param_groups.<n>.<option>  options of a parameter group, and the names of its parameters
    wire_feedback.<name>                 what encodings have lost of a parameter's gradients, see WirePolicy
    state.<name>.<n>                     further state that users gave to save(), by name
    sharded.<name>.<path>                DTensors in that state
    replicas.<r>.optimizer.state…        the same of replica r > 0, if replicas train apart
    <name>.<attribute>                   a tensor inside of a tensor subclass, if it is cut like the subclass
    <name>.<attribute>.[0:32,0:64]       the same if its shape differs: one tensor for each rank's part
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.serialization import get_safe_globals

from fullshard.checkpoint.blocks import CheckpointError
from fullshard.checkpoint.layout import SCALES, TABLES, Box, Layout, layout_of
from fullshard.checkpoint.reader import Checkpoint, Target
from fullshard.checkpoint.selection import Selection
from fullshard.group.parameter import local_tensor, plain_name
from fullshard.optim.disk_step import state_like
from fullshard.original_parameters import GroupParameters, OriginalParameter, expect, holds_several, shown_parameters
from fullshard.policies import warn
from fullshard.schedule.unit import units_in
from fullshard.torch_private import altered_spec, is_traceable_subclass, make_dtensor, spec_of
from fullshard.tree import tensors

#: Key for the class of a tensor subclass, in the dict that replaces it in an outline.
_KIND = "a tensor subclass"
State = dict[str, Any]
Path = tuple[str | int, ...]


@dataclass
class Contents:
    """This rank's part of a checkpoint."""

    boxes: list[Box] = field(default_factory=list)
    #: The values of each box. They share the memory of the model and the optimizer.
    tensors: list[torch.Tensor] = field(default_factory=list)
    #: Values that are not tensors, on the ranks that may write them; the layout names those ranks.
    values: dict[str, tuple[Any, Layout]] = field(default_factory=dict)
    #: For each name, the keys that lead to it in a nested state dict.
    paths: dict[str, Path] = field(default_factory=dict)

    def add(self, paths: Mapping[str, Path], value: Any, layout: Layout | None = None) -> None:
        """Adds a tensor or another value, to be saved under all these names. A tensor may have a parameter's layout."""
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

    def targets(self, names: Container[str]) -> Iterator[Target]:
        """What to read: the boxes that a checkpoint has. A tied tensor is read by the first of its names there."""
        for box, tensor in zip(self.boxes, self.tensors, strict=True):
            if name := next((each for each in box[0] if each in names), None):
                yield name, box[1], box[2], tensor

    def is_partial(self, ranks: int) -> bool:
        """Whether a tensor is distributed over fewer ranks than that."""
        return any(box.copies.among < ranks for box in self.boxes)

    def keys_with_other_holders(self, ranks: int) -> list[str]:
        """Keys of what this rank holds, and what others of ``ranks`` may hold without this rank's knowledge.

        These are whole tensors, such as buffers, which with pipelines only some ranks have; and tensors over fewer
        ranks, such as parameters that tensor parallel did not cut.
        """
        copies = {name: layout.copies for name, (_, layout) in self.values.items()}
        names = {name for name, each in copies.items() if each.ranks == "all" or each.among < ranks}
        return sorted(names | {key for box in self.boxes if (key := box.key(ranks))})

    def name_state_of(self, replica: int, replicas: int, or_first: bool = False) -> None:
        """Gives the optimizer state the names of one of several replicas that train apart. The first replica has the
        usual names. With ``or_first`` all replicas keep the usual names too, for checkpoints that lack a replica."""
        for at, box in enumerate(self.boxes):
            if box.names[0].startswith("optimizer.state."):
                own = {f"replicas.{replica}.{name}": name for name in box.names} if replica else {}
                self.paths |= {new: ("replicas", replica, *self.paths[name]) for new, name in own.items()}
                names = (*own, *box.names) if or_first else (*own,) or box.names
                apart = box.copies.size // replicas  # the replicas are the first dim of the mesh
                copies = box.copies._replace(number=box.copies.number % apart, size=apart)
                self.boxes[at] = box._replace(names=names, copies=copies)

    def _add_inner(self, paths: list[Path], local: Any, layout: Layout) -> None:
        """Adds the inner tensors of a subclass. The one with the shape and dtype of the subclass gets its name."""
        inner = {name: getattr(local, name).detach() for name in local.__tensor_flatten__()[0]}
        alike = [name for name, each in inner.items() if (each.shape, each.dtype) == (local.shape, local.dtype)]
        itself = alike[0] if alike and paths[0][0] != "optimizer" else None  # an optimizer's outline names the class
        for name, each in inner.items():
            inside = paths if name == itself else [(*path, name) for path in paths]
            if each.shape == local.shape:
                self.add(named(*inside), each, layout)
            elif (blocks := layout.of_inner(name, local.numel(), each)) is not None:
                self.add(named(*inside), each, blocks)
            else:
                whole = Layout(tuple(each.shape), (((0,) * each.ndim, tuple(each.shape)),), layout.copies)
                for box in layout.boxes:
                    self.add(named(*((*path, _box_name(box)) for path in inside)), each, whole)


def named(*paths: Path) -> dict[str, Path]:
    return {".".join(map(str, path)): path for path in paths}


def _box_name(box: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    return f"[{','.join(f'{at}:{at + size}' for at, size in zip(*box, strict=True))}]"


class KnownParameter(NamedTuple):
    """The layout of a parameter, and its names in the plain model, without wrappers."""

    layout: Layout
    names: list[str]


class Parameters:
    """The parameters of a model as optimizers have them, and this rank's part of each original parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.found = model, list[GroupParameters]()  # those of each group, kept for the next save
        #: For each parameter that an optimizer may have, the original parameters in it.
        self.shown = shown_parameters(model, self.found)
        self.known: dict[OriginalParameter, KnownParameter] = {}
        for found in self.found:
            if found.saved is None:
                found.saved = self._known_of(found), None, []
            self.known |= found.saved[0]
        self.groups = dict.fromkeys(each.group for each in self.known if each.group is not None)

    def _known_of(self, found: GroupParameters) -> dict[OriginalParameter, KnownParameter]:
        known, everywhere = dict[OriginalParameter, KnownParameter](), dict[nn.Parameter, list[str]]()
        prefixes = {module: _clean(f"{path}*")[:-1] for module, path in found.paths.items() if path is not None}
        if found.shown and not prefixes:  # they belong to no group
            for name, param in self.model.named_parameters(remove_duplicate=False):
                everywhere.setdefault(param, []).append(_clean(name))
        for param, originals in found.shown.items():
            for original in originals:
                at = () if original.param is None else original.param.locations
                names = [prefixes[each.module] + each.name for each in at if each.module in prefixes]
                names = list(dict.fromkeys(names or everywhere.get(param, [original.name])))
                known[original] = KnownParameter(layout_of(original.param or param), names)
        return known

    def collect(self, contents: Contents, frozen: bool) -> None:
        """Adds the parameters, frozen ones only if ``frozen``."""
        for found in self.found:
            known, part, holders = found.saved
            if part is None or not frozen:
                part, holders = Contents(), []
                for param, originals in found.shown.items():
                    for original in originals if frozen or param.requires_grad else ():
                        held = param if original.param is None else original.param.values
                        if held.is_meta:
                            raise CheckpointError(f"'{original.name}' is on the meta device: call to_empty() first")
                        paths: dict[str, Path] = {f"model.{name}": ("model", name) for name in known[original].names}
                        part.add(paths, held, known[original].layout)
                        holders += [param] * (len(part.boxes) - len(holders))
                if frozen and all(map(is_, map(local_tensor, holders), part.tensors)):
                    part.tensors.clear()  # which may be others the next time
                    found.saved = known, part, holders
            contents.boxes += part.boxes
            contents.tensors += part.tensors or map(local_tensor, holders)
            contents.paths |= part.paths

    def collect_state(self, contents: Contents, states: Mapping[Any, State], everyone: bool = False) -> None:
        """Adds the state of an optimizer. Values that belong to a whole parameter are added on one rank, or, with
        ``everyone``, on all ranks."""
        expect(self.shown, states)
        for param, state in states.items():
            for original in self.shown[param]:
                for key, value in state.items():
                    path = ("optimizer", "state", self.known[original].names[0], key)
                    self._collect_value(contents, param, original, path, value, everyone)

    def _collect_value(
        self,
        contents: Contents,
        param: nn.Parameter,
        original: OriginalParameter,
        path: Path,
        value: Any,
        everyone: bool,
    ) -> None:
        layout, has_several, problem = self.known[original].layout, holds_several(param), ""
        if isinstance(value, torch.Tensor) and value.ndim and value.shape != param.shape:
            if path[-1] in SCALES or path[-1] in TABLES:
                blocks = layout.of_inner(str(path[-1]), local_tensor(param).numel(), value)
                if blocks is not None:
                    contents.add(named(path), value, blocks)
                    return
            is_whole = layout.boxes == (((0,) * len(layout.shape), layout.shape),)  # state may then have any shape
            if has_several or not is_whole or isinstance(value, DTensor):
                problem = (
                    f"has the shape {tuple(value.shape)}, but this rank's part of the parameter has the shape "
                    f"{tuple(param.shape)}: it cannot be saved or loaded, because it cannot be cut for other ranks"
                )
        elif (has_several or layout.order is not None) and is_traceable_subclass(value):
            problem = (
                f"is a {type(value).__name__}, which FullyShardedDataParallel cannot cut: shard the model with "
                f"fully_shard, or use an optimizer with plain state"
            )
        if problem:
            raise ValueError(f"the state '{'.'.join(map(str, path[3:]))}' of parameter '{original.name}' {problem}")
        if isinstance(value, DTensor) or is_traceable_subclass(value):
            alike = not isinstance(value, DTensor) or (isinstance(param, DTensor) and spec_of(value) is spec_of(param))
            contents.add(named(path), value, layout if alike else None)
            value = _outline(value)
            if value is None or not layout.has_first:
                return
        elif isinstance(value, torch.Tensor) and value.shape == param.shape:
            contents.add(named(path), original.param.part_in(value) if has_several else value, layout)
            return
        elif isinstance(value, dict) or (isinstance(value, (list, tuple)) and any(True for _ in tensors(value))):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                self._collect_value(contents, param, original, (*path, key), each, everyone)
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
        return [self.known[original].names[0] for param in options["params"] for original in self.shown[param]]

    def other_values(self) -> State:
        """The model's state that is not parameters: persistent buffers, extra state, and what hooks add."""
        is_wrapped = _is_wrapped(self.model)
        with ExitStack() as contexts:
            for unit in units_in(self.model) if is_wrapped else ():
                wrapper: Any = unit.modules[0]
                contexts.enter_context(wrapper._state_dict_in_place())
            saved = self.model.state_dict(keep_vars=not is_wrapped)  # keep_vars takes half the time
        known = {name for each in self.known.values() for name in each.names}
        return {
            name: value
            for name, value in saved.items()
            if name not in known
            and _clean(name) not in known
            and not (is_wrapped and name.rpartition(".")[2].startswith("_flat_param"))
        }

    def load_other_values(self, other_values: State) -> None:
        """Loads values for the names of :meth:`other_values` into the model."""
        if not _is_wrapped(self.model):
            if other_values:
                self.model.load_state_dict(other_values, strict=False)
            return
        buffers = {_clean(name): buffer for name, buffer in self.model.named_buffers(remove_duplicate=False)}
        modules = {_clean(name): module for name, module in self.model.named_modules()}
        for name, value in other_values.items():
            path, _, last = name.rpartition(".")
            if name in buffers:
                with torch.no_grad():
                    buffers[name].copy_(value)
            elif last == "_extra_state" and path in modules:
                modules[path].set_extra_state(value)
            else:
                warn(f"'{name}' is in the checkpoint but is not a buffer of the wrapped model: it is not loaded")

    def written(self) -> None:
        """Counts a write to the shards of all groups."""
        for group in self.groups:
            group.writes += 1


def new_states(params: Parameters, optimizer: Optimizer, checkpoint: Checkpoint) -> dict[nn.Parameter, State]:
    """For each parameter of an optimizer, the state that a checkpoint has for it, with tensors to read into. The
    optimizer's own tensors are used if they have the same shape and dtype."""
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
    states, positions = dict[nn.Parameter, State](), checkpoint.tensors.positions
    for options in optimizer.param_groups:
        on_device = bool(options.get("capturable") or options.get("fused"))
        for param in options["params"]:
            originals = params.shown[param]
            if not holds_several(param) and originals[0].has_run and not param.numel():
                continue  # this rank has no elements of it, and so no state
            if not holds_several(param) and not params.known[originals[0]].layout.boxes:
                layout, names = params.known[originals[0]]
                keys = saved.get(names[0], {}).items()
                shapes = {positions[name][0].shape for key, name in keys if "." not in key and name in positions}
                if not shapes <= {(), layout.shape}:
                    continue  # this rank has none of the blocks, nor the matrix, that this is state of
            state: State = {}
            for original in originals:
                layout, names = params.known[original]
                for key, name in saved.get(names[0], {}).items():
                    if "." in key:
                        continue
                    if name in flattened or name in checkpoint.manifest.objects:
                        outline = flattened[name] if name in flattened else checkpoint.value(name)
                        state[key] = _filled(outline, name, param, layout, checkpoint)
                    elif key not in state:
                        kind, _ = positions[name]
                        is_part = kind.shape == layout.shape and (kind.shape or key != "step")
                        if type(optimizer).__name__ == "Adafactor" and is_part and not {*layout.boxes} <= kind.parts():
                            # it computes differently on other parts
                            raise cut_differently(f"'{name}', state of Adafactor", checkpoint)
                        shape = tuple(param.shape) if is_part else kind.shape
                        if layout.keeps_blocks and key in SCALES:
                            shape = layout.inner_sizes(key, local_tensor(param).shape, shape)
                        own = optimizer.state[param].get(key) if param in optimizer.state else None
                        if isinstance(own, torch.Tensor) and is_traceable_subclass(local_tensor(own)):
                            own = None  # its inner tensors are not what the checkpoint has
                        if isinstance(own, torch.Tensor) and (tuple(own.shape), own.dtype) == (shape, kind.dtype):
                            state[key] = own
                        elif is_part:
                            state[key] = _like(param, kind.dtype)
                        else:
                            device = param.device if on_device else None
                            state[key] = torch.zeros(shape, dtype=kind.dtype, device=device)
            if state:
                states[param] = state
    return states


def cut_differently(what: str, checkpoint: Checkpoint) -> ValueError:
    """The error to raise if a checkpoint has something for other parts of parameters than this rank's."""
    return ValueError(
        f"{checkpoint.path} has {what}, for different parts of parameters than this rank has: load it on the number of "
        f"ranks that saved it, with the same sharding"
    )


def _outline(value: Any) -> Any:
    """A state without its tensors: ``None`` for a plain tensor, and for a subclass what is needed to make it again."""
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
    """By name, the outlines of dicts and lists in an optimizer's state. Their items are saved under names of their own,
    as DCP does it. DCP has no outlines, but stores the keys that lead to each item."""
    outlines = "optimizer.outlines."
    outlined = (name for name in checkpoint.manifest.objects if name.startswith(outlines))
    found = {f"optimizer.state.{name.removeprefix(outlines)}": checkpoint.value(name) for name in outlined}
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
    """An outline with a list for each dict whose keys are numbers. The keys of real dicts are strings."""
    if not isinstance(outline, dict):
        return outline
    inside = {key: _with_lists(each) for key, each in outline.items()}
    is_list = all(type(key) is int for key in inside)
    return [inside[key] for key in sorted(inside)] if is_list else inside


def _filled(outline: Any, name: str, param: nn.Parameter, layout: Layout, checkpoint: Checkpoint) -> Any:
    """The reverse of :func:`_outline`: the state, with tensors to read into."""
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
            f"'{name}' is a {outline[_KIND]}: import the module that defines it, which must register it with "
            f"torch.serialization.add_safe_globals()"
        )
    if not layout.boxes:
        return _like(param, param.dtype)  # this rank has no elements of it
    inner, prefix = dict[str, torch.Tensor](), f"{name}."
    for each, entry in checkpoint.tensors.items():
        if each.startswith(prefix):
            attribute, _, box = each.removeprefix(prefix).partition(".")
            if not box:
                sizes = layout.inner_sizes(attribute, local.shape, entry.shape)
                inner[attribute] = torch.zeros(sizes, dtype=entry.dtype, device=local.device)
            elif box == _box_name(layout.boxes[0]):
                inner[attribute] = torch.zeros(entry.shape, dtype=entry.dtype, device=local.device)
            else:
                inner.setdefault(attribute, local)
    is_cut = layout.order is not None or holds_several(param)
    if is_cut or any(each is local for each in inner.values()):
        raise cut_differently(f"'{name}', a {outline[_KIND]}", checkpoint)
    context = layout.inner_context(outline["context"], local.shape)
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, local.shape, local.stride())
    return make_dtensor(made, altered_spec(spec_of(param), dtype=made.dtype)) if isinstance(param, DTensor) else made


def _like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros with a parameter's layout. (The system allocates their memory only when it is written.)"""
    return state_like(param, dtype) if isinstance(param, DTensor) else torch.zeros_like(param.detach(), dtype=dtype)


def load_optimizer(
    params: Parameters,
    optimizer: Optimizer,
    states: dict[nn.Parameter, State],
    checkpoint: Checkpoint,
    selection: Selection,
) -> None:
    """Loads states that were read, and the options in a checkpoint, into an optimizer. State that the checkpoint lacks
    stays as it is unless all of it is to be loaded."""
    is_whole = selection.strict and not selection.only
    groups: dict[str, State] = {}
    prefix = "optimizer.param_groups."
    for name in (*checkpoint.tensors, *checkpoint.manifest.objects):
        if name.startswith(prefix):
            number, _, key = name.removeprefix(prefix).partition(".")
            is_value = name in checkpoint.manifest.objects
            groups.setdefault(number, {})[key] = checkpoint.value(name) if is_value else checkpoint.tensor(name)
    for each in groups.values():
        each["params"] = {selection.in_model(name) for name in each.get("params", ())}
    numbers = {param: i for i, param in enumerate(p for options in optimizer.param_groups for p in options["params"])}
    options_to_load = []
    for options in optimizer.param_groups:
        names = params.names_in(options)
        found = next((each for each in groups.values() if each["params"] == set(names)), None)
        if found is None and is_whole:
            raise ValueError(
                f"{checkpoint.path} has no parameter group of {names[:3]}{', ...' if names[3:] else ''}: make the "
                f"optimizer with the same groups of parameters, or leave it out of load()"
            )
        options_to_load.append({**(found or options), "params": [numbers[param] for param in options["params"]]})
    others: dict[Any, State] = {} if is_whole else {**optimizer.state}
    states = others | states
    by_number = {numbers[param]: dict(state) for param, state in states.items()}
    optimizer.load_state_dict({"state": by_number, "param_groups": options_to_load})
    for param, state in states.items():
        for key, value in state.items():  # optimizers cast state to the dtype of the parameter
            if not isinstance(value, torch.Tensor) or optimizer.state[param][key].dtype != value.dtype:
                optimizer.state[param][key] = value


def _is_wrapped(model: nn.Module) -> bool:
    return any(unit.is_wrapper for unit in units_in(model))


def _clean(name: str) -> str:
    """The name in the plain model, without wrappers and without ``torch.compile``."""
    return plain_name(name).replace("_orig_mod.", "")
