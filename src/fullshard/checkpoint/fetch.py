"""Reads in-memory replicas: finds those on all hosts, selects one to continue from, and reads blocks from other hosts.

A rank reads the files that its host has. If its host lacks a file, or a block has a wrong checksum, it requests the
block from a rank of another host that has the file. Each rank has a thread that answers requests::

    rank 0, host a   ── file 2, bytes 0 to 262144 ──▶   rank 3, host b
                     ◀── the bytes, and whether they could be read ──
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.checkpoint.blocks import (
    BLOCK,
    BlockReader,
    CheckpointError,
    CorruptCheckpointError,
    open_regular,
    read_regular,
)
from fullshard.checkpoint.local import LocalFiles
from fullshard.checkpoint.manifest import MANIFEST, Location, Manifest, StoredFile, decode, few, number_of
from fullshard.checkpoint.ranks import PeerFailure, Ranks
from fullshard.checkpoint.reader import Checkpoint, list_checkpoints
from fullshard.checkpoint.replicas import Hosts, mark_at, training_of
from fullshard.checkpoint.storage import storage_of
from fullshard.comm.process_group import wait_for_message
from fullshard.comm.waits import waiting
from fullshard.disk.file import bytes_of
from fullshard.platforms import read_at
from fullshard.policies import warn

#: Tags of requests (number of the file, first byte, number of bytes; or :data:`_END`) and of answers.
ASK, _ANSWER = 0x6E656173, 0x6E656174
_END = -1
#: The most bytes of one request. Each request costs a message in both directions, and wakes up two threads.
AHEAD = 32 * BLOCK


class _HostPart(NamedTuple):
    """The part of a replica that one host has."""

    name: str
    binding: dict[str, str]
    files: frozenset[str]
    lacks: frozenset[str]


@dataclass
class Replica:
    """A replica, with parts on several hosts.

    Attributes:
        path: its directory on this host, even if this host has no part.
        step: the training step.
        refused: the reason why training must not continue from it; empty if it may.
        holders: for each file, the ranks of each host that has it. Any of them can be asked.
        source: a rank that has the manifest.
        ranks: the ranks that load.
        has_others: whether there are other hosts.
        received: the bytes received last: the rank that sent them, their file, their offset in it, and the bytes.
    """

    path: Path
    step: int
    refused: str
    holders: dict[str, list[list[int]]]
    source: int
    ranks: Ranks
    has_others: bool
    received: tuple[int, str, int, memoryview] = (-1, "", 0, memoryview(b""))

    def open(self) -> Checkpoint:
        """Opens it, to be read within :meth:`served`. All ranks must call it together."""
        data = b""
        if self.ranks.rank == self.source:
            with contextlib.suppress(CorruptCheckpointError):
                data = read_regular(self.path / MANIFEST)
        return _Near(decode(self.ranks.broadcast(data, self.source), self.path / MANIFEST), self)

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Answers requests of other ranks while the context runs. All ranks must enter it. They leave it together, when
        no rank reads any more. If only some ranks raise an error, those leave at once, and the others notice that when
        they wait for them."""
        if not self.has_others:
            yield
            return
        thread = threading.Thread(target=self._serve, name="fullshard.checkpoint.replicas", daemon=True)
        thread.start()
        agreed = True
        try:
            yield
        except BaseException as error:
            agreed = isinstance(error, CheckpointError) and not isinstance(error, PeerFailure)
            raise
        finally:
            if agreed:
                end = torch.tensor([_END, 0, 0, self.ranks.rank])
                with waiting("the other ranks to finish reading", self.ranks.group):
                    dist.send(end, group=self.ranks.group, group_dst=(self.ranks.rank + 1) % self.ranks.size, tag=ASK)
                    thread.join()

    def ask(self, holder: int, name: str, start: int, block: memoryview) -> None:
        """Fills ``block`` with bytes of a file that another rank has."""
        request = torch.tensor([sorted(self.holders).index(name), start, len(block), self.ranks.rank])
        answer = torch.empty(len(block) + 1, dtype=torch.uint8)
        try:
            with waiting("another rank's part of a checkpoint", self.ranks.group):
                dist.send(request, group=self.ranks.group, group_dst=holder, tag=ASK)
                work = dist.irecv(answer, group=self.ranks.group, group_src=holder, tag=_ANSWER)
                wait_for_message(work, self.ranks.group)
        except RuntimeError as error:
            raise self.ranks.lost(error) from error
        if answer[-1]:
            raise CorruptCheckpointError(f"rank {holder} could not read its {name}")
        block[:] = bytes_of(answer)[:-1]

    def _serve(self) -> None:
        names, request = sorted(self.holders), torch.empty(4, dtype=torch.int64)
        with contextlib.suppress(RuntimeError):  # a rank is lost: the other ranks notice when they wait for it
            while True:
                wait_for_message(dist.irecv(request, group=self.ranks.group, tag=ASK), self.ranks.group)
                number, start, length, requester = request.tolist()
                if number == _END:
                    return
                answer = torch.zeros(length + 1, dtype=torch.uint8)
                try:
                    with open(open_regular(self.path / names[number])[0], "rb", buffering=0) as file:
                        answer[-1] = read_at(file.fileno(), bytes_of(answer)[:-1], start) != length
                except (OSError, CorruptCheckpointError):
                    answer[-1] = 1
                dist.send(answer, group=self.ranks.group, group_dst=requester, tag=_ANSWER)


