"""Near copies: checkpoints in memory of the hosts, which outlive their processes, and of which another host has a copy.

A near copy is a checkpoint like any other, in a directory that each host has for itself, such as one in ``/dev/shm``.
There lie the files of the ranks of this host, those of the ranks of another host, and the same manifest everywhere::

    host a   /dev/shm/job/step-00000012    manifest.json   __0 __1   and, of host b,   __2 __3
    host b   /dev/shm/job/step-00000012    manifest.json   __2 __3   and, of host a,   __0 __1

Owns which ranks share a host and to which other host their files go, and to which training a near copy belongs: that of
a directory, which has a file with a number of its own, and to whose newest checkpoint the near copy was the next. What
is otherwise, of another training or from before the directory was changed, is never loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fullshard.checkpoint.background import finish
from fullshard.checkpoint.blocks import BLOCK, BlockWriter, CheckpointError, bytes_of, checksum, make_directory
from fullshard.checkpoint.manifest import StoredFile, mark_of
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.reader import checkpoints
from fullshard.comm.waits import waiting

#: The file of a directory of checkpoints that names its training.
_TRAINING = "near.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
#: Bytes that travel in one message to another host, and the tag of the messages.
_MESSAGE, _TAG = 32 * BLOCK, 0x6E656172


class Sent(NamedTuple):
    """A file that a rank wrote, as the other ranks are told of it."""

    name: str
    size: int
    digest: str

    @classmethod
    def of(cls, name: str, file: StoredFile) -> Sent:
        return cls(name, file.size, checksum("".join(file.checksums or ()).encode()))


class Hosts:
    """Which ranks share a directory for near copies, and to whom they send their files. All ranks must make it.

    Files go half of the hosts away: so two hosts must be lost before anything is, and a certain two.

    Args:
        root: the directory, which each host has for itself. It is made.
        ranks: that save or load.
        directory: of checkpoints, to whose training the near copies belong that are saved.

    Attributes:
        members: the ranks of each host, by the first of them.
        leader: the first rank of this host, which makes what is in its directory visible.
        to: the rank of another host that gets the file of this rank; ``None`` if there is one host.
        sources: the ranks whose files this rank gets.
        binding: what the manifest of a near copy says of the training, if there is one.

    Raises:
        CheckpointError: on all ranks, if the directory cannot be made on one.
    """

    def __init__(self, root: Path, ranks: Ranks, directory: Path | None = None) -> None:
        self._ranks = ranks
        _, every = ranks.attempt(lambda: ((_place_of(root), binding(directory) if directory and ranks.first else {}),))
        self.binding: dict[str, str] = every[0][1]
        hosts: dict[Any, list[int]] = {}
        for rank, (place, _) in enumerate(every):
            hosts.setdefault(place, []).append(rank)
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
        """Sends the file of this rank, one of ``files``, to another host, and writes those that come beside it. All
        ranks must call it. A CheckpointError if one could not be written, or is not what was sent."""
        group, mine = self._ranks.group, files[self._ranks.rank]
        size = mine.size if self.to is not None else 0
        data = torch.from_file(str(partial / mine.name), shared=False, size=size, dtype=torch.uint8) if size else None
        copies = [_Copy(rank, partial / files[rank].name, files[rank]) for rank in self.sources]
        for start in range(0, max([size, *(copy.file.size for copy in copies)]), _MESSAGE):
            works: list[dist.Work | None] = []
            come: list[tuple[_Copy, torch.Tensor]] = []
            if data is not None and start < size:
                part = data[start : start + _MESSAGE]
                works.append(dist.isend(part, group=group, group_dst=self.to, tag=_TAG))
            for copy in copies:
                if start < copy.file.size:
                    part = torch.empty(min(_MESSAGE, copy.file.size - start), dtype=torch.uint8)
                    works.append(dist.irecv(part, group=group, group_src=copy.rank, tag=_TAG))
                    come.append((copy, part))
            with waiting("the copies of a checkpoint", group):
                for work in works:
                    work.wait()  # type: ignore[union-attr]
            for copy, part in come:
                copy.write(part)
        for copy in copies:
            copy.close()


class _Copy:
    """A file of another rank, as it comes. After a failure what comes is thrown away: its sender waits for nobody."""

    def __init__(self, rank: int, path: Path, file: Sent) -> None:
        self.rank, self.path, self.file = rank, path, file
        self._writer: BlockWriter | None = None
        self._error: OSError | None = None
        try:
            self._writer = BlockWriter(path)
        except OSError as error:
            self._error = error

    def write(self, data: torch.Tensor) -> None:
        try:
            if self._writer is not None and self._error is None:
                self._writer.write(bytes_of(data))
        except OSError as error:
            self._error = error

    def close(self) -> None:
        try:
            if self._writer is not None and self._error is None:
                self._writer.close()
        except OSError as error:
            self._error = error
        finally:
            if self._writer is not None:
                self._writer.abandon()
        if self._error is not None:
            raise CheckpointError(f"{self.path} could not be written: {self._error.strerror}") from self._error
        assert self._writer is not None
        written = Sent.of(self.file.name, StoredFile(self._writer.size, self._writer.checksums))
        if written != self.file:
            raise CheckpointError(f"{self.path}, which rank {self.rank} sent, is not what it wrote (wrong checksum)")


def _place_of(root: Path) -> tuple[Any, ...]:
    """The same for ranks that see the same directory, and for no others."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        found = root.stat()
    except OSError as error:
        raise CheckpointError(f"no near copies can be kept in {root}: {error.strerror}") from error
    return _BOOT.read_text() if _BOOT.exists() else socket.gethostname(), found.st_dev, found.st_ino


def binding(directory: Path) -> dict[str, str]:
    """What the manifest of a near copy says: whose training it belongs to, and after which checkpoint it comes."""
    found = training_of(directory)
    if not found:
        make_directory(directory)
        written = directory / f".{_TRAINING}.{uuid.uuid4().hex[:8]}"
        written.write_text(json.dumps({"training": uuid.uuid4().hex}) + "\n")
        os.replace(written, directory / _TRAINING)
        found = training_of(directory)
    newest = next(iter(checkpoints(directory)), None)
    after = {"after": newest.name, "mark": mark_of(newest)} if newest is not None else {}
    return {"directory": str(directory.resolve()), "training": found, **after}


def training_of(directory: Path) -> str:
    """The number of the training in a directory; empty if it has none."""
    try:
        told = json.loads((directory / _TRAINING).read_text())
        return str(told["training"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def forget(near: str | Path, process_group: ProcessGroup | None = None) -> None:
    """Removes the near copies of a training that has come to its end, and so gives their memory back.

    All ranks must call it. Nothing else removes the last near copy but a restart of the host: without this call it
    stays, and a later :func:`load` may go on from it.

    Args:
        near: the directory that :func:`save` was given.
        process_group: the ranks of the model, if these are not all.

    Raises:
        CheckpointError: the last save, in the background, failed; near copies stay.
    """
    finish()
    root, ranks = Path(near), Ranks(process_group)
    if Hosts(root, ranks).leader == ranks.rank:  # all have come: nobody reads or writes any more
        for path in [*checkpoints(root), *root.glob(".step-*.partial"), *root.glob(".step-*.removed")]:
            if path != root:
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # it has something else too
            root.rmdir()
