"""Parity of the ZeRO stages, of a model and of its replicas: each trains as the unsharded model does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

import fullshard
from fullshard.buffer import plan
from tests.harness import World, ranks
from tests.harness.compare import Precision, Training, adamw, compare, each_block, whole
from tests.harness.models import MLP, Branches, OddParameters, random_batch, seeded
from tests.harness.slow import slow

#: With `outer` replicas shard the optimizer state, which is `outer_zero_stage=1`.
STAGES = ["0", "1", "outer 3", *slow("2", "3", "outer 1", "outer 2")]
LAST = 2
"""The last of three micro-batches, the one after which gradients are complete."""


def mesh_of(world: World, replicas: int = 0) -> Any:
    """A mesh of two shards on four ranks, and otherwise of replicas alone, unless `replicas` says their number."""
    replicas = replicas or (2 if world.size == 4 else world.size)
    return world.mesh(replicas, world.size // replicas, names=("replicate", "shard"))


def options_of(world: World, stage: str) -> dict[str, Any]:
    outer = {"mesh": mesh_of(world), "outer_zero_stage": 1} if stage.startswith("outer") else {}
    return {"zero_stage": int(stage[-1]), **outer}


def check(world: World, stage: str, options: dict[str, Any] | None = None, **changes: Any) -> None:
    options = {**options_of(world, stage), **(options or {})}
    shard = each_block(precision=changes.get("precision"), **options)
    defaults: dict[str, Any] = {"build": lambda: seeded(MLP), "shard": shard, "batch": random_batch(4, 6)}
    compare(world, Training(**{**defaults, **changes}), with_torch=False)


def sharded(world: World, stage: str, build: Any = MLP) -> Any:
    model = seeded(build)
    each_block(**options_of(world, stage))(fullshard, model)
    return model


def reducing_each(model: Any, micro: int) -> None:
    """Every micro-batch is reduced, which is what happens unasked."""


def accumulating(model: Any, micro: int) -> None:
    model.set_requires_gradient_sync(micro == LAST)


def inside_replicas(model: Any, micro: int) -> None:
    model.set_requires_all_reduce(micro == LAST)


@contextmanager
def every_parameter_is_large() -> Iterator[None]:
    """Gradients of any size are added up where autograd made them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "LEAST_ZERO_COPY", 1)
        plan._make_plan.cache_clear()
        yield
    plan._make_plan.cache_clear()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("stage", STAGES)
def test_stages(world: World, stage: str) -> None:
    check(world, stage, optimizer=adamw)


@ranks(2, 4)
@pytest.mark.parametrize("set_up", [accumulating, reducing_each, inside_replicas])
@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches(world: World, stage: str, set_up: Any) -> None:
    check(world, stage, micro_batches=LAST + 1, set_up_micro=set_up)


