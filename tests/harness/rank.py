"""One rank of the pool: a process that runs functions it is sent, each inside a default process group of their size.

It owns what happens in the process of a rank: the group's birth and end, the clean-up between two functions, and
the text of what went wrong. When to send what, and what a silent rank means, is left to `tests.harness.pool`.

A group serves as many functions in turn as ask for its size. A new one takes 20 ms, and as much again to fill the
caches of DTensor, which hold groups and are emptied with them; and torch 2.11 never lets go of the threads of one.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Test = TypeVar("Test", bound=Callable[..., None])

#: The simulated accelerators, which a test names in place of a transport: see `tests.simulated`.
SIMULATED = ("checked", "late")

#: Runs a test in the quick lane too with all its cases, world sizes and real transports.
everywhere = pytest.mark.everywhere


def ranks(
    *sizes: int, timeout: float = 60.0, transport: str | None = None, fresh: bool = False
) -> Callable[[Test], Test]:
    """Run a test on the first `size` ranks of the pool, once for each of `sizes`; it takes an argument `world`.

    `timeout` is in seconds, for one size. `transport` is for tests of what depends on how buffers move; without it the
    environment decides, as it does for users. `fresh` is for tests of what is chosen once for a process group: they
    have one that served no other test, and serves none after.
    """
    if not sizes:
        raise ValueError("ranks() got no world size; write for example @ranks(2) or @ranks(1, 2, 4).")

    def mark(test: Test) -> Test:
        marked: Test = pytest.mark.usefixtures("rank_pool")(
            pytest.mark.ranks(*sizes, timeout=timeout, transport=transport, fresh=fresh)(test)
        )
        return marked

    return mark


@dataclass(frozen=True)
class World:
    """The world as the body of a test sees it: this rank, and how many there are."""

    rank: int
    size: int

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A CPU mesh over all ranks, of one dimension unless `shape` says otherwise."""
        return init_device_mesh("cpu", shape or (self.size,), mesh_dim_names=names)


@dataclass(frozen=True)
class Outcome:
    """How a function ended on one rank.

    `summary` is one line, `report` the traceback or the stacks; `at` is a time that can be compared between ranks.
    """

    rank: int
    kind: Literal["returned", "raised", "skipped", "died", "hung"]
    value: Any = None
    summary: str = ""
    report: str = ""
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Setup:
    """What a rank needs to know before its first function."""

    rank: int
    store_port: int
    log: Path
    pytest_arguments: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """One function to run on `size` ranks; `payload` holds it pickled, so that a failed import is a failed job.

    `group` is the number of the default process group: that of the last job, or a new one.
    """

    group: int
    size: int
    timeout: float
    payload: bytes


def run_test(world: World, test: Callable[..., None], arguments: dict[str, Any], transport: str | None) -> None:
    """Call a test with its arguments, of which `world` need not be the first."""
    if transport in SIMULATED:
        os.environ["FULLSHARD_TRANSPORT"] = "collective"
        os.environ.pop("FULLSHARD_TESTS_WITH_TORCH", None)
        with importlib.import_module("tests.simulated").simulated(transport):
            test(world=world, **arguments)
        return
    if transport is not None:
        os.environ["FULLSHARD_TRANSPORT"] = transport
    test(world=world, **arguments)


#: Threads of a rank that is replaced. One that has just started has about ten.
_MOST_THREADS = 60


def serve(setup: Setup, parent: Connection) -> None:
    """The main function of a rank: run jobs until the parent sends None."""
    log = setup.log.open("a")
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    gc.freeze()  # to walk the objects of the imports would copy all their pages, which are the server's
    threading.Thread(target=exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _rewrite_assertions(setup.pytest_arguments)
    store = dist.TCPStore("127.0.0.1", setup.store_port, is_master=False)  # type: ignore[attr-defined]
    gc.freeze()
    parent.send(Outcome(setup.rank, "returned"))
    group = -1
    while (job := parent.recv()) is not None:
        log.truncate(0)
        environment = dict(os.environ)
        is_new, group = job.group != group, job.group
        outcome = _attempt(setup.rank, functools.partial(_run, job, setup.rank, store if is_new else None))
        parent.send(outcome)
        if outcome.kind == "returned":
            # A group that ends while a peer still reads from it would fail that peer: all have to be done first.
            parent.recv()
            parent.send(_attempt(setup.rank, _clean_up))
        else:
            _end_groups()  # at once, so that peers that wait for this rank fail too
        os.environ.clear()
        os.environ.update(environment)


def exit_with_parent() -> None:
    """Wait for the end of the process that started this one, and end too, whatever is going on."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(job: Job, rank: int, store: Any) -> Any:
    """Run a function, in a new default process group that meets in `store`, or in the one that is there."""
    if store is not None:
        _end_groups()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"group {job.group}", store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=job.size,
            timeout=timedelta(seconds=job.timeout + 30),  # the pool notices a hang first, and shows where
        )
    function, arguments, keywords = pickle.loads(job.payload)
    torch.manual_seed(0)
    value = function(World(rank, job.size), *arguments, **keywords)
    pickle.dumps(value)
    return value


def _attempt(rank: int, action: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(rank, "returned", action())
    except pytest.skip.Exception as skipped:
        return Outcome(rank, "skipped", summary=str(skipped))
    except BaseException as error:
        summary = "".join(traceback.format_exception_only(error)).strip()
        # The frames of this file say nothing to the author of a test.
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        report = "".join(traceback.format_exception(type(error), error, frames)).strip()
        return Outcome(rank, "raised", summary=summary, report=report)


def _clean_up() -> tuple[int | None, bool]:
    """Undo what a function did.

    Returns how many collectives its process group has seen, if it is the only one: it may serve again where all ranks
    have seen as many. (After an error some may have gone further than others.) And whether this process should end:
    functions have left process groups behind, each with threads that wake a hundred times a second.
    """
    torch.set_default_dtype(torch.float32)
    count = None
    if dist.is_initialized() and len(dist.distributed_c10d._world.pg_map) == 1:
        count = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    else:
        _end_groups()
    gc.collect()
    gc.freeze()  # what was imported on the way is not walked again either
    tasks = Path("/proc/self/task")
    return count, tasks.exists() and len([*tasks.iterdir()]) > _MOST_THREADS


def _end_groups() -> None:
    forget_meshes()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def forget_meshes() -> None:
    """Empty the caches of DTensor, which are keyed by meshes of equal shape and keep the groups of the old ones."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
    if "torch.distributed.tensor" in sys.modules:
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


def _rewrite_assertions(arguments: tuple[str, ...]) -> None:
    """Let a failed `assert` say what it compared, as it does in the test process."""
    pytest.Config.fromdictargs({}, ["--noconftest", "--disable-plugin-autoload", *arguments])
    pytest.register_assert_rewrite("tests.harness")
