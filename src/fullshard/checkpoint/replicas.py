"""In-memory replicas: checkpoints in the memory of the hosts. They outlive their processes, and are on two hosts.

A replica is a checkpoint like any other, in a directory that each host has for itself, for example in ``/dev/shm``.
It has the files of this host's ranks, the files of another host's ranks, and the manifest, which is the same on all
hosts::

    host a   /dev/shm/job/step-00000012    manifest.json   __0 __1   and, of host b,   __2 __3
    host b   /dev/shm/job/step-00000012    manifest.json   __2 __3   and, of host a,   __0 __1

Owns which ranks share a host, and which other host gets their files. Owns also the training to which a replica
belongs. Each directory of checkpoints has a file that identifies its training. A replica names that training, and the
checkpoint that was the newest when it was saved. A replica of another training, or one from before the directory
changed, is never loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fullshard.checkpoint.background import wait_until_finished
from fullshard.checkpoint.blocks import BLOCK, BlockWriter, CheckpointError, CorruptCheckpointError, checksum
from fullshard.checkpoint.local import LocalStorage
from fullshard.checkpoint.manifest import MANIFEST, Location, StoredFile, entry_of, mark_of
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.reader import list_checkpoints
from fullshard.checkpoint.storage import files_of, storage_of
from fullshard.comm.process_group import wait_for_message
from fullshard.comm.waits import waiting
from fullshard.disk.file import bytes_of
from fullshard.platforms import boot_id
from fullshard.policies import local_path

#: The file of a directory of checkpoints that names its training.
_TRAINING = "near.json"
#: Bytes of one message to another host, and the tag of the messages.
_MESSAGE, _TAG = 32 * BLOCK, 0x6E656172


class Sent(NamedTuple):
    """A file that a rank wrote, as it is described to the other ranks."""

    name: str
    size: int
    digest: str

    @classmethod
    def of(cls, name: str, file: StoredFile) -> Sent:
        return cls(name, file.size, checksum("".join(file.checksums or ()).encode()))


class Hosts:
    """The hosts: which ranks share a directory for replicas, and which ranks they send their files to. All ranks must
    make it.

    A host sends its files half way around the list of hosts. So data is lost only if two particular hosts are lost.

    Args:
        root: the directory for replicas, which each host has for itself. It is made.
        ranks: the ranks that save or load.
        directory: the directory of checkpoints, whose training the saved replicas belong to.

    Raises:
        CheckpointError: on all ranks, if the directory cannot be made on one.
    """

    binding: dict[str, str]  # what the manifest of a replica says about its training
    members: dict[int, list[int]]  # the ranks of each host, by the first of them
    leader: int  # the first rank of this host. It makes the replica in this host's directory visible
    to: int | None  # the rank of another host that receives this rank's file; None if there is only one host
    sources: list[int]  # the ranks whose files this rank receives

    def __init__(self, root: Path, ranks: Ranks, directory: Location | None = None) -> None:
        self._ranks = ranks
        _, every = ranks.attempt(
            lambda: ((_location_of(root), binding(directory) if directory and ranks.first else {}),)
        )
        self.binding = every[0][1]
        hosts: dict[Any, list[int]] = {}
        for rank, (location, _) in enumerate(every):
            hosts.setdefault(location, []).append(rank)
        self.members = {ranks_of_host[0]: ranks_of_host for ranks_of_host in hosts.values()}
        self.leader = hosts[every[ranks.rank][0]][0]
        targets: dict[int, int] = {}
        in_order = list(hosts.values())
        for number, members in enumerate(in_order if len(in_order) > 1 else ()):
            others = in_order[(number + len(in_order) // 2) % len(in_order)]
            targets |= {rank: others[i % len(others)] for i, rank in enumerate(members)}
        self.to = targets.get(ranks.rank)
        self.sources = [rank for rank, to in targets.items() if to == ranks.rank]

    def spread(self, partial: Path, files: Sequence[Sent]) -> None:
        """Sends this rank's file to another host, and writes the files that it receives beside its own. All ranks must
        call it. ``files`` describes the file of each rank. Raises CheckpointError if a received file could not be
        written, or has a wrong checksum."""
        group, own = self._ranks.group, files[self._ranks.rank]
        size = own.size if self.to is not None else 0
        data = torch.from_file(str(partial / own.name), shared=False, size=size, dtype=torch.uint8) if size else None
        copies = [_ReceivedFile(rank, partial / files[rank].name, files[rank]) for rank in self.sources]
        for start in range(0, max([size, *(copy.file.size for copy in copies)]), _MESSAGE):
            works: list[dist.Work | None] = []
            incoming: list[tuple[_ReceivedFile, torch.Tensor]] = []
            with waiting("the copies of a checkpoint", group):
                if data is not None and start < size:
                    part = data[start : start + _MESSAGE]
                    works.append(dist.isend(part, group=group, group_dst=self.to, tag=_TAG))
                for copy in copies:
                    if start < copy.file.size:
                        part = torch.empty(min(_MESSAGE, copy.file.size - start), dtype=torch.uint8)
                        works.append(dist.irecv(part, group=group, group_src=copy.rank, tag=_TAG))
                        incoming.append((copy, part))
                for work in works:
                    wait_for_message(work, group)
            for copy, part in incoming:
                copy.write(part)
        for copy in copies:
            copy.close()


class _ReceivedFile:
    """A file that is received from another rank. After a failure, received bytes are dropped, so that the sender is not
    blocked."""

    def __init__(self, rank: int, path: Path, file: Sent) -> None:
        self.rank, self.path, self.file = rank, path, file
        self._writer: BlockWriter | None = None
        self._error: OSError | None = None
        with self._attempt():
            self._writer = BlockWriter(path)

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Keeps the first error until :meth:`close`."""
        try:
            yield
        except OSError as error:
            self._error = self._error or error

    def write(self, data: torch.Tensor) -> None:
        if self._writer is not None and self._error is None:
            with self._attempt():
                self._writer.write(bytes_of(data))

    def close(self) -> None:
        with contextlib.ExitStack() as opened, self._attempt():
            if self._writer is not None:
                opened.callback(self._writer.abandon)
                if self._error is None:
                    self._writer.close()
        if self._error is not None:
            raise CheckpointError(f"{self.path} could not be written: {self._error.strerror}") from self._error
        assert self._writer is not None
        written = Sent.of(self.file.name, StoredFile(self._writer.size, self._writer.checksums))
        if written != self.file:
            raise CheckpointError(f"{self.path}, which rank {self.rank} sent, is not what it wrote (wrong checksum)")


