"""Parity of ragged layouts: training with parameters that are cut between blocks is training of the whole model."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import Ragged
from tests.harness import World, ranks
from tests.harness.compare import Batch, Precision, Training, adamw, compare, each_block, sgd
from tests.harness.models import MLP, Branches, Transformer, random_batch, seeded, token_batch
from tests.harness.slow import slow

WHOLE, ROWS, BLOCK = Ragged(), Ragged(rows=2), Ragged(block=6)


def ragged(placement: Ragged, **options: Any) -> Any:
    return each_block(shard_placement_fn=lambda param: placement if param.ndim > 1 else None, **options)


check = partial(compare, with_torch=False)


@ranks(1, 2, 3)
@pytest.mark.parametrize("placement", [WHOLE, ROWS, *slow(BLOCK, Ragged(tile=(3, 2)))], ids=str)
def test_mlp(world: World, placement: Ragged) -> None:
    check(
        world, Training(build=lambda: seeded(MLP), shard=ragged(placement), batch=random_batch(4, 6), optimizer=adamw)
    )


@pytest.mark.slow
@ranks(2, 3)
@pytest.mark.parametrize("placement", [WHOLE, ROWS], ids=str)
def test_a_transformer_with_tied_and_frozen_weights(world: World, placement: Ragged) -> None:
    def build() -> nn.Module:
        model = seeded(partial(Transformer, tied=True))
        model.blocks[0].up.weight.requires_grad_(False)
        return model

    check(world, Training(build=build, shard=ragged(placement), batch=token_batch(3, 5), optimizer=sgd, steps=2))


@ranks(2)
@pytest.mark.parametrize("stage", [1, *slow(0, 2)])
def test_stages(world: World, stage: int) -> None:
    def set_up(model: Any, micro: int) -> None:
        model.set_requires_gradient_sync(micro == 1)

    shard = ragged(ROWS, zero_stage=stage)
    check(
        world,
        Training(
            build=lambda: seeded(MLP), shard=shard, batch=random_batch(4, 6), micro_batches=2, set_up_micro=set_up
        ),
    )


@ranks(2)
def test_bfloat16(world: World) -> None:
    precision = Precision(torch.bfloat16, torch.float32)
    shard = ragged(BLOCK, precision=precision)
    check(world, Training(build=lambda: seeded(MLP), shard=shard, batch=random_batch(4, 6), precision=precision))


@ranks(2)
def test_branches_of_which_some_are_unused(world: World) -> None:
    def batch(seed: int) -> Batch:
        return (*random_batch(4, 6)(seed), torch.tensor([1, 0, 0]).roll(seed))

    def shard(fsdp: ModuleType, model: Any) -> None:
        fsdp.fully_shard(model, shard_placement_fn=lambda param: WHOLE)
        model.set_reduce_scatter_unused_params(True)

    check(world, Training(build=lambda: seeded(Branches), shard=shard, batch=batch, unused_are_zero=True))


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("after_forward", [None, 2])
def test_hybrid_and_smaller_meshes(world: World, after_forward: int | None) -> None:
    mesh = world.mesh(2, 2, names=("replicate", "shard")) if after_forward is None else None
    shard = ragged(ROWS, mesh=mesh, reshard_after_forward=after_forward)
    check(world, Training(build=lambda: seeded(MLP), shard=shard, batch=random_batch(4, 6)))
