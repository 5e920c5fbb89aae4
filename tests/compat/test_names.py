"""What frameworks read on sharded models by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import fullshard
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded


@ranks(2)
def test_modules_say_that_they_are_managed(world: World) -> None:
    """transformers reads it on the module that generates, which a wrapper may contain; Dynamo on each it traces."""
    wrapped = fullshard.FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    composable = fullshard.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    for module in (*wrapped.modules(), *composable.modules()):
        assert module._is_fsdp_managed_module
        assert module._fsdp_use_orig_params


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_optimizer_of_a_wrapper_is_known_by_its_parameters(world: World, use_orig_params: bool) -> None:
    inside, outside = nn.Linear(2, 2), nn.Linear(2, 2)
    model = fullshard.FullyShardedDataParallel(
        nn.Sequential(inside, outside), ignored_modules=[outside], use_orig_params=use_orig_params
    )
    ignored = set(outside.parameters())
    assert all(param._fsdp_flattened is (param not in ignored) for param in model.parameters())
    assert not any(hasattr(param, "_fsdp_flattened") for param in fullshard.fully_shard(MLP()).parameters())


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_wrapper_tells_its_place(world: World, use_orig_params: bool) -> None:
    inner = fullshard.FullyShardedDataParallel(nn.Linear(2, 2), use_orig_params=use_orig_params)
    model = fullshard.FullyShardedDataParallel(nn.Sequential(inner, nn.ReLU()), use_orig_params=use_orig_params)
    assert (model.rank, model.world_size, model.compute_device) == (world.rank, 2, torch.device("cpu"))
    assert (model._has_params, inner._has_params) == (False, True)
    assert model._flat_param is None
    assert model._handle is None
    assert (model._is_root, inner._is_root) == (None, None)
    model(torch.ones(1, 2))
    assert (model._is_root, inner._is_root) == (True, False)
    assert model._state_dict_type is fullshard.StateDictType.FULL_STATE_DICT
    fullshard.FullyShardedDataParallel.set_state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT)
    assert model._state_dict_type is fullshard.StateDictType.SHARDED_STATE_DICT


def cast_up(model: Any) -> None:
    """What accelerate does to a model of low precision that is trained in mixed precision."""
    for module in fullshard.FullyShardedDataParallel.fsdp_modules(model):
        if module._has_params:
            param = module._flat_param
            assert param._fqns
            if param.dtype != torch.float32 and param.device != torch.device("meta") and param.requires_grad:
                param.data = param.data.to(torch.float32)
                module._handle._orig_param_dtype = torch.float32


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_are_cast_up(world: World, use_orig_params: bool) -> None:
    """Afterwards it trains as one that was cast up before it was wrapped."""
    wrap = {"use_orig_params": use_orig_params, "mixed_precision": fullshard.MixedPrecision(param_dtype=torch.bfloat16)}
    late = fullshard.FullyShardedDataParallel(seeded(MLP).bfloat16(), **wrap)  # type: ignore[arg-type]
    early = fullshard.FullyShardedDataParallel(seeded(MLP).bfloat16().float(), **wrap)  # type: ignore[arg-type]
    cast_up(late)
    batch = torch.randn(3, 6, generator=torch.Generator().manual_seed(world.rank))
    for model in (late, early):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(batch).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(late.state_dict().items(), early.state_dict().values(), strict=True):
        assert one.dtype == other.dtype == torch.float32, name
        assert torch.equal(one, other), name


@ranks(2)
def test_nothing_is_to_be_set_for_gathers_ahead(world: World) -> None:
    fullshard.fully_shard(MLP())._set_unshard_async_op(True)  # type: ignore[attr-defined]


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_sharded_state_is_loaded_into_an_optimizer_that_made_no_step(world: World, use_orig_params: bool) -> None:
    """accelerate resumes so: what it asks for is where a checkpoint is loaded into. The optimizer is left as it was."""
    fsdp = fullshard.FullyShardedDataParallel
    models = [fsdp(seeded(MLP), use_orig_params=use_orig_params) for _ in range(2)]
    stepped, fresh = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in models)
    models[0](torch.ones(3, 6)).square().sum().backward()
    stepped.step()
    for model in models:
        fsdp.set_state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT)
    saved = fsdp.optim_state_dict(models[0], stepped)
    place = fsdp.optim_state_dict(models[1], fresh)
    assert not fresh.state
    assert place["state"].keys() == saved["state"].keys()
    for name, state in saved["state"].items():
        for key, value in state.items():
            zeros = place["state"][name][key]
            assert not (zeros.full_tensor() if isinstance(zeros, DTensor) else zeros).any()
            zeros.copy_(value)
    fresh.load_state_dict(fsdp.optim_state_dict_to_load(models[1], fresh, place))
    for mine, theirs in zip(fresh.state.values(), stepped.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
