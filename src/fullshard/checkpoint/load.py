"""Loads the newest checkpoint that is whole, each rank what it needs, into the memory in which it is used.

Owns the choice among the checkpoints of a directory: one that is broken is named and passed over, on all ranks alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard.checkpoint.background import finish
from fullshard.checkpoint.blocks import BrokenCheckpoint, CheckpointError, without_collections
from fullshard.checkpoint.contents import (
    Contents,
    Parameters,
    load_optimizer,
    named,
    new_states,
    targets,
    with_dtensors,
    without_dtensors,
)
from fullshard.checkpoint.fetch import NearCopy, near_copies
from fullshard.checkpoint.manifest import few, number_of
from fullshard.checkpoint.ranks import LostRank, Ranks
from fullshard.checkpoint.reader import Checkpoint, newest_first
from fullshard.policies import warn

_log = logging.getLogger("fullshard")


@without_collections()
def load(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    near: str | Path | None = None,
    process_group: ProcessGroup | None = None,
    **state: Any,
) -> dict[str, Any] | None:
    """Loads the newest whole checkpoint of a directory into a model, its optimizer and other objects.

    All ranks must call it; they may be other ranks, and sharded otherwise, than those that saved. Checkpoints that are
    not whole are passed over with a warning that names the file and the tensor.

    Args:
        directory: where :func:`save` put its checkpoints, or one of them, or one of DCP.
        model: sharded by ``fully_shard`` or ``FullyShardedDataParallel``, or not at all.
        optimizer: of the model's parameters; ``None``: its state is not loaded.
        strict: ``False``: what only the checkpoint or only the model has is left as it is.
        near: the directory of near copies that ``save`` was given. The newest near copy is loaded if it is whole, of
            this training, and not older than the newest checkpoint of ``directory``; ranks read what their host does
            not have from other hosts. A line of the log (logger ``fullshard``, level INFO) says what was loaded and
            why, and a warning why a near copy that is newer was not.
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
    ranks, directory = Ranks(process_group), Path(directory)
    broken: list[str] = []
    for path, opens, served, why in _candidates(directory, Path(near) if near is not None else None, ranks):
        loading = _Loading(path, opens, strict, ranks)
        with served(), loading.opened:
            try:
                ranks.attempt(partial(loading.read, model, optimizer, state))
            except BrokenCheckpoint as error:
                if ranks.any(path.exists()):  # otherwise another job has removed it, as it has a newer one
                    broken.append(str(error))
                    warn(f"the checkpoint {path} is passed over, because it is not whole: {error}")
                continue
            taken = ranks.attempt(partial(loading.take_over, optimizer, state))[0]
        if ranks.first:
            _log.info(f"step {taken['step']} is loaded from {path}{why}")
            if (number_of(path.name) or (taken["step"],))[0] != taken["step"]:
                warn(f"{path} holds step {taken['step']}, which is loaded: the directory was renamed")
        return taken
    if broken:
        raise CheckpointError(f"no checkpoint in {directory} is whole: {'; '.join(broken)}")
    if number_of(directory.name):
        raise CheckpointError(
            f"there is no checkpoint {directory}: give load() the directory of all, {directory.parent}"
        )
    if ranks.first:
        _log.info(f"nothing is loaded: {directory} has no checkpoint")
    return None


class _Candidate(NamedTuple):
    """What may be loaded."""

    path: Path
    open: Callable[[], Checkpoint]
    served: Callable[[], AbstractContextManager[None]]  # while ranks read
    why: str  # it is the next that is tried


def _candidates(directory: Path, near: Path | None, ranks: Ranks) -> Iterator[_Candidate]:
    """What may be loaded, the newest first, near copies before checkpoints that are not newer. All ranks must ask for
    the next one at once."""
    copies, why = list[NearCopy](), ""
    if near is not None:
        try:
            copies = near_copies(near, directory, ranks)
        except LostRank:
            raise
        except CheckpointError as error:
            warn(f"near copies are passed over: {error}")
        why = f": there is no near copy in {near}"
        if copies:
            why = f": the near copy of step {copies[0].step} is passed over: {copies[0].refused or 'it is older'}"
    on_disk = newest_first(directory)
    while True:
        path: Path | None = ranks.attempt(lambda: (next(on_disk, None) if ranks.first else None,))[1][0]
        step = -1 if path is None else (number_of(path.name) or (-1, 0))[0]
        while copies and copies[0].step >= step:
            copy = copies.pop(0)
            if not copy.refused:
                yield _Candidate(
                    copy.path, copy.open, copy.served, f": it is a near copy, and {directory} has nothing newer"
                )
            elif copy.step > step:
                warn(f"the near copy {copy.path} is passed over: {copy.refused}")
        if path is None:
            return
        yield _Candidate(path, partial(Checkpoint, path), nullcontext, why)


