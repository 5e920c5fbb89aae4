"""Reads near copies: which there are on the hosts, which of them training goes on from, and blocks of other hosts.

A rank reads the files that its host has. For a block of a file that its host has not, or of which the bytes are not
what was written, it asks a rank of another host that has the file. Each rank has a thread that answers::

    rank 0, host a   ── file 2, bytes 0 to 262144 ──▶   rank 3, host b
                     ◀── the bytes, and whether they could be read ──
"""

from __future__ import annotations

import contextlib
import os
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
    BrokenCheckpoint,
    CheckpointError,
    bytes_of,
    open_regular,
    read_regular,
)
from fullshard.checkpoint.manifest import MANIFEST, Manifest, StoredFile, decode, few, mark_of, number_of
from fullshard.checkpoint.near import Hosts, training_of
from fullshard.checkpoint.ranks import LostRank, Ranks
from fullshard.checkpoint.reader import Checkpoint, checkpoints
from fullshard.comm.waits import waiting
from fullshard.policies import warn

#: Tags of requests (number of the file, first byte, how many bytes; or :data:`_END`) and of answers.
ASK, _ANSWER = 0x6E656173, 0x6E656174
_END = -1
#: Bytes that one request asks for at most: each costs a message both ways and two threads that wake up.
AHEAD = 32 * BLOCK


class _Held(NamedTuple):
    """The part of a near copy that one host has."""

    name: str
    near: dict[str, str]
    files: frozenset[str]
    lacks: frozenset[str]


