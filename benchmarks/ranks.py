"""Processes to measure in: some ranks with gloo, or one that believes to be a rank of many.

Owns their start, their process group and the way their results come back. What they run is a module-level function.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run ``function(*args)`` in ``world_size`` fresh processes that form the default group; their results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (world_size, folder, "gloo", function, args), nprocs=world_size)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def run_pretending(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """Run ``function(*args)`` in one fresh process that is rank 0 of ``world_size``, where communication is free.

    What collectives deliver is undefined there, so only costs may be looked at.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (world_size, folder, "fake", function, args), nprocs=1)
        return pickle.loads((Path(folder) / "0").read_bytes())


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
        (Path(folder) / str(rank)).write_bytes(pickle.dumps(function(*args)))
        if backend == "gloo":
            dist.barrier()
    finally:
        dist.destroy_process_group()
