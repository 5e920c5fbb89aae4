"""Checks before the first forward: buffers without values, groups in other orders, parameters that nobody has."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from fullshard.schedule.checks import buffers_on_meta, check_first_forward, warn_of_emptied
from tests.fully_shard.cases import groups_of, shard_mlp
from tests.harness import World, ranks


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("saved", torch.zeros(2))
        self.inner.register_buffer("table", torch.zeros(2), persistent=False)


def test_buffers_that_no_state_dict_fills_are_found_by_their_paths() -> None:
    with torch.device("meta"):
        model = WithBuffers()
    assert buffers_on_meta(model) == [(model.inner, "table", "inner.table")]
    assert buffers_on_meta(model.inner) == [(model.inner, "table", "table")]
    assert buffers_on_meta(WithBuffers()) == []


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


def test_buffers_that_nobody_wrote_after_to_empty_are_named() -> None:
    model = WithBuffers()
    emptied = torch.empty(2)
    model.inner.table = emptied
    noted = [(emptied, model.inner, "table", "inner.table")]
    with pytest.warns(UserWarning, match=r"left uninitialized by to_empty\(\): \['inner.table'\]"):
        warn_of_emptied(noted)
    emptied.fill_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_emptied(noted)
        model.inner.table = torch.empty(2)  # another one, which to_empty() did not leave
        warn_of_emptied(noted)
