"""What is known of backends, by group and device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm.backends import BACKENDS, Backend, backend_of, backends_of
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.select import select_transport
from fullshard.device import CPU
from tests.harness import World, fake_world, ranks


@ranks(1)
def test_a_group_may_have_a_backend_for_each_device(world: World) -> None:
    several = dist.new_group(backend="cpu:gloo,cuda:gloo")
    assert backends_of(several) == {"cpu": BACKENDS["gloo"], "cuda": BACKENDS["gloo"]}
    assert backend_of(several, torch.device("mps")).name == ""
    assert isinstance(select_transport(several, CPU), PointToPointTransport)


def test_a_backend_that_is_not_known_does_what_all_do() -> None:
    with fake_world(2):
        assert dist.group.WORLD is not None
        assert backend_of(dist.group.WORLD, CPU) == Backend("fake")
