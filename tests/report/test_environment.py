"""What the doctor says of facts that ranks tell of where they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from fullshard.comm.backends import BACKENDS
from fullshard.device import META
from fullshard.report import environment
from fullshard.report.environment import Facts, _judge, _settings, _threads
from tests.harness import World, ranks


def fact(rank: int = 0, **known: Any) -> Facts:
    plain = {"host": "a", "accelerators": 0, "cores": list(range(8)), "threads": 4, "files": 1 << 20, "shared": 1 << 40}
    return Facts(**{"rank": rank, "clock": 0.0, "environment": {}, "restarts": 0, **plain, **known})


@pytest.mark.parametrize(("threads", "result"), [(3, "ok"), (4, "ok"), (5, "warning")])
def test_ranks_may_have_as_many_threads_as_there_are_cores(threads: int, result: str) -> None:
    (check,) = _threads([fact(rank, threads=threads) for rank in range(2)])
    assert check.result == result
    assert check.text == f"2 ranks of a compute with {2 * threads} threads, on 8 cores."
    assert check.advice == ("Set OMP_NUM_THREADS=4." if result == "warning" else "")


def said(**known: Any) -> list[tuple[str, str, str]]:
    """What is said of the settings of two ranks of different hosts."""
    every = [fact(rank, host="ab"[rank], **known) for rank in range(2)]
    return [(check.name, check.result, check.text.partition(",")[0].partition(":")[0]) for check in _settings(every)]


def test_settings_are_judged_by_who_reads_them() -> None:
    assert said() == [("settings", "ok", "None are set.")]
    assert said(environment={"FULLSHARD_TRANSPORT": "p2p", "NCCL_DEBUG": "INFO"})[0][1] == "ok"
    unread = said(environment={"FULLSHARD_TRANSPROT": "p2p"})
    assert unread == [("settings", "warning", "FULLSHARD_TRANSPROT is set")]
    assert said(environment={"GLOO_SOCKET_IFNAME": "lo"}) == [("settings", "error", "GLOO_SOCKET_IFNAME=lo")]
    alone = fact(environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert [check.result for check in _settings([alone])] == ["ok"]


def pairs_of(count: int, slow: tuple[tuple[int, int], ...] = ()) -> dict[tuple[int, int], tuple[float, float]]:
    """Pairs of ranks that take 0.1 ms and move 2 GB/s, but for the slow ones, of which each is slower than the last."""
    found = {(a, b): (1e-4, 2e9) for a in range(count) for b in range(a + 1, count)}
    return found | {pair: (1e-4, 1e8 / (1 + number)) for number, pair in enumerate(slow)}


def test_the_medians_of_pairs_are_told_with_their_units() -> None:
    (check,) = _judge(pairs_of(6), [fact(rank) for rank in range(6)])
    assert check.result == "ok"
    assert check.text.splitlines()[0] == (
        "All pairs of ranks reach each other: median latency 100 us, median bandwidth 2.00 GB/s."
    )
    (check,) = _judge(pairs_of(6), [fact(rank) for rank in range(60)])
    assert check.text.startswith("15 of 1770 pairs of ranks reach each other: ")


def test_slow_pairs_are_told_the_slowest_first_and_one_rank_is_blamed_for_several_alone() -> None:
    every = [fact(rank) for rank in range(6)]
    (check,) = _judge(pairs_of(6, ((0, 1),)), every)
    assert "the slowest first: 0 and 1 (100 us, 0.10 GB/s)." in check.text
    assert check.advice == "Check their hosts and network."
    (check,) = _judge(pairs_of(6, ((0, 1), (2, 3))), every)
    assert "the slowest first: 2 and 3 (100 us, 0.05 GB/s); 0 and 1 (100 us, 0.10 GB/s)." in check.text
    assert check.advice == "Check their hosts and network."
    (check,) = _judge(pairs_of(6, ((0, 1), (1, 3))), every)
    assert check.advice == "Check the host and the network of rank 1."


def test_pairs_of_a_host_are_compared_with_each_other_and_so_are_those_between_hosts() -> None:
    """Between hosts is slower, as a rule: that is nobody's fault."""
    hosts = "aabb"
    every = [fact(rank, host=host) for rank, host in enumerate(hosts)]
    apart = {(a, b): (1e-3, 1e8) for a in range(4) for b in range(a + 1, 4) if hosts[a] != hosts[b]}
    between, inside = _judge(pairs_of(4) | apart, every)
    assert between.result == inside.result == "ok"
    said, _, matrix = between.text.partition("\n")
    figures = "median latency 1 ms, median bandwidth 0.10 GB/s."
    assert said == f"All pairs of ranks on different hosts reach each other: {figures}"
    assert (matrix.count("2.00"), matrix.count("0.10")) == (2 * 2, 2 * 4)
    figures = "median latency 100 us, median bandwidth 2.00 GB/s."
    assert inside.text == f"All pairs of ranks of a host reach each other: {figures}"
    between, _ = _judge(pairs_of(4) | apart | {(1, 2): (1e-3, 1e7)}, every)
    assert between.text.startswith("1 pairs of ranks on different hosts are slower than the others, the slowest")


@ranks(2)
def test_messages_of_gloo_come_from_the_host(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the address of a device's tensor as one of the host, which ends the process."""
    monkeypatch.setattr(environment, "backend_of", lambda group, device: BACKENDS["gloo"])
    assert dist.group.WORLD is not None
    (check,) = environment._pairs(dist.group.WORLD, META, [fact(rank) for rank in range(2)])
    assert check.result == "ok"
