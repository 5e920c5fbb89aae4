"""The settings of the wrapper: names, members, fields and defaults are PyTorch's, and PyTorch's own are accepted."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from fullshard.policies import as_setting
from fullshard.wrapper import settings
from fullshard.wrapper.fsdp import FullyShardedDataParallel
from fullshard.wrapper.settings import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from tests.harness import fake_world

ENUMS = ["ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType"]
MODEL_CONFIGS = ["StateDictConfig", "FullStateDictConfig", "LocalStateDictConfig", "ShardedStateDictConfig"]
OPTIM_CONFIGS = [name.replace("State", "OptimState") for name in MODEL_CONFIGS]
SWITCHES = ["CPUOffload", *MODEL_CONFIGS, *OPTIM_CONFIGS]
ALL_DATA = ["MixedPrecision", "StateDictSettings", *SWITCHES]

ARGUMENTS: dict[str, type[Any]] = {
    "sharding_strategy": ShardingStrategy,
    "backward_prefetch": BackwardPrefetch,
    "mixed_precision": MixedPrecision,
    "cpu_offload": CPUOffload,
    "state_dict_type": StateDictType,
    "state_dict_config": StateDictConfig,
    "optim_state_dict_config": OptimStateDictConfig,
}


def taken(argument: str, given: object, default: Any = None) -> Any:
    return as_setting(given, ARGUMENTS[argument], argument, default)


def pair(name: str) -> tuple[Any, Any]:
    return getattr(settings, name), getattr(torch_fsdp, name)


def test_members_and_values_are_torchs_and_both_are_accepted() -> None:
    for name in ENUMS:
        ours, theirs = pair(name)
        assert [(m.name, m.value) for m in ours] == [(m.name, m.value) for m in theirs]
    for argument in ("sharding_strategy", "backward_prefetch", "state_dict_type"):
        for member in ARGUMENTS[argument]:
            theirs = getattr(torch_fsdp, type(member).__name__)
            assert taken(argument, member) is taken(argument, theirs[member.name]) is member


def test_fields_order_defaults_and_descent_are_torchs() -> None:
    for name in ALL_DATA:
        ours, theirs = ([(f.name, f.default) for f in dataclasses.fields(cls)] for cls in pair(name))
        assert ours == theirs
    named = {*ENUMS, *ALL_DATA}
    for name in named:
        ours, theirs = ([each.__name__ for each in cls.__mro__ if each.__name__ in named] for cls in pair(name))
        assert ours == theirs


def test_data_is_writable_comparable_and_survives_copies() -> None:
    """Programs change the settings that they made, as they may with torch's."""
    for name in SWITCHES:
        ours = pair(name)[0]()
        for field in dataclasses.fields(ours):
            setattr(ours, field.name, not getattr(ours, field.name))
        assert ours != type(ours)()
        assert copy.deepcopy(ours) == ours == pickle.loads(pickle.dumps(ours))


def test_a_switch_is_a_bool() -> None:
    switches = [(name, field.name) for name in SWITCHES for field in dataclasses.fields(pair(name)[0])]
    of_precision = ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs")
    switches += [("MixedPrecision", field) for field in of_precision]
    for (name, field), value in itertools.product(switches, (None, 1, "yes")):
        with pytest.raises(TypeError, match=rf"{name}\.{field} is {value!r} .*expected True or False"):
            pair(name)[0](**{field: value})


def test_a_dtype_is_a_floating_point_dtype() -> None:
    for field in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        what = rf"MixedPrecision\.{field} is"
        with pytest.raises(TypeError, match=rf"{what} 'bf16' .*expected a floating-point torch.dtype"):
            MixedPrecision(**{field: "bf16"})
        with pytest.raises(ValueError, match=rf"{what} torch.int8, which is not floating-point"):
            MixedPrecision(**{field: torch.int8})


def test_ignored_classes_are_a_sequence_of_classes() -> None:
    wrong: list[Any] = [nn.BatchNorm1d, None, [nn.LayerNorm(2)], "LayerNorm"]
    for ignored in wrong:
        with pytest.raises(
            TypeError, match=r"MixedPrecision\._module_classes_to_ignore is .*expected a sequence of mod"
        ):
            MixedPrecision(_module_classes_to_ignore=ignored)


def test_batch_norms_are_ignored_by_default() -> None:
    for norm in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d):
        assert issubclass(norm, tuple(MixedPrecision()._module_classes_to_ignore))


