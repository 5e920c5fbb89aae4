"""The transport of several hosts with several ranks each, which the ranks of these tests pretend to be on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import MixedPrecisionPolicy, WirePolicy, fully_shard
from fullshard.buffer.shared_memory import Segment
from fullshard.comm.hosts import HostsTransport, peers_of, shared_transport
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.process_group import gather_objects
from fullshard.comm.transport import Transfer
from fullshard.comm.waits import PeerFailureError
from tests.comm.cases import Case, Section, assert_gathered, fill_shards, group, transfers_of
from tests.fully_shard.cases import groups_of
from tests.harness import World, pretended_hosts, ranks

SHAPES = ((8, 3), 0), ((5,), 0), ((6, 5), 1), ((1024, 512), 0)
CASE = Case("even", (Section(torch.float32, SHAPES), Section(torch.bfloat16, SHAPES)))
HOSTS = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0,), (1, 2), (3, 4, 5)), ((1, 4), (0, 2, 3))]


def make(hosts: str) -> HostsTransport:
    with pretended_hosts(hosts):
        made = shared_transport(dist.group.WORLD, PointToPointTransport(), "hosts")
    assert isinstance(made, HostsTransport), made
    return made


@contextmanager
def on_hosts(hosts: str) -> Iterator[None]:
    """A context in which ranks are on these hosts, and choose their transport by that."""
    before = os.environ.pop("FULLSHARD_TRANSPORT", None)
    try:
        with pretended_hosts(hosts):
            yield
    finally:
        if before is not None:
            os.environ["FULLSHARD_TRANSPORT"] = before


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_each_shard_goes_once_to_every_other_host(hosts: Sequence[Sequence[int]]) -> None:
    every = {rank: peers_of(hosts, rank) for host in hosts for rank in host}
    for rank, peers in every.items():
        assert all(rank in every[source].targets for source in peers.sources), "both sides know of a message"
        assert all(rank in every[target].sources for target in peers.targets)
        assert peers.most == max(len(each.sources) for each in every.values())
    for host in hosts:
        fetched = [source for rank in host for source in every[rank].sources]
        assert sorted(fetched) == sorted(rank for other in hosts if other is not host for rank in other)


def in_slot(transport: HostsTransport) -> tuple[Any, list[Transfer]]:
    """A buffer in a slot of the host, and transfers to it."""
    transfers = transfers_of(CASE, dist.get_world_size())
    starts, end = [], 0
    for each in transfers:
        starts.append(end)
        end += -(-each.full.nbytes // 64) * 64
    buffer = transport.pool("parameters", torch.device("cpu")).buffer(end)
    buffer.take()
    pairs = zip(transfers, starts, strict=True)
    return buffer, [
        each._replace(full=buffer.memory[at : at + each.full.nbytes].view(each.full.dtype)) for each, at in pairs
    ]


@ranks(3, 4)
@pytest.mark.parametrize("hosts", ["aabb", "cdcd", "efff", "gggg"])
def test_a_gather_fills_the_slot_that_a_host_shares(world: World, hosts: str) -> None:
    transport = make(hosts)
    buffer, transfers = in_slot(transport)
    fill_shards(CASE, transfers, world.rank)
    for _ in range(3):
        transport.gather_route(transfers, group(), 3).start().finish()
        assert_gathered(CASE, transfers, world.rank)
        transfers[0].full.fill_(-1.0)  # nobody else sees it
        dist.barrier()
        assert (transfers[0].full == -1).all()
        buffer.give_back()
        buffer.take()


@ranks(3)
def test_other_memory_or_another_group_is_named(world: World) -> None:
    transport = make("iij")
    buffer, transfers = in_slot(transport)
    fill_shards(CASE, transfers, world.rank)
    route = transport.gather_route(transfers, group(), 3 if world.rank != 1 else 4)
    pending = route.start()
    if world.rank == 2:
        return
    with pytest.raises((RuntimeError, PeerFailureError), match=r"gathers the group with tag [34] where"):
        transport.compare(transport.begun.value)
    del pending, buffer


@ranks(2)
def test_ranks_that_wait_for_different_groups_are_told(world: World) -> None:
    """Each has begun both gathers, and then runs one module where the other runs another."""
    transport = make("oo")
    both = [in_slot(transport) for _ in range(2)]
    pending = []
    for tag, (_, transfers) in enumerate(both):
        fill_shards(CASE, transfers, world.rank)
        pending.append(transport.gather_route(transfers, group(), tag).start())
    with pytest.raises(RuntimeError, match=r"waits for the group with tag [01] where rank [01] waits for"):
        pending[world.rank].finish()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 64), nn.Linear(64, 48)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(self.up(x).relu())


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Net(), Net(), nn.Linear(48, 5))


def train(world: World, model: Any, steps: int = 4, *, alone: bool = False) -> list[torch.Tensor]:
    """The parameters after some steps, with this rank's part of the batch or with all of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        batch = torch.randn(world.size, 6, 48, generator=torch.Generator().manual_seed(step))
        loss = model(batch.view(-1, 48) if alone else batch[world.rank]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach() if not alone else param.detach() for param in model.parameters()]


