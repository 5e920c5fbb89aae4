"""Saves: all ranks write a checkpoint that nobody sees, and the first rank publishes it.

Owns the order of the steps. The process may end after any of them::

    every rank      describes its part                                      ─▶ agree
    first rank      begins the checkpoint: on a disk  .step-00000010.<job>.partial,  which it locks
    every rank      writes its files, and waits until they are stored       ─▶ agree
    first rank      writes .metadata and manifest.json, and publishes it: on a disk by a rename
    first rank      removes the checkpoints that no policy keeps            ─▶ agree

If a process ends during a save, what it wrote has no lock or lease any more, and the next save removes it.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard.checkpoint import dcp
from fullshard.checkpoint.background import NO_MEMORY, Background
from fullshard.checkpoint.blocks import CheckpointError, checksum, without_collections
from fullshard.checkpoint.contents import Contents, Parameters, named
from fullshard.checkpoint.feedback import collect_feedback
from fullshard.checkpoint.keep import LatestN, PreservationPolicy, checked_metrics, checked_policies
from fullshard.checkpoint.layout import Box, Copies
from fullshard.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Entry,
    Location,
    Manifest,
    StoredFile,
    Tensors,
    check,
    checked_state,
    checked_step,
    encode,
    encode_contents,
    number_of,
)
from fullshard.checkpoint.outline import BLANK, LastSave, Outline, outlines_of
from fullshard.checkpoint.progress import Progress
from fullshard.checkpoint.ranks import PeerFailure, Ranks
from fullshard.checkpoint.removal import remove_older
from fullshard.checkpoint.replicas import Hosts, Sent
from fullshard.checkpoint.storage import Partial, Storage, located, storage_of
from fullshard.diverging import refuse_mixture, replica_of
from fullshard.figures import Listener, listeners_of
from fullshard.policies import local_path, warn
from fullshard.schedule.unit import groups_in
from fullshard.text import bytes_of, bytes_text, quantity_text, seconds_text
from fullshard.torch_private import foreach_copy

if TYPE_CHECKING:
    from upath import UPath


_log = logging.getLogger("fullshard")


@without_collections()
def save(
    directory: str | Path | UPath,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    wait: bool = True,
    memory_budget_bytes: int | str | None = None,
    keep_last: int | None = None,
    keep: Sequence[PreservationPolicy] | None = None,
    metrics: Mapping[str, float] | None = None,
    trainable_only: bool = False,
    replicas: str | Path | None = None,
    process_group: ProcessGroup | None = None,
    state: Mapping[str, Any] | None = None,
) -> Path | UPath | None:
    """Saves a sharded model, its optimizer and other state as a new checkpoint.

    Existing checkpoints are not changed. The new one becomes visible in one step, when all of it is on the disk.

    Args:
        directory: the directory of all checkpoints. Each save makes a directory in it, such as ``step-00000010``.
        model: sharded by ``fully_shard`` or ``FullyShardedDataParallel``, or not sharded.
        optimizer: an optimizer of the model's parameters.
        step: the number of the checkpoint. ``None``: the next number.
        wait: ``False``: return once everything is copied to host memory, and write in the background. If that fails,
            the next :func:`save`, :func:`load` or :func:`wait_until_finished` raises the error; if none follows, the
            program prints it and ends with the status 1. A model that a
            ``DiskOffloadPolicy`` offloads is always written before it returns, because a copy would not fit.
        memory_budget_bytes: with ``wait=False``, the most host memory that the copies of this rank may take together,
            in bytes or as ``"64GiB"``. Saves are then written one after the other while training goes on, and a save
            waits until its copy fits. ``None``: a save waits until the one before is written.
        keep_last: how many checkpoints to keep, including this one: short for ``keep=[LatestN(keep_last)]``.
        keep: policies such as :class:`LatestN` and :class:`BestN`. Older checkpoints that are whole, and that none of
            them keeps, are removed. One that is being read is left to a later save. One that a symbolic link names is
            never removed. ``None``: all stay.
        metrics: numbers by name, for :class:`BestN` and for you. Those of the first rank are stored.
        trainable_only: leave out frozen parameters, for example when adapters are trained.
        replicas: a directory in memory that outlives processes, such as ``/dev/shm/job``. Each host has its own, under
            the same path on all ranks, and no other training may use it. The checkpoint is written there, not to
            ``directory``. Each host also gets a copy of the files of another host's ranks, so that :func:`load` needs
            no disk if ranks or one host are lost. A host needs memory for the bytes of its ranks: once if it is the
            only host, twice otherwise. During a save it needs that again, until the previous replica is removed
            (only the newest is kept by default). If there is not enough space, a warning says so and nothing changes.
            Needs ``step``. See :func:`forget_replicas`.
        process_group: the ranks of the model, if they are not all ranks.
        state: a dict of further state by name. Each rank gives its own: objects with ``state_dict()``, or numbers,
            strings, tensors, and lists and dicts of these.

    Returns:
        the new directory; ``None`` with ``wait=False``, or if there was not enough space for an in-memory replica.

    Raises:
        CheckpointError: on all ranks, if some rank could not write, or if a rank was lost.
        ValueError: ``keep_last`` is less than 1 or given with ``keep``, ``keep`` is empty, ``step`` is less than 0,
            ``memory_budget_bytes`` is no size, ``replicas`` is given without ``step``, ``directory`` has a name such as
            ``step-00000010``, or a name in ``state`` is "step" or has a dot.
        RuntimeError: replicas have trained apart since they were last synchronized (``optim.LocalSteps``).
        TypeError: ``step`` is not an integer, ``keep`` is not a list of policies, or ``metrics`` is not a dict of
            numbers.

    Ranks: all ranks of ``process_group`` alike.
    """
    began, state = time.perf_counter(), checked_state(state)
    budget = None if memory_budget_bytes is None else bytes_of(memory_budget_bytes)
    if wait or budget is None:
        Background.wait_until_finished()
    step, policies, metrics = checked_step(step), checked_policies(keep_last, keep), checked_metrics(metrics)
    if replicas is not None and step is None:
        raise ValueError("replicas need a step, which is compared with the steps of the checkpoints in the directory")
    root: Location = located(directory).absolute()
    memory = local_path(replicas, "replicas").absolute() if replicas is not None else None
    for path in (root, *([memory] if memory else [])):
        if number := number_of(path.name):
            raise ValueError(
                f"{path} names a single checkpoint: give save() its parent directory, '{path.parent}', and "
                f"step={number[0]}"
            )
    ranks = Ranks(process_group)
    manifest = Manifest(world_size=ranks.size, frozen=not trainable_only)
    manifest.time, manifest.metrics = datetime.now(UTC), metrics
    writing = _Writing(storage_of(memory or root), ranks, policies, manifest, began, root if memory else None, step)
    writing.listeners = listeners_of(model)
    # What is on a disk is not copied: there is no memory for a copy. The model may show whole parameters now.
    wait = wait or any(group.offloaded.disk is not None for group in groups_in(model, recurse=True))
    # What an older save has yet to publish decides a new number, and what a replica belongs to.
    writing.prepare(model, optimizer, state, begin=wait or (budget is None and not writing.storage.is_slow))
    if wait:
        return writing.write()
    ranks.communicate_in_background()
    copied = NO_MEMORY
    try:
        copied = writing.copy(budget or 0)
    except Exception as error:  # its thread tells the other ranks, whose threads wait for it
        writing.failure = error
    writing.blocked = time.perf_counter() - began
    Background.start(writing.write, writing.step, copied)
    return None


@dataclass
class _Writing:
    """One save, from the tensors of this rank to a visible directory."""

    storage: Storage
    ranks: Ranks
    keep: Sequence[PreservationPolicy]
    manifest: Manifest
    began: float
    replica_of: Location | None  # for an in-memory replica, the directory of checkpoints
    step: int | None
    hosts: Hosts | None = None  # only for an in-memory replica
    blocked: float | None = None  # seconds that training waited for a save in the background
    listeners: list[Listener] = field(default_factory=list)  # who is told of this save
    failure: Exception | None = None  # the reason why there is nothing to write
    partial: Partial | None = None
    boxes: list[Box] = field(default_factory=list)  # the boxes that this rank writes
    tensors: list[torch.Tensor] = field(default_factory=list)  # the values of these boxes
    values: list[tuple[str, bytes]] = field(default_factory=list)  # other values that this rank writes
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)  # names of the model's tensors that are not parameters

    @property
    def directory(self) -> Location:
        return self.storage.directory

    @property
    def leader(self) -> int:
        """The rank that makes the directory into which this rank writes, and makes it visible."""
        return self.hosts.leader if self.hosts else 0

    def prepare(self, model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any], begin: bool) -> None:
        """Collects what to save, and agrees with the other ranks on who writes what. With ``begin``, it makes the
        directory; otherwise :meth:`write` does. Raises the error of an older save that failed on any rank."""
        if begin:
            self._find_hosts()
        contents, user_state = Contents(), dict[str, bytes]()

        def collect() -> tuple[Any, ...]:
            self._collect(contents, user_state, model, optimizer, state)
            digests = {name: checksum(data) for name, data in user_state.items()}
            keys = contents.keys_with_other_holders(self.ranks.size)
            everywhere = "" if contents.is_partial(self.ranks.size) else checksum("\n".join(keys).encode())
            begun = self._begin() if begin else ("", self.step)
            failed = Background.has_failed()
            return ((begun, digests, everywhere, failed, self.manifest.time, self.manifest.metrics),)

        try:
            _, everyone = self.ranks.attempt(collect)
            (_, digests, everywhere, _, *first), *others = everyone
            self.manifest.time, self.manifest.metrics = first  # alike on all hosts
            if any(each[3] for each in everyone):
                Background.wait_until_finished()  # raises the error on all ranks of the older save
                raise CheckpointError("a save in the background failed on another rank: find the error in its log")
            self._open_partial([each[0] for each in everyone])
            if any(set(each[1]) != set(digests) for each in others):
                raise CheckpointError(
                    f"ranks gave state under different names: {[sorted(each[1]) for each in everyone]}; "
                    "give the same names"
                )
            holders = dict[str, list[int]]()
            if not all(everywhere == each[2] != "" for each in everyone):
                for rank, keys in enumerate(self.ranks.gather(contents.keys_with_other_holders(self.ranks.size))):
                    for each in keys:
                        holders.setdefault(each, []).append(rank)
            self._choose(contents, holders)
            for name, data in user_state.items():
                descriptions = [each[1][name] for each in everyone]
                distinct = list(dict.fromkeys(descriptions))
                self.manifest.state[name] = numbers = [distinct.index(each) for each in descriptions]
                if numbers.index(numbers[self.ranks.rank]) == self.ranks.rank:
                    path = ("state", name, str(numbers[self.ranks.rank]))
                    self.values.append((".".join(path), data))
                    self.paths[".".join(path)] = path
        except BaseException:
            if self.partial is not None:
                self.partial.discard(is_empty=True)
            raise

    def _find_hosts(self) -> None:
        if self.replica_of is not None:
            self.hosts = Hosts(Path(self.directory), self.ranks, self.replica_of)
            self.manifest.binding = self.hosts.binding

    def _begin(self) -> tuple[str, int | None]:
        """Makes the directory if this rank leads. Returns its key, and the step."""
        if self.ranks.rank != self.leader:
            return "", self.step
        self.partial = self.storage.begin(self.step)
        return self.partial.key, self.partial.step

    def _open_partial(self, begun: list[tuple[str, int | None]]) -> None:
        """Opens the checkpoint that a rank has begun."""
        key, self.step = begun[self.leader]
        self.partial = self.partial or (self.storage.open_partial(key) if key else None)

    def _collect(
        self, contents: Contents, user_state: dict[str, bytes], model: nn.Module, optimizer: Optimizer | None,
        state: Mapping[str, Any],
    ) -> None:  # fmt: skip
        refuse_mixture(model)
        params = Parameters(model)
        collect_feedback(params, contents)  # first: it communicates, and no rank may have failed before
        params.collect(contents, self.manifest.frozen)
        for name, value in params.other_values().items():
            contents.add({f"model.{name}": ("model", name)}, value)
            self.buffers.add(f"model.{name}")
        if optimizer is not None:
            params.collect_state(contents, optimizer.state)
            if (replica := replica_of(model)) is not None:
                contents.name_state_of(*replica)
            params.collect_options(contents, optimizer)
        for name, value in state.items():
            found: dict[tuple[str | int, ...], Any] = {}
            plain = dcp.without_dtensors(value.state_dict() if hasattr(value, "state_dict") else value, (name,), found)
            user_state[name] = dcp.saved(plain, f"the state '{name}'")
            for path, tensor in found.items():
                contents.add(named(("sharded", *path)), tensor)

    def _choose(self, contents: Contents, holders: Mapping[str, list[int]]) -> None:
        """Chooses what this rank writes. If several ranks hold the same boxes, each writes about the same number of
        bytes. The first rank writes all buffers: they may differ between ranks, as batch statistics do, and must come
        from one rank.
        """
        self.paths = contents.paths
        own, shared = list[tuple[Box, torch.Tensor]](), dict[object, list[tuple[Box, torch.Tensor]]]()
        for box, tensor in zip(contents.boxes, contents.tensors, strict=True):
            if holders and (at := holders.get(box.key(self.ranks.size))):
                box = box._replace(copies=Copies(tuple(at), at.index(self.ranks.rank), len(at)))
            if box.copies.size > 1 and box.names[0] not in self.buffers:
                shared.setdefault((box.copies.ranks, box.copies.size), []).append((box, tensor))
            elif not box.copies.number:
                own.append((box, tensor))
        for same in shared.values():
            if holders:  # the order may differ between ranks
                same.sort(key=lambda pair: (pair[0].names[0], pair[0].offsets))
            total, before = max(1, sum(tensor.nbytes for _, tensor in same)), 0
            for box, tensor in same:
                if min(before * box.copies.size // total, box.copies.size - 1) == box.copies.number:
                    own.append((box, tensor))
                before += tensor.nbytes
        self.boxes, self.tensors = [box for box, _ in own], [tensor for _, tensor in own]
        for name, (value, layout) in contents.values.items():
            if holders[name][0] == self.ranks.rank if name in holders else not layout.copies.number:
                self.values.append((name, dcp.saved(value, f"'{name}'")))

    def copy(self, budget: int) -> torch.Tensor:
        """Copies the tensors to host memory, so that training may change them. Returns that memory."""
        sizes = [-(-tensor.nbytes // dcp.ALIGNMENT) * dcp.ALIGNMENT for tensor in self.tensors]
        pin = any(tensor.device.type == "cuda" for tensor in self.tensors)
        arena, at = Background.memory(sum(sizes), pin, budget), 0
        copies = []
        for tensor, size in zip(self.tensors, sizes, strict=True):
            copies.append(arena[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            at += size
        with torch.no_grad():
            if copies:
                foreach_copy(copies, self.tensors)
        if any(not tensor.is_cpu for tensor in self.tensors):
            torch.accelerator.synchronize()
        self.tensors = copies
        return arena

    def write(self) -> Path | None:
        """Writes the checkpoint and makes it visible. Returns ``None`` if there was no space for a replica."""
        if self.partial is None:
            self._find_hosts()
        leads, hosts = self.ranks.rank == self.leader, self.hosts
        try:
            if self.partial is None:
                self._open_partial(self.ranks.attempt(lambda: (self._begin(),))[1])
            assert self.partial is not None
            assert self.step is not None
            self.manifest.step = self.step
            total = sum(tensor.nbytes for tensor in self.tensors) + sum(len(data) for _, data in self.values)
            with Progress(self.ranks, self.partial, self.step, str(self.manifest.time), total):
                (files, outlines, _), descriptions = self.ranks.attempt(self._write_files)
            keys = tuple(key for key, _, _ in descriptions)
            if hosts is not None:
                self.ranks.attempt(partial(hosts.spread, self.partial.path, [sent for _, _, sent in descriptions]))
            known = all(
                descriptions[leader][1] == checksum("".join(keys).encode())
                for leader in (hosts.members if hosts else [0])
            )
            parts = self.ranks.gather_to_first((files, None if known else outlines))
            parts = self.ranks.broadcast(parts) if hosts is not None else parts
            _, everyone = self.ranks.attempt(lambda: (self._publish(parts) if leads else "",))
            if leads:
                LastSave.keys = keys
            if leads and hosts is not None:  # remove older ones only when this one is visible on all hosts
                remove_older(self.directory, everyone[self.leader], self.keep or [LatestN(1)], replicas=True)
        except PeerFailure:
            raise
        except CheckpointError as error:
            if hosts is None:
                raise
            step = self.manifest.step
            warn(f"no in-memory replica of step {step} was kept, and training goes on without it: {error}")
            return None
        finally:
            if self.partial is not None:
                self.partial.discard()
        path, seconds = self.directory / str(everyone[self.leader]), time.perf_counter() - self.began
        written, blocked = sum(file.size for file in files.values()), self.blocked or seconds
        for tell in self.listeners:
            tell({"save_seconds": seconds, "save_bytes": written, "save_blocked_seconds": blocked})
        if self.ranks.first:
            nbytes = sum(file.size for file in self.manifest.files.values())
            _log.info(
                f"step {self.manifest.step} is saved in {path}: {bytes_text(nbytes)} in {seconds_text(seconds)} "
                f"({quantity_text(nbytes / seconds, 'B/s')}); training waited for "
                f"{seconds_text(blocked)}"
            )
        return path

    def _write_files(self) -> tuple[dict[str, StoredFile], list[Outline], tuple[str, str, Sent]]:
        """Writes the files of this rank: one, or several where the storage limits their size."""
        assert self.partial is not None
        if self.failure is not None:
            raise self.failure
        sizes, pairs = [(name, len(data)) for name, data in self.values], [*zip(self.boxes, self.tensors, strict=True)]
        parts = [
            *outlines_of(self.ranks.rank, pairs, sizes, self.paths, self.partial.largest, bool(self.partial.attempt))
        ]
        outlines = [outline for outline, _ in parts]
        if outlines != LastSave.outlines:
            LastSave.outlines, LastSave.between = outlines, [outline.laid_out()[2] for outline in outlines]
            LastSave.key = uuid.uuid4().hex
        files, left = dict[str, StoredFile](), iter(self.values)
        for (outline, tensors), between in zip(parts, LastSave.between, strict=True):
            values, each = islice(left, len(outline.values)), zip(between, tensors, strict=False)
            name = outline.name.replace(BLANK, self.partial.attempt)
            files[outline.name] = self._write_file(name, values, each, between[-1])
        self.partial.flush()
        digest = checksum("".join(LastSave.keys).encode())
        return files, outlines, (LastSave.key, digest, Sent.of(*next(iter(files.items()))))

    def _write_file(
        self, name: str, values: Iterable[tuple[str, bytes]], tensors: Iterable[tuple[bytes, torch.Tensor]], end: bytes
    ) -> StoredFile:
        assert self.partial is not None
        path = self.partial.path
        try:
            writer = self.partial.open(name)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{socket.gethostname()} does not see {path}, which rank {self.leader} created: "
                f"{self.directory} must be on a disk that all hosts share"
            ) from error
        try:
            for _, data in values:
                writer.write(data)
            writer.write_tensors(tensors)
            writer.write(end)
            writer.close()
        except OSError as error:
            raise CheckpointError(f"{path / name} could not be written: {error.strerror or error}") from error
        finally:
            writer.abandon()
        return StoredFile(writer.size, writer.checksums)

    def _publish(self, parts: list[tuple[dict[str, StoredFile], list[Outline] | None]]) -> str:
        """Writes the metadata and the manifest, makes the checkpoint visible, and returns its name."""
        import fullshard

        assert self.partial is not None
        manifest = self.manifest
        manifest.versions = {"fullshard": fullshard.__version__, "torch": torch.__version__}
        manifest.files = {name: file for files, _ in parts for name, file in files.items()}
        outlines = [outline for _, outlines in parts for outline in outlines or ()]
        if outlines:
            LastSave.metadata, LastSave.contents = self._describe(outlines)
        attempt = self.partial.attempt
        manifest.files = {name.replace(BLANK, attempt): file for name, file in manifest.files.items()}
        metadata = LastSave.metadata.replace(BLANK.encode(), attempt.encode()) if attempt else LastSave.metadata
        manifest.files[METADATA] = self._write_file(METADATA, [("", metadata)], (), b"")
        try:
            self.partial.flush()
            name = self.partial.publish(encode(manifest, LastSave.contents))
        except OSError as error:
            raise CheckpointError(f"{self.partial.path} could not be completed: {error.strerror or error}") from error
        if self.hosts is None:
            remove_older(self.directory, name, self.keep)
        return name

    def _describe(self, outlines: list[Outline]) -> tuple[bytes, bytes]:
        """The bytes of DCP's metadata, and the manifest's bytes about tensors and values."""
        manifest, paths, entries = self.manifest, dict[str, tuple[str | int, ...]](), dict[str, Entry]()
        for outline in outlines:
            tensors, values, _ = outline.laid_out()
            paths |= outline.paths
            for names, dtype, shape, piece in tensors:
                for each in names:
                    entry = entries.setdefault(each, Entry(dtype, shape))
                    if all(
                        piece[4:] != other[4:] for other in entry.pieces
                    ):  # without a common mesh, ranks write a piece twice
                        entry.pieces.append(piece)
            manifest.objects.update(values)
        manifest.tensors = Tensors.of(entries)
        assert self.partial is not None
        check(manifest, self.partial.path / MANIFEST)  # pieces of a tensor may be missing on all ranks
        return dcp.write_metadata(manifest, paths), encode_contents(manifest)