class _Loading:
    """One attempt to load a checkpoint."""

    def __init__(self, path: Path, opens: Callable[[], Checkpoint], strict: bool, ranks: Ranks) -> None:
        self.path, self.open, self.strict, self.ranks = path, opens, strict, ranks
        self.opened = ExitStack()  # what is read stays where it is until all of it was taken over
        self.state: dict[str, Any] = {}
        self.rest: dict[str, Any] = {}
        self.states: dict[nn.Parameter, dict[str, Any]] = {}
        self.sharded: dict[tuple[str | int, ...], Any] = {}

    @torch.no_grad()
    def read(self, model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any]) -> None:
        """Reads everything; what is not read in place is kept for :meth:`take_over`."""
        self.checkpoint, self.params, contents = self.opened.enter_context(self.open()), Parameters(model), Contents()
        manifest = self.checkpoint.manifest
        self.params.collect(contents, frozen=True)
        for name, value in self.params.rest().items():
            if isinstance(value, torch.Tensor):
                self.rest[name] = torch.empty_like(value)
                contents.add({f"model.{name}": ("model", name)}, self.rest[name])
            elif f"model.{name}" in manifest.objects:
                self.rest[name] = self.checkpoint.value(f"model.{name}")
        if not self.strict and not self.has_optimizer:
            optimizer = None
        if optimizer is not None:
            self.states = new_states(self.params, optimizer, self.checkpoint)
            self.params.collect_state(contents, self.states, everyone=True)
        contents.values.clear()
        self._read_state(contents, state)
        self._compare(contents, optimizer)
        self.checkpoint.read(targets(contents, manifest.tensors.places))
        self.params.written()
        both = manifest.tensors, manifest.objects
        self.rest = {name: each for name, each in self.rest.items() if any(f"model.{name}" in of for of in both)}

    @property
    def has_optimizer(self) -> bool:
        return any(name.startswith("optimizer.") for name in self.checkpoint.manifest.objects)

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
                    contents.add(named(("sharded", *path)), tensor)
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
            frozen = {
                f"model.{name}"
                for param, places in self.params.shown.items()
                for place in places
                for name in self.params.known[place].names
                if not param.requires_grad
            }
            here = {name for name in here if not frozen & {name.rsplit(".", depth)[0] for depth in range(3)}}
        for known in self.params.known.values():  # what is tied may be there under one of its names
            tied = {f"model.{name}" for name in known.names}
            if tied & there:
                here -= tied - there
        if missing := sorted(here - there):
            whole = {name.partition(".[")[0] for name in there}
            if any(name.partition(".[")[0] in whole for name in missing):
                raise ValueError(
                    f"{self.path} has {few(missing)}, for other parts of parameters than this rank has: "
                    f"load it on as many ranks, sharded alike, as saved it"
                )
            raise KeyError(f"{self.path} lacks {few(missing)}, which the model has: is it of another model?")
        there = {name for name in there if ".[" not in name}
        if unknown := sorted(there - set(contents.paths) - {f"model.{name}" for name in self.rest}):
            raise KeyError(f"the model lacks {few(unknown)}, which {self.path} has: is it of another model?")
        if optimizer is not None and not self.has_optimizer:
            raise KeyError(f"{self.path} was saved without an optimizer: leave it out of load()")

    @torch.no_grad()
    def take_over(self, optimizer: Optimizer | None, state: Mapping[str, Any]) -> dict[str, Any]:
        self.params.load_rest(self.rest)
        if optimizer is not None and self.has_optimizer:
            load_optimizer(self.params, optimizer, self.states, self.checkpoint, self.strict)
        for name, each in state.items():
            if hasattr(each, "load_state_dict") and name in self.state:
                each.load_state_dict(with_dtensors(self.state[name], (name,), self.sharded))
        return {"step": self.checkpoint.manifest.step, **self.state}
