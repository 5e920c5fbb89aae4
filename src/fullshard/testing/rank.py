"""One rank of a pool: a process that runs functions it is sent, each in a default process group of their size.

Owns what happens in a rank's process: the group's start and end, the environment, the clean-up between two functions,
and the text of an error. :mod:`fullshard.testing.pool` decides when to send what, and what a silent rank means;
:mod:`fullshard.testing.session` runs tests of pytest as such functions.

A group serves as many functions in turn as ask for its size. A new one takes 20 ms, and as much again to fill the
caches of DTensor, which hold groups and are emptied with them; and torch 2.11 never ends the threads of one.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pdb
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import platforms
from fullshard.torch_private import collectives_seen, forget_meshes, process_groups

Kind = Literal["returned", "raised", "skipped", "xfailed", "died", "hung"]


@dataclass(frozen=True)
class World:
    """The world as the body of a test sees it.

    Attributes:
        rank: This rank's number.
        size: How many ranks there are.
        device: This rank's device.
    """

    rank: int
    size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A mesh over all ranks on their devices, of one dimension unless ``shape`` says otherwise.

        Args:
            *shape: The sizes of its dimensions.
            names: The names of its dimensions.

        Ranks: all.
        """
        return init_device_mesh(self.device.type, shape or (self.size,), mesh_dim_names=names)

    def die(self) -> NoReturn:
        """End this rank's process at once, as the system ends one that takes too much memory.

        Ranks: each alone.
        """
        while True:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    def hang(self) -> NoReturn:
        """Wait for ever.

        Ranks: each alone.
        """
        while True:
            threading.Event().wait(3600)


@dataclass(frozen=True)
class Outcome:
    """How a function ended on one rank.

    Attributes:
        rank: The rank.
        kind: ``"returned"``, ``"raised"``, ``"skipped"``, ``"xfailed"``, ``"died"`` or ``"hung"``.
        value: What the function returned.
        summary: One line about an error.
        report: The traceback, or the stacks of a rank that hung.
        printed: What the rank printed, by title.
        left: The process groups that the function left behind, in words.
        at: When it ended, in seconds of a clock that the ranks share.
    """

    rank: int
    kind: Kind
    value: Any = None
    summary: str = ""
    report: str = ""
    printed: tuple[tuple[str, str], ...] = ()
    left: tuple[str, ...] = ()
    at: float = field(default_factory=time.monotonic)


class Ended(Exception):
    """How a test ended that neither returned nor skipped: carries the fields of its :class:`Outcome`."""

    def __init__(self, kind: Kind, summary: str, report: str = "") -> None:
        super().__init__(summary)
        self.kind: Kind = kind
        self.report = report


@dataclass(frozen=True)
class Setup:
    """What a rank needs to know before its first function; ``session`` has the arguments of pytest on it, if any."""

    rank: int
    store_port: int
    log: Path
    session: Mapping[str, Any] | None


@dataclass(frozen=True)
class RankJob:
    """One function to run on ``size`` ranks; ``payload`` holds it pickled, so that a failed import is a failed job.

    ``group`` is the number of the default process group: that of the last job, or a new one with a rendezvous at
    ``port``. Without ``init`` there is none, and the environment says how to make one.
    """

    group: int
    size: int
    timeout: float
    payload: bytes
    environment: Mapping[str, str]
    port: int
    device: str = "cpu"
    hosts: int = 1
    init: bool = True
    seed: int = 0
    debugged: int | None = None


@dataclass
class _RankState:
    """What this process knows of the function that runs on it."""

    store: Any = None
    group: int = -1
    world: World | None = None
    default: Any = None
    printed: list[tuple[str, str]] = field(default_factory=list)
    debugger: pdb.Pdb | None = None


_state = _RankState()
#: The signal that makes a rank write its stacks. Windows has none.
STACKS: int | None = getattr(signal, "SIGUSR1", None)
#: Threads of a rank that is replaced. One that has just started has about ten.
_MOST_THREADS = 60