def test_settings_hold_ours_whichever_were_given() -> None:
    theirs = (
        torch_fsdp.StateDictType.SHARDED_STATE_DICT,
        torch_fsdp.ShardedStateDictConfig(offload_to_cpu=True),
        torch_fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False),
    )
    assert StateDictSettings(*theirs) == StateDictSettings(
        StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(True), ShardedOptimStateDictConfig(False)
    )


def test_settings_refuse_what_stands_in_the_wrong_place() -> None:
    for place, field in enumerate(dataclasses.fields(StateDictSettings)):
        given: list[Any] = [StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()]
        given[place] = given[place - 1]
        with pytest.raises(TypeError, match=field.name):
            StateDictSettings(*given)


def test_mixed_precision_of_torch_keeps_every_field() -> None:
    values = {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "buffer_dtype": torch.float16,
        "keep_low_precision_grads": True,
        "cast_forward_inputs": True,
        "cast_root_forward_inputs": False,
        "_module_classes_to_ignore": [nn.LayerNorm],
    }
    assert taken("mixed_precision", torch_fsdp.MixedPrecision(**values)) == MixedPrecision(**values)
    assert taken("mixed_precision", torch_fsdp.MixedPrecision()) == MixedPrecision()
    ours = MixedPrecision()
    assert taken("mixed_precision", ours) is ours


def test_configurations_of_torch_keep_class_and_fields() -> None:
    for name, flip in itertools.product(SWITCHES, (False, True)):
        ours, theirs = pair(name)
        argument = "state_dict_config" if name in MODEL_CONFIGS else "optim_state_dict_config"
        argument = "cpu_offload" if name == "CPUOffload" else argument
        values = {field.name: field.default ^ flip for field in dataclasses.fields(theirs)}
        converted = taken(argument, theirs(**values))
        assert type(converted) is ours
        assert converted == ours(**values)
        assert taken(argument, converted) is converted


def test_classes_derived_from_torchs_are_accepted() -> None:
    class Mine(torch_fsdp.FullStateDictConfig):
        pass

    assert taken("state_dict_config", Mine(rank0_only=True)) == FullStateDictConfig(rank0_only=True)


def test_none_stands_for_what_the_constructor_defaults_to() -> None:
    with fake_world(2):
        model = FullyShardedDataParallel(
            nn.Linear(2, 2), sharding_strategy=None, backward_prefetch=None, mixed_precision=None, cpu_offload=None
        )
    assert model.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert model.backward_prefetch is None
    assert model.mixed_precision == MixedPrecision()
    assert model.cpu_offload == CPUOffload()


class Other(Enum):
    FULL_SHARD = 1


Impostor = Enum("ShardingStrategy", ["ZERO_5"])


def test_anything_else_is_refused_by_name() -> None:
    wrong = ["FULL_SHARD", 1, Other.FULL_SHARD, SimpleNamespace(offload_params=True), MixedPrecision, object()]
    for argument, value in itertools.product(ARGUMENTS, wrong):
        with pytest.raises(TypeError, match=rf"^{argument} is .*; expected "):
            taken(argument, value)
    for argument in ("state_dict_type", "state_dict_config", "optim_state_dict_config"):  # which have no default
        with pytest.raises(TypeError, match=f"{argument} is None"):
            taken(argument, None)


def test_an_enum_of_that_name_without_that_member_is_refused() -> None:
    with pytest.raises(TypeError, match=r"ZERO_5.*expected one of ShardingStrategy\.FULL_SHARD, "):
        taken("sharding_strategy", Impostor["ZERO_5"])


def test_a_setting_of_one_kind_is_not_taken_for_another() -> None:
    with pytest.raises(TypeError, match="sharding_strategy"):
        taken("sharding_strategy", BackwardPrefetch.BACKWARD_PRE)
    with pytest.raises(TypeError, match="expected OptimStateDictConfig or FullOptimStateDictConfig or Local"):
        taken("optim_state_dict_config", LocalStateDictConfig())
    with pytest.raises(TypeError, match="expected StateDictConfig or FullStateDictConfig or Local"):
        taken("state_dict_config", torch_fsdp.LocalOptimStateDictConfig())
    assert not issubclass(LocalOptimStateDictConfig, StateDictConfig)
    assert not issubclass(ShardedStateDictConfig, OptimStateDictConfig)


def test_fields_of_foreign_settings_are_checked_too() -> None:
    with pytest.raises(TypeError, match=r"CPUOffload\.offload_params is 'yes'"):
        taken("cpu_offload", torch_fsdp.CPUOffload("yes"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"MixedPrecision\.param_dtype is torch.int32"):
        taken("mixed_precision", torch_fsdp.MixedPrecision(param_dtype=torch.int32))
