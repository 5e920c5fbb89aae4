"""What we expect of the names by which torch places the results of operators on DTensors."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard import torch_rules as rules
from fullshard.torch_private import spec_of
from tests.harness import World, fake_world, ranks


def test_specs_are_found_in_lists_too() -> None:
    with fake_world(2) as world:
        spec = spec_of(DTensor.from_local(torch.ones(1), world.mesh(), [Shard(0)], run_check=False))
        assert rules.specs_in([1, spec, [spec, None]]) == [spec, spec]


@ranks(2)
def test_operators_may_be_answered_for_and_torch_is_asked_otherwise(world: World) -> None:
    asked = []
    rules.on_propagation(lambda schema, by_torch: asked.append(str(schema.op)))
    tensor = DTensor.from_local(torch.ones(2), world.mesh(), [Shard(0)])
    assert torch.equal((tensor * 3).full_tensor(), torch.full((4,), 3.0))
    assert any("mul" in each for each in asked)
    asked.clear()
    rules.replicate_between(lambda before, after: asked.append((before, after)) or False)
    assert torch.equal((tensor * 5).redistribute(placements=[Replicate()]).to_local(), torch.full((4,), 5.0))
