"""What replicas exchange when they synchronize, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

from fullshard import WirePolicy, fully_shard
from fullshard.comm.select import select_transport
from fullshard.device import CPU, Lane
from fullshard.optim.synchronization import ChangesExchange, FragmentMember, ModelFragment
from fullshard.wire_policy import EXACT
from tests.fully_shard.cases import groups_of
from tests.harness import World, ranks
from tests.harness.models import seeded


def fragment_of(make_outer: Any = None, policy: WirePolicy = EXACT) -> ModelFragment:
    """A fragment with all parameters of a layer, of which each rank is a replica. Its anchors are their values."""
    model: Any = seeded(lambda: nn.Linear(64, 64))
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    (group,) = groups_of(fully_shard(model, mesh=mesh))
    members = [FragmentMember(str(i), group, i) for i in range(2)]
    fragment = ModelFragment(members, 0, make_outer, False, policy, dist.get_world_size())
    fragment.take_anchor()
    return fragment


def changed(fragment: ModelFragment, amount: float) -> None:
    for each in fragment.members:
        each.param.values.detach().sub_(amount)


def exchange_of(fragment: ModelFragment) -> ChangesExchange:
    transport = select_transport(dist.group.WORLD, CPU).private
    exchange = ChangesExchange(fragment, transport, dist.group.WORLD, (0, 0))
    exchange.start(Lane(CPU))
    return exchange


@ranks(1)
def test_parameters_become_the_anchor_or_the_mean_of_both(world: World) -> None:
    fragment = fragment_of()
    before = [each.param.values.clone() for each in fragment.members]
    changed(fragment, 1.0)
    fragment.show(fragment.anchors, own_weight=0.5)
    for each, values in zip(fragment.members, before, strict=True):
        torch.testing.assert_close(each.param.values, values - 0.5)
    fragment.show(fragment.anchors)
    assert all(torch.equal(each.param.values, values) for each, values in zip(fragment.members, before, strict=True))


@ranks(2)
@pytest.mark.parametrize("has_outer", [False, True])
def test_the_mean_change_is_a_gradient_of_the_anchor(world: World, has_outer: bool) -> None:
    fragment = fragment_of((lambda params: SGD(params, lr=0.5)) if has_outer else None)
    before = [each.param.values.clone() for each in fragment.members]
    changed(fragment, 1.0 + world.rank)
    fragment.exchange = exchange_of(fragment)
    fragment.merge(0.0)
    step = 0.75 if has_outer else 1.5
    for each, values in zip(fragment.members, before, strict=True):
        torch.testing.assert_close(each.param.values, values - step)


@ranks(2)
def test_what_an_encoding_loses_comes_at_the_next_synchronization(world: World) -> None:
    plain, fragment = fragment_of(), fragment_of(policy=WirePolicy("exact", "int4", min_numel=0))
    for each in (plain, fragment):
        generator = torch.Generator().manual_seed(world.rank)
        for member in each.members:
            member.param.values.detach().sub_(torch.randn(member.param.values.shape, generator=generator))
    exact = exchange_of(plain).wait()
    found = [exchange_of(fragment).wait() for _ in range(8)]
    for number, expected in enumerate(exact):
        sums = torch.stack([means[number] for means in found]).sum(0)
        once = float((found[0][number] - expected).abs().max())
        assert once > 0.01
        assert float((sums - 8 * expected).abs().max()) < 2 * once