WAYS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 2": {"zero_stage": 2},
    "stage 1": {"zero_stage": 1},
    "stage 0": {"zero_stage": 0},
    "int8": {"wire_policy": WirePolicy("int8", "int8", min_numel=1)},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offloaded": {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)},
}


@ranks(3, 4, timeout=120)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hosts", ["aabb", "cdcd"])
def test_hosts_train_as_one_rank_alone(world: World, way: str, hosts: str) -> None:
    plain, model = build(), build()
    with on_hosts(hosts):
        for module in (model[0], model[1], model):
            fully_shard(module, **WAYS[way])
        assert {group.transport.name for group in groups_of(model)} == {"hosts"}
        found = train(world, model)
    rtol = {"int8": 0.05, "bf16": 0.05}.get(way, 1e-5)
    for one, other in zip(found, train(world, plain, alone=True), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)
    sums = [torch.zeros(()) for _ in range(world.size)]
    dist.all_gather(sums, sum(map(torch.Tensor.sum, found), torch.zeros(())))
    assert len({float(each) for each in sums}) == 1, "all ranks have the same bits"


@ranks(3, 4)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_that_an_error_has_ended_leaves_nothing_behind(world: World, in_backward: bool) -> None:
    """With gathers under way, and slots in use."""
    plain, model = build(), build()
    with on_hosts("kkll"):
        for module in (model[0], model[1], model):
            fully_shard(module)

        def fail(*_: Any) -> None:
            raise ValueError("a bad batch")

        train(world, model, 1)
        hook = (model[1].down.register_full_backward_hook if in_backward else model[1].down.register_forward_hook)(fail)
        with pytest.raises(ValueError, match="a bad batch"):
            model(torch.ones(2, 48)).sum().backward()
        hook.remove()
        model.reset_iter_state()
        model.zero_grad()
        found = train(world, model)
    train(world, plain, 1, alone=True)
    for one, other in zip(found, train(world, plain, alone=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@ranks(3)
def test_writes_to_unsharded_parameters_stay_on_their_rank(world: World) -> None:
    model = build()
    with on_hosts("mmn"):
        fully_shard(model)
        model.unshard()
        before = model[0].up.weight.clone()
        model[0].up.weight.data.fill_(float(world.rank))
        dist.barrier()
        assert (model[0].up.weight == world.rank).all()
        model.reshard()
        model.unshard()
        assert torch.equal(model[0].up.weight, before)


@ranks(3, 4)
@pytest.mark.parametrize(
    ("hosts", "refused", "slots"), [("ppqq", "open", 0), ("rrss", "open", 1), ("ttuu", "create", 0)]
)
def test_where_one_rank_has_no_memory_left_all_exchange_messages(
    world: World, hosts: str, refused: str, slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    """From then on; groups that have a slot of the host go on to take it."""
    plain, model, calls = build(), build(), []

    def refuse(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > 2 * slots:  # to write and to read
            raise OSError(12, "Cannot allocate memory")
        return usual(*args)

    usual = getattr(Segment, refused)
    with on_hosts(hosts), pytest.MonkeyPatch.context() as patch, caplog.at_level("WARNING", "fullshard"):
        for module in (model[0], model[1], model):
            fully_shard(module)
        if world.rank == (1 if refused == "open" else 2):
            patch.setattr(Segment, refused, refuse)
        with torch.no_grad():
            model(torch.ones(2, 48))
        patch.undo()
        found = train(world, model)
    names = [(group.gather_transport.name, group.reduce_transport.name) for group in groups_of(model)]
    assert ("p2p", "p2p") in names
    assert (("hosts", "hosts") in names) == (slots == 1)
    assert len(set(map(str, gather_objects(names, dist.group.WORLD)))) == 1, "all ranks do the same"
    said = [each.message for each in caplog.records if "shared memory" in each.message]
    assert len(said) == (world.rank == 0)
    for one, other in zip(found, train(world, plain, alone=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
