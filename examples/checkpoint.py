"""Checkpoints: each is a directory ``step-N`` of its own, and the small file ``latest`` says which one counts.

Model and optimizer are saved by ``torch.distributed.checkpoint``, each rank its shards, and load on any number of
ranks and with either front end. There is no random state to keep: a batch is a function of seed and step (``data.py``).
A save that is interrupted, at any moment, leaves ``latest`` on the older checkpoint, here of step 200::

    write step-300.partial  →  rename it to step-300  →  write latest.partial, rename it to latest  →  remove step-100

So two are kept, the current one and the one before it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards


def latest(directory: Path) -> Path | None:
    """Return the current checkpoint of a run, or None where there is none yet."""
    pointer = directory / "latest"
    return directory / pointer.read_text().strip() if pointer.exists() else None


def describe(path: Path) -> dict[str, Any]:
    """Return what :func:`save` was told of the run: a dict with ``step`` and whatever else it gave."""
    description: dict[str, Any] = json.loads((path / "run.json").read_text())
    return description


def save(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, run: dict[str, str | int]
) -> None:
    """Write a checkpoint and make it the current one. Every rank calls this."""
    first = dist.get_rank() == 0
    path = directory / f"step-{step}"
    partial = path.with_name(f"{path.name}.partial")
    if first:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in (partial, path):  # of a save that was interrupted: what counts is named by latest
            shutil.rmtree(leftover, ignore_errors=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save_shards({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    if first:
        (partial / "run.json").write_text(json.dumps({"step": step, **run}))
        partial.rename(path)
        kept = (latest(directory), path)
        _point(directory / "latest", path.name)
        for old in set(directory.glob("step-*")).difference(kept):
            shutil.rmtree(old)
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into a sharded model and its optimizer. Every rank calls this."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    load_shards({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def _point(pointer: Path, name: str) -> None:
    """Replace the text of a file in one step, which a reader sees either before or after."""
    partial = pointer.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(pointer)
