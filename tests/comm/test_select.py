"""Which transport is chosen, and how the choice is overridden."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.hosts import HostsTransport
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.select import select_transport
from fullshard.comm.shm import ShmTransport
from fullshard.comm.transport import Reduction
from tests.comm.cases import (
    Case,
    Section,
    assert_gathered,
    assert_reduced,
    fill_fulls,
    fill_shards,
    group,
    transfers_of,
)
from tests.harness import World, fake_world, ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@ranks(3)
def test_ranks_of_a_host_share_memory_in_each_process_group(world: World) -> None:
    pair = dist.new_group([0, 2])
    assert isinstance(select_transport(group(), CPU), ShmTransport)
    assert select_transport(group(), CPU) is select_transport(group(), CPU)
    if world.rank != 1:
        assert isinstance(select_transport(pair, CPU), ShmTransport)
        assert select_transport(pair, CPU) is not select_transport(group(), CPU)


@ranks(3, fresh=True)
def test_ranks_of_several_hosts_share_the_memory_of_each(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullshard.comm.local_ranks.host_id", lambda: f"host {dist.get_rank() // 2}")
        assert isinstance(select_transport(group(), CPU), HostsTransport)
        patch.setenv("FULLSHARD_TRANSPORT", "shm")
        with pytest.raises(ValueError, match="cannot be used for this process group: its ranks run on 2 hosts"):
            select_transport(group(), CPU)
        patch.setattr("fullshard.comm.local_ranks.host_id", lambda: f"host {dist.get_rank()}")
        patch.setattr("fullshard.platforms.pretended_host", "others")  # else what was found before is taken
        patch.delenv("FULLSHARD_TRANSPORT")
        assert isinstance(select_transport(group(), CPU), PointToPointTransport), "each is alone on its host"


@ranks(2, fresh=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nbytes", [2**18, 2**18 + 64], ids=["small", "larger"])
@pytest.mark.parametrize("forced", [True, False])
def test_two_hosts_move_small_groups_by_collectives(
    world: World, dtype: torch.dtype, nbytes: int, forced: bool
) -> None:
    """But low precision is added in fp32 always, which collectives do not."""
    case = Case("even", (Section(dtype, (((nbytes // dtype.itemsize,), 0),)),))
    transfers = transfers_of(case, world.size)
    called = []
    native = CollectiveTransport._route
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullshard.comm.local_ranks.host_id", lambda: f"host {dist.get_rank()}")
        patch.setenv("FULLSHARD_TRANSPORT", "p2p" if forced else "")
        patch.setattr(CollectiveTransport, "_route", lambda *args: called.append(args[1].direction) or native(*args))
        transport = select_transport(group(), CPU)
        assert transport.name == "p2p"
        gathering, reducing = (
            transport.gather_route(transfers, group(), 0),
            transport.reduce_route(transfers, group(), 1),
        )
    for _ in range(2):
        fill_shards(case, transfers, world.rank)
        gathering.start().finish()
        assert_gathered(case, transfers, world.rank)
        fill_fulls(case, transfers, world.rank)
        reducing.start([transfers[0].shard], Reduction(world.size)).finish()
        assert_reduced(case, transfers, world.rank, world.size)
    small = nbytes == 2**18 and not forced
    assert called == (["gather", "reduce"][: 2 if dtype.itemsize == 4 else 1] if small else [])


def refuse(*args: Any) -> Any:
    raise PermissionError("not in this sandbox")


WITHOUT = "rank 1 runs on a system without the shared memory that this transport needs: it lacks"
MEMORY = "fullshard.buffer.shared_memory"
#: What a system may lack or forbid, and what is said of rank 1, on which it is tried.
LACKS: dict[str, tuple[str, Any, str]] = {
    "shared memory": ("os.memfd_create", None, f"{WITHOUT} memfd_create"),
    "pidfd": ("os.pidfd_open", None, f"{WITHOUT} pidfd_open"),
    "pagemap": (f"{MEMORY}._PAGEMAP", "/proc/none", f"{WITHOUT} /proc/none"),
    "processor": ("platform.machine", lambda: "aarch64", rf"{WITHOUT} a processor x86-64 \(this is aarch64\)"),
    "processes": ("os.pidfd_open", refuse, "rank 1 cannot see the processes of the others"),
    "mappings": (f"{MEMORY}.Segment.open", refuse, "a rank could not map another rank's memory"),
}


@ranks(2, fresh=True)
@pytest.mark.parametrize("lack", LACKS)
def test_where_one_rank_cannot_share_all_exchange_messages(world: World, lack: str) -> None:
    name, value, message = LACKS[lack]
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1 and value is None:
            patch.delattr(name)
        elif world.rank == 1:
            patch.setattr(name, value)
        assert isinstance(select_transport(group(), CPU), PointToPointTransport)
        patch.setenv("FULLSHARD_TRANSPORT", "shm")
        with pytest.raises(ValueError, match=f"cannot be used for this process group: {message}.*unset it"):
            select_transport(group(), CPU)


@ranks(2, fresh=True)
def test_where_rank_0_has_no_memory_all_exchange_messages(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setattr("os.memfd_create", refuse)
        assert isinstance(select_transport(group(), CPU), PointToPointTransport)


@ranks(1)
@pytest.mark.parametrize(
    ("wanted", "device", "kind"),
    [
        ("", CPU, PointToPointTransport),
        ("shm", CPU, PointToPointTransport),
        ("p2p", CPU, PointToPointTransport),
        ("collective", CPU, CollectiveTransport),
        ("", CUDA, CollectiveTransport),
    ],
)
def test_one_rank_shares_with_nobody(world: World, wanted: str, device: torch.device, kind: type) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", wanted)
        assert isinstance(select_transport(group(), device), kind)


def test_every_other_backend_uses_its_collectives_in_all_groups() -> None:
    with fake_world(4):
        assert isinstance(select_transport(group(), CPU), CollectiveTransport)
        assert select_transport(group(), CPU) is select_transport(dist.new_group([0, 1]), CPU)


#: What the first line says, by ``FULLSHARD_TRANSPORT``.
LINES = {
    "": "2 ranks use the transport 'shm': all of them share a host. FULLSHARD_TRANSPORT=p2p or collective chooses "
    "another",
    "p2p": "2 ranks use the transport 'p2p': FULLSHARD_TRANSPORT=p2p. Unset it for the default",
    "collective": "2 ranks use the transport 'collective': FULLSHARD_TRANSPORT=collective. Unset it for the default",
}


@contextmanager
def logging_as(root: list[logging.Handler], level: int = logging.NOTSET) -> Iterator[io.StringIO]:
    """A program that configures logging so. Yields what is printed to its standard error."""
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as printed:
        patch.setattr(logging.getLogger(), "handlers", root)
        patch.setattr("fullshard.comm.select._has_shown", False)
        logging.getLogger("fullshard").setLevel(level)
        yield printed
        logging.getLogger("fullshard").setLevel(logging.NOTSET)


@ranks(2, fresh=True)
@pytest.mark.parametrize("wanted", LINES)
def test_the_first_rank_shows_once_which_was_chosen_and_why(world: World, wanted: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = wanted
    with logging_as([]) as printed:
        for _ in range(2):
            select_transport(group(), CPU)
        select_transport(dist.new_group([0, 1]), CPU)
    assert printed.getvalue() == ("" if world.rank else f"fullshard: {LINES[wanted]}\n")


@ranks(2, fresh=True)
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_program_that_configures_logging_decides_what_is_shown(world: World, level: int) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    with logging_as([handler], level) as printed:
        select_transport(group(), CPU)
    assert [record.getMessage() for record in records] == ([LINES[""]] if level == logging.INFO else [])
    assert printed.getvalue() == ""


@ranks(2, fresh=True)
def test_a_level_for_the_logger_silences_the_line(world: World) -> None:
    with logging_as([], logging.WARNING) as printed:
        select_transport(group(), CPU)
    assert printed.getvalue() == ""


@ranks(1)
def test_an_unknown_transport_is_refused_with_the_known_ones(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", "pigeon")
        with pytest.raises(ValueError, match="'pigeon' is not a transport: use one of shm, hosts, p2p, collective"):
            select_transport(group(), CPU)


@pytest.mark.parametrize("wanted", ["shm", "p2p"])
def test_what_needs_gloo_is_refused_without(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("FULLSHARD_TRANSPORT", wanted)
    with fake_world(2), pytest.raises(ValueError, match="uses 'fake' for buffers on cpu: unset it or use 'collective'"):
        select_transport(group(), CPU)
