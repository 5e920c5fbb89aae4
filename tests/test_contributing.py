"""The recipes of CONTRIBUTING work: each test follows one with a toy, and trains with it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.comm import select
from fullshard.comm.transport import PLAIN_SUM, Reduction, Request, Route, Transport
from fullshard.device import Done, Pending
from fullshard.group import reduction
from fullshard.testing import assert_trains_like
from tests.harness import World, ranks
from tests.harness.models import seeded


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


class OneAfterAnother(Transport):
    """Each rank broadcasts its shard in turn, and whole gradients are added up."""

    name = "toy"
    started: list[str] = []  # noqa: RUF012

    def _route(self, request: Request) -> Route:
        return _Turns(request)


class _Turns:
    staging = sent = 0

    def __init__(self, request: Request) -> None:
        self._request = request

    def start(
        self, shards: Sequence[torch.Tensor] = (), reduction: Reduction = PLAIN_SUM, *zero_copy: torch.Tensor
    ) -> Pending:
        direction, transfers, group, *_ = self._request
        OneAfterAnother.started.append(direction)
        with torch.no_grad():
            for at, (plan, full, shard) in enumerate(transfers):
                if direction == "reduce":
                    dist.all_reduce(full, group=group)
                    for piece in plan.pieces(group.rank()):
                        piece.of_shard(shards[at]).copy_(piece.of_full(full) / reduction.divisor)
                    continue
                for rank in range(group.size()):
                    message = shard.clone()
                    dist.broadcast(message, group=group, group_src=rank)
                    for piece in plan.pieces(rank):
                        piece.of_full(full.data).copy_(piece.of_shard(message))
        return Done()


@ranks(2)
def test_a_transport_is_a_class_with_routes_and_a_line_that_chooses_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "choose_transport", lambda *_: (OneAfterAnother(), "it is a toy"))
    whole = seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    model = copy.deepcopy(whole)
    fullshard.fully_shard(model[0])
    assert_trains_like(whole, fullshard.fully_shard(model), batch)
    assert set(OneAfterAnother.started) == {"gather", "reduce"}


class Vote(reduction.SecondHop):
    """Each replica says in which direction a parameter should go, as in signSGD with majority vote."""

    def start(self, values: Sequence[torch.Tensor]) -> reduction.Started:
        for each in values:
            each.sign_()
        return super().start(values)


@ranks(4)
def test_a_reduction_is_a_hop_and_a_line_that_chooses_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "SecondHop", Vote)
    whole = seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    votes = [torch.zeros_like(param) for param in whole.parameters()]
    for replica in ((0, 1), (2, 3)):
        loss = sum(whole(batch(0, rank)).sum() for rank in replica)
        grads = torch.autograd.grad(loss, list(whole.parameters()))
        votes = [vote + grad.sign() for vote, grad in zip(votes, grads, strict=True)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fullshard.fully_shard(copy.deepcopy(whole), mesh=mesh)
    model(batch(0, world.rank)).sum().backward()
    for param, vote in zip(model.parameters(), votes, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad.full_tensor(), vote)  # type: ignore[attr-defined]
