"""Parity of ``outer_zero_stage=1``: replicas that shard the optimizer state train as the unsharded model does."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard

import fullshard
from tests.harness import World, everywhere, ranks
from tests.harness.compare import Precision, Training, adamw, compare, each_block, whole
from tests.harness.models import MLP, OddParameters, Transformer, random_batch, seeded, token_batch

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
LAST = 2
"""The last of three micro-batches, the one after which gradients are complete."""


def mesh_of(world: World, replicas: int = 0) -> Any:
    """A mesh with as many replicas as can have two ranks each, unless `replicas` says otherwise."""
    replicas = replicas or max(1, world.size // 2)
    return world.mesh(replicas, world.size // replicas, names=("replicate", "shard"))


def reducing_each(model: Any, micro: int) -> None:
    """Every micro-batch is reduced, which is what happens unasked."""


def by_last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def outer(world: World, stage: int = 3, replicas: int = 0, **changes: Any) -> Training:
    """Training of the MLP where the replicas shard the optimizer state."""
    options = {"mesh": mesh_of(world, replicas), "zero_stage": stage, "outer_zero_stage": 1}
    options |= changes.pop("options", {})
    precision = changes.get("precision")
    defaults: dict[str, Any] = {
        "build": lambda: seeded(MLP),
        "shard": each_block(precision=precision, **options),
        "batch": random_batch(4, 6),
    }
    return Training(**{**defaults, **changes})


def check(world: World, training: Training) -> None:
    compare(world, training, with_torch=False)


def accumulating(model: Any, micro: int) -> None:
    model.set_requires_gradient_sync(micro == LAST)


def inside_replicas(model: Any, micro: int) -> None:
    model.set_requires_all_reduce(micro == LAST)


def sharded(world: World, replicas: int = 0, **options: Any) -> Any:
    model: Any = seeded(MLP)
    each_block(mesh=mesh_of(world, replicas), **{"outer_zero_stage": 1, **options})(fullshard, model)
    return model


@everywhere
@ranks(1, 2, 4)
@STAGES
def test_replicas_that_shard_the_optimizer_state(world: World, stage: int) -> None:
    check(world, outer(world, stage, world.size if world.size == 2 else 0, optimizer=adamw))


@everywhere
@ranks(2, 3)
def test_each_replica_has_one_rank(world: World) -> None:
    check(world, outer(world, replicas=world.size, build=lambda: seeded(OddParameters)))


@ranks(2, 4)
@pytest.mark.parametrize("set_up", [accumulating, inside_replicas, reducing_each])
@STAGES
def test_micro_batches(world: World, stage: int, set_up: Any) -> None:
    check(world, outer(world, stage, 2, micro_batches=LAST + 1, set_up_micro=set_up))


class TwoDtypes(nn.Module):
    """One group with parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(6, 5), nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wide(self.narrow(x).double())
        return y.float()


@everywhere
@ranks(2)
@pytest.mark.parametrize("replicas", [1, 2])
def test_micro_batches_of_parameters_of_two_dtypes(world: World, replicas: int) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        fsdp.fully_shard(model, mesh=mesh_of(world, replicas), outer_zero_stage=1)

    build = partial(seeded, TwoDtypes)
    check(world, outer(world, build=build, shard=shard, micro_batches=LAST + 1, set_up_micro=inside_replicas))


@everywhere
@ranks(2)
@pytest.mark.parametrize("precision", [Precision(torch.bfloat16, torch.float32), Precision(torch.bfloat16)])
def test_mixed_precision(world: World, precision: Precision) -> None:
    check(world, outer(world, replicas=2, precision=precision))


@ranks(2)
def test_offloaded_parameters(world: World) -> None:
    check(world, outer(world, replicas=2, options={"offload_policy": fullshard.CPUOffloadPolicy()}))


@ranks(4)
@pytest.mark.parametrize("options", [{"reshard_after_forward": 2}, {"shard_placement_fn": by_last_dim}])
def test_other_placements(world: World, options: dict[str, Any]) -> None:
    check(world, outer(world, options=options))


@ranks(2)
def test_transformers_with_tied_weights(world: World) -> None:
    tokens = {"batch": token_batch(2, 5), "loss": lambda call, batch: call(*batch).square().mean()}
    check(world, outer(world, replicas=2, build=lambda: seeded(Transformer), **tokens))


