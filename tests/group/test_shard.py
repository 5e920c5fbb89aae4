"""The memory that a group keeps between uses: one chunk for each parameter, each with a storage of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fullshard
from fullshard.group.shard import ShardBuffer, give_own_storage
from tests.fully_shard.cases import groups_of, shard_mlp
from tests.harness import World, fake_world, ranks


def test_each_rank_has_its_chunk_of_each_parameter() -> None:
    for rank, rows in enumerate(([0, 1], [2, 3], [4], [])):
        with fake_world(4, rank):
            model = nn.Linear(3, 5)
            weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
            fullshard.fully_shard(model)
            (group,) = groups_of(model)
            assert isinstance(group.shard, ShardBuffer)
            assert torch.equal(group.shard.chunks[0], weight[rows])
            assert torch.equal(group.shard.chunks[1], bias[rows])
            assert sum(view.nbytes for view in group.shard.views) <= group.shard.nbytes


def test_what_is_on_meta_takes_no_memory() -> None:
    with fake_world(2), torch.device("meta"):
        (group,) = groups_of(fullshard.fully_shard(nn.Linear(1 << 20, 1 << 20)))
        assert group.shard.is_meta
        assert all(chunk.is_meta for chunk in group.shard.chunks.values())
        with pytest.raises(RuntimeError, match=r"still on the meta device: \['weight', 'bias'\]"):
            group.shard.refuse_meta()


def test_a_view_gets_a_storage_of_its_own_over_the_same_memory() -> None:
    memory = torch.arange(10.0)
    view = memory[4:7]
    give_own_storage(view)
    assert (view.untyped_storage().nbytes(), view.storage_offset()) == (12, 0)
    view.fill_(-1)
    assert memory.tolist() == [0, 1, 2, 3, -1, -1, -1, 7, 8, 9]
    assert torch.equal(copy.deepcopy(view), view)


@ranks(2, transport="shm")
def test_ranks_of_a_host_have_their_chunks_where_all_of_them_read(world: World) -> None:
    model = shard_mlp()
    group = groups_of(model)[0]
    model(torch.ones(2, 6))  # maps the memory
    assert group.shard.shared is not None
    with torch.no_grad():
        group.params[0].sharded.to_local().fill_(world.rank)
    torch.distributed.barrier()
    whole = group.params[0].sharded.full_tensor()
    group.unshard()
    group.wait_for_unshard()
    assert torch.equal(group.params[0].unsharded, whole)
    group.reshard()
    torch.distributed.barrier()
