"""How a process comes to an elastic job: with all others when it begins, or to one that runs.

Owns the directory in which members write down where they are, and what a new process is told. What it does then is in
:mod:`fullshard.elastic.job`.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fullshard.elastic.agreement import Agreement, Membership
from fullshard.elastic.connections import Connections, answers, ask, host_address
from fullshard.elastic.founding import founders, key_of, take_number, write
from fullshard.elastic.messages import Welcome
from fullshard.elastic.rows import arrange, shard_for
from fullshard.platforms import host_id
from fullshard.policies import expect

PATIENCE = 30.0  # seconds in which a change must be decided
_SILENCE = 30.0  # seconds after which a process that says nothing is taken for lost, unless the user says
_ANSWER = 5.0  # seconds in which a member must answer a new process
_POLL = 0.2  # seconds between two looks at a directory
_KEYS = "fullshard/elastic"  # what the keys in the store begin with


class ElasticError(RuntimeError):
    """The job cannot go on with the processes that are left. The message says what they lack."""

    __module__ = "fullshard.elastic"


class Entering:
    """The base of a :class:`~fullshard.elastic.job.Job`: its connections, and its first membership."""

    _coming: dict[int, int]  # new processes, and their shards
    _error: Exception | None
    _members_before: set[int]

    def __init__(self, replicas: int, seed: int, directory: str | Path | None) -> None:
        self.replicas, self.seed = replicas, seed
        self._directory = Path(directory) if directory is not None else None
        self._changed = threading.Condition(threading.RLock())
        self._number = 0  # of the membership that this process has acted on
        self._last_number = 0  # the highest number that a process has had
        self._newcomer = math.inf  # when the last new process came; infinite before the job begins
        self.has_left = False
        self._opened: object = None  # stands for the connections of this process, until it leaves
        self._sources: tuple[int, ...] = ()  # members that may have the state of a new process's shard

    def _enter(self, processes: int | None) -> None:
        if (welcome := self._find_job()) is not None:
            self._join(*welcome)
        elif processes is None:
            self._found_by_launcher()
        elif self._directory is None:
            raise ValueError("processes is given without a directory, in which they are to find each other")
        else:
            self._found_by_directory(self._directory, processes)

    def _found_by_launcher(self) -> None:
        """Begins a job with all processes of the launcher."""
        store, rank, size = next(iter(dist.rendezvous("env://")))  # type: ignore[attr-defined]
        key = store_once(store, f"{_KEYS}/key", os.urandom(16).hex())
        self._begin_alone(rank, size)
        self._connections = self._open(bytes.fromhex(key), host_address(os.environ["MASTER_ADDR"]))
        store.set(f"{_KEYS}/{rank}", json.dumps(self._connections.address))
        self._found([json.loads(store.get(f"{_KEYS}/{other}")) for other in range(size)])

    def _found_by_directory(self, directory: Path, processes: int) -> None:
        """Begins a job with as many processes as the user said, or joins it if that many other processes came first."""
        key = key_of(directory)
        self._begin_alone(-1, processes)
        connections = self._connections = self._open(key, host_address())
        mine = [host_id(), [*connections.address]]

        def is_there(said: Any) -> bool:
            return said == mine or answers(said[1], key, _ANSWER)

        while True:
            number, found = take_number(directory, processes, mine, is_there), founders(directory, processes)
            if number is not None and found is not None and all(map(is_there, found)):
                break
            if number is None and (welcome := self._find_job()) is not None:
                connections.close()
                self._join(*welcome)
                return
            time.sleep(_POLL)
        found.sort()  # processes of a host are neighbours, and so in one row if it has enough
        self._begin_alone(found.index(mine), processes)
        connections.begin(self.rank)
        self._found([address for _, address in found])

    def _begin_alone(self, rank: int, size: int) -> None:
        """Notes what a job of ``size`` processes begins with."""
        replicas = self.replicas
        expect(size % replicas == 0, "replicas", replicas, f"a divisor of the number of processes, {size}", ValueError)
        self.rank, self.size, self.shards = rank, size, size // replicas
        self.shard, self._last_number = rank % self.shards, size - 1
        shard_of = {process: process % self.shards for process in range(size)}
        first = Membership(0, 0, tuple(shard_of.items()), arrange((), shard_of, self.shards, replicas))
        self._agreement, self._members_before = Agreement(rank, self.shards, replicas, first), {*shard_of}

    def _found(self, addresses: Sequence[Any]) -> None:
        """Connects with the first processes, by their ranks."""
        found = {process: tuple(address) for process, address in enumerate(addresses)}
        if missing := self._connections.connect(found, 2 * PATIENCE):
            raise ElasticError(f"processes {sorted(missing)} did not connect with process {self.rank}")
        self._newcomer = 0.0
        self._publish()

    def _open(self, key: bytes, address: str) -> Connections:
        hang = float(os.environ.get("FULLSHARD_HANG_TIMEOUT", "inf"))
        limits = (_SILENCE if hang == math.inf else hang), hang
        self._opened = opened = object()
        hear = partial(self._hear, opened)
        heard = partial(hear, self._receive), partial(hear, self._lose), partial(hear, self._suspect)
        return Connections(self.rank, key, address, *heard, *limits, self._progress, self._welcome, self._end_welcome)

    def _hear(self, opened: object, act: Callable[..., None], *news: Any) -> None:
        """Acts on news, in a thread beside training, unless this process has left what it comes from."""
        with self._changed:
            if opened == self._opened:
                try:
                    act(*news)
                except Exception as error:
                    self._error = error
                self._changed.notify_all()

    def _publish(self) -> None:
        """Writes down where this member is, for processes that are to join."""
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            said = json.dumps({"address": self._connections.address, "key": self._connections.key.hex()})
            write(self._directory / f"{self.rank}.json", said)

    def _find_job(self, patience: float = 0.0) -> tuple[Welcome, bytes, Connection] | None:
        """What the first member of a running job says, the job's key, and the connection with that member. ``None`` if
        members have ended, do not answer for ``patience`` seconds, or this process is asked to leave."""
        deadline = time.monotonic() + patience
        while self._directory is not None and not self.has_left:
            files = sorted(self._directory.glob("[0-9]*.json"), key=lambda file: int(file.stem))
            gone, answered = list[Path](), False
            for file in files:
                try:
                    said = json.loads(file.read_text(encoding="utf-8"))
                    key = bytes.fromhex(said["key"])
                    welcome, connection = ask(tuple(said["address"]), key, _ANSWER)
                    if welcome is not None:
                        return welcome, key, connection
                    connection.close()
                    answered = True
                except (ConnectionError, FileNotFoundError, EOFError, ValueError):
                    gone.append(file)
                except OSError:  # nobody answers: its host may be gone, or this one is cut off
                    continue
            if not answered and (len(gone) == len(files) or time.monotonic() >= deadline):
                for file in gone:
                    file.unlink(missing_ok=True)
                break
            time.sleep(_POLL)
        return None

    def _welcome(self) -> Welcome | None:
        """What a new process is told. ``None`` if this process is not the first member, or another process is new."""
        with self._changed:
            now, agreement = time.monotonic(), self._agreement
            is_busy = now < self._newcomer + PATIENCE or agreement.is_frozen
            if is_busy or not self._is_first or self._opened is None:
                return None
            self._newcomer, self._last_number = now, max(self._last_number, *self._connections.addresses, 0) + 1
            everyone = {**self._coming, **agreement.members}
            shard = shard_for({each: has for each, has in everyone.items() if each not in self._gone()}, self.shards)
            shard_of = {each: has for each, has in agreement.members.items() if each not in agreement.lost}
            members = [*shard_of]
            self._coming[self._last_number] = shard
            in_rows = {process for row in agreement.membership.rows for process in row}
            members.sort(key=lambda process: (shard_of[process] != shard, process in in_rows))
            known = {**self._connections.addresses, self.rank: self._connections.address}
            addresses = {each: known[each] for each in known if each not in agreement.lost}  # also of other new ones
            mine = self._last_number, shard, self.size, self.replicas, self.seed
            return Welcome(*mine, addresses, tuple(members))

    def _end_welcome(self, welcome: Welcome) -> None:
        """Lets the next new process come: the last one has ended, or this process can tell where it is."""
        with self._changed:
            if welcome.number == self._last_number:
                self._newcomer = 0.0
            if welcome.number not in self._connections.addresses:
                self._coming.pop(welcome.number, None)

    def _join(self, welcome: Welcome, key: bytes, welcomed: Connection) -> None:
        """Becomes a process of a running job, which is no member yet."""
        if welcome.replicas != self.replicas:
            raise ValueError(f"replicas is {self.replicas}, but the running job has {welcome.replicas}")
        self.seed, self._last_number, self._number = welcome.seed, welcome.number, -1
        self.rank, self.shard, self.size = welcome.number, welcome.shard, welcome.size
        self.shards, self._sources = welcome.size // welcome.replicas, welcome.sources
        self._agreement = Agreement(self.rank, self.shards, self.replicas)
        self._connections = self._open(key, host_address(next(iter(welcome.addresses.values()))[0]))
        for process in self._connections.connect(welcome.addresses, _ANSWER):
            self._connections.suspected.add(process)
            self._agreement.suspect(process)  # it has ended meanwhile, or is stopped
        welcomed.close()
        self._newcomer = 0.0

    def _gone(self) -> set[int]:
        return self._agreement.lost | self._agreement.suspected

    @property
    def _is_first(self) -> bool:
        return next((each for each in self._agreement.members if each not in self._gone()), -1) == self.rank

    def _receive(self, sender: int, message: Any) -> None:
        raise NotImplementedError

    def _lose(self, process: int, is_read: bool, has_trusted: bool) -> None:
        raise NotImplementedError

    def _suspect(self, process: int, why: str) -> None:
        raise NotImplementedError

    def _progress(self) -> tuple[float, float]:
        raise NotImplementedError


def store_once(store: Any, key: str, value: str) -> str:
    """The value of a key, which is ``value`` if there was none."""
    return bytes(store.compare_set(key, "", value)).decode()
