"""Parameters that keep their memory while they are resharded: their addresses stay, and training is as without."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from tests.fully_shard.cases import Twins, groups_of, inputs, shard_mlp, slots_in_use, twins
from tests.harness import World, ranks
from tests.harness.compare import LIBRARIES, Precision, Training, compare, each_block
from tests.harness.models import MLP, random_batch, seeded

KEEP = "set_keep_unsharded_storage"
KEEPING = [name for name, library in LIBRARIES.items() if hasattr(library.FSDPModule, KEEP)]


def addresses(model: Any) -> list[int]:
    found = []
    for block in model.blocks:
        block.unshard()
        found += [parameter.data_ptr() for parameter in block.parameters()]
        block.reshard()
    return found


@ranks(2)
@pytest.mark.parametrize("library", KEEPING)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_addresses_stay_over_reshard_and_unshard(world: World, library: str, param_dtype: torch.dtype | None) -> None:
    fsdp = LIBRARIES[library]
    model = shard_mlp(fsdp, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=param_dtype))
    model.set_keep_unsharded_storage(True)
    before = addresses(model)
    assert len(set(before)) == len(before), "each has memory of its own"
    for _ in range(2):
        model(inputs()).sum().backward()
        with torch.no_grad():
            model(inputs())
        assert addresses(model) == before


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_training_is_as_without(world: World, reshard: bool) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        each_block(precision=Precision(reduce_dtype=torch.float32), reshard_after_forward=reshard)(fsdp, model)
        if hasattr(model, KEEP):
            model.set_keep_unsharded_storage(True)

    compare(world, Training(build=partial(seeded, MLP), shard=shard, batch=random_batch(4, 6)))


@ranks(2)
def test_one_of_many_keeps_its_memory_and_lets_go_of_it(world: World) -> None:
    pair = twins(world)
    pair.step()
    kept = pair.sharded.blocks[1]
    (group,) = groups_of(kept)
    kept.set_keep_unsharded_storage(True)
    where = address_of(kept)
    for _ in range(2):
        pair.step()
        pair.sharded.free_buffers()
        assert address_of(kept) == where
    if group.shard.shared is None:
        assert group.parameter_pool.nbytes_free == 0
    kept.set_keep_unsharded_storage(False)
    if group.shard.shared is None:
        assert group.parameter_pool.nbytes_free >= group.full.buffer.nbytes
    for _ in range(2):
        pair.step()
    assert slots_in_use(group.parameter_pool) == 0


def address_of(module: Any) -> int:
    module.unshard()
    address: int = next(module.parameters()).data_ptr()
    module.reshard()
    return address


@ranks(2)
def test_a_group_keeps_its_address_when_its_tree_becomes_part_of_another(world: World) -> None:
    model = shard_mlp()
    model.set_keep_unsharded_storage(True)
    where = address_of(model.blocks[0])  # which makes it the root of a tree of its own
    pair = Twins(world, model, seeded(MLP))
    pair.step()
    assert address_of(model.blocks[0]) == where
    pair.step()


@ranks(2)
def test_modules_inside_follow_only_if_asked(world: World) -> None:
    model = shard_mlp()
    model.set_keep_unsharded_storage(True, recurse=False)
    assert [group.options.keep_unsharded_storage for group in groups_of(model)] == [True, False, False, False, False]
    with pytest.raises(TypeError, match="set_keep_unsharded_storage expects True or False, got 1"):
        model.set_keep_unsharded_storage(1)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.high = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(self.low(x.bfloat16()).float())


@pytest.mark.slow
@ranks(4)
def test_several_dtypes_resting_over_a_smaller_mesh(world: World) -> None:
    model = seeded(Mixed)
    fullshard.fully_shard(model.low, reshard_after_forward=2)
    fullshard.fully_shard(model)
    model.set_keep_unsharded_storage(True)
    before = [address_of(model.low), address_of(model)]
    for _ in range(2):
        model(inputs()).sum().backward()
    assert [address_of(model.low), address_of(model)] == before
