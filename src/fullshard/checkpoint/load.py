"""Loads the newest checkpoint that is whole, each rank what it needs, into the memory in which it is used.

Owns the choice among the checkpoints of a directory: one that is broken is named and passed over, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard.checkpoint.blocks import BrokenCheckpoint, CheckpointError, without_collections
from fullshard.checkpoint.contents import (
    Contents,
    Parameters,
    load_optimizer,
    new_states,
    targets,
    with_dtensors,
    without_dtensors,
)
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.reader import Checkpoint, checkpoints, few
from fullshard.checkpoint.save import finish
from fullshard.policies import warn


@without_collections()
def load(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    process_group: ProcessGroup | None = None,
    **state: Any,
) -> dict[str, Any] | None:
    """Loads the newest whole checkpoint of a directory into a model, its optimizer and other objects.

    All ranks must call it; they may be other ranks, and sharded otherwise, than those that saved. Checkpoints that are
    not whole are passed over with a warning that names the file and the tensor.

    Args:
        directory: where :func:`save` put its checkpoints, or one of them, or one of DCP.
        strict: ``False``: what only the checkpoint or only the model has is left as it is.
        process_group: the ranks of the model, if these are not all.
        state: by the names that ``save`` was given, the objects with ``load_state_dict()`` that take their state back.

    Returns:
        ``None`` if the directory has no checkpoint: the training begins. Otherwise a dict of ``step`` and of all state
        that this rank gave to ``save`` by name. Where another number of ranks saved, rank r has the state of rank r
        modulo that number, and names under which ranks differed are warned of.

    Raises:
        CheckpointError: on all ranks, if no checkpoint is whole, or if the newest one does not fit the model. Model and
            optimizer may then have parts of it.
    """
    finish()
    ranks = Ranks(process_group)
    (paths, *_), _ = ranks.attempt(lambda: (checkpoints(directory) if ranks.first else [], None))
    paths = ranks.gather(paths)[0]
    broken: list[str] = []
    for path in paths:
        try:
            loading = _Loading(path, strict, ranks)
            ranks.attempt(partial(loading.read, model, optimizer, state))
        except BrokenCheckpoint as error:
            broken.append(str(error))
            warn(f"the checkpoint {path} is passed over, because it is not whole: {error}")
            continue
        return ranks.attempt(partial(loading.take_over, optimizer, state))[0]
    if broken:
        raise CheckpointError(f"no checkpoint in {directory} is whole: {'; '.join(broken)}")
    return None


class _Loading:
    """One attempt to load a checkpoint."""

    def __init__(self, path: Path, strict: bool, ranks: Ranks) -> None:
        self.path, self.strict, self.ranks = path, strict, ranks
        self.state: dict[str, Any] = {}
        self.rest: dict[str, Any] = {}
        self.states: dict[nn.Parameter, dict[str, Any]] = {}
        self.sharded: dict[tuple[str | int, ...], Any] = {}

    @torch.no_grad()
    def read(self, model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any]) -> None:
        """Reads everything; what is not read in place is kept for :meth:`take_over`."""
        self.checkpoint, self.params, contents = Checkpoint(self.path), Parameters(model), Contents()
        with self.checkpoint:
            manifest = self.checkpoint.manifest
            self.params.collect(contents, frozen=True)
            for name, value in self.params.rest().items():
                if isinstance(value, torch.Tensor):
                    self.rest[name] = torch.empty_like(value)
                    contents.add([("model", name)], self.rest[name])
                elif f"model.{name}" in manifest.objects:
                    self.rest[name] = self.checkpoint.value(f"model.{name}")
            if optimizer is not None:
                self.states = new_states(self.params, optimizer, self.checkpoint)
                self.params.collect_state(contents, self.states, everyone=True)
            contents.values.clear()
            self._read_state(contents, state)
            self._compare(contents, optimizer)
            self.checkpoint.read(target for target in targets(contents) if target.name in manifest.tensors)
            self.params.written()
            self.rest = {
                name: each
                for name, each in self.rest.items()
                if f"model.{name}" in {*manifest.tensors, *manifest.objects}
            }

    def _read_state(self, contents: Contents, state: Mapping[str, Any]) -> None:
        manifest = self.checkpoint.manifest
        self.state = self.checkpoint.state(self.ranks.rank)
        for name, each in state.items():
            if hasattr(each, "load_state_dict"):
                if name not in self.state and self.strict:
                    raise KeyError(
                        f"{self.path} has no state '{name}', but {sorted(self.state)}: leave it out of load()"
                    )
                found: dict[tuple[str | int, ...], Any] = {}
                without_dtensors(each.state_dict(), (name,), found)
                for path, tensor in found.items():
                    contents.add([("sharded", *path)], tensor)
                self.sharded |= found
        differing = self.checkpoint.differing()
        if differing and self.ranks.first and self.ranks.size != manifest.world_size:
            warn(
                f"{self.path} was saved by {manifest.world_size} ranks, and {self.ranks.size} load it: of {differing}, "
                f"which differ between ranks, rank r has those of rank r modulo {manifest.world_size}"
            )

    def _compare(self, contents: Contents, optimizer: Optimizer | None) -> None:
        """Refuses a checkpoint of another model."""
        if not self.strict:
            return
        manifest, here = self.checkpoint.manifest, {name for name in contents.paths if name.startswith("model.")}
        there = {name for name in (*manifest.tensors, *manifest.objects) if name.startswith("model.")}
        if not manifest.frozen:
            here -= {
                f"model.{name}"
                for param, places in self.params.shown.items()
                for place in places
                for name in self.params.names[place]
                if not param.requires_grad
            }
        if missing := sorted(here - there):
            raise KeyError(f"{self.path} lacks {few(missing)}, which the model has: is it of another model?")
        if unknown := sorted(there - set(contents.paths) - {f"model.{name}" for name in self.rest}):
            raise KeyError(f"the model lacks {few(unknown)}, which {self.path} has: is it of another model?")
        if optimizer is not None and not any(name.startswith("optimizer.") for name in manifest.objects):
            raise KeyError(f"{self.path} was saved without an optimizer: leave it out of load()")

    @torch.no_grad()
    def take_over(self, optimizer: Optimizer | None, state: Mapping[str, Any]) -> dict[str, Any]:
        with self.checkpoint:
            self.params.load_rest(self.rest)
            if optimizer is not None:
                load_optimizer(self.params, optimizer, self.states, self.checkpoint)
        for name, each in state.items():
            if hasattr(each, "load_state_dict") and name in self.state:
                each.load_state_dict(with_dtensors(self.state[name], (name,), self.sharded))
        return {"step": self.checkpoint.manifest.step, **self.state}
