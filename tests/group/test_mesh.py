"""Which ranks shard and which replicate: sizes and numbers, with one of both, and with neither."""

from __future__ import annotations

from fullshard.group.mesh import DataMesh
from tests.harness import fake_world


def sizes(data: DataMesh) -> tuple[int, int, int]:
    return data.shard_size, data.shard_rank, data.replicate_size


def test_a_mesh_of_two_dims_replicates_along_the_first() -> None:
    for rank in (0, 4, 5):
        with fake_world(6, rank) as world:
            mesh = world.mesh(2, 3, names=("replicate", "shard"))
            assert sizes(DataMesh(mesh, mesh.get_group("shard"), mesh.get_group("replicate"))) == (3, rank % 3, 2)


def test_without_shards_there_is_one_rank_to_shard_over_and_without_replicas_one_replica() -> None:
    with fake_world(4, 2) as world:
        mesh = world.mesh(4)
        assert sizes(DataMesh(mesh, None, mesh.get_group())) == (1, 0, 4)
        assert sizes(DataMesh(mesh, mesh.get_group())) == (4, 2, 1)
