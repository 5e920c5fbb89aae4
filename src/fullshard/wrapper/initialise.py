"""Prepares a module whose parameters will be flattened: checks it, materializes it, and synchronizes its values.

Owns these steps, one function each, in the order in which the constructor calls them. They work on modules, tensors and
ranks, without groups or hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullshard.comm.process_group import broadcast
from fullshard.device import compute_device as current_device
from fullshard.device import default_device_type
from fullshard.group.mesh import DataMesh
from fullshard.group.owners import owner_of
from fullshard.policies import expect, warn
from fullshard.schedule.unit import unit_of
from fullshard.torch_private import after_accumulation, plain_parts, replicated
from fullshard.wrapper.flat import FlatParameter

_BUCKET_BYTES = 250 * 1024 * 1024


class Ignored(NamedTuple):
    """Modules and tensors that are not sharded. If :func:`materialize` makes new tensors, it replaces them here."""

    modules: set[nn.Module]
    params: set[nn.Parameter]
    buffers: set[Tensor]


def ignored(module: nn.Module, ignored_modules: Any, ignored_states: Any, nested: Iterable[Ignored] = ()) -> Ignored:
    """The modules and tensors to ignore: those that the arguments name, all inside of these that is not sharded, and
    what ``nested`` instances ignore."""
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("ignored_modules and ignored_states are both given: give ignored_states, which takes either")
    name, given = "ignored_states", ignored_states
    if ignored_states is None:
        name, given = "ignored_modules", () if ignored_modules is None else ignored_modules
    expect(isinstance(given, Iterable), name, given, "an iterable")
    elements = list(given)
    kinds = (nn.Module,) if ignored_states is None else (nn.Module, nn.Parameter)
    if not any(all(isinstance(element, kind) for element in elements) for kind in kinds):
        expected = " or all ".join(f"nn.{kind.__name__}" for kind in kinds)
        raise ValueError(f"{name} must be all {expected}, got {sorted({type(each).__name__ for each in elements})}")
    roots = [element for element in elements if isinstance(element, nn.Module)]
    for root in roots:
        if unit_of(root) is not None:
            raise ValueError(f"{name} has a {type(root).__name__} that is sharded already: it cannot be ignored")
    roots += replicated([module])
    modules = {inner for root in roots for inner in root.modules() if unit_of(inner) is None}
    if module in modules:
        warn(f"{name} has the module that is to be wrapped, a {type(module).__name__}: nothing of it will be sharded")
    params = {element for element in elements if isinstance(element, nn.Parameter)}
    params.update(param for inner in modules for param in inner.parameters())
    buffers = {buffer for inner in modules for buffer in inner.buffers()}
    for other in nested:
        modules |= other.modules
        params |= other.params
        buffers |= other.buffers
    return Ignored(modules, {param for param in params if owner_of(param) is None}, buffers)


def managed_modules(root: nn.Module, but: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """``root`` and the modules inside of it that are not sharded yet, level by level. PyTorch's FSDP initializes
    modules in this order, which determines the random numbers that they draw."""
    found, seen = [root], {root, *but}
    for module in found:  # found grows in the loop
        for child in module.children():
            if child not in seen and unit_of(child) is None:
                seen.add(child)
                found.append(child)
    return found


def compute_device(
    params: Iterable[Tensor], device_id: int | torch.device | str | None, device_type: str | None = None
) -> torch.device:
    """The device on which parameters are gathered: ``device_id``, else their own device unless it is the CPU, else the
    current device of the type. Parameters that are sharded already do not count, as they may be offloaded."""
    lie = list(dict.fromkeys(param.device for param in params if not param.is_meta and owner_of(param) is None))
    elsewhere = [device for device in lie if device.type != "cpu"]
    if len(elsewhere) > 1 or (elsewhere and len(lie) > 1 and device_id is None):
        several = ", ".join(map(str, lie))
        raise RuntimeError(f"the parameters lie on several devices, {several}: move them to one, or give device_id")
    if device_id is None:
        return elsewhere[0] if elsewhere else current_device(device_type or default_device_type())
    device = torch.device(device_id)
    if device.type != "cpu" and device.index is None:
        device = current_device(device.type)
        warn(f"device_id is {device_id}, without an index: the current device, {device}, is used. Give the index")
    if elsewhere and elsewhere[0] != device:
        raise ValueError(f"device_id is {device}, but parameters lie on {elsewhere[0]}: they must agree")
    return torch.device(device.type) if device.type == "cpu" else device


def materialize(modules: list[nn.Module], param_init_fn: Any, device: torch.device, but: Ignored | None = None) -> None:
    """Give memory and values to parameters and buffers on the meta device, if there are any, and ``device`` has memory.

    ``param_init_fn`` is called for each module, and must know which modules need it. Without it, each module with
    tensors on meta gets empty memory, and its ``reset_parameters()`` is called. If that fails, a warning names the
    module and the error is raised. Tensors that several modules share stay shared, with the values of the first module.
    A module is not initialized because of tensors in ``but``; if it is initialized, they are replaced in ``but``.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(f"param_init_fn must be callable, got {param_init_fn!r}")
    but = but or Ignored(set(), set(), set())
    names = {module: name for name, module in modules[0].named_modules()}
    spared: set[Tensor] = but.params | but.buffers

    def on_meta(module: nn.Module) -> list[str]:
        return [name for _, name, tensor in _own([module]) if tensor.is_meta and tensor not in spared]

    before = [entry for entry in _own(modules) if entry[2].is_meta]
    if device.type == "meta" or not any(map(on_meta, modules)):
        return
    for module in modules:
        if param_init_fn is not None:
            param_init_fn(module)
        elif on_meta(module):
            try:
                with torch.no_grad():
                    module.to_empty(device=device, recurse=False)
                    module.reset_parameters()  # type: ignore[operator]
            except BaseException as error:
                warn(
                    f"{_where(module, names)} has tensors on the meta device, and its reset_parameters() failed: "
                    f"{error}. Write one for what the module itself has, or give param_init_fn",
                )
                raise
    made: dict[Tensor, Tensor] = {}
    for tensors, name, old in before:
        if (now := tensors.get(name)) is not None and not now.is_meta:
            made.setdefault(old, now)
    for tensors, name, old in before:
        if old in made and name in tensors:
            tensors[name] = made[old]
    for ignored_tensors in (but.params, but.buffers):
        known: set[Any] = {made.get(tensor, tensor) for tensor in ignored_tensors}
        ignored_tensors.clear()
        ignored_tensors.update(known)
    for module in modules:
        if left := on_meta(module):
            raise RuntimeError(
                f"param_init_fn left {left} of {_where(module, names)} on the meta device: it has to initialize what "
                f"each module itself has"
            )


