"""Makes torch's own code that checks for torch's FSDP recognize fullshard too, without a call by the user.

Names in some modules of torch get values that support both libraries: for ``get_state_dict()``, ``set_state_dict()``
and similar functions, for pipeline stages, which then reduce once a step, and for ``replicate()``, which then skips
sharded modules. Owns also the time of the change: when something is first sharded, for modules that are imported by
then, and for other modules when they are imported. Nothing here imports them. A ``RuntimeWarning`` names what a release
of torch lacks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.group.owners import owner_of
from fullshard.module import FSDPModule
from fullshard.policies import warn
from fullshard.schedule.hooks import when_sharded
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import Unit, unit_of
from fullshard_at_start import AfterImport


def _wrappers() -> tuple[Any, ...]:
    """The class of wrapped modules, if the program has imported it."""
    module = sys.modules.get("fullshard.wrapper.fsdp")
    return () if module is None else (module.FullyShardedDataParallel,)


class _Both(type):
    """A class that represents both wrappers. Its static methods call those of the wrapper that the given model uses."""

    torch_class: Any

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.torch_class, *_wrappers()))

    def __getattr__(cls, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            model = next(each for each in (*args, *kwargs.values()) if isinstance(each, nn.Module))
            ours = [wrapper for wrapper in _wrappers() if wrapper.fsdp_modules(model)]
            return getattr(ours[0] if ours else cls.torch_class, name)(*args, **kwargs)

        return method


class _Hybrid(list[Any]):
    """The strategies with replicas, of both libraries: they have the same names."""

    def __contains__(self, strategy: Any) -> bool:
        return any(strategy.name == each.name for each in self)


def _state_of(torch_class: Any, module: nn.Module) -> Any:
    """The state that a pipeline stage gets from ``fully_shard.state``. Ours has the function that reduces the gradients
    that micro-batches accumulated."""
    if (unit := unit_of(module)) is None:
        return torch_class.state(module)
    reduce = partial(_reduce, unit.schedule or unit.start())
    return SimpleNamespace(_state_ctx=SimpleNamespace(all_states=()), _root_post_backward_final_callback=reduce)


def _reduce(schedule: Schedule) -> None:
    """Run a backward that computes nothing. When it ends, the waiting gradients are reduced."""

    def begin(_: torch.Tensor) -> None:
        schedule.begin_backward()
        for group in schedule.groups:
            for index, param in enumerate(group.params):  # a stage may have computed its gradient itself
                if param.unsharded is not None and param.unsharded.grad is not None:
                    group.gradients.receive(weakref.ref(group), index, param.unsharded)

    with torch.enable_grad():
        nothing = torch.zeros((), requires_grad=True).clone()
    nothing.register_hook(begin)
    nothing.backward()


def _names_of(old: Callable[..., set[str]], model: nn.Module, name: str, *args: Any, **kwargs: Any) -> set[str]:
    """The original names in a parameter of a model. In torch a module has one flat parameter; ours may have several."""
    names, (_, _, last) = old(model, name, *args, **kwargs), name.rpartition(".")
    if last.startswith("_flat_param_") and (inside := getattr(model.get_parameter(name), "_fqns", None)) is not None:
        names = {path.removesuffix(last) + each for path in names for each in inside}
    return names


def _unflatten(old: Callable[..., Any], optimizer: Optimizer, flat: dict[str, Any], info: Any) -> Any:
    """Torch takes the names of states from the optimizer, which has none for a parameter without elements on this rank.
    So give it these names from the state dict."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        for name in info.fqn_param_mapping[param] if param.numel() == 0 and not optimizer.state.get(param) else ():
            keys = [key.split(f"state.{name}.", 1)[1] for key in flat if key.startswith(f"state.{name}.")]
            optimizer.state[param] = dict.fromkeys(key.partition(".")[0] for key in keys)
    return old(optimizer, flat, info)


def _registry(old: Callable[[nn.Module], Any], module: nn.Module) -> Any:
    """The composable functions of torch that prepared a module; our ``fully_shard`` counts as torch's."""
    is_ours = isinstance(module, (FSDPModule, *_wrappers()))
    return {**(old(module) or {}), "fully_shard": None} if is_ours else old(module)


def _clip(
    old: Callable[..., None], parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
) -> None:
    """Clip gradients, and warn if they are this rank's parts of the gradients of wrapped modules, with a norm of their
    own."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]  # it may be a generator
    for param in parameters:
        group, index = owner_of(param) or (None, 0)
        if group is not None and group.params[index].run is not None and group.data.shard_group is not None:
            warn(
                "clip_grad_norm_ of torch.nn.utils was given parameters of a FullyShardedDataParallel, of which each "
                "rank has only a part: each rank computes a different norm and scales its gradients differently. Call "
                "the method of the wrapped model: model.clip_grad_norm_(max_norm)"
            )
            break
    old(parameters, *args, **kwargs)


#: Names that some releases lack: before 2.13 state dicts needed no process group; from 2.15 on stages call our methods.
_NOT_EVERYWHERE = {"HYBRID_SHARDING_STRATEGIES", "fully_shard"}
#: For each module of torch, its names to replace, each with the function that makes the new value from the old one.
_NAMES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "torch.distributed._composable.replicate": {"_get_registry": lambda old: partial(_registry, old)},
    "torch.distributed._composable.replicate_with_fsdp": {"_get_registry": lambda old: partial(_registry, old)},
    "torch.distributed.checkpoint.state_dict": {
        "FSDP": lambda torch_class: _Both("FullyShardedDataParallel", (), {"torch_class": torch_class}),
        "HYBRID_SHARDING_STRATEGIES": _Hybrid,
        "_get_fqns": lambda old: partial(_names_of, old),
        "_get_module_fsdp_state_if_fully_sharded_module": lambda old: lambda module: unit_of(module) or old(module),
        "_unflatten_optim_state_dict": lambda old: partial(_unflatten, old),
    },
    "torch.nn.utils.clip_grad": {"_clip_grads_with_norm_": lambda old: partial(_clip, old)},
    "torch.distributed.pipelining.schedules": {"FSDPModule": lambda old: (old, FSDPModule)},  # for isinstance()
    "torch.distributed.pipelining.stage": {
        "FSDPModule": lambda old: (old, FSDPModule),
        "fully_shard": lambda old: SimpleNamespace(state=partial(_state_of, old)),
    },
}


def _replace(module: ModuleType, names: dict[str, Callable[[Any], Any]]) -> None:
    """Give names of a module new values."""
    found = names.keys() & vars(module).keys()
    if missing := sorted(names.keys() - found - _NOT_EVERYWHERE):
        warn(
            f"{module.__name__} of torch {torch.__version__} has no {missing}, so it does not find what fullshard "
            f"sharded: make state dicts of FullyShardedDataParallel by its own methods, or use an older torch",
            RuntimeWarning,
        )
    else:
        vars(module).update({name: names[name](vars(module)[name]) for name in found})


_hook = AfterImport({name: partial(_replace, names=names) for name, names in _NAMES.items()})


def install() -> None:
    """Replace the names, once in a process."""
    _hook.install()


@when_sharded
def _install(_: Unit) -> None:
    install()
