"""Objects by name in a store: put, get a range, list, delete. Every request has a time limit, and is repeated if it
fails.

Owns what is particular about stores. Requests fail now and then, so each is repeated with growing pauses. A *lease* is
an object that says which process uses others: it takes the place of a lock, and expires if that process has ended.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fullshard.checkpoint.blocks import CheckpointError
from fullshard.platforms import after_fork, host_id
from fullshard.policies import warn

_Result = TypeVar("_Result")

#: Pauses before a failed request is repeated, in seconds.
PAUSES = (0.1, 0.3, 1.0, 3.0, 10.0)
#: Seconds after which a request without an answer has failed, and for how long failed requests are repeated. Both grow
#: with the bytes that a request moves: a link that moves fewer bytes in a second than this is too slow.
LIMIT, PATIENCE, _SLOWEST = 30.0, 45.0, 128 << 10
#: Bytes to expect of an object whose size is not known, such as a manifest.
_UNKNOWN = 8 << 20
#: Seconds between two renewals of a lease, and seconds without one after which it has expired.
_RENEWAL, _EXPIRY = 30.0, 300.0
#: The prefix of objects that are made to read the store's clock.
NOW = ".now-"
#: The protocols of stores in which the first part of a path is a bucket or a container, which must exist already.
_WITH_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "r2"}


class Store:
    """The objects below a ``UPath``, by names relative to it.

    Attributes:
        is_web: whether it is a web server: objects can be read, but neither written nor listed reliably.

    Raises:
        CheckpointError: a request was refused, or failed each time that it was repeated.
    """

    def __init__(self, root: Any) -> None:
        self._made, self._root, self._url = root.fs, root.path.rstrip("/"), str(root).rstrip("/")
        self._process = os.getpid()
        protocol = self._made.protocol
        protocols = {protocol} if isinstance(protocol, str) else {*protocol}
        self.is_web = not protocols.isdisjoint({"http", "https"})
        self._bucket = self._root.partition("/")[0] if protocols & _WITH_BUCKETS else ""

    @property
    def _fs(self) -> Any:
        made = self._made
        if made.async_impl and self._process != os.getpid():  # it lacks the thread that sends its parent's requests
            self._made, self._process = type(made)(*made.storage_args, **made.storage_options), os.getpid()
        return self._made

    def put(self, name: str, data: bytes) -> None:
        """Writes an object, whether there is one or not."""
        try:
            self._repeat(name, lambda path, limit: self._call("pipe_file", limit, path, data), len(data))
        except FileNotFoundError as error:
            raise self._no_bucket() from error

    def create(self, name: str, data: bytes) -> bool:
        """Writes an object if there is none of this name. Returns whether it did. Of several processes that try, one
        succeeds; in stores without conditional writes, the last one."""
        is_written = False

        def write(path: str, limit: float) -> None:
            nonlocal is_written
            if self._call("exists", limit, path):
                raise FileExistsError(path)
            try:
                self._call("pipe_file", limit, path, data, mode="create")
            except (NotImplementedError, TypeError, ValueError, OSError) as error:
                if isinstance(error, OSError) and error.errno != errno.ENOSYS:
                    raise
                self._call("pipe_file", limit, path, data)
            is_written = True

        # The answer to a request that succeeded may be lost, and then its repetition finds the object.
        try:
            self._repeat(name, write, len(data))
        except FileExistsError:
            pass
        except FileNotFoundError as error:
            raise self._no_bucket() from error
        try:
            return self.get(name) == data
        except CheckpointError:
            if is_written:  # the store has said so
                return True
            raise

    def get(self, name: str, start: int | None = None, end: int | None = None, nbytes: int = 0) -> bytes | None:
        """The bytes of an object, or of a range of it; ``None`` if there is no such object. ``nbytes``: how many bytes
        to expect, if that is known."""
        length = end - (start or 0) if end is not None else nbytes or _UNKNOWN
        try:
            data: bytes = self._repeat(
                name, lambda path, limit: self._call("cat_file", limit, path, start=start, end=end), length
            )
        except FileNotFoundError:
            return None
        if end is not None and len(data) > length:  # some web servers know no ranges, and send everything
            return bytes(data[start or 0 : end])
        return bytes(data)

    def size(self, name: str) -> int | None:
        """The size of an object; -1 if there is none; ``None`` if the store does not say."""
        try:
            found = self._repeat(name, lambda path, limit: self._call("info", limit, path))
        except FileNotFoundError:
            return -1
        size = found.get("size")
        return None if size is None else int(size) if found["type"] == "file" else -1

    def exists(self, name: str) -> bool:
        if self.is_web:  # its library answers in the same way if the server is out of reach
            return self.get(name, 0, 1) is not None
        return self.size(name) != -1

    def list(self) -> list[str]:
        """The first part of each name."""
        return [*self._listed("ls")]

    def sizes(self) -> dict[str, int]:
        """The names of all objects, and their sizes in bytes."""
        return {name: int(each["size"] or 0) for name, each in self._listed("find", detail=True).items()}

    def _listed(self, method: str, detail: bool = False) -> dict[str, Any]:
        try:
            found = self._repeat("", lambda path, limit: self._call(method, limit, path, detail=detail))
        except FileNotFoundError:
            return {}
        except CheckpointError as error:
            if self.is_web and 400 <= getattr(error.__cause__, "status", 0) < 500:  # it lists nothing
                return {}
            raise
        below = f"{self._root}/"
        by_path = found if detail else dict.fromkeys(found)
        return {path.rstrip("/").removeprefix(below): each for path, each in by_path.items() if path.startswith(below)}

    def refuse_missing(self) -> None:
        """Raises CheckpointError if nothing can be saved here, because there is no bucket of this name, because it is
        an object, or because it is on a web server."""
        if self.is_web:
            raise CheckpointError(f"{self._url} is not a checkpoint, and nothing can be saved on a web server")
        if self.exists(""):
            raise CheckpointError(f"{self._url} is an object, not a directory")
        if self._bucket and self._lacks_bucket():
            raise self._no_bucket()

    def _lacks_bucket(self) -> bool:
        """Whether there is certainly no bucket of this name."""
        lacks = False
        for method in ("info", "ls"):  # the cheaper one may not find an empty bucket
            try:
                self._call(method, LIMIT, self._bucket)
                return False
            except Exception as error:  # where it may not be read, it is there
                lacks = isinstance(error, FileNotFoundError)
        return lacks

    def _no_bucket(self) -> CheckpointError:
        return CheckpointError(
            f"{self._url} cannot be used: there is no bucket or container '{self._bucket or self._root}'"
        )

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects, in this order. Those that do not exist are skipped."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._repeat(name, lambda path, limit: self._call("rm_file", limit, path))

    def age(self, name: str, newer: str) -> float:
        """By how many seconds an object is older than another one, by the clock of the store; 0 if it does not say."""
        times = list[datetime]()
        for each in (name, newer):
            try:
                times.append(self._repeat(each, lambda path, limit: self._call("modified", limit, path)))
            except (NotImplementedError, FileNotFoundError):
                return 0.0
        return (times[1] - times[0]).total_seconds()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _call(self, method: str, limit: float, *args: Any, **options: Any) -> Any:
        """One request. Raises TimeoutError if there is no answer after ``limit`` seconds."""
        fs = self._fs
        fs.invalidate_cache()  # other processes change what libraries remember of listings
        if fs.async_impl and (call := getattr(fs, f"_{method}", None)):
            from fsspec.asyn import sync

            return sync(fs.loop, call, *args, timeout=limit, **options)  # which cancels it
        answer = Future[Any]()

        def run() -> None:
            try:
                answer.set_result(getattr(fs, method)(*args, **options))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="fullshard-request", daemon=True).start()
        return answer.result(limit)

    def _repeat(self, name: str, request: Callable[[str, float], _Result], nbytes: int = 0) -> _Result:
        path, began, more = self._path(name), time.monotonic(), nbytes / _SLOWEST
        for attempt, pause in enumerate((*PAUSES, None), 1):
            try:
                return request(path, LIMIT + more)
            except (FileNotFoundError, FileExistsError, NotImplementedError):
                raise
            except Exception as error:  # the libraries of stores have no common class of errors
                what = f"{type(error).__name__}: {error}"
                if isinstance(error, TimeoutError) and not str(error):
                    what = f"no answer in {LIMIT + more:.0f} s"
                refused = isinstance(error, PermissionError | IsADirectoryError | NotADirectoryError)
                if refused or 400 <= getattr(error, "status", 0) < 500:  # of a web server
                    raise CheckpointError(f"{self._url}/{name}: the store refused a request: {what}") from error
                if pause is None or time.monotonic() - began > PATIENCE + more:
                    times = f"{attempt} times" if attempt > 1 else "once"
                    raise CheckpointError(f"{self._url}/{name}: the store failed {times}: {what}") from error
            time.sleep(pause * random.uniform(0.5, 1.5))
        raise AssertionError


class StoreLease:
    """An object by which this process holds others. It is renewed in the background until it is released.

    Nobody else ever makes an object of its name. So a request about it does no harm, however late it arrives.

    Attributes:
        key: the end of its name, which no other lease has.
    """

    _held: ClassVar[weakref.WeakValueDictionary[str, StoreLease]] = weakref.WeakValueDictionary()
    _renewing: threading.Thread | None = None

    def __init__(self, store: Store, prefix: str) -> None:
        """Makes a lease. Its name is the prefix and its key."""
        self._store, self._process, self._renewed = store, os.getpid(), time.monotonic()
        self.key = uuid.uuid4().hex[:15]
        self.name = f"{prefix}{self.key}"
        self._data = _holder(self.key)
        self._held[self.key] = self  # not later: other threads take it for the lease of a process that has ended
        if self._renewing is None or not self._renewing.is_alive():
            StoreLease._renewing = threading.Thread(target=self._renew, name="fullshard-leases", daemon=True)
            StoreLease._renewing.start()
        store.put(self.name, self._data)

    @classmethod
    def _renew(cls) -> None:
        while True:  # a thread that is about to end would not see a new lease
            cls._renew_once()
            time.sleep(_RENEWAL / 30)

    @classmethod
    def _renew_once(cls) -> None:
        for reference in cls._held.valuerefs():
            lease = reference()
            if lease is not None and time.monotonic() - lease._renewed >= _RENEWAL:
                with contextlib.suppress(CheckpointError):
                    if lease.key in cls._held and lease.is_held():
                        lease._store.put(lease.name, lease._data)
                        lease._renewed = time.monotonic()

    def is_held(self) -> bool:
        """Whether it is still there: other processes delete it if this one was suspended for long."""
        return self._store.exists(self.name)

    def release(self) -> None:
        """Deletes it. May be called again, and in a forked process, which does not hold it."""
        if self._process != os.getpid() or self._held.pop(self.key, None) is None:
            return
        try:
            self._store.delete([self.name])
        except CheckpointError as error:
            warn(f"a lease could not be deleted, and expires in {_EXPIRY / 60:.0f} minutes: {error}")

    def leave(self, prefix: str) -> None:
        """Ends it, but lets it expire, under a name with another prefix: requests may still be under way to what it
        protects."""
        if self._process != os.getpid() or self._held.pop(self.key, None) is None:
            return
        with contextlib.suppress(CheckpointError):  # then the old name expires
            self._store.put(f"{prefix}{self.key}", b"")
            if self.name != f"{prefix}{self.key}":
                self._store.delete([self.name])

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
        now = f"{NOW}{uuid.uuid4().hex}"  # an object with the store's time of now
        store.put(now, _holder(now))
        try:
            return store.age(name, now) > _EXPIRY
        finally:
            store.delete([now])


def _holder(key: str) -> bytes:
    """The bytes of a lease of this process."""
    process = os.getpid()
    return json.dumps({"host": host_id(), "process": process, "started": _started(process), "lease": key}).encode()


def _started(process: int) -> str:
    """When a process of this host was started, which tells it from a later one of the same number."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _forget_parent() -> None:
    """Ends what a forked process has of its parent's leases, and of the thread that renews them."""
    StoreLease._held, StoreLease._renewing = weakref.WeakValueDictionary(), None


after_fork(_forget_parent)