def current_world() -> World:
    """The world of the function that runs on this rank. Raises RuntimeError outside of one."""
    if _state.world is None:
        raise RuntimeError("no test runs on this process as a rank")
    return _state.world


def add_printed(title: str, text: str) -> None:
    """Add what was printed, under a title, to the next outcome of this rank."""
    _state.printed.append((title, text))


def serve(setup: Setup, parent: Connection) -> None:
    """The main function of a rank's process: run jobs until the parent sends None."""
    log = setup.log.open("a")
    faulthandler.enable(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the parent ends its ranks
    gc.freeze()  # to walk the objects of the imports would copy all their pages, which are the server's
    threading.Thread(target=exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    sys.breakpointhook = _refuse_breakpoint
    _state.store = dist.TCPStore("127.0.0.1", setup.store_port, is_master=False)  # type: ignore[attr-defined]
    loop = functools.partial(_loop, setup.rank, parent, log)
    if setup.session is None:
        loop()
    else:
        importlib.import_module("fullshard.testing.session").run_session(setup.session, loop)


def _loop(rank: int, parent: Connection, log: TextIO) -> None:
    if STACKS is not None:
        vars(faulthandler)["register"](STACKS, log, all_threads=True)
    gc.freeze()
    parent.send(Outcome(rank, "returned"))
    while (job := parent.recv()) is not None:
        log.truncate(0)
        environment = dict(os.environ)
        outcome = _attempt(rank, functools.partial(_run, job, rank, parent))
        parent.send(outcome)
        if outcome.kind == "returned":
            # A group that ends while a peer still reads from it would fail that peer: all have to be done first.
            parent.recv()
            parent.send(_attempt(rank, _clean_up))
        else:
            end_groups()  # at once, so that peers that wait for this rank fail too
        _state.world = None
        os.environ.clear()
        os.environ.update(environment)


def exit_with_parent() -> None:
    """Wait for the end of the process that started this one, and end too, whatever is going on."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(job: RankJob, rank: int, parent: Connection) -> Any:
    """Run a function, in a new default process group, or in the one that is there."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(_told_by_launcher(job, rank))
    device = _device(job.device, rank)
    if job.group != _state.group:
        end_groups()
        _state.group = job.group
        if job.init:
            dist.init_process_group(
                "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:gloo",
                store=dist.PrefixStore(f"group {job.group}", _state.store),  # type: ignore[attr-defined]
                rank=rank,
                world_size=job.size,
                timeout=timedelta(seconds=job.timeout + 30),  # the pool notices a hang first, and shows where
            )
    _state.default = dist.group.WORLD if dist.is_initialized() else None
    _state.world = World(rank, job.size, device)
    for seed in (
        torch.manual_seed,
        random.seed,
        *([sys.modules["numpy"].random.seed] if "numpy" in sys.modules else ()),
    ):
        seed(job.seed)
    function, arguments, keywords = pickle.loads(job.payload)
    platforms.pretended_host = f" {rank * job.hosts // job.size}" if job.hosts > 1 else ""
    with _debugger(job.debugged, rank, parent):
        value = function(_state.world, *arguments, **keywords)
    pickle.dumps(value)
    return value


def _told_by_launcher(job: RankJob, rank: int) -> dict[str, str]:
    """The variables that torchrun sets: a program that reads them, or makes the default group itself, finds them."""
    here = job.size // job.hosts
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": job.size,
        "LOCAL_RANK": rank % here,
        "LOCAL_WORLD_SIZE": here,
        "GROUP_RANK": rank // here,
        "MASTER_PORT": job.port,
    }
    said = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return said | {name: str(number) for name, number in numbers.items()}


def _device(kind: str, rank: int) -> torch.device:
    """A rank's device: the ranks take the machine's accelerators in turns, so that several share one."""
    if kind == "cpu":
        return torch.device(kind)
    module = torch.get_device_module(kind)
    device = torch.device(kind, rank % module.device_count())
    module.set_device(device)
    importlib.import_module("fullshard.testing.shared_device").route_by_host(kind)
    return device


@contextmanager
def _debugger(debugged: int | None, rank: int, parent: Connection) -> Iterator[None]:
    """Give one rank the terminal: ``breakpoint()`` and errors enter pdb there, and ``breakpoint()`` nowhere else."""
    if debugged is None:
        yield
        return
    if rank != debugged:
        sys.breakpointhook = lambda *args, **kwargs: None
    else:
        receive: Callable[[Connection], int] = vars(reduction)["recv_handle"]
        read, write = receive(parent), receive(parent)
        debugger = _state.debugger = pdb.Pdb(stdin=os.fdopen(read), stdout=os.fdopen(write, "w"))
        debugger.prompt = f"(rank {rank}) "
        sys.breakpointhook = lambda *args, **kwargs: debugger.set_trace(sys._getframe(1))
    try:
        yield
    finally:
        sys.breakpointhook, _state.debugger = _refuse_breakpoint, None


def debug(error: BaseException) -> None:
    """Enter the debugger where an error was raised, on the rank that is debugged."""
    if _state.debugger is not None:
        debugger, _state.debugger = _state.debugger, None
        print("".join(traceback.format_exception_only(error)), end="", file=debugger.stdout)
        debugger.reset()
        debugger.interaction(None, error.__traceback__)


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("breakpoint() has no terminal on a rank: run pytest with --ranks-pdb-rank=RANK")


def _attempt(rank: int, action: Callable[[], Any]) -> Outcome:
    try:
        outcome = Outcome(rank, "returned", action())
    except Ended as ended:
        outcome = Outcome(rank, ended.kind, summary=str(ended), report=ended.report)
    except BaseException as error:
        debug(error)
        summary = "".join(traceback.format_exception_only(error)).strip()
        # The frames of this file say nothing to the author of a test.
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        report = "".join(traceback.format_exception(type(error), error, frames)).strip()
        outcome = Outcome(rank, "raised", summary=summary, report=report)
    printed, _state.printed = tuple(_state.printed), []
    return replace(outcome, printed=printed)


@dataclass(frozen=True)
class CleanUp:
    """What a rank found after a function.

    ``collectives`` counts those that the process group has seen, if it is the only one: it may serve again where all
    ranks have seen as many. (After an error some may have gone further than others.) ``is_worn`` ranks should end:
    functions have left groups whose threads wake a hundred times a second. ``left`` names the groups left behind.
    """

    collectives: int | None
    is_worn: bool
    left: tuple[str, ...]


def _clean_up() -> CleanUp:
    """Undo what a function did to its process."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    forget_accelerate()
    count, left = None, _left_behind()
    if dist.is_initialized() and dist.group.WORLD is _state.default and len(process_groups()) == 1:
        count = collectives_seen(dist.group.WORLD)
    else:
        end_groups()
    gc.collect()
    gc.freeze()  # what was imported on the way is not walked again either
    tasks = Path("/proc/self/task")
    return CleanUp(count, tasks.exists() and len([*tasks.iterdir()]) > _MOST_THREADS, left)


def forget_accelerate() -> None:
    """Let accelerate forget the program that ran in this process: the next one may have different ranks."""
    if state := sys.modules.get("accelerate.state"):
        vars(state.AcceleratorState)["_reset_state"](reset_partial_state=True)
        vars(state.GradientState)["_reset_state"]()


def _left_behind() -> tuple[str, ...]:
    """The process groups that a function made and did not destroy, but for those of meshes and of this library."""
    if not dist.is_initialized():
        return ()
    left = []
    for group in process_groups():
        what = group.group_desc
        if group == dist.group.WORLD:
            if group != _state.default:
                left.append(f"a default group that it made itself, of {group.size()} ranks")
        elif not what.startswith(("mesh_", "fullshard")):
            named = "" if what in ("", "undefined") else f" '{what}'"
            left.append(f"the group{named} of the ranks {dist.get_process_group_ranks(group)}")
    return tuple(left)


def end_groups() -> None:
    """Destroy every process group of this process, and forget the meshes that hold them."""
    _state.group, _state.default = -1, None  # a group that is held keeps its connections, and peers would wait
    forget_meshes()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
