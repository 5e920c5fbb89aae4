"""Loads the newest whole checkpoint, or that of a step. Each rank reads only its own parts, directly into the model.

Owns the choice among the checkpoints of a directory. All ranks skip a broken one together, with a warning that names
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard.checkpoint.background import wait_until_finished
from fullshard.checkpoint.blocks import CheckpointError, CorruptCheckpointError, checksum, without_collections
from fullshard.checkpoint.contents import Contents, Parameters, cut_differently, load_optimizer, named, new_states
from fullshard.checkpoint.dcp import with_dtensors, without_dtensors
from fullshard.checkpoint.feedback import Lost, new_feedback
from fullshard.checkpoint.fetch import Replica, find_replicas
from fullshard.checkpoint.manifest import Location, checked_state, checked_step, few, number_of, step_of, steps_of
from fullshard.checkpoint.ranks import PeerFailure, Ranks
from fullshard.checkpoint.reader import Checkpoint, is_there, list_checkpoints, newest_first
from fullshard.checkpoint.selection import Item, Selection, tell
from fullshard.checkpoint.storage import located
from fullshard.disk.file import bytes_of
from fullshard.diverging import replica_of
from fullshard.original_parameters import holds_several
from fullshard.policies import local_path, warn

if TYPE_CHECKING:
    from upath import UPath


@without_collections()
def load(
    directory: str | Path | UPath,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    only: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    replicas: str | Path | None = None,
    process_group: ProcessGroup | None = None,
    state: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Loads the newest whole checkpoint of a directory into a model, its optimizer and other objects.

    The number of ranks, and the way in which the model is sharded, may differ from those that saved.
    Checkpoints that are not whole are skipped with a warning that names the file and the tensor.

    Args:
        directory: the directory that was given to :func:`save`, or a single checkpoint in it, or a checkpoint of DCP.
        model: sharded by ``fully_shard`` or ``FullyShardedDataParallel``, or not sharded.
        optimizer: an optimizer of the model's parameters. ``None``: no optimizer state is loaded.
        step: load only a checkpoint of this step, also of ``replicas``: its newest whole save. ``None``: of any step.
        only: a pattern, or several, for names in the model, such as ``"encoder.*"`` (``fnmatch``). Only parameters and
            buffers that match one, and their optimizer state, are loaded. A parameter group's options are loaded if
            the checkpoint has a group of the same parameters.
        rename: new names of modules and parameters, by their names in the checkpoint, such as ``{"backbone":
            "encoder"}``. If two begin a name, the longer one applies. ``{"": "model."}`` puts a prefix before all
            names, and ``{"model.": ""}`` removes one. ``only`` sees the new names.
        strict: ``False``: ignore what only the checkpoint has, and keep what only the model has. Tensors of different
            shapes keep the model's values, with a warning.
        replicas: the directory of in-memory replicas that was given to ``save``. The newest replica is loaded if it is
            whole, belongs to this training, and is not older than the newest checkpoint of ``directory``. Ranks read
            files that their host lacks from other hosts. The log (logger ``fullshard``, level INFO) says what was
            loaded and why. If a newer replica was not loaded, a warning says why.
        process_group: the ranks of the model, if they are not all ranks.
        state: a dict of objects with ``load_state_dict()``, under the names that :func:`save` got. Their state is
            loaded.

    Returns:
        ``None`` if the directory has no checkpoint, so that the training begins. Otherwise a dict with ``step`` and, by
        name, all state that this rank gave to ``save``. If the number of ranks differs from that of the save, rank r
        gets the state of rank r modulo the number of ranks that saved, and a warning names the state that differed
        between ranks.

    Raises:
        CheckpointError: on all ranks, if no checkpoint is whole, if there is none of ``step``, if the directory is a
            file or in a bucket that does not exist, or if the chosen one does not fit the model. Model and optimizer
            may then be partly loaded.
        TypeError: ``step`` is not an integer.
        ValueError: ``step`` is less than 0, or a path is a URL that ``Path`` has changed.

    Ranks: all ranks of ``process_group`` alike.
    """
    state, step = checked_state(state), checked_step(step)
    wait_until_finished()
    ranks, root = Ranks(process_group), located(directory)
    broken, selection = list[str](), Selection(only, rename, strict)
    memory = local_path(replicas, "replicas") if replicas is not None else None
    for path, opens, served, why in _candidates(root, step, memory, ranks, broken):
        loading = Loading(path, opens, selection, ranks, step)
        with served(), loading.opened:
            try:
                loading.read(model, optimizer, state)
            except CorruptCheckpointError as error:
                broken.append(str(error))
                if any(ranks.attempt(partial(_found, path))[1]):  # else it was removed for a newer one
                    warn(f"the checkpoint {path} is skipped, because it is not whole: {error}")
                continue
            loaded = ranks.attempt(partial(loading.apply, optimizer, state))[0]
        if ranks.first:
            selection.log(f"step {loaded['step']} is loaded from {path}{why}")
            if step_of(path.name) not in (None, loaded["step"]):
                warn(f"{path} holds step {loaded['step']}, which is loaded: the directory was renamed")
        return loaded
    if step is not None:
        places = [root, *([memory] if memory else [])]
        _, every = ranks.attempt(lambda: (_steps(places) if ranks.first else "",))
        raise CheckpointError(f"step {step} cannot be loaded from {root}: {'; '.join(broken) or every[0]}")
    if broken:
        raise CheckpointError(f"no checkpoint in {root} is whole: {'; '.join(broken)}")
    if number_of(root.name):
        raise CheckpointError(f"there is no checkpoint {root}: give load() its parent directory, {root.parent}")
    if ranks.first:
        tell(f"nothing is loaded: {root} has no checkpoint")
    return None


