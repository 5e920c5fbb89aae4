"""The methods of ``FullyShardedDataParallel`` for optimizer state, with torch's names.

Owns the choice of the kind of state dict, and of the keys for parameters in an optimizer's state dict: their names,
their numbers in the optimizer, or, in deprecated calls, their numbers in what was given to the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.optim import Optimizer

from fullshard.original_parameters import expect, shown_parameters
from fullshard.policies import warn
from fullshard.wrapper.optim_state import Key, local_state, whole_state, with_groups
from fullshard.wrapper.settings import FullOptimStateDictConfig, OptimStateDictConfig, OptimStateKeyType, settings_of

StateDict = dict[str, Any]
Optim = Optimizer | None
ProcessGroup = dist.ProcessGroup | None
#: Parameters, or parameter groups, as they were given to an optimizer.
OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


class OptimStateMethods:
    """Static methods. A *named* state dict has the names of the plain model as keys.

    All ranks must call them, except :meth:`shard_full_optim_state_dict` and :meth:`rekey_optim_state_dict`.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_state_dict: StateDict | None = None, group: ProcessGroup = None
    ) -> StateDict:
        """The named state dict of ``optim``, of the kind that ``set_state_dict_type`` chose.

        A full state dict has whole tensors. The other kinds have DTensors, of which each rank has its rows. You can
        load into these DTensors even before the optimizer's first step: they then have the values with which torch's
        optimizer begins, mostly zeros.

        Args:
            model: the root, wrapped.
            optim: the optimizer of its parameters.
            optim_state_dict: a state dict to convert instead of ``optim.state_dict()``.
            group: a process group of the model's ranks, which are the default.

        Raises:
            AssertionError: the wrappers differ in their settings of state dicts or in ``use_orig_params``.
            KeyError: the optimizer has parameters that the model lacks, or the state dict some that the optimizer
                lacks.
            ValueError: a state does not have the shape of its parameter; parameters of one flat parameter have states
                that cannot be concatenated; there is no ``"state"``.
            RuntimeError: without ``use_orig_params``, a rank lacks a state that the first rank has.
        """
        state_dict, new = (optim.state_dict(), optim) if optim_state_dict is None else (optim_state_dict, None)
        keys = [key for options in state_dict.get("param_groups", ()) for key in options["params"]]
        is_named = isinstance(next(iter(keys or state_dict["state"]), None), str)
        params, config = _params(model, optim, is_named), settings_of(model).optim_state_dict_config
        return whole_state(model, params, state_dict, config, group, new)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict | None,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup = None,
    ) -> StateDict:
        """Convert a named state dict of any kind, from any sharding or none, for ``optim.load_state_dict``.

        Its errors are those of :meth:`optim_state_dict`.

        Args:
            model: the root, wrapped.
            optim: the optimizer of its parameters.
            optim_state_dict: the state dict. With ``rank0_only`` that of the first rank; others may give ``None``.
            is_named_optimizer: whether ``optim`` itself identifies parameters by name, and needs a state for each.
            load_directly: whether to load the result too.
            group: a process group of the model's ranks, which are the default. With ``rank0_only`` its first rank sends
                its state dict to the others.
        """
        params, named = _params(model, optim, is_named_optimizer), optim if is_named_optimizer else None
        rank0_only = settings_of(model).optim_state_dict_config.rank0_only
        result = local_state(model, params, optim_state_dict or {}, rank0_only, group, named)
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: ProcessGroup = None,
    ) -> StateDict:
        """Deprecated: :meth:`optim_state_dict` of a full state dict, on the CPU.

        Args:
            model: the root, wrapped.
            optim: the optimizer of its parameters.
            optim_input: deprecated: what was given to the optimizer.
            rank0_only: whether all ranks but the first get an empty dict.
            group: a process group of the model's ranks, which are the default.
        """
        params = _given(model, optim, optim_input, "full_optim_state_dict", "optim_state_dict")
        return whole_state(model, params, optim.state_dict(), FullOptimStateDictConfig(True, rank0_only), group)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: ProcessGroup = None) -> StateDict:
        """Deprecated: :meth:`optim_state_dict` of a sharded state dict, on the CPU.

        Args:
            model: the root, wrapped.
            optim: the optimizer of its parameters.
            group: a process group of the model's ranks, which are the default.
        """
        params = _given(model, optim, None, "sharded_optim_state_dict", "optim_state_dict")
        return whole_state(model, params, optim.state_dict(), OptimStateDictConfig(), group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict, model: nn.Module, optim_input: OptimInput = None, optim: Optim = None
    ) -> StateDict:
        """Deprecated: :meth:`optim_state_dict_to_load` of a full state dict that every rank has.

        Ranks: each for itself.

        Args:
            full_optim_state_dict: the state dict.
            model: the root, wrapped.
            optim_input: deprecated: what was given to the optimizer.
            optim: the optimizer of its parameters.
        """
        params = _given(model, optim, optim_input, "shard_full_optim_state_dict")
        return local_state(model, params, full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
    ) -> StateDict:
        """Deprecated: :meth:`optim_state_dict_to_load` of a sharded state dict.

        Args:
            sharded_optim_state_dict: the state dict.
            model: the root, wrapped.
            optim: the optimizer of its parameters.
        """
        params = _given(model, optim, None, "flatten_sharded_optim_state_dict")
        return local_state(model, params, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optim = None,
        group: Any | None = None,
    ) -> StateDict:
        """Deprecated: :meth:`optim_state_dict_to_load` of a full state dict that the first rank has.

        Args:
            full_optim_state_dict: the state dict on the first rank.
            model: the root, wrapped.
            optim_input: deprecated: what was given to the optimizer.
            optim: the optimizer of its parameters.
            group: a process group of the model's ranks, which are the default.
        """
        params = _given(model, optim, optim_input, "scatter_full_optim_state_dict")
        return local_state(model, params, full_optim_state_dict or {}, True, group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optim = None,
    ) -> StateDict:
        """Converts the keys of a state dict of the whole ``model`` to names, or to numbers in the optimizer.

        Args:
            optim_state_dict: the state dict.
            optim_state_key_type: which of the two.
            model: the model, not sharded.
            optim_input: deprecated: what was given to the optimizer.
            optim: the optimizer of its parameters.

        Raises:
            AssertionError: ``optim_state_key_type`` is not an :class:`OptimStateKeyType`.
            ValueError: the state dict has keys of both kinds.
            RuntimeError: several parameters lie in one flat parameter, so that each has no key of its own.
            KeyError: the optimizer has parameters that the model lacks, or the state dict some that the optimizer
                lacks.

        Ranks: each for itself.
        """
        params = _given(model, optim, optim_input)
        wanted = {"PARAM_NAME": str, "PARAM_ID": int}.get(getattr(optim_state_key_type, "name", ""))
        assert wanted, f"optim_state_key_type is {optim_state_key_type!r}; expected one of {list(OptimStateKeyType)}"
        kinds = {type(key) for key in optim_state_dict["state"]}
        if len(kinds) > 1:
            raise ValueError(f"parameters are called both by name and by number: {list(optim_state_dict['state'])}")
        if not kinds - {wanted}:
            return optim_state_dict
        new: dict[Any, Any] = {}
        shown = shown_parameters(model)
        expect(shown, params.values())
        for key, param in params.items():
            if len(shown[param]) > 1:
                names = [original.name for original in shown[param]]
                raise RuntimeError(f"{names} lie in one flat parameter: they have no key for each")
            name = shown[param][0].name
            new.update({key: [name]} if wanted is str else {name: [key]})
        expect(new, optim_state_dict["state"], problem := "the optimizer lacks these parameters of the state dict")
        state = {new[key][0]: value for key, value in optim_state_dict["state"].items()}
        return with_groups(optim_state_dict, state, new, problem)


