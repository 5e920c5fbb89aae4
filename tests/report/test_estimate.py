"""What an estimate counts as computing, and how long it lets exchanges take."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.report.estimate import Hardware
from fullshard.report.explain import Explanation, explain
from fullshard.report.twins import Event

WIDTH, TOKENS = 32, 10
#: Multiplications and additions of one weight, for all tokens.
PRODUCT = 2 * WIDTH * WIDTH * TOKENS


@cache
def layers(*frozen: int, batch: bool = False) -> Explanation:
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        for number in frozen:
            model[number].requires_grad_(False)
        for layer in model:
            fullshard.fully_shard(layer)
        return fullshard.fully_shard(model)

    return explain(build, ranks=4, batch=torch.ones(TOKENS, WIDTH) if batch else None)


@pytest.mark.parametrize("frozen", [(), (0, 2), (0, 1, 2)])
def test_a_frozen_weight_costs_no_gradient_of_its_own(frozen: tuple[int, ...]) -> None:
    found = layers(*frozen).estimate(bandwidth=1e9, peak_flops=1.0, tokens=TOKENS)
    rows = {row.name: row for row in found.groups}
    for number in range(3):
        row = rows[str(number)]
        assert row.forward == PRODUCT
        assert row.backward == (1 if number in frozen else 2) * PRODUCT
    assert found.computing == sum(row.forward + row.backward for row in found.groups)


def hardware(**given: Any) -> Hardware:
    return Hardware(**{"bandwidth": 1e9, "peak_flops": 1e12, "count": 100} | given)


@pytest.mark.parametrize(
    ("algorithm", "transport", "steps"),
    [("ring", "collective", 1023), ("tree", "collective", 10), ("ring", "p2p", 1023), ("tree", "p2p", 1023)],
)
def test_latency_grows_with_the_ranks_as_in_the_algorithm(algorithm: Any, transport: str, steps: int) -> None:
    given = hardware(latency=5e-6, algorithm=algorithm)
    assert given.seconds(Event("gather", 0, 10**9, 1024), 1, transport) == pytest.approx(steps * 5e-6 + 1)
    assert given.seconds(Event("all-reduce", 0, 10**9, 1024), 1, transport) == pytest.approx(2 * steps * 5e-6 + 1)


def test_two_ranks_have_one_step_in_each_algorithm() -> None:
    for algorithm in ("ring", "tree"):
        assert hardware(latency=1.0, algorithm=algorithm).seconds(Event("gather", 0, 0, 2), 1, "collective") == 1


@pytest.mark.parametrize(
    ("algorithm", "ranks", "stride", "bandwidth"),
    [
        ("ring", 8, 1, 1e9),  # on one node
        ("ring", 64, 1, 0.4e9),  # one of the 8 ranks sends to the next node
        ("ring", 8, 8, 0.4e9 / 8),  # replicas: each rank of a node in a ring of its own
        ("ring", 8, 4, 0.4e9 / 4),  # two ranks of each ring on a node: four rings
        ("tree", 64, 1, 0.4e9 / (8 * 56 / 63)),  # each rank sends to 56 of the 63 others on other nodes
        ("tree", 8, 1, 1e9),
    ],
)
def test_the_ranks_of_a_node_share_its_bandwidth(algorithm: Any, ranks: int, stride: int, bandwidth: float) -> None:
    given = hardware(algorithm=algorithm, node_bandwidth=0.4e9, ranks_per_node=8)
    exchange = Event("gather", 0, 10**9, ranks)
    assert given.seconds(exchange, stride, "collective") == pytest.approx(1e9 / bandwidth)
    fast = hardware(algorithm=algorithm, node_bandwidth=1e12, ranks_per_node=8)
    assert fast.seconds(exchange, stride, "collective") == 1, "no rank sends more than its own bandwidth"


def test_messages_to_other_nodes_share_its_bandwidth() -> None:
    given = hardware(node_bandwidth=0.4e9, ranks_per_node=8)
    assert given.seconds(Event("gather", 0, 10**9, 64), 1, "p2p") == pytest.approx(8 * 56 / 63 / 0.4)


def test_the_card_of_a_host_carries_what_its_ranks_send() -> None:
    """The gathers of two hosts of four ranks: each host sends its half of the parameters to the other one."""

    def build() -> nn.Module:
        return fullshard.fully_shard(nn.Linear(1024, 1024, bias=False))

    found = explain(build, ranks=8, hosts=2)
    half = 4 * 1024 * 1024 // 2
    estimate = found.estimate(bandwidth=1e15, node_bandwidth=1e6, peak_flops=1e15, latency=1e-3, tokens=1)
    assert estimate.by_host == 2 * half, "its half is gathered, and half of the sums are the other host's"
    assert estimate.exchanges == pytest.approx(2 * (half / 1e6 + 1e-3), rel=1e-4)
    assert found.estimate(bandwidth=1e6, peak_flops=1e15, tokens=1).exchanges == pytest.approx(
        (2 * half / 4 + 3 * half / 2) / 1e6
    ), "each rank sends its quarter of the half twice, and reads its part of the gradients of three others"


def test_a_step_takes_longer_on_more_hosts() -> None:
    def build() -> nn.Module:
        return fullshard.fully_shard(nn.Linear(1024, 1024, bias=False))

    given = {"bandwidth": 1e10, "node_bandwidth": 1e8, "peak_flops": 1e12, "latency": 1e-4, "tokens": 1}
    found = {hosts: explain(build, ranks=2 * hosts, hosts=hosts).estimate(**given) for hosts in (1, 2, 8, 64)}
    assert found[1].by_host == 0
    steps = [each.step for each in found.values()]
    assert steps == sorted(steps)
    whole = 4 * 1024 * 1024
    assert found[64].by_host == pytest.approx(2 * whole * 63 / 64), "as much as all parameters, whatever their number"


def hybrid() -> nn.Module:
    """Two nodes of four ranks: sharded inside of a node, replicated over both."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    return fullshard.fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=mesh)