#: A checkpoint that may be loaded: its path, a function that opens it, the context in which ranks read it, and the
#: reason why it is tried next, for the log.
_Candidate = tuple[Location, Callable[[], Checkpoint], Callable[[], AbstractContextManager[None]], str]


def _found(path: Location) -> tuple[bool]:
    return (is_there(path),)


def _steps(places: Sequence[Location]) -> str:
    """A sentence about the steps that directories have."""
    found = steps_of(path for place in places for path in list_checkpoints(place))
    return f"there are only the steps {found}" if found else "there are no steps"


def _candidates(
    directory: Location, only: int | None, memory: Path | None, ranks: Ranks, refused: list[str]
) -> Iterator[_Candidate]:
    """The checkpoints that may be loaded, the newest first: all, or those of ``only`` one step. A replica comes before
    a checkpoint that is not newer. All ranks must take the next one together. Adds to ``refused`` why replicas of the
    step must not be loaded."""
    found, why = list[Replica](), ""
    of = "" if only is None else f" of step {only}"
    if memory is not None:
        try:
            found = find_replicas(memory, directory, ranks)
        except PeerFailure:
            raise
        except CheckpointError as error:
            warn(f"in-memory replicas are skipped: {error}")
        found = [replica for replica in found if only in (None, replica.step)]
        why = f": there is no in-memory replica{of} in {memory}"
        if found:
            why = f": the in-memory replica of step {found[0].step} is skipped: {found[0].refused or 'it is older'}"
    on_disk = newest_first(directory, only)
    while True:
        name = ranks.attempt(lambda: (_relative(next(on_disk, None), directory) if ranks.first else None,))[1][0]
        path = None if name is None else directory / name if name else directory
        step = -1 if path is None else (number_of(path.name) or (-1, 0))[0]
        while found and found[0].step >= step:
            replica = found.pop(0)
            if not replica.refused:
                reason = f": it is an in-memory replica, and {directory} has nothing newer{of}"
                yield replica.path, replica.open, replica.served, reason
            elif replica.step > step:
                warn(text := f"the in-memory replica {replica.path} is skipped: {replica.refused}")
                refused += [text] if of else []
        if path is None:
            return
        yield path, partial(Checkpoint, path), nullcontext, why


def _relative(path: Location | None, directory: Location) -> str | None:
    """The name of a checkpoint in a directory; empty if it is the directory itself."""
    return None if path is None else "" if path == directory else path.name


