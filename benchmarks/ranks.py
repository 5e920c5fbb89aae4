"""Processes to measure in: some ranks with gloo, or one that simulates a rank of many.

Owns their start, their process group, the way their results come back, and the count of the CPU time they took. What
they run is a module-level function. Every call gets fresh processes; they are forked from a server that has imported
torch (and what its optimizers import later) and done nothing else, which saves seconds each time.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

_cpu_seconds = 0.0


def cpu_seconds() -> float:
    """CPU time of all ranks that ended so far."""
    return _cpu_seconds


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run ``function(*args)`` in ``world_size`` fresh processes that form the default group; their results by rank."""
    return _run(function, world_size, "gloo", world_size, *args)


def run_simulated(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """Run ``function(*args)`` in one fresh process that is rank 0 of ``world_size``, where communication is free.

    What collectives deliver is undefined there, so only costs may be looked at.
    """
    return _run(function, world_size, "fake", 1, *args)[0]


def _run(function: Callable[..., Any], world_size: int, backend: str, processes: int, *args: Any) -> list[Any]:
    global _cpu_seconds
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # or the server does not find what it shall import
    multiprocessing.set_forkserver_preload(["benchmarks.contenders", "torch.distributed.checkpoint", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            _rank, (world_size, folder, backend, function, args), nprocs=processes, start_method="forkserver"
        )
        ended = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(processes)]
    _cpu_seconds += sum(seconds for seconds, _ in ended)
    return [result for _, result in ended]


def _rank(
    rank: int, world_size: int, folder: str, backend: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}
    warnings.simplefilter("ignore")  # of what torch says about itself
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    else:
        init = (Path(folder) / "rendezvous").as_uri()
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size)
    try:
        result = function(*args)
        (Path(folder) / str(rank)).write_bytes(pickle.dumps((time.process_time(), result)))
        if backend == "gloo":
            dist.barrier()
    finally:
        dist.destroy_process_group()
