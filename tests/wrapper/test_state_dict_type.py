"""What is said about the state dicts of a wrapped model: `state_dict_type` and its kin."""

from __future__ import annotations

from contextlib import suppress

import pytest
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import StateDictType
from tests.checkpoint.state_dicts import (
    build,
    speaking,
    wrapped,
)
from tests.harness import World, fake_world, ranks
from tests.harness.compare import LIBRARIES
from tests.harness.wrapper import EACH_WRAPPER, ORIGINAL, WRAPPERS, wrap

FSDP = fullshard.FullyShardedDataParallel


@ranks(2)
@EACH_WRAPPER
@ORIGINAL
def test_settings_are_put_back(world: World, library: str, original: bool) -> None:
    """After an error too, after which torch forgets them."""
    fsdp = WRAPPERS[library]
    model = wrapped(fsdp, build(), original=original)
    wrapper = fsdp.FullyShardedDataParallel
    default = wrapper.get_state_dict_type(model)
    assert default.state_dict_type.name == "FULL_STATE_DICT"
    assert (default.state_dict_config.rank0_only, default.state_dict_config.offload_to_cpu) == (False, False)
    before = wrapper.set_state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT)
    assert before == default
    with suppress(KeyError), speaking(fsdp, model, "FULL", rank0_only=True):
        assert wrapper.get_state_dict_type(model).state_dict_config.rank0_only
        if library != "torch":
            raise KeyError
    now = wrapper.get_state_dict_type(model)
    assert now.state_dict_type is fsdp.StateDictType.SHARDED_STATE_DICT
    assert isinstance(now.state_dict_config, fsdp.ShardedStateDictConfig)
    assert isinstance(now.optim_state_dict_config, fsdp.ShardedOptimStateDictConfig)


@EACH_WRAPPER
def test_a_configuration_of_another_type(library: str) -> None:
    fsdp = WRAPPERS[library]
    with fake_world(2):
        model = wrap(fsdp, build())
    wrapper = fsdp.FullyShardedDataParallel
    for kind, config, optim in (
        ("FULL", "ShardedStateDictConfig", None),
        ("FULL", "LocalStateDictConfig", None),
        ("SHARDED", "FullStateDictConfig", None),
        ("LOCAL", "FullStateDictConfig", None),
        ("FULL", None, "ShardedOptimStateDictConfig"),
        ("SHARDED", None, "FullOptimStateDictConfig"),
        ("LOCAL", None, "FullOptimStateDictConfig"),
        ("FULL", "StateDictConfig", None),
    ):
        given = [None if name is None else getattr(fsdp, name)() for name in (config, optim)]
        with pytest.raises(RuntimeError):
            wrapper.set_state_dict_type(model, fsdp.StateDictType[f"{kind}_STATE_DICT"], *given)
        assert wrapper.get_state_dict_type(model).state_dict_type.name == "FULL_STATE_DICT"


@EACH_WRAPPER
def test_settings_that_differ_in_a_tree(library: str) -> None:
    fsdp = WRAPPERS[library]
    with fake_world(2):
        model = wrapped(fsdp, build())
    wrapper = fsdp.FullyShardedDataParallel
    wrapper.set_state_dict_type(model.module.blocks[0], fsdp.StateDictType.SHARDED_STATE_DICT)
    with pytest.raises(AssertionError):
        wrapper.get_state_dict_type(model)
    with pytest.raises(AssertionError):
        wrapper.set_state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT)


@ranks(2)
def test_torchs_own_settings_are_taken(world: World) -> None:
    torchs = LIBRARIES["torch"]
    model = wrapped(fullshard, build())
    with FSDP.state_dict_type(
        model, torchs.StateDictType.SHARDED_STATE_DICT, torchs.ShardedStateDictConfig(offload_to_cpu=True)
    ):
        assert FSDP.get_state_dict_type(model).state_dict_type is StateDictType.SHARDED_STATE_DICT
        assert isinstance(model.state_dict()["first.weight"], DTensor)
