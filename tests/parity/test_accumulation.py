"""Parity of what happens between backward and step: accumulation of both kinds, divisors, and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.group import gradient_buffer
from tests.harness import World, ranks
from tests.harness.compare import Precision, ShardFunction, Training, compare, each_block, mean_square, whole
from tests.harness.models import MLP, Branches, Transformer, random_batch, seeded, token_batch
from tests.harness.slow import slow, some

LAST = 2
"""The last of three micro-batches, the one after which gradients are complete."""


def micro_batches(shard: ShardFunction, **changes: Any) -> Training:
    defaults: dict[str, Any] = {
        "build": lambda: seeded(MLP),
        "shard": shard,
        "batch": random_batch(4, 6),
        "micro_batches": LAST + 1,
    }
    return Training(**{**defaults, **changes})


def kept_until_the_last(model: Any, micro: int) -> None:
    for setter in ("requires_gradient_sync", "reshard_after_backward", "is_last_backward"):
        getattr(model, f"set_{setter}")(micro == LAST)


#: What is set before each micro-batch.
SET_UPS: dict[str, Callable[[Any, int], object]] = {
    "each": lambda model, micro: None,
    "the last": lambda model, micro: model.set_requires_gradient_sync(micro == LAST),
    "all but one": lambda model, micro: model.set_requires_gradient_sync(micro != 1),
    "the last, kept": kept_until_the_last,
    "a block, the last": lambda model, micro: model.blocks[1].set_requires_gradient_sync(micro == LAST, recurse=False),
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("communicates", some(SET_UPS, ("each", "the last")))
def test_micro_batches(world: World, communicates: str) -> None:
    compare(world, micro_batches(each_block(), set_up_micro=SET_UPS[communicates]))


@ranks(2)
@pytest.mark.parametrize("most_waiting", [0, 40, 1 << 20])
def test_gradients_that_wait_for_one_another(world: World, most_waiting: int) -> None:
    """However many bytes of gradients wait before they are taken into the buffer together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buffer, "MOST_WAITING", most_waiting)
        compare(world, micro_batches(each_block(), set_up_micro=SET_UPS["the last"]))


def _clear(model: Any, how: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=how == "foreach")
    if how in ("foreach", "optimizer"):
        optimizer.zero_grad(set_to_none=how == "optimizer")
    elif how == "model":
        model.zero_grad(set_to_none=False)
    else:
        for param in model.parameters():
            param.grad.data.zero_()


@ranks(2)
@pytest.mark.parametrize("how", ["optimizer", "model", *slow("foreach", "by hand")])
@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("is_first", [True, False], ids=["nothing reduced", "reduced before"])
def test_what_waits_is_dropped_when_gradients_are_cleared(
    world: World, how: str, replicas: bool, is_first: bool
) -> None:
    """As with DistributedDataParallel. Nothing is dropped of what comes after."""
    model: Any = seeded(MLP)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if replicas else None
    each_block(mesh=mesh)(fullshard, model)
    reference, batches = seeded(MLP), [random_batch(4, 6)(seed) for seed in range(4)]  # equal on all ranks
    if not is_first:
        mean_square(model, batches[0]).backward()
    waits = model.set_requires_all_reduce if replicas else model.set_requires_gradient_sync
    waits(False)
    for _ in range(2):
        (1000 * mean_square(model, batches[0])).backward()
    assert not is_first or not any(param.grad.full_tensor().any() for param in model.parameters())
    _clear(model, how)
    mean_square(model, batches[1]).backward()
    waits(True)
    for seed in (2, 3):
        mean_square(model, batches[seed]).backward()
    for batch in batches[1:]:
        mean_square(reference, batch).backward()
    for mine, plain in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), torch.as_tensor(plain.grad), rtol=1e-4, atol=1e-7)