def _own(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """The parameters and buffers of each module itself: yields the dict that has it, its name there, and the tensor."""
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            yield from ((tensors, name, tensor) for name, tensor in tensors.items() if tensor is not None)


def _where(module: nn.Module, names: Mapping[nn.Module, str]) -> str:
    return f"'{names[module]}', a {type(module).__name__}," if names.get(module) else f"the {type(module).__name__}"


def check_flattenable(params: Mapping[str, nn.Parameter], use_orig_params: bool, were_moved: bool = True) -> None:
    """Raise a ValueError for parameters that cannot lie in one flat parameter. Dtypes may differ, and devices until
    they ``were_moved`` to one."""
    first = next(iter(params), "")
    for name, param in params.items():
        if not param.is_floating_point():
            problem = f"'{name}' is {param.dtype}, which is not floating-point: make it a buffer, or ignore it"
        elif hasattr(param, "fsdp_pre_all_gather"):
            problem = (
                f"'{name}' is a {type(param).__name__}, which says itself how it is gathered and cannot lie in a flat "
                f"parameter: shard its module with fully_shard, which asks it"
            )
        elif not use_orig_params and after_accumulation([param]):
            problem = (
                f"'{name}' has hooks or optimizers that wait for its gradient in backward, and would have none: give "
                f"them to the flat parameters, after wrapping, or set use_orig_params=True"
            )
        elif isinstance(param, FlatParameter):
            problem = f"'{name}' is a FlatParameter, made of other parameters: wrap the module that it was made for"
        elif were_moved and param.device != params[first].device:
            problem = f"'{name}' lies on {param.device}, and '{first}' on {params[first].device}: move them to one"
        elif param.requires_grad != params[first].requires_grad and not use_orig_params:
            frozen, trained = (first, name) if param.requires_grad else (name, first)
            problem = f"'{frozen}' is frozen and '{trained}' is not: wrap them separately, or set use_orig_params=True"
        else:
            continue
        raise ValueError(f"parameter {problem}")


def sync_module_states(
    params: Iterable[Tensor], buffers: Iterable[Tensor], data: DataMesh, device: torch.device
) -> None:
    """Copies the values of a mesh's first rank to all its ranks. All of them must call it. Tensors may have any dtype,
    layout and device; they are sent from ``device``. A buffer is sent only once, even if several calls have it: the
    outer of nested instances also have the buffers of the inner ones."""
    new = [buffer for buffer in dict.fromkeys(buffers) if not getattr(buffer, "_fullshard_synced", False)]
    for buffer in new:
        buffer._fullshard_synced = True  # type: ignore[attr-defined]
    # From the first rank along its column, and from there along each row.
    groups = [group for group in (data.replicate_group, data.shard_group) if group is not None and group.size() > 1]
    if not groups:
        return
    with torch.no_grad():
        parts = [part for tensor in (*new, *params) for part in plain_parts(tensor.detach())]
        plain = [part for part in parts if part.numel() > 0 and not part.is_meta]
        plain.sort(key=lambda part: -part.itemsize)  # so that each is aligned in the message
        while plain:
            ends = accumulate(tensor.nbytes for tensor in plain)
            count = max(1, sum(end <= _BUCKET_BYTES for end in ends))
            bucket, plain = plain[:count], plain[count:]
            pieces = [tensor.reshape(-1).view(torch.uint8) for tensor in bucket]  # not every backend knows every dtype
            message = (torch.cat(pieces) if count > 1 else pieces[0]).to(device)
            for group in groups:
                broadcast(message, group, "values from the first rank")
            for tensor, piece in zip(bucket, message.split([tensor.nbytes for tensor in bucket]), strict=True):
                tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