def _params(model: nn.Module, optim: Optimizer, is_named: bool = False) -> dict[Key, nn.Parameter]:
    """The parameters of an optimizer by the keys of its state dict."""
    params = [param for group in optim.param_groups for param in group["params"]]
    if not is_named:
        return dict(enumerate(params))
    names = {param: name for name, param in model.named_parameters()}
    expect(names, params)
    return {names[param]: param for param in params}


def _given(
    model: nn.Module, optim: Optim, optim_input: OptimInput, old: str = "", new: str = "optim_state_dict_to_load"
) -> dict[Key, nn.Parameter]:
    """The parameters of an optimizer by number. They come from ``optim_input`` if given, else from ``optim``, else from
    the model. Warns if ``old``, a deprecated method, was called."""
    if old:
        warn(f"FullyShardedDataParallel.{old} is deprecated: call {new}", FutureWarning)
    if optim_input is None:
        return dict(enumerate(model.parameters())) if optim is None else _params(model, optim)
    warn("optim_input is deprecated: give the optimizer", FutureWarning)
    given: list[Any] = list(optim_input) if isinstance(optim_input, Iterable) else [optim_input]
    if not given:
        raise ValueError("optim_input is empty: give what was given to the optimizer, or the optimizer itself")
    if all(isinstance(each, dict) for each in given):
        assert all("params" in each for each in given), "a dict of optim_input has no 'params': each is a group of them"
        given = [param for each in given for param in each["params"]]
    if not all(isinstance(each, nn.Parameter) for each in given):
        kinds = sorted({type(each).__name__ for each in given})
        raise TypeError(f"optim_input has {kinds}; expected either parameters or dicts, as given to the optimizer")
    return dict(enumerate(given))