class TwoDtypes(nn.Module):
    """One group with parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(6, 5), nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wide(self.narrow(x).double())
        return y.float()


@ranks(2)
@pytest.mark.parametrize("replicas", [1, 2])
def test_micro_batches_of_parameters_of_two_dtypes(world: World, replicas: int) -> None:
    shard = partial(fullshard.fully_shard, mesh=mesh_of(world, replicas), outer_zero_stage=1)
    changes = {"build": partial(seeded, TwoDtypes), "shard": lambda fsdp, model: shard(model)}
    check(world, "outer 3", **changes, micro_batches=LAST + 1, set_up_micro=inside_replicas)


@ranks(2)
@pytest.mark.parametrize("precision", [Precision(torch.bfloat16, torch.float32), Precision(torch.bfloat16)])
def test_mixed_precision(world: World, precision: Precision) -> None:
    check(world, "outer 3", precision=precision)


@ranks(2)
@pytest.mark.parametrize("precision", [Precision(), Precision(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("set_up", [accumulating, inside_replicas, *slow(reducing_each)])
def test_gradients_are_added_up_where_autograd_made_them(world: World, precision: Precision, set_up: Any) -> None:
    """With `inside_replicas`, sums over one rank are kept beside them."""
    with every_parameter_is_large():
        check(world, "0", micro_batches=LAST + 1, set_up_micro=set_up, precision=precision)
        check(world, "0", build=lambda: seeded(OddParameters))


@ranks(2)
@pytest.mark.parametrize("stage", ["outer 3", *slow("0", "1")])
def test_offloaded_parameters(world: World, stage: str) -> None:
    check(world, stage, options={"offload_policy": fullshard.CPUOffloadPolicy()})


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        ("outer 3", {"reshard_after_forward": 2}),
        ("outer 3", {"shard_placement_fn": lambda param: Shard(param.ndim - 1)}),
        ("0", {"mesh": (2, 2)}),
    ],
    ids=["smaller mesh", "last dim", "stage 0 of two dims"],
)
def test_other_placements(world: World, stage: str, options: dict[str, Any]) -> None:
    check(world, stage, options={"mesh": mesh_of(world)} if "mesh" in options else options)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES[:2])
def test_parameters_are_dtensors_between_steps(world: World, stage: str) -> None:
    model = sharded(world, stage)
    model(torch.ones(2, 6)).sum().backward()
    placement = Replicate() if stage == "0" else Shard(0)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.placements == (placement,)
        assert isinstance(param.grad, DTensor)
        assert param.grad.placements == (placement,)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 6)).sum().backward()
    assert all(isinstance(param, DTensor) for param in model.parameters()), "also where the next forward reuses values"


@ranks(4)
def test_every_rank_has_a_part_of_the_parameters_and_the_state(world: World) -> None:
    model, plain = sharded(world, "outer 3"), seeded(MLP)
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
@pytest.mark.parametrize("said", [r"stepped on parameters 'scale' since", "modified by an inplace operation"])
def test_what_autograd_saved_of_a_replica_is_not_read_after_a_write(world: World, said: str) -> None:
    model = sharded(world, "0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    loss = model(torch.ones(2, 6)).sum()
    if said.startswith("stepped"):
        optimizer.step()
    else:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    with pytest.raises(RuntimeError, match=said):
        loss.backward()


@ranks(2)
def test_full_parameters_copies_and_state_dicts(world: World) -> None:
    model = sharded(world, "outer 3")
    with fullshard.summon_full_params(model), torch.no_grad():
        model.blocks[0][0].weight[-1].fill_(7.0)
    twin = copy.deepcopy(model)
    assert bool((whole(twin.blocks[0][0].weight)[-1] == 7).all())
    other = sharded(world, "outer 3")
    other.load_state_dict(twin.state_dict())
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(one), whole(two))
    model(torch.ones(2, 6)).sum().backward()
    with fullshard.summon_full_params(model, with_grads=True):
        full = [param.grad.clone() for param in model.parameters()]
    for one, grad in zip(model.parameters(), full, strict=True):
        assert torch.equal(whole(one.grad), grad)


@ranks(2, 4)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("0", "outer 3"),
        *(pytest.param(*stages, marks=pytest.mark.slow) for stages in (("1", "3"), ("3", "0"), ("outer 3", "3"))),
    ],
)
def test_a_checkpoint_of_one_stage_is_loaded_in_another(world: World, saved: str, loaded: str, tmp_path: Path) -> None:
    models = [sharded(world, stage) for stage in (saved, loaded)]
    optimizers = [adamw(model.parameters()) for model in models]

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        train(models[0], optimizers[0])
    fullshard.checkpoint.save(tmp_path, models[0], optimizers[0], step=2)
    assert fullshard.checkpoint.load(tmp_path, models[1], optimizers[1]) is not None
    for each in zip(models, optimizers, strict=True):
        train(*each)
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(whole(one), whole(two))


@pytest.mark.slow
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


@pytest.mark.slow
@ranks(2)
def test_an_optimizer_that_sums_over_matrices_steps_on_replicas(world: World) -> None:
    check(world, "0", optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.05))


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


@ranks(2)
def test_what_an_outer_stage_cannot_work_with_is_refused_by_name(world: World) -> None:
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
