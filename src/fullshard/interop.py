"""Lets torch's own code that looks for torch's FSDP find this one too: ``import fullshard.interop``.

The only file that may import ``torch.distributed.fsdp``, and loaded on request only. Some modules of torch ask what a
model was sharded with. In each of them the names that are asked get values that know both libraries::

    torch.distributed.checkpoint.state_dict    get_state_dict(), set_state_dict() and their kin, for wrapped models
    torch.distributed.optim.named_optimizer    the same questions
    torch.distributed.pipelining               stages to which fully_shard was applied reduce once, after the last
                                               micro-batch

torch's own FSDP is served as before. State dicts of models to which ``fully_shard`` was applied need nothing of this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.optim import named_optimizer
from torch.distributed.pipelining import schedules, stage
from torch.optim import Optimizer

from fullshard.fully_shard import fully_shard
from fullshard.group.flat import FLAT_NAME, FlatParameter
from fullshard.module import FSDPModule
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
            ours = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
            return getattr(FullyShardedDataParallel if ours else theirs.FullyShardedDataParallel, name)(*args, **kwargs)

        return method


class _Wrapper(metaclass=_Both):
    pass


class _FullyShard:
    """Stands for both functions ``fully_shard``: calls torch's, and knows the modules of either."""

    __call__ = staticmethod(theirs.fully_shard)

    @staticmethod
    def state(module: nn.Module) -> Any:
        """Of ours no more than a stage uses to reduce what its micro-batches have added up."""
        if fully_shard.state(module) is None:
            return theirs.fully_shard.state(module)  # type: ignore[attr-defined]
        reduce = _reduction_of(module)
        return SimpleNamespace(_state_ctx=SimpleNamespace(all_states=()), _root_post_backward_final_callback=reduce)


def _reduction_of(module: nn.Module) -> Callable[[], None]:
    """A backward of ``module`` in which nothing is computed: when it ends, the gradients that wait are reduced."""

    def begin(_: torch.Tensor) -> None:
        schedule = unit_of(module).schedule  # type: ignore[union-attr]
        assert schedule is not None
        schedule.begin_backward()
        for group in schedule.groups():
            for index, param in enumerate(group.params):  # stages may compute gradients of parameters apart, by hand
                if param.unsharded is not None and param.unsharded.grad is not None:
                    group.gradients.receive(weakref.ref(group.gradients), index, param.unsharded)

    def reduce() -> None:
        with torch.enable_grad():
            nothing = torch.zeros((), requires_grad=True).clone()
        nothing.register_hook(begin)
        nothing.backward()  # type: ignore[no-untyped-call]

    return reduce


def _both_names_of(theirs_of: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """The names of what lies in a parameter of a model. Torch knows one flat parameter a module, and we several."""

    def names_of(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> set[str]:
        names, (_, _, last) = theirs_of(model, name, *args, **kwargs), name.rpartition(".")
        if last.startswith(f"{FLAT_NAME}_") and isinstance(flat := model.get_parameter(name), FlatParameter):
            names = {path.removesuffix(last) + inside for path in names for inside in flat._fqns}
        return names

    return names_of


def _both_unflatten(theirs_unflatten: Callable[..., Any]) -> Callable[..., Any]:
    """From keys ``state.<parameter>.<name>`` back to a state dict. Torch asks the optimizer which names there are, who
    knows none for a parameter of which this rank has nothing."""

    def unflatten(optimizer: Optimizer, flat: dict[str, Any], info: Any) -> Any:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param.numel() == 0 and not optimizer.state.get(param):
                prefixes = [f"state.{name}." for name in info.fqn_param_mapping[param]]
                found = [key.removeprefix(prefix) for prefix in prefixes for key in flat if key.startswith(prefix)]
                optimizer.state[param] = dict.fromkeys(name.partition(".")[0] for name in found)
        return theirs_unflatten(optimizer, flat, info)

    return unflatten


def _replace(module: ModuleType, **values: Any) -> None:
    missing = sorted(values.keys() - vars(module).keys())
    if missing:
        raise ImportError(
            f"{module.__name__} of this release of torch has no {missing}, which fullshard.interop expects"
        )
    vars(module).update(values)


_theirs_state_of = state_dict._get_module_fsdp_state_if_fully_sharded_module
_replace(
    state_dict,
    FSDP=_Wrapper,
    HYBRID_SHARDING_STRATEGIES=[*state_dict.HYBRID_SHARDING_STRATEGIES, *HYBRID],
    _get_fqns=_both_names_of(state_dict._get_fqns),
    _unflatten_optim_state_dict=_both_unflatten(state_dict._unflatten_optim_state_dict),
    _get_module_fsdp_state_if_fully_sharded_module=lambda module: unit_of(module) or _theirs_state_of(module),
)
_replace(named_optimizer, FSDP=_Wrapper)
for _module in (stage, schedules):
    _replace(_module, FSDPModule=(theirs.FSDPModule, FSDPModule))  # for isinstance()
_replace(stage, fully_shard=_FullyShard())