@ranks(2)
def test_what_waits_is_left_out_of_a_step_and_waits_on(world: World) -> None:
    """As with torch's FSDP2: a module may be reduced in every other step only."""
    model: Any = seeded(MLP)
    each_block()(fullshard, model)
    reference, batch, slow = seeded(MLP), random_batch(4, 6)(0), model.blocks[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    slow.set_requires_gradient_sync(False)
    mean_square(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not any(param in optimizer.state for param in slow.parameters())
    slow.set_requires_gradient_sync(True)
    for _ in range(2):
        mean_square(reference, batch).backward()
    mean_square(model, batch).backward()
    for mine, plain in zip(slow.parameters(), reference.blocks[0].parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), torch.as_tensor(plain.grad), rtol=1e-4, atol=1e-7)


@ranks(2)
def test_a_gradient_of_a_sharded_parameter_is_kept_while_another_waits(world: World) -> None:
    """That of a penalty, and what users write."""
    model: Any = seeded(MLP)
    each_block()(fullshard, model)
    reference, batch = seeded(MLP), random_batch(4, 6)(0)
    model.set_requires_gradient_sync(False)
    mean_square(model, batch).backward()
    penalties = [param.square().sum() for param in model.parameters()]
    sum(each.full_tensor() for each in penalties).backward()  # type: ignore[union-attr]
    model.set_requires_gradient_sync(True)
    mean_square(model, batch).backward()
    for mine, plain in zip(model.parameters(), reference.parameters(), strict=True):
        (2 * mean_square(reference, batch)).backward()
        expected = torch.as_tensor(plain.grad) + 2 * plain.detach()
        torch.testing.assert_close(whole(mine.grad), expected, rtol=1e-4, atol=1e-7)
        reference.zero_grad()


def before_all_reduce(model: Any, micro: int) -> None:
    model.set_requires_all_reduce(micro == LAST)


def before_both(model: Any, micro: int) -> None:
    model.set_requires_gradient_sync(micro > 0)
    model.set_requires_all_reduce(micro == LAST)


@ranks(2, 4)
@pytest.mark.parametrize("replicas", [2, 1])
@pytest.mark.parametrize("waits", [before_all_reduce, before_both])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_hybrid_micro_batches(world: World, replicas: int, waits: Any, param_dtype: torch.dtype | None) -> None:
    precision = Precision(param_dtype, param_dtype and torch.float32)
    mesh = world.mesh(replicas, world.size // replicas, names=("replicate", "shard"))
    shard = each_block(mesh=mesh, precision=precision)
    compare(world, micro_batches(shard, set_up_micro=waits, precision=precision))


@ranks(2)
@pytest.mark.parametrize("as_one", [True, False])
def test_hybrid_accumulated_where_the_last_micro_batch_leaves_a_block_out(world: World, as_one: bool) -> None:
    def batch(seed: int) -> tuple[Tensor, ...]:
        return (*random_batch(4, 6)(seed), torch.tensor([1, int(seed % (LAST + 1) < LAST), 0]))

    mesh = world.mesh(2, 1, names=("replicate", "shard"))

    def shard(fsdp: ModuleType, model: Any) -> None:
        fsdp.fully_shard(model, mesh=mesh) if as_one else each_block(mesh=mesh)(fsdp, model)

    training = micro_batches(shard, build=lambda: seeded(Branches), batch=batch, set_up_micro=before_all_reduce)
    compare(world, training, with_torch=False)


@ranks(2, 3, 4)
@pytest.mark.parametrize("divisor", [1.0, 3.0])
@pytest.mark.parametrize("sum_only", [False, True])
def test_gradient_divide_factor(world: World, divisor: float, sum_only: bool) -> None:
    mesh = world.mesh(2, world.size // 2, names=("replicate", "shard")) if world.size % 2 == 0 and sum_only else None

    def shard(fsdp: ModuleType, model: Any) -> None:
        each_block(mesh=mesh)(fsdp, model)
        for module in (*model.blocks, model):
            module.set_gradient_divide_factor(divisor)
            module.set_force_sum_reduction_for_comms(sum_only)

    training = Training(build=lambda: seeded(MLP), shard=shard, batch=random_batch(4, 6), divisor=divisor)
    # torch asks gloo for a reduction that gloo does not have, and does not divide where one rank shards.
    compare(world, training, with_torch=sum_only and world.size > 2)


@pytest.mark.slow
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), *slow(1.0)])
def test_clipped_gradients(world: World, norm_type: float) -> None:
    def clip(model: nn.Module) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type)

    mesh = world.mesh(2, 2, names=("replicate", "shard")) if world.size == 4 else None
    shard, batch = each_block(mesh=mesh), token_batch(3, 5)
    compare(world, Training(build=lambda: seeded(Transformer), shard=shard, batch=batch, after_backward=clip))


@ranks(2)
def test_all_reduce_hook_sees_each_group_once_a_step(world: World) -> None:
    calls: list[int] = []

    def shard(fsdp: ModuleType, model: Any) -> None:
        each_block()(fsdp, model)
        for module in (*model.blocks, model):
            module.set_all_reduce_hook(double)
        calls.clear()

    def double(gradients: Tensor) -> None:
        calls.append(gradients.numel())
        gradients.mul_(2)

    # What the hook does to the reduced gradients is what the optimizer gets: here half the divisor.
    compare(world, Training(build=lambda: seeded(MLP), shard=shard, batch=random_batch(4, 6), divisor=world.size / 2))
    assert len(calls) == 5 * 3