def _location_of(root: Path) -> tuple[Any, ...]:
    """A value that is equal on ranks that see the same directory, and differs on all others. Nobody else may read or
    write the directory, because anybody may make one in ``/dev/shm``. On a system whose files have no such owners, that
    is left to the user."""
    try:
        root.mkdir(0o700, parents=True, exist_ok=True)
        found, problem = root.stat(), ""
        if not hasattr(os, "geteuid"):
            pass
        elif not {root.lstat().st_uid, found.st_uid} <= {os.geteuid()}:
            problem = f"it belongs to the user {found.st_uid}, and this process is of {os.geteuid()}"
        elif found.st_mode & 0o022:
            problem = "other users may write to it"
        elif found.st_mode & 0o077:
            root.chmod(0o700)
    except OSError as error:
        raise CheckpointError(f"no in-memory replicas can be kept in {root}: {error.strerror}") from error
    if problem:
        raise CheckpointError(f"no in-memory replicas can be kept in {root}: {problem}; name a new directory")
    return boot_id() or socket.gethostname(), found.st_dev, found.st_ino


def binding(directory: Location) -> dict[str, str]:
    """What the manifest of a replica says: its training, and the newest checkpoint before it."""
    found = training_of(directory)
    if not found:
        storage_of(directory).write_note(_TRAINING, json.dumps({"training": uuid.uuid4().hex}) + "\n")
        found = training_of(directory)
    newest = next(storage_of(directory).newest_first(), None)
    after = {"after": newest.name, "mark": mark_at(newest)} if newest is not None else {}
    return {"directory": str(directory.resolve()), "training": found, **after}


def training_of(directory: Location) -> str:
    """The identifier of the training in a directory; empty if it has none."""
    return entry_of(storage_of(directory).note(_TRAINING), "training")


def mark_at(path: Location) -> str:
    """What identifies the checkpoint at a path; empty if there is none."""
    with contextlib.suppress(OSError, CorruptCheckpointError):
        return mark_of(files_of(path).read(MANIFEST, 64))
    return ""


def forget_replicas(replicas: str | Path, process_group: ProcessGroup | None = None) -> None:
    """Removes the in-memory replicas of a finished training, and so frees their memory.

    Otherwise only a restart of the host removes the last replica, and a later :func:`load` may continue from it.

    Args:
        replicas: the directory that was given to :func:`save`.
        process_group: the ranks of the model, if they are not all ranks.

    Raises:
        CheckpointError: the last save in the background failed. The replicas stay.

    Ranks: all ranks of ``process_group`` alike.
    """
    wait_until_finished()
    root, ranks = local_path(replicas, "replicas"), Ranks(process_group)
    if Hosts(root, ranks).leader == ranks.rank:  # all ranks are here, so no rank reads or writes any more
        saved = [path for path in list_checkpoints(root) if path != root and mark_at(path)]  # no other program's
        for path in [*saved, *LocalStorage(root).leftovers()]:
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # the directory has other files too
            root.rmdir()
