"""The transports that simulated ranks have, on one host and on several."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fullshard.comm.select import choose_transport
from fullshard.report.simulated import simulated_job

CPU = torch.device("cpu")


def name_of(process_group: dist.ProcessGroup) -> str:
    return choose_transport(process_group, CPU)[0].name


@pytest.mark.parametrize(
    ("ranks", "hosts", "asked", "name"),
    [
        (4, 2, "", "hosts"),
        (4, 4, "", "p2p"),
        (4, 1, "", "shm"),
        (1, 1, "", "p2p"),
        (4, None, "", "collective"),
        (4, 1, "hosts", "hosts"),
        (4, 2, "p2p", "p2p"),
        (4, 2, "collective", "collective"),
    ],
)
def test_a_simulated_job_has_the_transport_of_a_job_there(
    ranks: int, hosts: int | None, asked: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_TRANSPORT", asked)
    with simulated_job(ranks, 0, hosts):
        assert name_of(dist.group.WORLD) == name
    assert not dist.is_initialized()


def test_each_process_group_has_the_transport_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_TRANSPORT", "")
    with simulated_job(8, 5, 2):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        assert [name_of(mesh.get_group(each)) for each in ("replicate", "shard")] == ["p2p", "shm"]
        transport, why = choose_transport(dist.group.WORLD, CPU)  # type: ignore[arg-type]
        assert transport.peers is not None
        assert (transport.peers.sources, transport.peers.targets) == ([1], [1])
        assert why == "simulated"