class _Near(Checkpoint):
    """A replica, of which this host has some files and other hosts have the others."""

    def __init__(self, manifest: Manifest, copy: Replica) -> None:
        self.path, self.manifest, self._readers, self._replica = copy.path, manifest, {}, copy
        self._files, self._unpin = LocalFiles(copy.path), lambda: None

    def _reader(self, file: str) -> BlockReader:
        if file not in self._readers:
            self._readers[file] = _ReplicaReader(self._replica, file, self.manifest.files[file])
        return self._readers[file]


class _ReplicaReader(BlockReader):
    """Reads each block from the first host on which its checksum is right: this host first, then others."""

    def __init__(self, copy: Replica, name: str, file: StoredFile) -> None:
        rank = copy.ranks.rank
        self._replica, self._name, self._has_warned = copy, name, False
        self._others = [members[rank % len(members)] for members in copy.holders[name] if rank not in members]
        self._end = 0  # end of the bytes that are being read
        with contextlib.suppress(CorruptCheckpointError):  # this host does not have it
            super().__init__(copy.path / name, *file)

    def read_into(self, target: memoryview, start: int) -> None:
        self._end = start + len(target)
        super().read_into(target, start)

    def _ask(self, holder: int, start: int, block: memoryview) -> None:
        """Fills ``block`` from the bytes received last, or else requests it. If this host lacks the file, the request
        includes the blocks that follow. Otherwise it is for this block only: its neighbours are probably fine here."""
        sender, name, first, received = self._replica.received
        if (sender, name) != (holder, self._name) or not first <= start <= start + len(block) <= first + len(received):
            run = min(-(-self._end // BLOCK) * BLOCK, start + AHEAD, self.size) if self._file < 0 else 0
            self._replica.received = Replica.received
            del received  # free the previous bytes first
            first, received = start, memoryview(bytearray(max(run, start + len(block)) - start))
            self._replica.ask(holder, self._name, start, received)
            self._replica.received = holder, self._name, start, received
        block[:] = received[start - first : start - first + len(block)]

    def _read(self, number: int, block: memoryview) -> None:
        reasons: list[str] = []
        for holder in [*([-1] if self._file >= 0 else []), *self._others]:
            try:
                if holder < 0:
                    super()._read(number, block)
                else:
                    self._ask(holder, number * BLOCK, block)
                    self._compare(number, block)
                    if reasons and not self._has_warned:
                        self._has_warned = True
                        warn(f"the copy of rank {holder} is read, because on this host {reasons[0]}")
                return
            except CorruptCheckpointError as error:
                reasons.append(str(error) if holder < 0 else f"of rank {holder}: {error}")
        raise CorruptCheckpointError("; ".join(reasons))


def find_replicas(root: Path, directory: Location, ranks: Ranks) -> list[Replica]:
    """The replicas on all hosts, the newest first. All ranks must call it.

    Args:
        root: this host's directory of replicas.
        directory: the directory of checkpoints. It decides from which replicas training may continue.
        ranks: the ranks that load.
    """
    hosts = Hosts(root, ranks)
    _, every = ranks.attempt(lambda: (_parts_on_host(root) if hosts.leader == ranks.rank else {},))
    found: dict[str, dict[int, _HostPart]] = {}
    for leader, parts in enumerate(every):
        for mark, each in parts.items():
            found.setdefault(mark, {})[leader] = each
    ordered = sorted(found.values(), key=lambda parts: _number(parts[min(parts)]), reverse=True)
    _, refusals = ranks.attempt(
        lambda: ([_refusal(parts[min(parts)], directory) for parts in ordered] if ranks.first else [],)
    )
    copies = []
    for refused, parts in zip(refusals[0], ordered, strict=True):
        source = min(parts)
        holders: dict[str, list[list[int]]] = {}
        for leader, each in parts.items():
            for file in each.files:
                holders.setdefault(file, []).append(hosts.members[leader])
        lost = sorted(parts[source].files.union(parts[source].lacks) - set(holders))
        if lost and not refused:
            refused = f"no host has {few(lost)} any more"
        path = root / parts.get(hosts.leader, parts[source]).name
        copies.append(Replica(path, _number(parts[source])[0], refused, holders, source, ranks, len(hosts.members) > 1))
    return copies


def _parts_on_host(root: Path) -> dict[str, _HostPart]:
    """This host's part of each replica, by the mark of its manifest."""
    found = {}
    for path in list_checkpoints(root):
        try:
            saved = Checkpoint(path, whole=False)
        except CorruptCheckpointError as error:
            warn(f"the in-memory replica {path} is skipped, because it is not whole: {error}")
            continue
        lacks = frozenset(saved.lacking())
        found[mark_at(path)] = _HostPart(
            path.name, saved.manifest.binding, frozenset(saved.manifest.files) - lacks, lacks
        )
    return found


def _number(part: _HostPart) -> tuple[int, int]:
    return number_of(part.name) or (-1, 0)


def _refusal(part: _HostPart, directory: Location) -> str:
    """The reason why training in a directory must not continue from a replica; empty if it may."""
    after = part.binding.get("after", "")
    if not part.binding.get("training") or part.binding["training"] != training_of(directory):
        return f"it belongs to a different training run than {directory}"
    if after and mark_at(directory / after) != part.binding["mark"]:
        return f"it was saved after {after}, which is no longer in {directory}"
    for path in storage_of(directory).newest_first():
        number = number_of(path.name)
        if number is None or number <= (number_of(after) or (-1, 0)):
            break
        if number[0] <= _number(part)[0]:
            return f"{path} was saved after it"
    return ""
