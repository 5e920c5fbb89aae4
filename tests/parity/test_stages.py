"""Parity of the ZeRO stages: each trains as the unsharded model does, on every transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fullshard
from fullshard.buffer import plan
from tests.harness import World, everywhere, ranks
from tests.harness.compare import Precision, Training, adamw, compare, each_block, sgd, whole
from tests.harness.models import MLP, Branches, OddParameters, Transformer, random_batch, seeded, token_batch

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
LAST = 2
"""The last of three micro-batches, the one after which gradients are complete."""


def stage_of(stage: int, **changes: Any) -> Training:
    """Training of the MLP in a stage."""
    precision = changes.get("precision")
    defaults: dict[str, Any] = {
        "build": lambda: seeded(MLP),
        "shard": each_block(zero_stage=stage, precision=precision, **changes.pop("options", {})),
        "batch": random_batch(4, 6),
    }
    return Training(**{**defaults, **changes})


def check(world: World, training: Training) -> None:
    compare(world, training, with_torch=False)


def accumulating(model: Any, micro: int) -> None:
    model.set_requires_gradient_sync(micro == LAST)


@contextmanager
def every_parameter_is_large() -> Iterator[None]:
    """Gradients of any size are added up where autograd made them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "LEAST_ZERO_COPY", 1)
        plan._make_plan.cache_clear()
        yield
    plan._make_plan.cache_clear()


@everywhere
@ranks(1, 2, 3)
@STAGES
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_stages(world: World, stage: int, optimizer: Any) -> None:
    check(world, stage_of(stage, optimizer=optimizer))


@everywhere
@ranks(2)
@STAGES
def test_micro_batches(world: World, stage: int) -> None:
    check(world, stage_of(stage, micro_batches=LAST + 1, set_up_micro=accumulating))
    check(world, stage_of(stage, micro_batches=LAST + 1))


