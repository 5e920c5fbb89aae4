"""Saves: all ranks write into a hidden directory, and one rename makes it visible.

Owns the order of the steps. The process may end after any of them::

    every rank      describes its part                                      ─▶ agree
    first rank      makes  .step-00000010.<job>.partial  and locks it
    every rank      writes its file and forces it to the disk               ─▶ agree
    first rank      writes .metadata and manifest.json, forces them and the directory to the disk
    first rank      renames it to  step-00000010,  and forces that to the disk
    first rank      removes the checkpoints beyond keep_last                ─▶ agree

If a process ends during a save, its hidden directory has no lock any more, and the next save removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import operator
import os
import shutil
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard._renamed import renamed_keywords
from fullshard.checkpoint import dcp
from fullshard.checkpoint.background import Background
from fullshard.checkpoint.blocks import (
    BlockWriter,
    CheckpointError,
    checksum,
    force_names,
    make_directory,
    without_collections,
)
from fullshard.checkpoint.contents import Contents, Parameters, named, without_dtensors
from fullshard.checkpoint.layout import Box, Copies
from fullshard.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Entry,
    Manifest,
    Piece,
    Stored,
    StoredFile,
    Tensors,
    check,
    checked_state,
    encode,
    encode_contents,
    name_of,
    number_of,
)
from fullshard.checkpoint.ranks import PeerFailure, Ranks
from fullshard.checkpoint.reader import list_checkpoints
from fullshard.checkpoint.removal import remove_leftovers, remove_older
from fullshard.checkpoint.replicas import Hosts, Sent
from fullshard.policies import warn
from fullshard.torch_private import foreach_copy


@renamed_keywords("fullshard.checkpoint.save")
@without_collections()
def save(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    wait: bool = True,
    keep_last: int | None = None,
    trainable_only: bool = False,
    replicas: str | Path | None = None,
    process_group: ProcessGroup | None = None,
    state: Mapping[str, Any] | None = None,
) -> Path | None:
    """Saves a sharded model, its optimizer and other state as a new checkpoint.

    Existing checkpoints are not changed. The new one becomes visible in one step, when all of it is on the disk.

    Args:
        directory: the directory of all checkpoints. Each save makes a directory in it, such as ``step-00000010``.
        model: sharded by ``fully_shard`` or ``FullyShardedDataParallel``, or not sharded.
        optimizer: an optimizer of the model's parameters.
        step: the number of the checkpoint. ``None``: the next number.
        wait: ``False``: return once everything is copied to host memory, and write in the background. If that fails,
            the next :func:`save`, :func:`load` or :func:`wait_until_finished` raises the error.
        keep_last: how many checkpoints to keep, including this one. Older ones that are whole are removed. One that is
            being read is left to a later save. One that a symbolic link names is never removed.
        trainable_only: leave out frozen parameters, for example when adapters are trained.
        replicas: a directory in memory that outlives processes, such as ``/dev/shm/job``. Each host has its own, under
            the same path on all ranks, and no other training may use it. The checkpoint is written there, not to
            ``directory``. Each host also gets a copy of the files of another host's ranks, so that :func:`load` needs
            no disk if ranks or one host are lost. A host needs memory for the bytes of its ranks: once if it is the
            only host, twice otherwise. During a save it needs that again, until the previous replica is removed
            (``keep_last=None`` means 1 here). If there is not enough space, a warning says so and nothing changes.
            Needs ``step``. See :func:`forget_replicas`.
        process_group: the ranks of the model, if they are not all ranks.
        state: a dict of further state by name. Each rank gives its own: objects with ``state_dict()``, or numbers,
            strings, tensors, and lists and dicts of these.

    Returns:
        the new directory; ``None`` with ``wait=False``, or if there was not enough space for an in-memory replica.

    Raises:
        CheckpointError: on all ranks, if some rank could not write, or if a rank was lost.
        ValueError: ``keep_last`` is less than 1, ``step`` is less than 0, ``replicas`` is given without ``step``,
            ``directory`` has a name such as ``step-00000010``, or a name in ``state`` is "step" or has a dot.
        TypeError: ``step`` is not an integer.

    Ranks: all ranks of ``process_group`` alike.
    """
    state = checked_state(state)
    Background.wait_until_finished()
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; expected None or how many to keep, 1 or more")
    if step is not None and not hasattr(step, "__index__"):
        raise TypeError(f"step is {step!r}; expected an integer")
    if step is not None and (step := operator.index(step)) < 0:
        raise ValueError(f"step is {step}; expected a number of 0 or more")
    if replicas is not None and step is None:
        raise ValueError("replicas need a step, which is compared with the steps of the checkpoints in the directory")
    directory, memory = Path(directory).absolute(), Path(replicas).absolute() if replicas is not None else None
    for path in filter(None, (directory, memory)):
        if number := number_of(path.name):
            raise ValueError(
                f"{path} names a single checkpoint: give save() its parent directory, '{path.parent}', and "
                f"step={number[0]}"
            )
    ranks = Ranks(process_group, background=not wait)
    hosts = None if memory is None else Hosts(memory, ranks, directory)
    manifest = Manifest(world_size=ranks.size, frozen=not trainable_only, binding=hosts.binding if hosts else {})
    writing = _Writing(memory or directory, ranks, keep_last, manifest, hosts)
    writing.prepare(model, optimizer, state, step)
    if wait:
        return writing.write()
    writing.copy()
    Background.start(writing.write)
    return None


@dataclass
class _Writing:
    """One save, from the tensors of this rank to a visible directory."""

    directory: Path
    ranks: Ranks
    keep_last: int | None
    manifest: Manifest
    hosts: Hosts | None = None  # only for an in-memory replica
    partial: Path = Path()
    boxes: list[Box] = field(default_factory=list)  # the boxes that this rank writes
    tensors: list[torch.Tensor] = field(default_factory=list)  # the values of these boxes
    values: list[tuple[str, bytes]] = field(default_factory=list)  # other values that this rank writes
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)  # names of the model's tensors that are not parameters
    _lock: int = -1

    @property
    def leader(self) -> int:
        """The rank that makes the directory into which this rank writes, and makes it visible."""
        return self.hosts.leader if self.hosts else 0

    def prepare(
        self, model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any], step: int | None
    ) -> None:
        """Collects what to save, agrees with the other ranks on who writes what, and makes the directory."""
        contents, user_state = Contents(), dict[str, bytes]()

        def collect() -> tuple[Any, ...]:
            self._collect(contents, user_state, model, optimizer, state)
            digests = {name: checksum(data) for name, data in user_state.items()}
            keys = contents.keys_with_other_holders(self.ranks.size)
            everywhere = "" if contents.is_partial(self.ranks.size) else checksum("\n".join(keys).encode())
            if self.ranks.rank == self.leader:
                self._make_directory(step)
            return ((self.partial.name, self.manifest.step, digests, everywhere),)

        try:
            _, everyone = self.ranks.attempt(collect)
            (_, self.manifest.step, digests, everywhere), *others = everyone
            self.partial = self.directory / everyone[self.leader][0]
            if any(set(each[2]) != set(digests) for each in others):
                raise CheckpointError(
                    f"ranks gave state under different names: {[sorted(each[2]) for each in everyone]}; "
                    "give the same names"
                )
            holders = dict[str, list[int]]()
            if not all(everywhere == each[3] != "" for each in everyone):
                for rank, keys in enumerate(self.ranks.gather(contents.keys_with_other_holders(self.ranks.size))):
                    for each in keys:
                        holders.setdefault(each, []).append(rank)
            self._choose(contents, holders)
            for name, data in user_state.items():
                descriptions = [each[2][name] for each in everyone]
                distinct = list(dict.fromkeys(descriptions))
                self.manifest.state[name] = numbers = [distinct.index(each) for each in descriptions]
                if numbers.index(numbers[self.ranks.rank]) == self.ranks.rank:
                    path = ("state", name, str(numbers[self.ranks.rank]))
                    self.values.append((".".join(path), data))
                    self.paths[".".join(path)] = path
        except BaseException:
            self._discard()
            raise

    def _collect(
        self, contents: Contents, user_state: dict[str, bytes], model: nn.Module, optimizer: Optimizer | None,
        state: Mapping[str, Any],
    ) -> None:  # fmt: skip
        params = Parameters(model)
        params.collect(contents, self.manifest.frozen)
        for name, value in params.other_values().items():
            contents.add({f"model.{name}": ("model", name)}, value)
            self.buffers.add(f"model.{name}")
        if optimizer is not None:
            params.collect_state(contents, optimizer.state)
            params.collect_options(contents, optimizer)
        for name, value in state.items():
            found: dict[tuple[str | int, ...], Any] = {}
            plain = without_dtensors(value.state_dict() if hasattr(value, "state_dict") else value, (name,), found)
            user_state[name] = dcp.saved(plain, f"the state '{name}'")
            for path, tensor in found.items():
                contents.add(named(("sharded", *path)), tensor)

    def _choose(self, contents: Contents, holders: Mapping[str, list[int]]) -> None:
        """Chooses what this rank writes. If several ranks hold the same boxes, each writes about the same number of
        bytes. The first rank writes all buffers: they may differ between ranks, as batch statistics do, and must come
        from one rank.
        """
        self.paths = contents.paths
        mine, shared = list[tuple[Box, torch.Tensor]](), dict[object, list[tuple[Box, torch.Tensor]]]()
        for box, tensor in zip(contents.boxes, contents.tensors, strict=True):
            if holders and (at := holders.get(box.key(self.ranks.size))):
                box = box._replace(copies=Copies(tuple(at), at.index(self.ranks.rank), len(at)))
            if box.copies.size > 1 and box.names[0] not in self.buffers:
                shared.setdefault((box.copies.ranks, box.copies.size), []).append((box, tensor))
            elif not box.copies.number:
                mine.append((box, tensor))
        for same in shared.values():
            if holders:  # the order may differ between ranks
                same.sort(key=lambda pair: (pair[0].names[0], pair[0].offsets))
            total, before = max(1, sum(tensor.nbytes for _, tensor in same)), 0
            for box, tensor in same:
                if min(before * box.copies.size // total, box.copies.size - 1) == box.copies.number:
                    mine.append((box, tensor))
                before += tensor.nbytes
        self.boxes, self.tensors = [box for box, _ in mine], [tensor for _, tensor in mine]
        for name, (value, layout) in contents.values.items():
            if holders[name][0] == self.ranks.rank if name in holders else not layout.copies.number:
                self.values.append((name, dcp.saved(value, f"'{name}'")))

    def copy(self) -> None:
        """Copies the tensors to host memory, so that training may change them."""
        sizes = [-(-tensor.nbytes // dcp.ALIGNMENT) * dcp.ALIGNMENT for tensor in self.tensors]
        pin = any(tensor.device.type == "cuda" for tensor in self.tensors)
        arena, at = Background.memory(sum(sizes), pin), 0
        copies = []
        for tensor, size in zip(self.tensors, sizes, strict=True):
            copies.append(arena[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            at += size
        with torch.no_grad():
            foreach_copy(copies, self.tensors)
        if any(not tensor.is_cpu for tensor in self.tensors):
            torch.accelerator.synchronize()
        self.tensors = copies

    def write(self) -> Path | None:
        """Writes the checkpoint and makes it visible. Returns ``None`` if there was no space for a replica."""
        leads, hosts = self.ranks.rank == self.leader, self.hosts
        try:
            (file, outline, _), descriptions = self.ranks.attempt(self._write_file)
            keys = tuple(key for key, _, _ in descriptions)
            if hosts is not None:
                self.ranks.attempt(partial(hosts.spread, self.partial, [sent for _, _, sent in descriptions]))
            known = all(
                descriptions[leader][1] == checksum("".join(keys).encode())
                for leader in (hosts.members if hosts else [0])
            )
            parts = self.ranks.gather_to_first((file, None if known else outline))
            parts = self.ranks.broadcast(parts) if hosts is not None else parts
            _, everyone = self.ranks.attempt(lambda: (self._publish(parts) if leads else "",))
            if leads:
                _Last.keys = keys
            if leads and hosts is not None:  # remove older ones only when this one is visible on all hosts
                remove_older(self.directory, everyone[self.leader], self.keep_last or 1, replicas=True)
        except PeerFailure:
            raise
        except CheckpointError as error:
            if hosts is None:
                raise
            step = self.manifest.step
            warn(f"no in-memory replica of step {step} was kept, and training goes on without it: {error}")
            return None
        finally:
            self._discard()
        return self.directory / str(everyone[self.leader])

    def _write_file(self) -> tuple[StoredFile, _Outline, tuple[str, str, Sent]]:
        name = f"__{self.ranks.rank}_0.distcp"
        kinds = [(tensor.dtype, tensor.shape) for tensor in self.tensors]
        outline = _Outline(name, self.boxes, kinds, [(each, len(data)) for each, data in self.values], self.paths)
        if outline != _Last.outline:
            _Last.outline, _Last.between, _Last.key = outline, outline.laid_out()[2], uuid.uuid4().hex
        try:
            writer = BlockWriter(self.partial / name)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{socket.gethostname()} does not see {self.partial}, which rank {self.leader} created: "
                f"{self.directory} must be on a disk that all hosts share"
            ) from error
        try:
            for _, data in self.values:
                writer.write(data)
            writer.write_tensors(zip(_Last.between, self.tensors, strict=False))
            writer.write(_Last.between[-1])
            writer.close()
        except OSError as error:
            raise CheckpointError(f"{self.partial / name} could not be written: {error.strerror}") from error
        finally:
            writer.abandon()
        file = StoredFile(writer.size, writer.checksums)
        return file, outline, (_Last.key, checksum("".join(_Last.keys).encode()), Sent.of(name, file))

    def _publish(self, parts: list[tuple[StoredFile, _Outline | None]]) -> str:
        """Writes the metadata and the manifest, renames the directory, and returns its name."""
        import fullshard

        manifest = self.manifest
        manifest.versions = {"fullshard": fullshard.__version__, "torch": torch.__version__}
        manifest.files = {f"__{rank}_0.distcp": file for rank, (file, _) in enumerate(parts)}
        outlines = [outline for _, outline in parts if outline is not None]
        if outlines:
            _Last.metadata, _Last.contents = self._describe(outlines)
        try:
            self._write_small(METADATA, _Last.metadata)
            manifest.files[METADATA] = StoredFile(len(_Last.metadata), self._checksums)
            self._write_small(MANIFEST, encode(manifest, _Last.contents))
            force_names(self.partial)
            name = self._rename()
            force_names(self.directory)
        except OSError as error:
            raise CheckpointError(f"{self.partial} could not be completed: {error.strerror}") from error
        self._release()
        if self.keep_last is not None and self.hosts is None:
            remove_older(self.directory, name, self.keep_last)
        return name

    def _describe(self, outlines: list[_Outline]) -> tuple[bytes, bytes]:
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
        check(manifest, self.partial / MANIFEST)  # pieces of a tensor may be missing on all ranks
        return dcp.write_metadata(manifest, paths), encode_contents(manifest)

    def _write_small(self, name: str, data: bytes) -> None:
        writer = BlockWriter(self.partial / name)
        try:
            writer.write(data)
            writer.close()
        finally:
            writer.abandon()
        self._checksums = writer.checksums

    def _rename(self) -> str:
        numbers = [number_of(path.name) or (-1, 0) for path in list_checkpoints(self.directory)]
        made = [again for step, again in numbers if step == self.manifest.step]
        for again in itertools.count(max(made, default=-1) + 1):  # a lower one would be older
            name = name_of(self.manifest.step, again)
            if not os.path.lexists(self.directory / name):
                try:
                    os.rename(self.partial, self.directory / name)
                    return name
                except OSError as error:  # another job was faster
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
        raise AssertionError

    def _make_directory(self, step: int | None) -> None:
        """Makes a hidden directory, and locks it until this process has written it."""
        try:
            make_directory(self.directory)
            remove_leftovers(self.directory)
            numbers = [number[0] for path in list_checkpoints(self.directory) if (number := number_of(path.name))]
            self.manifest.step = max(numbers, default=-1) + 1 if step is None else step
            while not self._lock_directory():
                pass
        except OSError as error:
            raise CheckpointError(f"no checkpoint can be made in {self.directory}: {error.strerror}") from error

    def _lock_directory(self) -> bool:
        job = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.partial = self.directory / f".{name_of(self.manifest.step)}.{job}.partial"
        self.partial.mkdir()
        # Another job may take it for a leftover before it is locked, and remove it.
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            self._lock = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    raise
            if self.partial.exists():  # locked, or on a file system without locks, where leftovers stay
                return True
        self._release()
        return False

    def _release(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _discard(self) -> None:
        """Removes the directory if it did not become visible."""
        if self._lock >= 0:
            shutil.rmtree(self.partial, ignore_errors=True)
            self._release()


class _Outline(NamedTuple):
    """The outline of a rank's file: its name, its contents in order, and their paths in the nested state dict."""

    name: str
    boxes: list[Box]
    kinds: list[tuple[torch.dtype, torch.Size]]
    values: list[tuple[str, int]]  # names and lengths; values come before the tensors
    paths: dict[str, tuple[str | int, ...]]

    def laid_out(self) -> tuple[list[Any], dict[str, Stored], list[bytes]]:
        """The layout of the file: names, dtype, shape and piece of each tensor; the positions of values; and the bytes
        before each tensor and after the last."""
        tensors, values, at = list[Any](), dict[str, Stored](), 0
        for name, length in self.values:
            values[name] = Stored(self.name, at, length)
            at += length
        between, concatenate = [bytes(-at % dcp.ALIGNMENT)], cache(operator.add)  # of which few are different
        at += len(between[0])
        for (names, shape, offsets, _), (dtype, sizes) in zip(self.boxes, self.kinds, strict=True):
            before, after, length = dcp.around(dtype, tuple(sizes))
            tensors.append((names, dtype, shape, Piece(self.name, at, length, at + len(before), offsets, tuple(sizes))))
            between[-1:] = concatenate(between[-1], before), after
            at += len(before) + sizes.numel() * dtype.itemsize + len(after)
        return tensors, values, between


class _Last:
    """A cache of the last save's descriptions. The next save of the same model has the same, and does not make them
    again.

    Attributes:
        outline: this rank's outline. ``between`` are its bytes between tensors, ``key`` a name for it.
        keys: the keys of all ranks, in the last save that this rank described. ``metadata`` and ``contents`` are the
            bytes that it wrote then.
    """

    outline: _Outline | None = None
    between: list[bytes]
    key = ""
    keys: tuple[str, ...] = ()
    metadata = b""
    contents = b""
