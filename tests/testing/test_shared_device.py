"""Collectives that are given copies on the CPU. tests/gpu has them on an accelerator."""

from __future__ import annotations

import pytest
import torch

from fullshard.testing import World
from fullshard.testing.shared_device import by_host
from fullshard.torch_private import FUNCTIONAL_COLLECTIVES
from tests.harness import ranks


@ranks(2)
def test_results_and_written_arguments_come_back(world: World) -> None:
    group = torch.distributed.group.WORLD
    assert group is not None
    tensor = torch.full((2,), world.rank + 1.0)
    gathered = by_host(FUNCTIONAL_COLLECTIVES.all_gather_into_tensor.default, tensor, 2, group.group_name)
    assert gathered.tolist() == [1, 1, 2, 2]
    assert tensor.tolist() == [world.rank + 1.0] * 2
    assert by_host(FUNCTIONAL_COLLECTIVES.all_reduce_.default, tensor, "sum", group.group_name) is tensor
    assert tensor.tolist() == [3, 3]
    both = [torch.ones(1), torch.full((1,), float(world.rank))]
    by_host(FUNCTIONAL_COLLECTIVES.all_reduce_coalesced_.default, both, "sum", group.group_name)
    assert [each.item() for each in both] == [2, 1]


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"])
def test_what_is_routed_is_an_operator_of_torch(name: str) -> None:
    assert hasattr(FUNCTIONAL_COLLECTIVES, name)