@dataclass
class NearCopy:
    """A near copy, parts of which lie on several hosts.

    Attributes:
        path: where this host has it, or would have it.
        step: the training step.
        refused: why training does not go on from it; empty if it does.
        holders: by file, on each host that has it the ranks, of which each can be asked.
        source: a rank that has the manifest.
        ranks: that load.
        come: the bytes that came last, with the rank and the file that they are of, and the first one's place in it.
    """

    path: Path
    step: int
    refused: str
    holders: dict[str, list[list[int]]]
    source: int
    ranks: Ranks
    has_others: bool
    come: tuple[int, str, int, memoryview] = (-1, "", 0, memoryview(b""))

    def open(self) -> Checkpoint:
        """Opens it for :meth:`served` reads. All ranks must call it at once."""
        data = b""
        if self.ranks.rank == self.source:
            with contextlib.suppress(BrokenCheckpoint):
                data = read_regular(self.path / MANIFEST)
        return _Near(decode(self.ranks.broadcast(data, self.source), self.path / MANIFEST), self)

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Answers the other ranks meanwhile. All must enter, and leave when none of them reads any more; an error that
        not all of them raise ends it on this rank, and the others notice that when they wait for it."""
        if not self.has_others:
            yield
            return
        thread = threading.Thread(target=self._serve, name="fullshard.checkpoint.near", daemon=True)
        thread.start()
        agreed = True
        try:
            yield
        except BaseException as error:
            agreed = isinstance(error, CheckpointError) and not isinstance(error, LostRank)
            raise
        finally:
            if agreed:
                end = torch.tensor([_END, 0, 0])
                with waiting("the end of the other ranks' reading", self.ranks.group):
                    dist.send(end, group=self.ranks.group, group_dst=(self.ranks.rank + 1) % self.ranks.size, tag=ASK)
                    thread.join()

    def ask(self, holder: int, name: str, start: int, block: memoryview) -> None:
        """Fills ``block`` with what another rank has of a file."""
        request = torch.tensor([sorted(self.holders).index(name), start, len(block)])
        answer = torch.empty(len(block) + 1, dtype=torch.uint8)
        try:
            with waiting("what another rank has of a checkpoint", self.ranks.group):
                dist.send(request, group=self.ranks.group, group_dst=holder, tag=ASK)
                dist.recv(answer, group=self.ranks.group, group_src=holder, tag=_ANSWER)
        except RuntimeError as error:
            raise self.ranks.lost(error) from error
        if answer[-1]:
            raise BrokenCheckpoint(f"rank {holder} could not read its {name}")
        block[:] = bytes_of(answer)[:-1]

    def _serve(self) -> None:
        names, request = sorted(self.holders), torch.empty(3, dtype=torch.int64)
        with contextlib.suppress(RuntimeError):  # a rank is lost: all notice where they wait for one another
            while True:
                asks = dist.recv(request, group=self.ranks.group, tag=ASK)
                number, start, length = request.tolist()
                if number == _END:
                    return
                answer = torch.zeros(length + 1, dtype=torch.uint8)
                try:
                    with open(open_regular(self.path / names[number])[0], "rb", buffering=0) as file:
                        answer[-1] = os.preadv(file.fileno(), [bytes_of(answer)[:-1]], start) != length
                except (OSError, BrokenCheckpoint):
                    answer[-1] = 1
                dist.send(answer, dst=asks, group=self.ranks.group, tag=_ANSWER)


class _Near(Checkpoint):
    """A near copy, of which this host has some files and others have the rest."""

    def __init__(self, manifest: Manifest, copy: NearCopy) -> None:
        self.path, self.manifest, self._readers, self._near_copy = copy.path, manifest, {}, copy

    def _reader(self, file: str) -> BlockReader:
        if file not in self._readers:
            self._readers[file] = _NearReader(self._near_copy, file, self.manifest.files[file])
        return self._readers[file]


class _NearReader(BlockReader):
    """Takes each block from the first host that has it as it was written: this one, then others."""

    def __init__(self, copy: NearCopy, name: str, file: StoredFile) -> None:
        rank = copy.ranks.rank
        self._copy, self._name, self._told = copy, name, False
        self._others = [members[rank % len(members)] for members in copy.holders[name] if rank not in members]
        self._end = 0  # of the run of bytes that is being read
        with contextlib.suppress(BrokenCheckpoint):  # this host does not have it
            super().__init__(copy.path / name, *file)

    def read_into(self, target: memoryview, start: int) -> None:
        self._end = start + len(target)
        super().read_into(target, start)

    def _ask(self, holder: int, start: int, block: memoryview) -> None:
        """Fills ``block`` from what has come. Asks where that lacks it: for the rest of the run if this host lacks the
        file, else for the block alone, as the blocks around it are probably whole."""
        whom, name, first, come = self._copy.come
        if (whom, name) != (holder, self._name) or not first <= start <= start + len(block) <= first + len(come):
            run = min(-(-self._end // BLOCK) * BLOCK, start + AHEAD, self.size) if self._file < 0 else 0
            self._copy.come = NearCopy.come
            del come  # the memory of before, so that only one such piece is held
            first, come = start, memoryview(bytearray(max(run, start + len(block)) - start))
            self._copy.ask(holder, self._name, start, come)
            self._copy.come = holder, self._name, start, come
        block[:] = come[start - first : start - first + len(block)]

    def _read(self, number: int, block: memoryview) -> None:
        reasons: list[str] = []
        for holder in [*([-1] if self._file >= 0 else []), *self._others]:
            try:
                if holder < 0:
                    super()._read(number, block)
                else:
                    self._ask(holder, number * BLOCK, block)
                    self._compare(number, block)
                    if reasons and not self._told:
                        self._told = True
                        warn(f"what rank {holder} has is taken, because on this host {reasons[0]}")
                return
            except BrokenCheckpoint as error:
                reasons.append(str(error) if holder < 0 else f"of rank {holder}: {error}")
        raise BrokenCheckpoint("; ".join(reasons))


def near_copies(root: Path, directory: Path, ranks: Ranks) -> list[NearCopy]:
    """The near copies that the hosts have, the newest first. All ranks must call it. ``root`` is the directory of near
    copies of this host; that of checkpoints decides what training goes on from a near copy."""
    hosts = Hosts(root, ranks)
    _, every = ranks.attempt(lambda: (_held_in(root) if hosts.leader == ranks.rank else {},))
    found: dict[str, dict[int, _Held]] = {}
    for leader, held in enumerate(every):
        for mark, each in held.items():
            found.setdefault(mark, {})[leader] = each
    ordered = sorted(found.values(), key=lambda held: _number(held[min(held)]), reverse=True)
    _, told = ranks.attempt(
        lambda: ([_refusal(held[min(held)], directory) for held in ordered] if ranks.first else [],)
    )
    copies = []
    for refused, held in zip(told[0], ordered, strict=True):
        source = min(held)
        holders: dict[str, list[list[int]]] = {}
        for leader, each in held.items():
            for file in each.files:
                holders.setdefault(file, []).append(hosts.members[leader])
        lost = sorted(held[source].files.union(held[source].lacks) - set(holders))
        if lost and not refused:
            refused = f"no host has {few(lost)} any more"
        path = root / held.get(hosts.leader, held[source]).name
        copies.append(NearCopy(path, _number(held[source])[0], refused, holders, source, ranks, len(hosts.members) > 1))
    return copies


def _held_in(root: Path) -> dict[str, _Held]:
    """What this host has of each near copy, by the mark of its manifest."""
    found = {}
    for path in checkpoints(root):
        try:
            saved = Checkpoint(path, whole=False)
        except BrokenCheckpoint as error:
            warn(f"the near copy {path} is passed over, because it is not whole: {error}")
            continue
        lacks = frozenset(saved.lacking())
        found[mark_of(path)] = _Held(path.name, saved.manifest.near, frozenset(saved.manifest.files) - lacks, lacks)
    return found


def _number(held: _Held) -> tuple[int, int]:
    return number_of(held.name) or (-1, 0)


def _refusal(held: _Held, directory: Path) -> str:
    """Why training in a directory does not go on from a near copy; empty if it does."""
    after = held.near.get("after", "")
    if not held.near.get("training") or held.near["training"] != training_of(directory):
        return f"it is of another training than what is in {directory}"
    if after and not ((directory / after).is_dir() and mark_of(directory / after) == held.near["mark"]):
        return f"it was saved after {after}, which {directory} does not have any more"
    for path in checkpoints(directory):
        number = number_of(path.name)
        if number is not None and (number_of(after) or (-1, 0)) < number and number[0] <= _number(held)[0]:
            return f"{path} was saved after it"
    return ""
