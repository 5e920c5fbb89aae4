"""Which ranks shard and which replicate: sizes and numbers, with one of both, and with neither."""

from __future__ import annotations

import pytest

from fullshard.group.mesh import DataMesh
from tests.harness import fake_world


@pytest.mark.parametrize("rank", [0, 4, 5])
def test_a_mesh_of_two_dims_replicates_along_the_first(rank: int) -> None:
    with fake_world(6, rank) as world:
        mesh = world.mesh(2, 3, names=("replicate", "shard"))
        data = DataMesh(mesh, mesh.get_group("shard"), mesh.get_group("replicate"))
        assert (data.shard_size, data.shard_rank, data.replicate_size) == (3, rank % 3, 2)


def test_what_is_only_replicated_is_sharded_over_one_rank() -> None:
    with fake_world(4, 2) as world:
        mesh = world.mesh(4)
        data = DataMesh(mesh, None, mesh.get_group())
        assert (data.shard_size, data.shard_rank, data.replicate_size) == (1, 0, 4)


def test_what_is_only_sharded_has_one_replica() -> None:
    with fake_world(4, 2) as world:
        mesh = world.mesh(4)
        data = DataMesh(mesh, mesh.get_group())
        assert (data.shard_size, data.shard_rank, data.replicate_size) == (4, 2, 1)
