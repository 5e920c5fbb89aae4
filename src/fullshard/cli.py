"""The commands of ``python -m fullshard``: ``run`` a program on it, describe the ``env``, ``explain`` a model or make
it ``fit``, look at jobs (``doctor``) and checkpoints.

A thin layer: each command calls what the library has.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import runpy
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

import fullshard
from fullshard.checkpoint.commands import add_commands
from fullshard.comm.select import choose_transport
from fullshard.compat.patch import patch_and_report
from fullshard.device import default_device_type, is_host
from fullshard.rehearsal.command import add_rehearse
from fullshard.report.commands import add_explain, add_fit
from fullshard.report.doctor import add_doctor

#: Packages whose versions belong in a bug report.
_PACKAGES = ("numpy", "accelerate", "transformers", "peft", "trl", "lightning", "torchao", "torchtitan", "safetensors")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    name = "fullshard" if Path(sys.argv[0]).name == "fullshard" else "python -m fullshard"
    parser = argparse.ArgumentParser(prog=name, description="Fully sharded data parallelism.")
    parser.add_argument("--version", action="version", version=f"fullshard {fullshard.__version__}")
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser(
        "run", help="run a program, unchanged, with fullshard in place of torch's FSDP", description=_run.__doc__
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="the program is a module, as with python -m")
    run.add_argument("program", help="a Python file, with -m a module, or a command, such as torchrun")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    run.set_defaults(call=_run)
    about = "say what is installed and what fullshard would choose, for bug reports"
    env = commands.add_parser("env", help=about, description=f"{about.capitalize()}.")
    env.set_defaults(call=_env)
    add_explain(commands.add_parser("explain", help="say what sharding would do to a model, on any number of ranks"))
    add_fit(commands.add_parser("fit", help="choose how to shard a model so that a step fits into memory"))
    add_rehearse(commands.add_parser("rehearse", help="run a program as one rank of many, over a simulated network"))
    add_doctor(commands.add_parser("doctor", help="start a job, check its first steps, and say what is wrong with it"))
    add_commands(commands.add_parser("checkpoint", help="list, check, show, convert and compare checkpoints"))
    options = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every encoding of a terminal has all characters
    return int(options.call(options))


def _run(options: argparse.Namespace) -> int:
    """Runs a program with fullshard in place of torch's FSDP, in its child processes too (FULLSHARD_PATCH=1)."""
    os.environ["FULLSHARD_PATCH"] = "1"
    program = options.program
    is_command = not program.endswith(".py") and shutil.which(program)  # Windows takes each file for a command
    if not options.is_module and (is_command or not Path(program).is_file()):
        return _execute(program, options.arguments)
    patch_and_report()
    sys.argv = [program, *options.arguments]
    if options.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")
    return 0


def _execute(command: str, arguments: Sequence[str]) -> int:
    """Replace this process by another program, or run it where the system cannot do that. Each Python process in it
    patches torch when it imports torch."""
    if (found := shutil.which(command)) is None:
        print(f"python -m fullshard run: no file and no command '{command}'", file=sys.stderr)
        return 2
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    if not any(Path(folder, "fullshard_at_start.pth").exists() for folder in folders):
        print(
            f"python -m fullshard run: {command} starts Python processes that would run on torch's FSDP: fullshard "
            f"is found by its path only. Install it (pip install), so that {folders[0]} has fullshard_at_start.pth",
            file=sys.stderr,
        )
        return 2
    if not hasattr(os, "fork"):  # such a system starts a new process for it, and ends this one before that
        return subprocess.call([found, *arguments])
    os.execvp(command, [command, *arguments])


def _env(_: argparse.Namespace) -> int:
    """Prints what a bug report should contain."""
    device = torch.device(default_device_type())
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    rows = {
        "fullshard": fullshard.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "device": f"{device}, {os.cpu_count() if is_host(device) else torch.accelerator.device_count()} of them",
        "backends": ", ".join(backends),
        "transport": _transport(device),
        "torch's names": "bound to fullshard's" if fullshard.is_patched() else "torch's own",
    }
    if Path("/dev/shm").exists():
        free = shutil.disk_usage("/dev/shm").free
        rows["shared memory"] = f"{free / 2**30:.1f} GiB free in /dev/shm"
    rows |= {name: found for name in _PACKAGES if (found := _version(name))}
    rows |= {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("FULLSHARD_", "FSDP_", "NCCL_"))}
    for name, value in rows.items():
        print(f"{name:<16} {value}")
    return 0


def _transport(device: torch.device) -> str:
    """The transport that two ranks on this machine would use, and why."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(_write_transport, (folder, device), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
        except Exception as error:  # such as two ranks on the one GPU of a machine
            if not Path(folder, "transport").exists():
                return f"unknown, as two ranks could not be tried: {str(error).strip().splitlines()[-1]}"
        return Path(folder, "transport").read_text(encoding="utf-8")


def _write_transport(rank: int, folder: str, device: torch.device) -> None:
    backend = dist.get_default_backend_for_device(device)
    store = dist.FileStore(str(Path(folder, "store")), 2)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    try:
        transport, why = choose_transport(dist.group.WORLD, device)  # type: ignore[arg-type]
        message = f"{transport.name} for ranks of this machine: {why}"
    except ValueError as error:
        message = str(error)
    if rank == 0:
        Path(folder, "transport").write_text(message, encoding="utf-8")
    dist.barrier()  # a rank that ends while the other still connects would fail it
    dist.destroy_process_group()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
