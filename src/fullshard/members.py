"""The modules and parameters of a call of ``fully_shard``: which are free, and what speaks against sharding them.

Owns the search in the modules that are given, and the checks of their classes and attributes. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, MutableSequence, Sequence
from functools import cache
from typing import Any

import torch.nn as nn

from fullshard.group.owners import owner_of
from fullshard.group.parameter import Location
from fullshard.module import FSDPModule
from fullshard.schedule.unit import unit_of
from fullshard.torch_private import replicated

#: Parameters, each with all its locations in modules.
Found = dict[nn.Parameter, list[Location]]
#: Attributes of every module. Of these only ``_parameters`` has parameters: the registered ones.
_OF_MODULES = frozenset(nn.Module().__dict__)


def root_modules(module: Any) -> tuple[nn.Module, ...]:
    """The modules of a call, without those that another one contains. Raises an error for those it cannot shard."""
    modules = [module] if isinstance(module, nn.Module) else list(module) if isinstance(module, Iterable) else []
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise ValueError(f"fully_shard expects a module or a list of modules, got {module!r}")
    for each in modules:
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: {type(each).__name__} is "
                f"never run itself. Apply it to each of its members, or give it a list of them"
            )
        refuse_torchs(each)
        if unit_of(each) is not None:
            raise AssertionError(f"fully_shard was already applied to this {type(each).__name__}: call it only once")
    inside = {id(inner) for each in modules for inner in each.modules() if inner is not each}
    return tuple(dict.fromkeys(each for each in modules if id(each) not in inside))


def refuse_torchs(module: nn.Module) -> None:
    """Raise ValueError if torch's FSDP has sharded ``module`` or a module inside. It recognizes these by their class
    names, because fullshard does not import torch's FSDP."""
    torch_classes = replicated([module])
    for name, inner in module.named_modules():
        for cls in type(inner).__mro__ if inner is module or inner not in torch_classes else ():
            known = cls.__name__ in ("FSDPModule", "FullyShardedDataParallel")
            if known and cls.__module__.startswith("torch.distributed."):
                which = f"'{name}' of this {type(module).__name__}" if name else f"this {type(module).__name__}"
                raise ValueError(
                    f"{which} was sharded by torch.distributed.fsdp before: shard the whole model either with it or "
                    f"with fullshard, and import fully_shard or FullyShardedDataParallel from that one only"
                )


@cache
def sharded_class(cls: type) -> type:
    """The class of a sharded module: ``FSDP<Name>(FSDPModule, <Name>)``, made once for each class."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})


def swapped_class(module: nn.Module) -> type:
    """The class that a module gets when it is sharded. Raises TypeError if it cannot get one."""
    cls: type = type(module)
    try:
        sharded = sharded_class(cls)
        object.__setattr__(module, "__class__", sharded)
        object.__setattr__(module, "__class__", cls)
    except Exception as error:
        raise TypeError(
            f"fully_shard gives a module a subclass of its class, and a {cls.__name__} cannot get one: {error}. Put it "
            f"into a module of an ordinary class and shard that, or use FullyShardedDataParallel"
        ) from error
    return sharded


def free_parameters(managed: Mapping[nn.Module, str], ignored: set[nn.Parameter]) -> Found:
    """The parameters of modules, given with their paths, that belong to no group yet, with their locations. Raises
    ValueError if one is to have sparse gradients."""
    found: Found = {}
    for module, path in managed.items():
        for name, param in module._parameters.items():
            if param is not None and param not in ignored and owner_of(param) is None:
                if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and param.requires_grad:
                    raise ValueError(
                        f"parameter '{path and f'{path}.'}{name}' of {module} has sparse gradients, which cannot be "
                        f"reduced with dense ones: use sparse=False, or ignored_params and reduce them yourself"
                    )
                found.setdefault(param, []).append(Location(module, name, path))
    return found


def managed_modules(modules: Sequence[nn.Module], but: Container[nn.Module] = ()) -> dict[nn.Module, str]:
    """The modules inside of ``modules`` that are not sharded yet, parents before children, each with its path; but not
    those inside of others."""
    inside = {inner for module in modules for inner in module.modules()}.difference(modules)
    passed = {inner for inner in inside if unit_of(inner) is not None or inner in but}  # with all below them
    return {inner: path for module in modules for path, inner in module.named_modules(passed)}


def check_modules(roots: Sequence[nn.Module], managed: Iterable[nn.Module]) -> None:
    """Raise ValueError if ``roots`` cannot be sharded, because parameters of the ``managed`` modules inside cannot be
    replaced, or belong to a module around them."""
    for module in managed:
        if not isinstance(module._parameters, dict):
            raise ValueError(
                f"a {type(module).__name__} keeps its parameters in a {type(module._parameters).__name__}, where they "
                f"cannot be replaced: shard the model before torch.jit.script or torch.jit.trace"
            )
        for param in [*module._parameters.values(), *(param for _, param in attribute_parameters(module))]:
            group, index = owner_of(param) or (None, 0)
            if group is not None and any(inner in roots for outer in group.modules for inner in outer.modules()):
                raise ValueError(
                    f"parameter '{group.params[index].name}' already belongs to a module that contains this "
                    f"{', '.join(type(root).__name__ for root in roots)}: apply fully_shard to the inner modules first "
                    f"and to those that contain them after"
                )


def attribute_parameters(module: nn.Module) -> list[tuple[tuple[Any, ...], nn.Parameter]]:
    """The parameters that a module keeps in attributes, or in lists, deques, dicts and tuples there, as ``nn.LSTM``
    does; each with the path of keys that leads to it. Raises ValueError if one is in a tuple, where it cannot be
    replaced."""
    found: list[tuple[tuple[Any, ...], nn.Parameter]] = []
    waiting: list[tuple[tuple[Any, ...], Any]] = [
        ((name,), value) for name, value in module.__dict__.items() if name not in _OF_MODULES
    ]
    seen: set[int] = set()
    for path, value in waiting:
        if isinstance(value, nn.Parameter):
            found.append((path, value))
        elif isinstance(value, tuple) and any(isinstance(each, nn.Parameter) for each in value):
            raise ValueError(
                f"a {type(module).__name__} keeps parameters in a tuple, its attribute '{path[0]}', where they cannot "
                f"be replaced by sharded and unsharded ones: keep them in a list"
            )
        elif isinstance(value, (MutableSequence, dict, tuple)) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [((*path, key), each) for key, each in items]
    return found
