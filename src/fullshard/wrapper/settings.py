"""The settings of ``FullyShardedDataParallel`` and of its state dicts: enums and plain data.

Names, members, fields and defaults are PyTorch's. An object checks its fields when it is made.
:func:`~fullshard.policies.as_setting` converts PyTorch's own objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn

from fullshard.policies import Checked, as_setting, expect
from fullshard.torch_private import BatchNorm

#: The names that :mod:`fullshard` exports.
__all__ = ["BackwardPrefetch", "CPUOffload", "MixedPrecision", "OptimStateKeyType", "ShardingStrategy", "StateDictType"]
__all__ += ["FullOptimStateDictConfig", "FullStateDictConfig", "LocalOptimStateDictConfig", "LocalStateDictConfig"]
__all__ += ["OptimStateDictConfig", "ShardedOptimStateDictConfig", "ShardedStateDictConfig", "StateDictConfig"]
__all__ += ["StateDictSettings"]


class ShardingStrategy(Enum):
    """What each rank keeps whole, and when.

    Attributes:
        FULL_SHARD: parameters are gathered for each use; parameters, gradients and optimizer state are kept in shards.
        SHARD_GRAD_OP: the same, but parameters stay whole from forward to the end of their backward.
        NO_SHARD: everything is whole on every rank, and gradients are averaged, as by ``DistributedDataParallel``.
            Deprecated above one rank.
        HYBRID_SHARD: ``FULL_SHARD`` over the ranks of one node, replicated over nodes.
        _HYBRID_SHARD_ZERO2: ``SHARD_GRAD_OP`` over the ranks of one node, replicated over nodes.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """When backward starts to gather the parameters that it needs next. ``None`` instead of a member: never early.

    Attributes:
        BACKWARD_PRE: before it computes the current gradients: most overlap, but two units are gathered at a time.
        BACKWARD_POST: after it has computed them: the current parameters are freed first.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision(Checked):
    """The dtypes of computation and communication; the optimizer and checkpoints see the original ones.

    Args:
        param_dtype: dtype of gathered parameters, and so of forward and backward. ``None``: the original dtype.
        reduce_dtype: dtype in which gradients are reduced and accumulate. ``None``: that of the computation.
        buffer_dtype: dtype to which floating-point buffers are cast, except in state dicts. ``None``: left as they are.
        keep_low_precision_grads: whether gradients stay in ``param_dtype``.
        cast_forward_inputs: whether floating-point inputs of forward are cast to ``param_dtype``.
        cast_root_forward_inputs: the same for the outermost module, if ``cast_forward_inputs`` is ``False``.
        _module_classes_to_ignore: wrap policies wrap modules of these classes on their own, and they keep their dtypes.

    Raises:
        TypeError: a dtype is neither a ``torch.dtype`` nor ``None``, a switch is not a ``bool``, or
            ``_module_classes_to_ignore`` is not a sequence of classes.
        ValueError: a dtype is not floating-point.

    Ranks: each for itself, alike.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (BatchNorm,)

    def __post_init__(self) -> None:
        super().__post_init__()
        ignored, name = self._module_classes_to_ignore, "MixedPrecision._module_classes_to_ignore"
        are_classes = isinstance(ignored, Sequence) and all(isinstance(cls, type) for cls in ignored)
        expect(are_classes, name, ignored, "a sequence of module classes")


@dataclass
class CPUOffload(Checked):
    """Whether sharded parameters are kept on the CPU.

    Args:
        offload_params: if ``True``, their gradients are kept there too, and the optimizer runs there.

    Raises:
        TypeError: ``offload_params`` is neither ``True`` nor ``False``.
    """

    offload_params: bool = False


class StateDictType(Enum):
    """What ``state_dict()`` of a wrapped model returns.

    Attributes:
        FULL_STATE_DICT: whole parameters by the names of the model without the wrapper. The default.
        LOCAL_STATE_DICT: each rank's flat parameters as they are: DTensors of one dim, by names of flat parameters.
        SHARDED_STATE_DICT: each rank's rows of every parameter, as DTensors by original names. Any sharding can load
            it.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig(Checked):
    """How a model's state dict returns its values: the base of one class for each :class:`StateDictType`.

    Args:
        offload_to_cpu: whether the values lie on the CPU.

    Raises:
        TypeError: a field is neither ``True`` nor ``False``.
    """

    offload_to_cpu: bool = False
    rank0_only = False  # a field only of full state dicts


@dataclass
class FullStateDictConfig(StateDictConfig):
    """How a model's full state dict returns its whole parameters.

    Args:
        offload_to_cpu: whether the values lie on the CPU.
        rank0_only: whether all ranks but the first get an empty dict.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """How a model's local state dict returns each rank's flat parameters: with ``offload_to_cpu`` on the CPU."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """How a model's sharded state dict returns each rank's parts: as DTensors, whatever ``_use_dtensor`` says, and with
    ``offload_to_cpu`` on the CPU."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig(Checked):
    """How an optimizer's state dict returns its values: the base of one class for each :class:`StateDictType`.

    Args:
        offload_to_cpu: whether the values lie on the CPU.

    Raises:
        TypeError: a field is neither ``True`` nor ``False``.
    """

    offload_to_cpu: bool = True
    rank0_only = False


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """How an optimizer's full state dict returns its whole values.

    Args:
        offload_to_cpu: whether the values lie on the CPU.
        rank0_only: whether all ranks but the first get an empty dict, and a load uses only the first rank's dict.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """The optimizer's side of a local state dict: with ``offload_to_cpu`` on the CPU."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """How an optimizer's sharded state dict returns each rank's parts: as DTensors, whatever ``_use_dtensor`` says, and
    with ``offload_to_cpu`` on the CPU."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The type of the state dicts of a model and its optimizer, and the configuration of each.

    Args:
        state_dict_type: the type of both.
        state_dict_config: the configuration for the model.
        optim_state_dict_config: the configuration for the optimizer.

    Raises:
        TypeError: a field is of another type, neither fullshard's nor PyTorch's.
    """

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig

    def __post_init__(self) -> None:
        given = self.optim_state_dict_config
        self.state_dict_type = as_setting(self.state_dict_type, StateDictType, "state_dict_type")
        self.state_dict_config = as_setting(self.state_dict_config, StateDictConfig, "state_dict_config")
        self.optim_state_dict_config = as_setting(given, OptimStateDictConfig, "optim_state_dict_config")


#: The configurations that belong to each type of state dict: of the model, and of the optimizer.
CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


class OptimStateKeyType(Enum):
    """How an optimizer's state dict identifies parameters.

    Attributes:
        PARAM_NAME: by original names.
        PARAM_ID: by their index in the optimizer.
    """

    PARAM_NAME = auto()
    PARAM_ID = auto()


def settings_of(module: nn.Module) -> StateDictSettings:
    """The settings of the wrappers in ``module``; the defaults if there are none.

    Raises:
        AssertionError: the wrappers have different settings.
    """
    default = StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
    found = [each.__dict__["_settings"] for each in module.modules() if "_settings" in each.__dict__] or [default]
    for other in found:
        if other != found[0]:
            raise AssertionError(
                f"the wrappers in one {type(module).__name__} must have the same state dict settings, but there are "
                f"{found[0]} and {other}: set them on the outermost one"
            )
    return found[0]
