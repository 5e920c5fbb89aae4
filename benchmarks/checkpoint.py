"""Ending and beginning again: time, bytes and memory of saving and loading the model and its optimizer.

Checkpoints are torch's distributed ones (DCP) of parameters and AdamW's state, made the way each library documents; DDP
also with ``torch.save`` on one rank, which is what its users do. Contenders take turns in the same processes. The files
lie in a temporary folder and are not forced to the disk, so that it is not the disk that is measured.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks import resident
from benchmarks.contenders import DDP, FSDP1, FSDP2, Contender, ours
from benchmarks.models import TINY, Work
from benchmarks.ranks import run_ranks

_FIGURES = ("save seconds", "save bytes", "load seconds", "load bytes", "file bytes")


@dataclass(frozen=True)
class Run:
    """A contender's model and optimizer after a step, which are saved and loaded."""

    contender: Contender
    alone: bool
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def name(self) -> str:
        return f"{self.contender.name}, torch.save on rank 0" if self.alone else self.contender.name

    def save(self, folder: Path) -> None:
        if not self.alone:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            save({"model": model, "optimizer": optimizer}, storage_writer=FileSystemWriter(folder, sync_files=False))
        elif dist.get_rank() == 0:
            folder.mkdir()
            torch.save((self.model.state_dict(), self.optimizer.state_dict()), folder / "checkpoint.pt")

    def load(self, folder: Path) -> None:
        if self.alone:
            model, optimizer = torch.load(folder / "checkpoint.pt")
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
            return
        model, optimizer = get_state_dict(self.model, self.optimizer)
        load({"model": model, "optimizer": optimizer}, storage_reader=FileSystemReader(folder))
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def measure_checkpoint(work: Work, world_size: int, rounds: int) -> dict[str, Any]:
    """For each contender, a number for each round: seconds of the slowest rank, bytes of the rank that takes most."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank = run_ranks(_measure, world_size, work, rounds, folder)
    contenders = {
        name: {
            what: [max(values) for values in zip(*(rank[name][what] for rank in by_rank), strict=True)]
            for what in first
        }
        for name, first in by_rank[0].items()
    }
    return {"ranks": world_size, "model_bytes": work.model_bytes, "contenders": contenders}


def _measure(work: Work, rounds: int, folder: str) -> dict[str, dict[str, list[float]]]:
    resident.return_what_is_freed()
    place = Path(folder) / "checkpoint"
    for run in _runs(TINY):
        _take_turn(run, place)  # what a first checkpoint imports
    runs = _runs(work)
    found: dict[str, dict[str, list[float]]] = {run.name: {figure: [] for figure in _FIGURES} for run in runs}
    for number in range(rounds):
        random.Random(number).shuffle(runs)
        for run in runs:
            for figure, value in _take_turn(run, place).items():
                found[run.name][figure].append(value)
    return found


def _runs(work: Work) -> list[Run]:
    return [
        *(_trained(contender, work) for contender in (*ours(every_transport=False), FSDP2, FSDP1, DDP)),
        _trained(DDP, work, alone=True),
    ]


def _trained(contender: Contender, work: Work, alone: bool = False) -> Run:
    model = work.build()
    sharded = contender.wrap(model, list(model.blocks))
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded(work.batch(dist.get_rank(), 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return Run(contender, alone, sharded, optimizer)


def _take_turn(run: Run, folder: Path) -> dict[str, float]:
    save_seconds, save_bytes = _watched(lambda: run.save(folder))
    dist.barrier()
    load_seconds, load_bytes = _watched(lambda: run.load(folder))
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return dict(zip(_FIGURES, (save_seconds, save_bytes, load_seconds, load_bytes, written), strict=True))


def _watched(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and bytes at the peak above what was there."""
    resident.settle()
    before, begin = resident.bytes_now(), time.perf_counter()
    with resident.Peak() as peak:
        run()
    return time.perf_counter() - begin, peak.bytes - before
