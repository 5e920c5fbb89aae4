"""Parity of the wrapper's settings: strategies, original or flat parameters, precision, offload, accumulation."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import World, ranks
from tests.harness.compare import Precision, adamw, compare, sgd
from tests.harness.models import MixedDtypes, Transformer, seeded, token_batch
from tests.harness.slow import slow
from tests.harness.wrapper import (
    HYBRID,
    ORIGINAL,
    no_sync_before,
    training,
    wrap_blocks,
    wrap_whole,
)

BF16, FP32 = torch.bfloat16, torch.float32
EACH_STRATEGY = pytest.mark.parametrize("strategy", ["FULL_SHARD", *slow("SHARD_GRAD_OP"), "NO_SHARD"])
LAST = 2
"""The last of three micro-batches."""


@ranks(1, 2, 3)
@EACH_STRATEGY
@ORIGINAL
def test_strategies(world: World, strategy: str, original: bool) -> None:
    compare(world, training(wrap_blocks(strategy=strategy, original=original), steps=3))


@pytest.mark.slow
@ranks(2, transport="shm")
@ORIGINAL
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_transformer_in_one_unit_and_in_many(world: World, original: bool, optimizer: Any) -> None:
    options = {"build": lambda: seeded(Transformer), "batch": token_batch(3, 5), "optimizer": optimizer}
    for shard in (wrap_whole(original=original), wrap_blocks(original=original)):
        compare(world, training(shard, **options))


def hybrid_groups(world: World, kind: str) -> dict[str, Any]:
    """Pairs of ranks that shard and pairs that replicate, as a mesh and as the groups of this rank."""
    if kind == "mesh":
        return {"device_mesh": world.mesh(2, 2, names=("replicate", "shard"))}
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return {"process_group": (shards[world.rank // 2], replicas[world.rank % 2])}


@ranks(4)
@pytest.mark.parametrize("strategy", [HYBRID[0], *slow(HYBRID[1])])
@pytest.mark.parametrize("kind", ["mesh", *slow("groups")])
@ORIGINAL
def test_hybrid_strategies(world: World, strategy: str, kind: str, original: bool) -> None:
    compare(world, training(wrap_blocks(strategy=strategy, original=original, **hybrid_groups(world, kind))))


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("strategy", HYBRID)
@pytest.mark.parametrize("without_communication", [False, True])
def test_hybrid_strategies_over_micro_batches(world: World, strategy: str, without_communication: bool) -> None:
    changes = {"around_micro": no_sync_before(LAST)} if without_communication else {}
    shard = wrap_blocks(strategy=strategy, **hybrid_groups(world, "mesh"))
    compare(world, training(shard, micro_batches=LAST + 1, **changes))


@ranks(2, transport="shm")
def test_a_mesh_of_one_dimension(world: World) -> None:
    compare(world, training(wrap_blocks(device_mesh=world.mesh())))


@ranks(3)
def test_a_process_group_of_some_ranks(world: World) -> None:
    pair = dist.new_group([0, 2])
    if world.rank != 1:
        place = (world.rank // 2, 2)
        compare(world, training(wrap_blocks(process_group=pair)), data_parallel=place)


@ranks(2)
@EACH_STRATEGY
@ORIGINAL
def test_bf16_parameters_reduced_in_fp32(world: World, strategy: str, original: bool) -> None:
    precision = Precision(BF16, FP32)
    shard = wrap_blocks(strategy=strategy, original=original, precision=precision)
    compare(world, training(shard, precision=precision, optimizer=adamw))


@ranks(2)
@EACH_STRATEGY
@ORIGINAL
def test_parameters_of_several_dtypes(world: World, strategy: str, original: bool) -> None:
    shard = wrap_whole(strategy=strategy, original=original)
    compare(world, training(shard, build=lambda: seeded(MixedDtypes)), with_torch=False)


@ranks(2)
@EACH_STRATEGY
@ORIGINAL
def test_cpu_offload(world: World, strategy: str, original: bool) -> None:
    shard = wrap_blocks(strategy=strategy, original=original, offload=True)
    compare(world, training(shard), with_torch=False)  # torch pins memory, for which it wants an accelerator


@ranks(2)
@EACH_STRATEGY
@ORIGINAL
@pytest.mark.parametrize("without_communication", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_accumulated(world: World, strategy: str, original: bool, without_communication: bool, offload: bool) -> None:
    changes = {"around_micro": no_sync_before(LAST)} if without_communication else {}
    shard = wrap_blocks(strategy=strategy, original=original, offload=offload)
    compare(world, training(shard, micro_batches=LAST + 1, **changes), with_torch=not offload)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("quiet", [{1}, *slow({0}, {0, 2})])
def test_some_micro_batches_communicate(world: World, quiet: set[int]) -> None:
    """Each gradient arrives once, however quiet and other micro-batches follow one another: the last one sends all."""

    def around(model: Any, micro: int) -> Any:
        return no_sync_before(4)(model, micro if micro in quiet else 4)

    compare(world, training(wrap_blocks(), micro_batches=LAST + 2, around_micro=around))


@pytest.mark.slow
@ranks(2, transport="shm")
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", *slow(None)])
@pytest.mark.parametrize("ahead", [False, True])
def test_prefetch_changes_nothing(world: World, prefetch: str | None, ahead: bool) -> None:
    def shard(fsdp: ModuleType, model: nn.Module) -> Any:
        which = fsdp.BackwardPrefetch[prefetch] if prefetch else None
        options = {"backward_prefetch": which, "forward_prefetch": ahead, "limit_all_gathers": ahead}
        return wrap_blocks(**options)(fsdp, model)

    compare(world, training(shard, steps=3))


@pytest.mark.slow
@ranks(2, transport="shm")
@ORIGINAL
def test_units_inside_of_units(world: World, original: bool) -> None:
    def nested() -> nn.Module:
        inner = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))
        return nn.Sequential(nn.Linear(6, 7), nn.Sequential(inner, nn.Linear(7, 3)))

    def shard(fsdp: ModuleType, model: Any) -> Any:
        one = wrap_whole(original=original)
        model[1][0][0] = one(fsdp, model[1][0][0])
        model[1][0] = one(fsdp, model[1][0])
        model[1] = one(fsdp, model[1])
        return one(fsdp, model)

    compare(world, training(shard, build=lambda: seeded(nested)))


@pytest.mark.slow
@ranks(2, transport="shm")
@ORIGINAL
def test_a_plain_root_over_wrapped_blocks(world: World, original: bool) -> None:
    """Blocks that are roots of their own; the model's own parameter is nobody's, and frozen."""

    def shard(fsdp: ModuleType, model: Any) -> None:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap_whole(original=original)(fsdp, block)

    def build() -> nn.Module:
        model = training(shard).build()
        model.get_parameter("scale").requires_grad_(False)
        return model

    compare(world, training(shard, build=build))
