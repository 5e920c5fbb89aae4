"""Which transport is chosen, and how the choice is overridden."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fullshard.comm.backend import backend_name
from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.select import select_transport
from tests.harness import World, fake_world, ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@ranks(2)
def test_gloo_on_the_cpu_exchanges_messages(world: World) -> None:
    assert isinstance(select_transport(group(), CPU), PointToPointTransport)


@ranks(1)
def test_gloo_elsewhere_uses_its_collectives(world: World) -> None:
    assert isinstance(select_transport(group(), CUDA), CollectiveTransport)


@ranks(1)
def test_a_group_may_have_a_backend_for_each_device(world: World) -> None:
    several = dist.new_group(backend="cpu:gloo,cuda:gloo")
    assert backend_name(several, CPU) == "gloo"
    assert backend_name(several, torch.device("mps")) == ""
    assert isinstance(select_transport(several, CPU), PointToPointTransport)


def test_every_other_backend_uses_its_collectives() -> None:
    with fake_world(4):
        assert backend_name(group(), CPU) == "fake"
        assert isinstance(select_transport(group(), CPU), CollectiveTransport)


def test_all_groups_share_a_transport() -> None:
    with fake_world(4):
        assert select_transport(group(), CPU) is select_transport(dist.new_group([0, 1]), CPU)


@ranks(1)
def test_the_environment_overrides_the_choice(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", "collective")
        assert isinstance(select_transport(group(), CPU), CollectiveTransport)
        patch.setenv("FULLSHARD_TRANSPORT", "p2p")
        assert isinstance(select_transport(group(), CPU), PointToPointTransport)


@ranks(1)
def test_an_unknown_transport_is_refused_with_the_known_ones(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", "pigeon")
        with pytest.raises(ValueError, match="'pigeon' names no transport: use one of p2p, collective"):
            select_transport(group(), CPU)


def test_messages_without_gloo_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_TRANSPORT", "p2p")
    with fake_world(2), pytest.raises(ValueError, match="uses 'fake' for buffers on cpu: unset it or use 'collective'"):
        select_transport(group(), CPU)
