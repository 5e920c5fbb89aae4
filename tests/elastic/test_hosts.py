"""Elastic jobs over hosts with a network of their own: a host that is gone, and one that is cut off."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.__main__ import undisturbed
from tests.hosts.hosts import Host, Hosts, why_impossible

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_impossible()), reason=why_impossible())]

RANKS = 2  # on each host
STEPS = 10


@pytest.fixture
def hosts() -> Iterator[tuple[Host, ...]]:
    with Hosts(3) as made:
        yield made


def start(host: Host, ranks: range, size: int, directory: Path) -> list[subprocess.Popen[str]]:
    """Starts processes of a job on a host. Each tells what it does in a file of the directory."""
    plan = {"steps": STEPS, "replicas": size // RANKS, "directory": str(directory / "members"), "pause": 0.5}
    plan |= {"faults": [], "micro_batches": 2, "groups": "blocks", "host": ""}
    environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "host-a", "MASTER_PORT": "29500"}
    environment |= {"FULLSHARD_HANG_TIMEOUT": "4"}
    program = f'exec {sys.executable} -m tests.elastic.program "$0" > {directory}/$RANK.out 2> {directory}/$RANK.err'
    return [
        host.start("sh", "-c", program, json.dumps(plan), environment={**environment, "RANK": str(rank)})
        for rank in ranks
    ]


def run(hosts: tuple[Host, ...], directory: Path, happen: Callable[[Host], None], to: int) -> list[list[Any]]:
    """Runs a job in which something happens to a host in the middle; returns what each process has said."""
    size = RANKS * len(hosts)
    started = [start(host, range(n * RANKS, (n + 1) * RANKS), size, directory) for n, host in enumerate(hosts)]
    deadline = time.monotonic() + 120
    while '"step": 2' not in said(directory, RANKS * (to == 0)):
        assert time.monotonic() < deadline, (directory / "0.err").read_text()
        time.sleep(0.1)
    happen(hosts[to])
    for process in [each for of_host in started for each in of_host]:
        process.wait(max(0.1, deadline - time.monotonic()))
    return [[json.loads(line) for line in said(directory, rank).splitlines()] for rank in range(size)]


def said(directory: Path, rank: int) -> str:
    file = directory / f"{rank}.out"
    return file.read_text() if file.exists() else ""


def digests(of_ranks: list[list[Any]]) -> dict[int, set[str]]:
    ends = [each for lines in of_ranks for each in lines if each.get("step") == STEPS and "digest" in each]
    return {shard: {each["digest"] for each in ends if each["shard"] == shard} for shard in range(RANKS)}


def test_the_host_of_the_launcher_s_store_may_be_lost(hosts: tuple[Host, ...], tmp_path: Path) -> None:
    of_ranks = run(hosts, tmp_path, Host.kill, 0)
    assert digests(of_ranks[RANKS:]) == undisturbed(RANKS, len(hosts), STEPS).digests(STEPS)
    assert not digests(of_ranks[:RANKS])[0]


def test_a_majority_goes_on_when_the_network_is_cut(hosts: tuple[Host, ...], tmp_path: Path) -> None:
    """The others cannot know that the host lives. Its processes cannot know that the others go on, and end."""
    of_ranks = run(hosts, tmp_path, Host.disconnect, 2)
    assert digests(of_ranks[:-RANKS]) == undisturbed(RANKS, len(hosts), STEPS).digests(STEPS)
    assert not digests(of_ranks[-RANKS:])[0]
    assert all("cannot agree on how to go on" in lines[-1]["error"] for lines in of_ranks[-RANKS:])
