"""What ranks tell each other, as objects of Python."""

from __future__ import annotations

from fullshard.comm.process_group import gather_objects
from tests.harness import World, ranks


@ranks(1, 3)
def test_objects_of_every_size_arrive_whole_and_in_order(world: World) -> None:
    for size in (0, 200, *range(230, 250), 5000):
        for largest in range(world.size):
            said = [rank * b"\0" + bytes(size if rank == largest else 7 * rank) for rank in range(world.size)]
            assert gather_objects(said[world.rank], None) == said
