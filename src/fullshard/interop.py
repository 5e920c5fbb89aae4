"""Lets torch's own code that looks for torch's FSDP find this one too: ``import fullshard.interop``.

The only file that may import ``torch.distributed.fsdp``. Names by which modules of torch ask what a model was sharded
with get values that know both libraries: for ``get_state_dict()``, ``set_state_dict()`` and their kin, and for stages
of pipelines, which then reduce once a step. torch's own FSDP is served as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.pipelining import schedules, stage
from torch.optim import Optimizer

from fullshard.group.flat import FLAT_NAME, FlatParameter
from fullshard.module import FSDPModule
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import unit_of
from fullshard.wrapper.fsdp import FullyShardedDataParallel
from fullshard.wrapper.meshes import HYBRID


class _Both(type):
    """A class that stands for both wrappers. Its static methods are those of the one that the given model has."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (theirs.FullyShardedDataParallel, FullyShardedDataParallel))

    def __getattr__(cls, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            model = next(each for each in (*args, *kwargs.values()) if isinstance(each, nn.Module))
            ours = FullyShardedDataParallel.fsdp_modules(model)
            return getattr(FullyShardedDataParallel if ours else theirs.FullyShardedDataParallel, name)(*args, **kwargs)

        return method


_Wrapper = _Both("FullyShardedDataParallel", (), {})


class _FullyShard:
    """Stands for both functions ``fully_shard``. Of ours a stage learns how to reduce what micro-batches added up."""

    @staticmethod
    def state(module: nn.Module) -> Any:
        unit, of_theirs = unit_of(module), cast(Any, theirs.fully_shard).state
        if unit is None:
            return of_theirs(module)
        reduce = partial(_reduce, unit.schedule or unit.start())
        return SimpleNamespace(_state_ctx=SimpleNamespace(all_states=()), _root_post_backward_final_callback=reduce)


def _reduce(schedule: Schedule) -> None:
    """A backward in which nothing is computed: when it ends, the gradients that wait are reduced."""

    def begin(_: torch.Tensor) -> None:
        schedule.begin_backward()
        for group in schedule.groups():
            for index, param in enumerate(group.params):  # of which a stage may have computed the gradient by hand
                if param.unsharded is not None and param.unsharded.grad is not None:
                    group.gradients.receive(weakref.ref(group), index, param.unsharded)

    with torch.enable_grad():
        nothing = torch.zeros((), requires_grad=True).clone()
    nothing.register_hook(begin)
    nothing.backward()


def _both_names_of(old: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """The names of what lies in a parameter of a model. Torch knows one flat parameter a module, and we several."""

    def names_of(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> set[str]:
        names, (_, _, last) = old(model, name, *args, **kwargs), name.rpartition(".")
        if last.startswith(f"{FLAT_NAME}_") and isinstance(flat := model.get_parameter(name), FlatParameter):
            names = {path.removesuffix(last) + inside for path in names for inside in flat._fqns}
        return names

    return names_of


def _both_unflatten(old: Callable[..., Any]) -> Callable[..., Any]:
    """Torch asks the optimizer what states there are, which has none of a parameter of which this rank has nothing."""

    def unflatten(optimizer: Optimizer, flat: dict[str, Any], info: Any) -> Any:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            for name in info.fqn_param_mapping[param] if param.numel() == 0 and not optimizer.state.get(param) else ():
                keys = [key.split(f"state.{name}.", 1)[1] for key in flat if key.startswith(f"state.{name}.")]
                optimizer.state[param] = dict.fromkeys(key.partition(".")[0] for key in keys)
        return old(optimizer, flat, info)

    return unflatten


def _replace(module: ModuleType, **values: Callable[[Any], Any]) -> None:
    """Give names of a module new values, each made of the one it had."""
    missing = sorted(values.keys() - vars(module).keys())
    if missing:
        raise ImportError(f"{module.__name__} of this release of torch has no {missing}, which fullshard.interop needs")
    vars(module).update({name: value(vars(module)[name]) for name, value in values.items()})


_replace(
    state_dict,
    FSDP=lambda _: _Wrapper,
    HYBRID_SHARDING_STRATEGIES=lambda old: [*old, *HYBRID],
    _get_fqns=_both_names_of,
    _get_module_fsdp_state_if_fully_sharded_module=lambda old: lambda module: unit_of(module) or old(module),
    _unflatten_optim_state_dict=_both_unflatten,
)
_replace(schedules, FSDPModule=lambda old: (old, FSDPModule))  # for isinstance()
_replace(stage, FSDPModule=lambda old: (old, FSDPModule), fully_shard=lambda _: _FullyShard())