@ranks(4)
def test_every_rank_has_a_part_of_the_parameters_and_the_state(world: World) -> None:
    model, plain = sharded(world), seeded(MLP)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert param.placements == (Shard(0), Shard(0))
        assert param.device_mesh.mesh_dim_names == ("shard", "replicate")
        largest = plain.get_parameter(name).chunk(2)[0].chunk(2)[0]  # the replicas cut the shards again
        assert param.to_local().shape[0] <= len(largest)
        assert param.grad.to_local().shape == param.to_local().shape
        assert optimizer.state[param]["exp_avg"].to_local().shape == param.to_local().shape


@ranks(2)
def test_full_parameters_copies_and_state_dicts(world: World) -> None:
    model = sharded(world, 2)
    with fullshard.summon_full_params(model), torch.no_grad():
        model.blocks[0][0].weight[-1].fill_(7.0)
    twin = copy.deepcopy(model)
    assert bool((whole(twin.blocks[0][0].weight)[-1] == 7).all())
    other = sharded(world, 2)
    other.load_state_dict(twin.state_dict())
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(one), whole(two))
    model(torch.ones(2, 6)).sum().backward()
    with fullshard.summon_full_params(model, with_grads=True):
        full = [param.grad.clone() for param in model.parameters()]
    for one, grad in zip(model.parameters(), full, strict=True):
        assert torch.equal(whole(one.grad), grad)


@ranks(2, 4)
@pytest.mark.parametrize("saved", [True, False])
def test_checkpoints_are_loaded_by_other_stages(world: World, saved: bool, tmp_path: Path) -> None:
    def trained(is_outer: bool, steps: int) -> tuple[Any, torch.optim.Optimizer]:
        options = {} if is_outer else {"outer_zero_stage": 0, "zero_stage": 3}
        model = sharded(world, 2, **options)
        optimizer = adamw(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(saved, 2)
    fullshard.checkpoint.save(tmp_path, model, optimizer, step=2)
    other, its_optimizer = trained(not saved, 0)
    assert fullshard.checkpoint.load(tmp_path, other, its_optimizer) is not None
    for each, chosen in ((model, optimizer), (other, its_optimizer)):
        each(torch.ones(2, 6)).sum().backward()
        chosen.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(one), whole(two))


@ranks(2)
def test_models_on_meta(world: World) -> None:
    with torch.device("meta"):
        model: Any = MLP()
    each_block(mesh=mesh_of(world, 2), outer_zero_stage=1)(fullshard, model)
    with pytest.raises(RuntimeError, match="meta"):
        model(torch.ones(2, 6))
    model.reset_iter_state()
    model.to_empty(device="cpu")
    plain = seeded(MLP)
    values = plain.state_dict()
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(model(torch.ones(2, 6)), plain(torch.ones(2, 6)))


@ranks(2)
def test_what_it_cannot_work_with_is_refused_by_name(world: World) -> None:
    flat = world.mesh(2, names=("shard",))
    both = mesh_of(world, 2)
    with pytest.raises(ValueError, match=r"outer_zero_stage is .*expected 0 or 1"):
        fullshard.fully_shard(nn.Linear(2, 2), mesh=both, outer_zero_stage=2)
    with pytest.raises(TypeError, match="outer_zero_stage"):
        fullshard.fully_shard(nn.Linear(2, 2), mesh=both, outer_zero_stage=True)
    with pytest.raises(ValueError, match=r"outer_zero_stage=1 .*needs a 2-D mesh.* only shards"):
        fullshard.fully_shard(nn.Linear(2, 2), mesh=flat, outer_zero_stage=1)
    with pytest.raises(ValueError, match=r"outer_zero_stage=1 .* only replicates"):
        fullshard.fully_shard(nn.Linear(2, 2), mesh=both, zero_stage=0, outer_zero_stage=1)
    with pytest.raises(ValueError, match=r"parameter 'weight' is Ragged.*: use outer_zero_stage=0"):
        fullshard.fully_shard(
            nn.Linear(2, 2), mesh=both, outer_zero_stage=1, shard_placement_fn=lambda param: fullshard.Ragged()
        )


@ranks(2)
def test_ranks_that_disagree_are_told_so(world: World) -> None:
    with pytest.raises(ValueError, match=r"has outer_zero_stage=. where rank"):
        fullshard.fully_shard(nn.Linear(2, 2), mesh=mesh_of(world, 2), outer_zero_stage=world.rank)