@everywhere
@ranks(2, 3)
@pytest.mark.parametrize("precision", [Precision(), Precision(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
def test_gradients_are_added_up_where_autograd_made_them(world: World, precision: Precision) -> None:
    with every_parameter_is_large():
        for micro_batches, set_up in ((1, lambda model, micro: None), (LAST + 1, accumulating)):
            changes = {"micro_batches": micro_batches, "set_up_micro": set_up, "precision": precision}
            check(world, stage_of(0, **changes))
        check(world, stage_of(0, build=lambda: seeded(OddParameters), batch=random_batch(4, 6)))


@ranks(2)
@STAGES
def test_transformers_with_tied_weights(world: World, stage: int) -> None:
    tokens = {"batch": token_batch(2, 5), "loss": lambda call, batch: call(*batch).square().mean()}
    check(world, stage_of(stage, build=lambda: seeded(Transformer), **tokens))


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_offloaded_parameters(world: World, stage: int) -> None:
    check(world, stage_of(stage, options={"offload_policy": fullshard.CPUOffloadPolicy()}))


@everywhere
@ranks(2)
def test_replicas_that_add_up_some_micro_batches_only(world: World) -> None:
    """Sums over one rank are kept beside gradients that are to be added up where autograd made them."""

    def set_up(model: Any, micro: int) -> None:
        model.set_requires_all_reduce(micro == LAST)

    with every_parameter_is_large():
        check(world, stage_of(0, micro_batches=LAST + 1, set_up_micro=set_up))


@ranks(2)
@STAGES
def test_parameters_are_dtensors_between_steps(world: World, stage: int) -> None:
    model: Any = seeded(MLP)
    each_block(zero_stage=stage)(fullshard, model)
    model(torch.ones(2, 6)).sum().backward()
    placement = Replicate() if stage == 0 else Shard(0)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.placements == (placement,)
        assert isinstance(param.grad, DTensor)
        assert param.grad.placements == (placement,)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 6)).sum().backward()
    assert all(isinstance(param, DTensor) for param in model.parameters()), "also where the next forward reuses values"


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_gathers_once_for_all_micro_batches(world: World, stage: int) -> None:
    model: Any = seeded(MLP)
    each_block(zero_stage=stage)(fullshard, model)
    optimizer, gathers = torch.optim.SGD(model.parameters(), lr=0.1), list[str]()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    log = model.blocks[0].__dict__["_fullshard_unit"].schedule.log
    log.listeners.append(lambda action, group, moves: gathers.append(group.name) if action == "gather" and moves else 0)
    for micro in range(LAST + 1):
        accumulating(model, micro)
        model(torch.ones(2, 6)).sum().backward()
    groups = len(model.blocks) + 1
    moved = fullshard.explain(model).facts.groups[0].transport != "shm"
    assert len(gathers) == (groups if stage == 1 and moved else 0)


@ranks(2)
def test_what_autograd_saved_of_a_replica_is_not_read_after_a_step(world: World) -> None:
    model: Any = seeded(MLP)
    each_block(zero_stage=0)(fullshard, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    loss = model(torch.ones(2, 6)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"stepped on parameters 'scale' since"):
        loss.backward()


@ranks(2)
@pytest.mark.parametrize("saved", [0, 1, 3])
@pytest.mark.parametrize("loaded", [0, 1, 3])
def test_a_checkpoint_of_one_stage_is_loaded_in_another(world: World, saved: int, loaded: int, tmp_path: Path) -> None:
    def trained(stage: int, steps: int) -> tuple[Any, torch.optim.Optimizer]:
        model: Any = seeded(MLP)
        each_block(zero_stage=stage)(fullshard, model)
        optimizer = adamw(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(saved, 2)
    fullshard.checkpoint.save(tmp_path, model, optimizer, step=2)
    other, its_optimizer = trained(loaded, 0)
    assert fullshard.checkpoint.load(tmp_path, other, its_optimizer) is not None
    for each in (model, other):
        chosen = optimizer if each is model else its_optimizer
        each(torch.ones(2, 6)).sum().backward()
        chosen.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(one), whole(two))


@ranks(2)
def test_hooks_that_come_after_a_step_get_the_gradients_of_the_next(world: World) -> None:
    seen: list[int] = []
    with every_parameter_is_large():
        wrapped: Any = fullshard.FullyShardedDataParallel(
            seeded(MLP), sharding_strategy=fullshard.ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
        )
        wrapped(torch.ones(2, 6)).sum().backward()
        wrapped.register_comm_hook(None, lambda state, grad: seen.append(grad.numel()))
        wrapped(torch.ones(2, 6)).sum().backward()
        assert len(seen) == 1
        model: Any = fullshard.fully_shard(seeded(MLP), zero_stage=0)
        model(torch.ones(2, 6)).sum().backward()
        model.set_all_reduce_hook(lambda output: seen.append(output.numel()))
        model(torch.ones(2, 6)).sum().backward()
        assert len(seen) == 2, "one tensor for the group"


@ranks(2)
def test_an_optimizer_that_sums_over_matrices_steps_on_replicas(world: World) -> None:
    check(world, stage_of(0, optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.05)))


@everywhere
@ranks(2)
def test_replicas_with_gradients_of_different_parameters_say_so(world: World) -> None:
    model: Any = seeded(Branches)
    with every_parameter_is_large():
        fullshard.fully_shard(model, zero_stage=0)
        used = torch.tensor([world.rank == 0, world.rank == 1, False])  # of one shape: sums would be of both

        def train() -> None:
            for _ in range(2):  # on a device ranks hear of it in the next pass
                model(torch.ones(2, 6), used).sum().backward()

        with pytest.raises(RuntimeError, match="parameters"):
            train()


@ranks(2)
def test_stages_that_do_not_exist_or_reshard(world: World) -> None:
    for stage in (-1, 4):
        with pytest.raises(ValueError, match=r"zero_stage is .*expected 0, 1, 2 or 3"):
            fullshard.fully_shard(nn.Linear(2, 2), zero_stage=stage)
    for wrong in (True, "3", 1.0):
        with pytest.raises(TypeError, match="zero_stage"):
            fullshard.fully_shard(nn.Linear(2, 2), zero_stage=wrong)  # type: ignore[call-overload]
    for after_forward in (True, 2):
        with pytest.raises(ValueError, match=r"zero_stage=1 keeps parameters whole .* leave out one of the two"):
            fullshard.fully_shard(nn.Linear(2, 2), zero_stage=1, reshard_after_forward=after_forward)


@ranks(4)
def test_a_mesh_of_two_dims_only_replicates_in_stage_0(world: World) -> None:
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    check(world, stage_of(0, options={"mesh": mesh}))