@dataclass
class Loading:
    """One attempt to load a checkpoint."""

    path: Location
    open: Callable[[], Checkpoint]
    selection: Selection
    ranks: Ranks
    step: int | None = None
    opened: ExitStack = field(default_factory=ExitStack)  # keeps the checkpoint from being removed until it is applied
    state: dict[str, Any] = field(default_factory=dict)
    other_values: dict[str, Any] = field(default_factory=dict)
    states: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)
    sharded: dict[tuple[str | int, ...], Any] = field(default_factory=dict)
    lost: Lost = field(default_factory=dict)

    def read(self, model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any]) -> None:
        """Reads everything on all ranks. What is not read directly into the model is kept for :meth:`apply`."""
        matched = self.ranks.attempt(partial(self._read, model, optimizer, state))[1]
        if unmatched := self.selection.unmatched(matched):
            raise CheckpointError(f"only={unmatched} matches no name of a parameter or buffer in the model")

    @torch.no_grad()
    def _read(self, model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any]) -> tuple[list[str]]:
        self.checkpoint, self.params, contents = self.opened.enter_context(self.open()), Parameters(model), Contents()
        if self.step not in (None, self.checkpoint.manifest.step):
            raise CorruptCheckpointError(f"{self.path} holds step {self.checkpoint.manifest.step}, not {self.step}")
        self.params.collect(contents, frozen=True)
        others = self.params.other_values()
        shapes = {name: tuple(each.shape) if isinstance(each, torch.Tensor) else None for name, each in others.items()}
        items: list[Item] = [(each.names, each.layout.shape) for each in self.params.known.values()]
        self.selection.apply(self.checkpoint, [*items, *(([name], shape) for name, shape in shapes.items())])
        manifest = self.checkpoint.manifest
        for name, value in others.items():
            if isinstance(value, torch.Tensor):
                self.other_values[name] = torch.empty_like(value)
                contents.add({f"model.{name}": ("model", name)}, self.other_values[name])
            elif f"model.{name}" in manifest.objects:
                self.other_values[name] = self.checkpoint.value(f"model.{name}")
        if not self.selection.strict and not self.has_optimizer:
            optimizer = None
        if optimizer is not None:
            for param, originals in self.params.shown.items():
                names = [self.params.known[each].names[0] for each in originals]
                if holds_several(param) and len({f"model.{name}" in self.selection for name in names}) > 1:
                    raise ValueError(
                        f"only={self.selection.only} selects a part of {few(names)}, which are one flat parameter with "
                        f"one optimizer state: load without the optimizer, or wrap with use_orig_params=True"
                    )
            self.states = new_states(self.params, optimizer, self.checkpoint)
            self.params.collect_state(contents, self.states, everyone=True)
            if (replica := replica_of(model)) is not None:
                contents.name_state_of(*replica, or_first=True)
        contents.values.clear()
        self.lost = new_feedback(self.params, contents, self.checkpoint)
        self._read_state(contents, state)
        self._compare(contents, optimizer)
        self.checkpoint.read(contents.targets(manifest.tensors.positions))
        self.params.written()
        both = manifest.tensors, manifest.objects
        self.other_values = {
            name: each for name, each in self.other_values.items() if any(f"model.{name}" in of for of in both)
        }
        self._compare_tied(contents, others)
        return (self.selection.matched(),)

    def _compare_tied(self, contents: Contents, others: Mapping[str, Any]) -> None:
        """Raises an error if the checkpoint has different values under the names of a tied parameter or buffer, of
        which the model has one."""
        stored, groups, shared = self.checkpoint.tensors, dict[Any, dict[str, str]](), dict[Any, list[str]]()
        for box, tensor in zip(contents.boxes, contents.tensors, strict=True):
            names = [name for name in box.names if name.startswith("model.") and name in stored]
            if any(stored[name].pieces != stored[names[0]].pieces for name in names[1:]):
                for name in names:
                    part = torch.empty(tensor.shape, dtype=tensor.dtype)
                    self.checkpoint.read([(name, box.shape, box.offsets, part)])
                    groups.setdefault(box, {})[name] = checksum(bytes_of(part))
        for name, value in self.other_values.items():
            if type(value) is torch.Tensor and (address := others[name].data_ptr()):
                shared.setdefault((address, value.shape, value.dtype), []).append(name)
        for key, names in shared.items():
            if len(names) > 1:
                values = {f"model.{name}": self.other_values[name].cpu().contiguous() for name in names}
                groups[key] = {name: checksum(bytes_of(value)) for name, value in values.items()}
        if untied := sorted({name for group in groups.values() if len({*group.values()}) > 1 for name in group}):
            text = f"{few(untied)} are tied in the model, and differ in {self.path}"
            if self.selection.strict:
                raise ValueError(f"{text}: load into a model that does not tie them, or take one by strict=False")
            warn(f"{text}: the model has the values of one of them")

    @property
    def has_optimizer(self) -> bool:
        return any(name.startswith("optimizer.") for name in self.checkpoint.manifest.objects)

    def _read_state(self, contents: Contents, state: Mapping[str, Any]) -> None:
        manifest = self.checkpoint.manifest
        self.state = self.checkpoint.state(self.ranks.rank)
        for name, each in state.items():
            if hasattr(each, "load_state_dict"):
                if name not in self.state and self.selection.strict:
                    raise KeyError(
                        f"{self.path} has no state '{name}', only {sorted(self.state)}: leave it out of load(state=...)"
                    )
                found: dict[tuple[str | int, ...], Any] = {}
                without_dtensors(each.state_dict(), (name,), found)
                for path, tensor in found.items():
                    contents.add(named(("sharded", *path)), tensor)
                self.sharded |= found
        differing = self.checkpoint.differing()
        if differing and self.ranks.first and self.ranks.size != manifest.world_size:
            warn(
                f"{self.path} was saved by {manifest.world_size} ranks and is loaded by {self.ranks.size}. The states "
                f"{differing} differ between ranks: rank r gets those of rank r modulo {manifest.world_size}"
            )

    def _compare(self, contents: Contents, optimizer: Optimizer | None) -> None:
        """Raises an error if the checkpoint does not fit the model."""
        problems = [
            f"'model.{name}' has the shape {here} here, but {there} in {self.path}"
            for name, (here, there) in self.selection.differing.items()
        ]
        if problems[2:]:
            problems[1:] = [f"{few([f'model.{name}' for name in [*self.selection.differing][1:]])} differ, too"]
        if not self.selection.strict:
            if problems and self.ranks.first:
                warn(f"tensors of different shapes keep the model's values: {'; '.join(problems)}")
            return
        manifest, in_model = self.checkpoint.manifest, {name for name in contents.paths if name.startswith("model.")}
        in_checkpoint = {name for name in (*manifest.tensors, *manifest.objects) if name.startswith("model.")}
        if not manifest.frozen:
            frozen = {
                f"model.{name}"
                for param, originals in self.params.shown.items()
                for original in originals
                for name in self.params.known[original].names
                if not param.requires_grad
            }
            in_model = {name for name in in_model if not frozen & {name.rsplit(".", depth)[0] for depth in range(3)}}
        for known in self.params.known.values():  # a tied parameter may be stored under one of its names only
            tied = {f"model.{name}" for name in known.names}
            if tied & in_checkpoint:
                in_model -= tied - in_checkpoint
        if missing := sorted(name for name in in_model - in_checkpoint if name in self.selection):
            whole = {name.partition(".[")[0] for name in in_checkpoint}
            if any(name.partition(".[")[0] in whole for name in missing):
                raise cut_differently(few(missing), self.checkpoint)
            problems.append(f"{self.path} lacks {few(missing)}, which the model has")
        in_checkpoint = {name for name in in_checkpoint if ".[" not in name}
        if unknown := sorted(in_checkpoint - set(contents.paths) - {f"model.{name}" for name in self.other_values}):
            problems.append(f"the model lacks {few(unknown)}, which {self.path} has")
        if problems:
            raise ValueError(f"{'; '.join(problems)}: is it from a different model?")
        if optimizer is not None and not self.has_optimizer:
            raise KeyError(f"{self.path} was saved without an optimizer: leave it out of load()")

    @torch.no_grad()
    def apply(self, optimizer: Optimizer | None, state: Mapping[str, Any]) -> dict[str, Any]:
        """Applies what :meth:`read` kept: buffers, optimizer state and other objects' state. Returns the user's
        state."""
        self.params.load_other_values(self.other_values)
        for group, chunks in self.lost.items():
            group.gradients.load_lost(chunks)
        if optimizer is not None and self.has_optimizer:
            load_optimizer(self.params, optimizer, self.states, self.checkpoint, self.selection)
        for name, each in state.items():
            if hasattr(each, "load_state_dict") and name in self.state:
                each.load_state_dict(with_dtensors(self.state[name], (name,), self.sharded))
        return {"step": self.checkpoint.manifest.step, **self.state}
