"""Checks before the first forward: buffers without values, groups in other orders, parameters that nobody has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullshard.schedule.checks import check_first_forward
from tests.fully_shard.cases import groups_of, shard_mlp
from tests.harness import World, ranks


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("saved", torch.zeros(2))
        self.inner.register_buffer("table", torch.zeros(2), persistent=False)


def test_a_buffer_on_meta_is_named_before_the_first_forward() -> None:
    with torch.device("meta"):
        model = WithBuffers()
    with pytest.raises(RuntimeError, match=r"buffers are still on the meta device: \['saved', 'inner.table'\]"):
        check_first_forward([model], [])
    check_first_forward([WithBuffers()], [])


@ranks(2)
def test_ranks_that_sharded_in_another_order_are_told(world: World) -> None:
    model = shard_mlp()
    groups = groups_of(model)
    check_first_forward([], groups)
    if world.rank:
        groups[0].tag, groups[1].tag = groups[1].tag, groups[0].tag
    with pytest.raises(ValueError, match="did not shard their modules in the same order: rank 0 has the group"):
        check_first_forward([], groups)
