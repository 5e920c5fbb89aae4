"""A world of many ranks in one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fullshard.testing.simulated import simulated_world


@pytest.mark.parametrize("size", [1, 7, 1024])
def test_worlds_come_and_go(size: int) -> None:
    with simulated_world(size, rank=size - 1) as world:
        assert (dist.get_rank(), dist.get_world_size()) == (size - 1, size)
        assert world.mesh().size() == size
        with pytest.raises(RuntimeError, match="needs a process without a default process group"), simulated_world(2):
            pass
    assert not dist.is_initialized()
