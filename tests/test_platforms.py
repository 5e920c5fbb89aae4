"""A system that lacks what Linux has: each feature is taken away before fullshard is imported, and programs run.

In a process of its own, `program` removes features, trains in several ways, compares each with the same training
unsharded, saves, loads and runs commands. With all of them together, files behave as those of Windows too: one that is
open can be neither removed nor renamed, nor a directory around it.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import io
import mmap
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
#: What is taken away together, by name: names of modules, or paths.
FEATURES: dict[str, tuple[tuple[ModuleType, tuple[str, ...]], ...]] = {
    "memfd": ((os, ("memfd_create",)),),
    "pidfd and poll": ((os, ("pidfd_open",)), (select, ("poll", "POLLIN", "POLLRDHUP"))),
    "fork": ((os, ("fork", "register_at_fork")), (signal, ("SIGUSR1", "SIGUSR2", "SIGHUP"))),
    "kinds of open": (
        (os, ("O_TMPFILE", "O_DIRECT", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY", "SEEK_HOLE", "SEEK_DATA")),
    ),
    "reads at a place": ((os, ("pread", "preadv", "pwrite", "pwritev", "readv", "writev")),),
    "reservation": ((os, ("posix_fallocate", "posix_fadvise")),),
    "mappings": ((mmap, ("MAP_SHARED", "MAP_PRIVATE", "MAP_ANONYMOUS", "PROT_READ", "PROT_WRITE", "MADV_DONTNEED")),),
    "users and limits": ((os, ("geteuid", "sysconf", "fstatvfs", "getloadavg")),),
    "scheduler": ((os, ("sched_getaffinity", "sched_yield")),),
    "facts of connections": ((socket, ("TCP_INFO", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "AF_UNIX")),),
    "modules": (),
    "paths": (),
    "libc": (),
    "x86-64": (),
    "fine clocks": (),
}
MODULES, PATHS = ("resource", "fcntl", "termios", "pwd", "grp"), ("/proc", "/dev/shm", "/dev/fd", "/sys")


def hide_paths() -> None:
    """Paths of Linux do not exist."""

    def hiding(call: Callable[..., Any], missing: Any = FileNotFoundError) -> Callable[..., Any]:
        def called(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(PATHS):
                if missing is FileNotFoundError:
                    raise FileNotFoundError(2, "No such file or directory", str(path))
                return missing
            return call(path, *args, **kwargs)

        return called

    for name in ("stat", "lstat", "open", "readlink", "listdir", "scandir", "statvfs"):
        if hasattr(os, name):
            setattr(os, name, hiding(getattr(os, name)))
    os.access = hiding(os.access, False)
    builtins.open = io.open = hiding(io.open)


def hide_libc() -> None:
    """`ctypes.CDLL(None)` is a TypeError on Windows."""
    made = ctypes.CDLL.__init__

    def load(library: ctypes.CDLL, name: Any, *args: Any, **kwargs: Any) -> None:
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        made(library, name, *args, **kwargs)

    ctypes.CDLL.__init__ = load  # type: ignore[method-assign]


def coarsen_clocks() -> None:
    """Before Python 3.13 the clock of Windows moves in steps."""
    monotonic, step = time.monotonic_ns, 15_625_000
    time.monotonic_ns = lambda: monotonic() // step * step
    time.monotonic = lambda: time.monotonic_ns() / 1e9


def keep_open_files() -> None:
    """A file that this process has open, or has mapped, is neither renamed nor removed, nor is a directory with it."""
    listdir, readlink, read = os.listdir, os.readlink, io.open

    def in_use() -> Iterator[str]:
        for name in listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                yield readlink(f"/proc/self/fd/{name}")
        with read("/proc/self/maps") as maps:
            yield from (fields[5].rstrip("\n") for line in maps if len(fields := line.split(maxsplit=5)) > 5)

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *args: Any, **kwargs: Any) -> Any:
            whole = os.path.abspath(os.fspath(path))
            if found := [each for each in in_use() if each == whole or each.startswith(whole + os.sep)]:
                raise PermissionError(13, f"The process cannot access the file: {found[0]} is open", str(path))
            return call(path, *args, **kwargs)

        return called

    for name in ("rename", "replace", "unlink", "remove", "rmdir"):
        setattr(os, name, refusing(getattr(os, name)))
    os.O_TEMPORARY = 0  # type: ignore[attr-defined]


def lack(names: list[str]) -> None:
    """Takes features away."""
    import torch.distributed.checkpoint  # torch asks `sys.platform`: it is not what is tried here
    import torch.multiprocessing  # noqa: F401

    if len(names) == len(FEATURES) and os.path.exists("/proc/self/fd"):
        keep_open_files()
    for module, lacked in (each for name in names for each in FEATURES[name]):
        for each in lacked:
            if hasattr(module, each):
                delattr(module, each)
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # of Linux, too
    if "modules" in names:
        sys.modules.update(dict.fromkeys(MODULES))  # type: ignore[arg-type]
    if "paths" in names:
        hide_paths()
    if "libc" in names:
        hide_libc()
    if "x86-64" in names:
        platform.machine = lambda: "arm64"
    if "fine clocks" in names:
        coarsen_clocks()


def train(step: Callable[[Any], Any], optimizer: Any, steps: int = 3) -> None:
    import torch

    for number in range(steps):
        step(torch.linspace(-1, 1, 32).reshape(4, 8) + number).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def program(names: list[str], folder: Path) -> None:
    """What a rank does."""
    lack(names)
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    import fullshard
    from fullshard import checkpoint
    from fullshard.checkpoint import PreemptionHandler
    from fullshard.cli import main
    from fullshard.comm.select import choose_transport
    from fullshard.optim import LocalSteps

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))

    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.05)

    def whole(sharded: torch.nn.Module) -> list[torch.Tensor]:
        return [each.full_tensor() if isinstance(each, DTensor) else each for each in sharded.parameters()]

    def compare(found: list[torch.Tensor]) -> None:
        for each, expected in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(each.detach(), expected.detach())

    plain = model()
    train(plain, adam(plain.parameters()))
    on_disk = fullshard.DiskOffloadPolicy(folder / "disk")
    cases: list[dict[str, Any]] = [{}, {"zero_stage": 1}, {"zero_stage": 0}, {"offload_policy": on_disk}]
    for number, options in enumerate(cases):
        sharded = fullshard.fully_shard(model(), mesh=mesh, **options)
        optimizer = adam(sharded.parameters())
        metrics = folder / f"metrics-{rank}.jsonl"
        with fullshard.log_metrics(sharded, metrics), PreemptionHandler() as preempted:
            with fullshard.profile(sharded, steps=3) as trace:
                train(sharded, optimizer)
            assert not preempted()
            print(trace)
        compare(whole(sharded))
        directory = folder / f"run{number}"
        checkpoint.save(directory, sharded, optimizer, step=1)
        checkpoint.save(directory, sharded, optimizer, step=2, wait=False, keep_last=2)
        checkpoint.save(directory, sharded, optimizer, step=3, wait=False, keep_last=2)
        checkpoint.wait_until_finished()
        train(sharded, optimizer, 1)
        checkpoint.load(directory, sharded, optimizer)
        compare(whole(sharded))
        if rank == 0:
            assert [path.name for path in checkpoint.list_checkpoints(directory)] == ["step-00000003", "step-00000002"]
            assert not [*directory.glob(".step-*")]
    wrapped = fullshard.FullyShardedDataParallel(model(), use_orig_params=True)
    train(wrapped, adam(wrapped.parameters()))
    with fullshard.summon_full_params(wrapped):
        compare([*wrapped.parameters()])
    checkpoint.save(folder / "replicas-too", wrapped, step=1, replicas=folder / "near")
    checkpoint.load(folder / "replicas-too", wrapped, replicas=folder / "near")
    if size > 1:
        apart = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
        replicas = fullshard.fully_shard(model(), mesh=apart)
        optimizer = adam(replicas.parameters())
        local_steps = LocalSteps(replicas, optimizer, every=1)
        train(replicas, optimizer)
        assert local_steps.steps == 3
        compare(whole(replicas))
        world = dist.group.WORLD
        assert world is not None
        assert choose_transport(world, torch.device("cpu"))[0].name == "p2p"
        os.environ["FULLSHARD_TRANSPORT"] = "shm"
        with pytest.raises(ValueError, match=r"'shm' cannot .* without the shared memory .* it lacks .*memfd_create"):
            choose_transport(world, torch.device("cpu"))
        os.environ["FULLSHARD_TRANSPORT"] = "collective"
        collective = fullshard.fully_shard(model(), mesh=mesh)
        train(collective, adam(collective.parameters()))
        compare(whole(collective))
        del os.environ["FULLSHARD_TRANSPORT"]
    print(fullshard.doctor(sharded))
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        run, out = str(folder / "run3"), folder / "out"
        for command in (
            ["list", run], ["show", run], ["verify", run], ["diff", run, run],
            ["export", run, str(out)], ["export", run, str(folder / "model.pt")],
            ["import", str(folder / "model.pt"), str(folder / "again")], ["prune", run, "--latest", "1"],
        ):  # fmt: skip
            assert main(["checkpoint", *command]) == 0, command
        assert [path.name for path in checkpoint.list_checkpoints(run)] == ["step-00000003"]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
    found = {name: value for name, value in os.environ.items() if not name.startswith("FULLSHARD_")}
    for loopback in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:  # the host's name may not resolve
        found.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return {**found, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


def run(folder: Path, names: list[str], size: int) -> None:
    """Runs the program on ranks of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "from pathlib import Path\nfrom tests.test_platforms import program\n"
    code += f"program({names!r}, Path({str(folder)!r}))"
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "USE_LIBUV": "0"}
    place |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}  # files and terminals are of ASCII
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(RANK=str(rank), **place),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]
    try:
        texts = [rank.communicate(timeout=120)[0].decode(errors="replace") for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(texts)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_programs_run_on_a_system_that_lacks_everything(tmp_path: Path, size: int) -> None:
    run(tmp_path, [*FEATURES], size)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_programs_run_without_one_feature(tmp_path: Path, feature: str) -> None:
    run(tmp_path, [feature], 1)


@pytest.mark.parametrize("name", ["preadv", "no preadv"])
def test_threads_read_and_write_at_places_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from fullshard.platforms import open_flags, read_at, write_at

    for call in ("preadv", "pwritev") if name == "no preadv" else ():
        monkeypatch.delattr(os, call, raising=False)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | open_flags("O_NO_SUCH_FLAG"))

    def move(number: int) -> bool:
        mine, found = memoryview(bytes([10, 13, number]) * 100), memoryview(bytearray(400))
        assert write_at(file, mine, 300 * number) == 300
        assert read_at(file, found[:300], 300 * number) == 300
        return found[:300] == mine

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(move, range(200)))
    assert read_at(file, memoryview(bytearray(400)), 300 * 199) == 300
    os.close(file)
    assert (tmp_path / "file").stat().st_size == 300 * 200


@pytest.mark.slow
def test_a_torch_without_its_distributed_part_is_named() -> None:
    code = "import torch; torch.distributed.is_available = lambda: False; import fullshard"
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert "ImportError: this torch, 2." in ended.stderr
    assert "was built without torch.distributed" in ended.stderr