def test_only_the_all_reduce_of_a_hybrid_group_leaves_the_node() -> None:
    found = explain(hybrid, ranks=8)
    (group,) = found.groups
    assert (group.stride, group.replica_stride) == (1, 4)
    fast = found.estimate(bandwidth=1e3, peak_flops=1e15, tokens=1)
    slow = found.estimate(bandwidth=1e3, peak_flops=1e15, tokens=1, node_bandwidth=1e2, ranks_per_node=4)
    all_reduced = 2 * (4 * WIDTH * WIDTH // 4) / 2  # bytes: twice the shard, of which half is sent
    assert fast.exchanges == pytest.approx((2 * 3 * 4 * WIDTH * WIDTH / 4 + all_reduced) / 1e3)
    assert slow.exchanges - fast.exchanges == pytest.approx(all_reduced / (1e2 / 4) - all_reduced / 1e3)


def test_throughput_and_the_share_of_the_peak_follow_from_the_step() -> None:
    found = layers()
    estimate = found.estimate(bandwidth=1e9, peak_flops=1e6, efficiency=0.5, tokens=TOKENS)
    assert estimate.flops == 3 * 3 * PRODUCT
    assert estimate.computing == pytest.approx(3 * 3 * PRODUCT / 0.5e6)
    assert estimate.throughput == pytest.approx(4 * TOKENS / estimate.step)
    assert estimate.peak_share == pytest.approx(0.5 * estimate.computing / estimate.step)
    assert not estimate.is_counted


def test_the_flops_of_a_batch_are_those_of_the_estimate() -> None:
    found = layers(batch=True)
    estimate = found.estimate(bandwidth=1e9, peak_flops=1e6)
    assert estimate.is_counted
    assert estimate.flops == (3 * 3 - 1) * PRODUCT  # no gradient of the batch is needed
    assert (estimate.given.count, estimate.given.unit) == (TOKENS, "samples")
    assert {row.name: row.backward * 1e6 for row in estimate.groups}["0"] == pytest.approx(PRODUCT)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "estimate\\(\\) needs tokens, because explain\\(\\) was given no batch"),
        ({"tokens": 1, "efficiency": 40}, "efficiency is a share of peak_flops, above 0 and at most 1, got 40"),
        ({"tokens": 1, "latency": -1}, "latency must not be negative"),
        ({"tokens": 1, "node_bandwidth": 1e9}, "node_bandwidth and ranks_per_node belong together"),
        ({"tokens": 1, "node_bandwidth": 0, "ranks_per_node": 8}, "node_bandwidth must be positive, got 0"),
        ({"tokens": 1, "algorithm": "star"}, "algorithm must be 'ring' or 'tree', got 'star'"),
    ],
)
def test_hardware_that_makes_no_sense_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layers().estimate(bandwidth=1e9, peak_flops=1e12, **given)
