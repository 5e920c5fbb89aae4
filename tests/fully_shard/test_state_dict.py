"""State dicts: keys, what they hold, and checkpoints that outlive the number of ranks that wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import fullshard
from tests.fully_shard.cases import (
    BOTH,
    Library,
    are_sharded,
    assert_close,
    groups_of,
    inputs,
    local,
    shard_mlp,
)
from tests.harness import World, ranks
from tests.harness.compare import each_block, whole
from tests.harness.models import MLP, MixedDtypes, OddParameters, Transformer, seeded


@ranks(2)
@BOTH
def test_a_state_dict_is_that_of_the_plain_module_and_sharded(world: World, fsdp: Library) -> None:
    model, reference = shard_mlp(fsdp, reshard_after_forward=False), seeded(MLP)
    for is_unsharded in (False, True):
        if is_unsharded:
            model(inputs())
        assert are_sharded(model) is not is_unsharded
        state = model.state_dict()
        assert are_sharded(model), "its hook resharded"
        assert list(state) == list(reference.state_dict())
        for name, value in reference.state_dict().items():
            assert isinstance(state[name], DTensor)
            assert torch.equal(whole(state[name]), value)


@ranks(2)
@BOTH
def test_loading_into_an_unsharded_module(world: World, fsdp: Library) -> None:
    model, other = shard_mlp(fsdp, reshard_after_forward=False), seeded(MLP, seed=1)
    source = seeded(MLP, seed=1)
    each_block()(fsdp, source)
    model(inputs())
    model.load_state_dict(source.state_dict())
    assert_close(model(inputs()), other(inputs()), "output")


@ranks(2)
def test_state_dicts_hold_no_view_of_more_than_a_group(world: World) -> None:
    model = shard_mlp()
    model(inputs()).sum().backward()
    full = {group.full.buffer.storage_id for group in groups_of(model)}
    for value in model.state_dict().values():
        held = local(value).untyped_storage()
        assert held._cdata not in full
        assert held.nbytes() <= max(group.shard.nbytes for group in groups_of(model))


@ranks(2)
def test_state_dicts_of_odd_models_go_there_and_back(world: World) -> None:
    for build in (OddParameters, MixedDtypes, lambda: Transformer(tied=True)):
        model, other = seeded(build), seeded(build, seed=1)
        for each in (model, other):
            each_block()(fullshard, each)
        other.load_state_dict(model.state_dict())
        reference = seeded(build)
        assert list(model.state_dict()) == list(reference.state_dict())
        for name, value in reference.state_dict().items():
            assert torch.equal(whole(other.state_dict()[name]), value), name


@ranks(2)
def test_a_missing_key_is_said_and_hooks_of_users_run(world: World) -> None:
    model = shard_mlp()
    calls: list[str] = []
    model.blocks[0][0].register_state_dict_post_hook(lambda *_: calls.append("save"))
    model.blocks[0][0].register_load_state_dict_post_hook(lambda *_: calls.append("load"))
    state = model.state_dict()
    model.load_state_dict(state)
    assert calls == ["save", "load"]
    del state["scale"]
    with pytest.raises(RuntimeError, match="scale"):
        model.load_state_dict(state)


@ranks(2)
def test_a_checkpoint_of_torch_is_loaded_and_the_other_way_round(world: World, tmp_path: Path) -> None:
    torch_model, ours, back = (seeded(MLP, seed=seed) for seed in range(3))
    each_block()(Library("torch"), torch_model)
    for model in (ours,):
        each_block()(fullshard, model)
    each_block()(Library("torch"), back)
    dcp.save({"model": torch_model.state_dict()}, checkpoint_id=tmp_path / "torch")
    state = {"model": ours.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "torch")
    ours.load_state_dict(state["model"])
    dcp.save({"model": ours.state_dict()}, checkpoint_id=tmp_path / "ours")
    state = {"model": back.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    back.load_state_dict(state["model"])
    reference = seeded(MLP)
    for model in (ours, back):
        assert_close(model(inputs()), reference(inputs()), "output")


@pytest.mark.slow
@ranks(4)
def test_a_hybrid_checkpoint_is_loaded_by_a_plain_mesh(world: World, tmp_path: Path) -> None:
    hybrid, plain = seeded(MLP), seeded(MLP, seed=1)
    each_block(mesh=world.mesh(2, 2, names=("replicate", "shard")))(fullshard, hybrid)
    each_block()(fullshard, plain)
    dcp.save(hybrid.state_dict(), checkpoint_id=tmp_path)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    plain.load_state_dict(state)
    assert_close(plain(inputs()), seeded(MLP)(inputs()), "output")
