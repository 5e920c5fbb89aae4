"""Objects by name in a store: put, get a range, list, delete. Every request is repeated if it fails.

Owns what is particular about stores. Requests fail now and then, so each is repeated with growing pauses. A *lease* is
an object that says which process uses others: it takes the place of a lock, and expires if that process has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fullshard.checkpoint.blocks import CheckpointError, checksum
from fullshard.comm.local_ranks import host_id

_Result = TypeVar("_Result")

#: Pauses before a failed request is repeated, in seconds.
PAUSES = (0.1, 0.3, 1.0, 3.0, 10.0)
#: Seconds between two renewals of a lease, and seconds without one after which it has expired.
_RENEWAL, _EXPIRY = 30.0, 300.0
#: How the names of objects begin that are made to read the store's clock.
NOW = ".now-"
#: The protocols of stores in which the first part of a path is a bucket, or a container, that is made apart.
_WITH_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "r2"}
#: Errors that another attempt would not change.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


class Store:
    """The objects below a ``UPath``, by names relative to it.

    Raises:
        CheckpointError: a request failed each time that it was repeated.
    """

    def __init__(self, root: Any) -> None:
        self._fs, self._root, self._url = root.fs, root.path.rstrip("/"), str(root).rstrip("/")

    def put(self, name: str, data: bytes | bytearray) -> None:
        """Writes an object, whether there is one or not."""
        self._repeat(name, lambda path: self._fs.pipe_file(path, data))

    def create(self, name: str, data: bytes) -> bool:
        """Writes an object if there is none of this name. Returns whether it did. Of several processes that try, one
        succeeds; in stores without conditional writes, the last one."""

        def write(path: str) -> None:
            if self._fs.exists(path):
                raise FileExistsError(path)
            try:
                self._fs.pipe_file(path, data, mode="create")
            except (NotImplementedError, TypeError, ValueError):
                self._fs.pipe_file(path, data)

        # The answer to a request that succeeded may be lost, and then its repetition finds the object.
        with contextlib.suppress(FileExistsError):
            self._repeat(name, write)
        return self.get(name) == data

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes | None:
        """The bytes of an object, or of a range of it; ``None`` if there is no such object."""
        try:
            return bytes(self._repeat(name, lambda path: self._fs.cat_file(path, start=start, end=end)))
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int:
        """The size of an object; -1 if there is none."""
        try:
            found = self._repeat(name, self._fs.info)
        except FileNotFoundError:
            return -1
        return int(found["size"] or 0) if found["type"] == "file" else -1

    def exists(self, name: str) -> bool:
        return self.size(name) >= 0

    def list(self) -> list[str]:
        """The first part of each name."""
        return [*self._listed(lambda path: dict.fromkeys(self._fs.ls(path, detail=False)))]

    def sizes(self) -> dict[str, int]:
        """The names of all objects, and their sizes in bytes."""
        found = self._listed(lambda path: self._fs.find(path, detail=True))
        return {name: int(each["size"] or 0) for name, each in found.items()}

    def _listed(self, request: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        try:
            found = self._repeat("", request)
        except FileNotFoundError:
            return {}
        below = f"{self._root}/"
        return {path.rstrip("/").removeprefix(below): each for path, each in found.items() if path.startswith(below)}

    def refuse_missing(self) -> None:
        """Raises CheckpointError if nothing can be saved here, because there is no bucket of this name, because it is
        an object, or because it is on a web server."""
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else {*self._fs.protocol}
        bucket = self._root.partition("/")[0]
        if protocols & {"http", "https"}:
            raise CheckpointError(f"{self._url} is not a checkpoint, and nothing can be saved on a web server")
        if self.exists(""):
            raise CheckpointError(f"{self._url} is an object, not a directory")
        if protocols & _WITH_BUCKETS and self._lacks(bucket):
            raise CheckpointError(f"{self._url} cannot be used: there is no bucket or container '{bucket}'")

    def _lacks(self, bucket: str) -> bool:
        """Whether there is certainly no bucket of this name."""
        lacks = False
        for request in (self._fs.info, self._fs.ls):  # the cheaper one may not find an empty bucket
            try:
                request(bucket)
                return False
            except Exception as error:  # where it may not be read, it is there
                lacks = isinstance(error, FileNotFoundError)
        return lacks

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects, in this order. Those that do not exist are skipped."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._repeat(name, self._fs.rm_file)

    def age(self, name: str, newer: str) -> float:
        """By how many seconds an object is older than another one, by the clock of the store; 0 if it does not say."""
        times = list[datetime]()
        for each in (name, newer):
            try:
                times.append(self._repeat(each, self._fs.modified))
            except (NotImplementedError, FileNotFoundError):
                return 0.0
        return (times[1] - times[0]).total_seconds()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _repeat(self, name: str, request: Callable[[str], _Result]) -> _Result:
        path = self._path(name)
        for pause in (*PAUSES, None):
            try:
                self._fs.invalidate_cache()  # other processes change what libraries remember of listings
                return request(path)
            except (*_FINAL, NotImplementedError):
                raise
            except Exception as error:  # the libraries of stores have no common class of errors
                if pause is None:
                    what = f"{type(error).__name__}: {error}"
                    raise CheckpointError(
                        f"{self._url}/{name}: the store failed {len(PAUSES) + 1} times: {what}"
                    ) from error
            time.sleep(pause * random.uniform(0.5, 1.5))
        raise AssertionError


class Lease:
    """An object by which this process holds others. It is renewed in the background until it is released.

    The lease of a process that has ended is not deleted to take its place: two processes might do so at once, and the
    slower one would delete the lease of the faster one. It gets a *successor*, an object whose name is made from it, so
    that one process can create it. Who releases that, deletes both, the first one first.

    Args:
        store: where it is.
        name: its name.
    """

    _held: ClassVar[weakref.WeakValueDictionary[str, Lease]] = weakref.WeakValueDictionary()
    _renewing: threading.Thread | None = None

    def __init__(self, store: Store, name: str) -> None:
        self._store, self.name, self._first = store, name, name
        self._before = dict[str, bytes]()  # the leases whose successor it is
        self._is_alone = False  # whether no other process can take it
        self._id, process = uuid.uuid4().hex, os.getpid()
        holder = {"host": host_id(), "process": process, "started": _started(process), "lease": self._id}
        self._data = json.dumps(holder).encode()
        self._renewed = time.monotonic()

    @classmethod
    def made(cls, store: Store, prefix: str) -> Lease:
        """Makes a lease whose name nobody else can have."""
        lease = cls(store, f"{prefix}{uuid.uuid4().hex}")
        lease._is_alone = True
        lease._hold()
        store.put(lease.name, lease._data)
        return lease

    @classmethod
    def taken(cls, store: Store, name: str, *, succeed: bool = False) -> Lease | None:
        """Takes a lease; ``None`` if there is one of this name. With ``succeed``, it may be the successor of leases
        whose processes have ended."""
        lease = cls(store, name)
        lease._hold()
        while not store.create(lease.name, lease._data):
            data = store.get(lease.name)
            if data is None or not succeed or not cls.is_over(store, lease.name):
                return None
            lease._before[lease.name] = data
            lease.name = lease._successor(data)
        if any(store.get(each) != data for each, data in lease._before.items()):  # another successor released them
            store.delete([lease.name])
            return None
        return lease

    def _hold(self) -> None:
        self._held[self._id] = self
        if self._renewing is None or not self._renewing.is_alive():
            Lease._renewing = threading.Thread(target=self._renew, name="fullshard-leases", daemon=True)
            Lease._renewing.start()

    @classmethod
    def _renew(cls) -> None:
        while cls._held:
            cls._renew_once()
            time.sleep(1.0)

    @classmethod
    def _renew_once(cls) -> None:
        for reference in cls._held.valuerefs():
            lease = reference()
            if lease is not None and time.monotonic() - lease._renewed >= _RENEWAL:
                with contextlib.suppress(CheckpointError):
                    if lease.is_held():
                        lease._store.put(lease.name, lease._data)
                        lease._renewed = time.monotonic()

    def _successor(self, data: bytes) -> str:
        """The name of the successor of a lease with these bytes."""
        return f"{self._first}-{checksum(data)}"

    @property
    def names(self) -> list[str]:
        """The names of its objects, in the order in which they are deleted."""
        return [*self._before, self.name]

    def is_held(self) -> bool:
        """Whether it was not released, and did not expire and was taken by another process, as when this one was
        suspended for long."""
        is_there = self._id in self._held and self._store.get(self.name) == self._data
        return is_there and not self._store.exists(self._successor(self._data))

    def release(self) -> None:
        """Deletes it. May be called again."""
        try:
            if self._is_alone or self.is_held():
                self._store.delete(self.names)
        finally:  # not before: other threads take it for the lease of a process that has ended
            self._held.pop(self._id, None)

    @classmethod
    def is_over(cls, store: Store, name: str) -> bool:
        """Whether the holder of a lease has ended, or has not renewed it for long."""
        data = store.get(name)
        if data is None:
            return True
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            holder = json.loads(data)
            if holder["host"] == host_id():
                if holder["process"] == os.getpid():
                    return holder["lease"] not in cls._held
                if holder["started"]:
                    return _started(int(holder["process"])) != str(holder["started"])
        now = cls(store, f"{NOW}{uuid.uuid4().hex}")  # an object with the store's time of now
        store.put(now.name, now._data)
        try:
            return store.age(name, now.name) > _EXPIRY
        finally:
            store.delete([now.name])


def _started(process: int) -> str:
    """When a process of this host was started, which tells it from a later one of the same number."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[19]
    except (OSError, IndexError):
        return ""
