"""Checkpoints in an object store, or in any other file system that fsspec knows.

There is no rename that publishes a directory, and there are no locks. So objects are written under their final names,
and the manifest publishes them. It is written last, if there is none of its name::

    .writing-step-00000010-<key>       a lease: a save writes there, or failed there and its manifest may still arrive
    step-00000010/.begun-<key>         until it is published
    step-00000010/__0_0-<key>.distcp   from every rank, several at a time
    step-00000010/.metadata            for DCP
    step-00000010/manifest.json        names the objects; from now on it is a checkpoint
    newest.json                        its name, because listings may be late

The process may end after any of them, or sleep between any two. A request may arrive after the process has taken it for
failed. So the names of objects are unique to one save, and no other save is harmed by a request that comes late.

If the lease of a save is over, other processes remove what the save has left. Before that they put a *mark*. A save
that finds a mark after it has published was taken for ended, and fails. Only objects that belong to such a lease are
removed: those of other programs stay. A removal deletes the manifest first. A reader holds a lease, too
(``.reading-*``), so that nobody removes what it reads.
"""

from __future__ import annotations

import builtins
import io
import json
import random
import re
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, cached_property, partial

from fullshard.checkpoint.blocks import BLOCK, BlockReader, BlockWriter, CheckpointError, CorruptCheckpointError
from fullshard.checkpoint.manifest import MANIFEST, METADATA, Location, StoredFile, entry_of, name_of, number_of
from fullshard.checkpoint.store import NOW, Store, StoreLease
from fullshard.platforms import after_fork
from fullshard.policies import warn

#: The most bytes of an object with tensors, or of a range that is read at once. How many of them travel at a time.
_OBJECT, _AT_A_TIME = 32 << 20, 8
#: Beginnings of the names of leases. ``_FAILED`` is that of a save that failed before it sent its manifest.
_WRITING, _FAILED, _REMOVING, _READING = ".writing-", ".failed-", ".removing-", ".reading-"
_LEASE = re.compile(r"(\.writing-|\.failed-|\.removing-)(.+)-([0-9a-f]{15})")
#: Beginnings of the names of marks, and of an object that each save makes once. The name of the newest checkpoint.
_MARK, _BEGUN, _NEWEST = ".over-", ".begun-", "newest.json"


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AT_A_TIME, "fullshard-store")


after_fork(_threads.cache_clear)  # a forked process has none of the threads


class ObjectStorage:
    """A directory of checkpoints in a store."""

    is_slow = True

    def __init__(self, directory: Location) -> None:
        self.directory, self._store = directory, Store(directory)

    def list(self) -> list[Location]:
        return [*self.newest_first()]

    def newest_first(self, step: int | None = None) -> Iterator[Location]:
        if number_of(name := self.directory.name):
            if step is None or _number(name)[0] == step:
                yield from self._those([self.directory])
            return
        noted = _threads().submit(self._store.get, _NEWEST)
        names = self._steps(self._store.list(), noted.result())
        if not names:
            yield from (found := self._those([self.directory]))
            if not found:
                self._store.refuse_missing()
        paths = [self.directory / name for name in names if step is None or _number(name)[0] == step]
        # The first one alone, because it is usually the only one that anybody wants to know.
        for start in (0, *range(1, len(paths), _AT_A_TIME)):
            yield from self._those(paths[start : start + (_AT_A_TIME if start else 1)])

    def unfinished(self) -> builtins.list[Location]:
        names = sorted(filter(number_of, self._store.list()))
        return self._those([self.directory / name for name in names], published=False)

    def _those(self, paths: builtins.list[Location], published: bool = True) -> builtins.list[Location]:
        """Those that are published, or those that are not."""
        found = _threads().map(lambda path: ObjectFiles(path).is_published(), paths)
        return [path for path, is_published in zip(paths, found, strict=True) if is_published == published]

    def begin(self, step: int | None) -> ObjectPartial:
        found = self._store.list()
        if not found:
            self._store.refuse_missing()
        if self._remove_leftovers(found):
            found = self._store.list()
        numbers = [*map(_number, self._steps(found, self._store.get(_NEWEST)))]  # also those of other programs
        step = max(numbers, default=(-1, 0))[0] + 1 if step is None else step
        made = [again for at, again in numbers if at == step]
        again = max(made, default=0)  # a lower one would be older
        while True:
            path = self.directory / (name := name_of(step, again))
            if not self._is_free(path, found):
                again += 1
                continue
            lease = StoreLease(self._store, f"{_WRITING}{name}-")
            found = self._store.list()
            # Of two saves that choose a name at once, at least one finds the lease of the other one, or its manifest.
            if not _users(name, found, lease) and not ObjectFiles(path).is_published():
                return ObjectPartial(path, step, lease.key, lease)
            lease.release()
            time.sleep(random.random() / 4)
            found = self._store.list()

    def _is_free(self, path: Location, found: Iterable[str]) -> bool:
        """Whether a save may write there. Objects that failed saves have left do not matter."""
        if _users(path.name, found) or ObjectFiles(path).is_published():
            return False
        failed = [lease[3] for lease in map(_LEASE.fullmatch, found) if lease and lease[2] == path.name]
        return all(any(key in each for key in failed) for each in Store(path).list())

    def open_partial(self, key: str) -> ObjectPartial:
        name, _, key = key.rpartition("/")
        return ObjectPartial(self.directory / name, 0, key)

    def remove(self, path: Location) -> bool:
        lease = StoreLease(self._store, f"{_REMOVING}{path.name}-")  # so that no save begins here now
        try:
            is_removed = not _users(path.name, self._store.list(), lease) and _remove(Store(path), lease)
        except BaseException:
            lease.leave(f"{_REMOVING}{path.name}-")  # a later save removes what is left
            raise
        lease.release()
        return is_removed

    def _remove_leftovers(self, found: Iterable[str]) -> bool:
        """Removes what interrupted saves and removals have left. Returns whether they have left something."""
        is_left = False
        try:
            for name in found:
                lease = _LEASE.fullmatch(name)
                if (lease or name.startswith(NOW)) and StoreLease.is_over(self._store, name):
                    is_left = True
                    if lease:
                        self._clean(*lease.groups())
                    self._store.delete([name])
                    if lease:
                        Store(self.directory / lease[2]).delete([f"{_MARK}{lease[3]}"])
            for name in self._steps(found)[:1]:  # readers mostly read the newest
                store = Store(self.directory / name)
                store.delete(
                    [each for each in store.list() if each.startswith(_READING) and StoreLease.is_over(store, each)]
                )
        except CheckpointError as error:
            warn(f"what an interrupted save has left in {self.directory} could not be removed: {error}")
        return is_left

    def _clean(self, kind: str, name: str, key: str) -> None:
        """Removes what a save or a removal has left after its lease was over."""
        store = Store(self.directory / name)
        if kind == _REMOVING:
            if not store.exists(MANIFEST) and not _is_pinned(store, names := store.list()):
                _delete_all(store, names)
            return
        store.put(f"{_MARK}{key}", b"")
        # In this order: a save publishes first, and then looks for a mark.
        manifest = store.get(MANIFEST) or b""
        names = [f"{_BEGUN}{key}"]
        if key.encode() not in manifest:
            names += [each for each in store.list() if each.endswith(f"-{key}.distcp")]
            if kind == _WRITING and not manifest and _users(name, self._store.list()) == [f"{kind}{name}-{key}"]:
                names.append(METADATA)  # otherwise it may be that of the save that took over from this one
        _delete_all(store, names)

    def _steps(self, found: Iterable[str], note: bytes | None = None) -> builtins.list[str]:
        """The names of saves in a listing, the newest first. A listing may lack the newest one, which is in a note."""
        newest = entry_of(note or b"", "newest")
        if note is not None and not number_of(newest):
            warn(f"{self.directory / _NEWEST} is ignored: it is not what was written")
        return sorted({name for name in (*found, newest) if number_of(name)}, key=_number, reverse=True)

    def files(self, path: Location) -> ObjectFiles:
        return ObjectFiles(path)

    def note(self, name: str) -> str:
        return (self._store.get(name) or b"").decode(errors="replace")

    def write_note(self, name: str, text: str) -> None:
        self._store.put(name, text.encode())


def _number(name: str) -> tuple[int, int]:
    return number_of(name) or (-1, 0)


def _users(name: str, found: Iterable[str], own: StoreLease | None = None) -> list[str]:
    """The leases in a listing that forbid a save of this name, without the caller's ``own``."""
    leases = [each for each in map(_LEASE.fullmatch, found) if each and each[2] == name and each[1] != _FAILED]
    return [each[0] for each in leases if own is None or each[0] != own.name]


def _remove(store: Store, lease: StoreLease) -> bool:
    """Removes a checkpoint, unless somebody reads it. Returns whether it did."""
    names = MANIFEST, METADATA
    data = [*_threads().map(store.get, names)]
    if _is_pinned(store, store.list()) or not lease.is_held():
        return False
    store.delete(names)
    objects = store.sizes()
    if _is_pinned(store, objects):  # a reader may have come in between
        for name, each in zip(reversed(names), reversed(data), strict=True):
            if each is not None:
                store.put(name, each)
        return False
    _delete_all(store, objects)
    return True


def _is_pinned(store: Store, names: Iterable[str]) -> bool:
    return any(not StoreLease.is_over(store, name) for name in names if name.startswith(_READING))


def _delete_all(store: Store, names: Iterable[str]) -> None:
    deque(_threads().map(lambda name: store.delete([name]), names), maxlen=0)


class ObjectPartial:
    """A checkpoint whose objects are being written."""

    largest = float(_OBJECT)

    def __init__(self, path: Location, step: int, key: str, lease: StoreLease | None = None) -> None:
        self.path, self.step, self.attempt = path, step, key
        self._store, self._lease = Store(path), lease
        self._under_way: dict[Future[None], int] = {}  # with the size of each object
        self._left = _FAILED  # the beginning of the name of the lease that it leaves if it fails
        self._begun = f"{_BEGUN}{key}"
        if lease is not None:
            self._store.put(self._begun, b"")

    @property
    def key(self) -> str:
        return f"{self.path.name}/{self.attempt}"

    @property
    def unsent(self) -> int:
        return sum(size for put, size in self._under_way.copy().items() if not put.done())

    def open(self, name: str) -> BlockWriter:
        return _ObjectWriter(self.path / name, lambda data: self._put(name, data))

    def _put(self, name: str, data: bytes) -> None:
        while len(self._under_way) >= _AT_A_TIME:
            self._wait(FIRST_COMPLETED)
        put = self._put_metadata if name == METADATA else self._store.put
        self._under_way[_threads().submit(put, name, data)] = len(data)

    def _put_metadata(self, name: str, data: bytes) -> None:
        """Its name is not unique to this save."""
        self._left = _WRITING
        if not self._store.create(name, data):
            raise self._taken_over()

    def flush(self) -> None:
        self._wait(ALL_COMPLETED)

    def _wait(self, until: str) -> None:
        for each in wait(self._under_way, return_when=until).done:
            each.result()
            del self._under_way[each]  # until now it counts as unsent

    def _is_cleaned(self) -> bool:
        """Whether another job has taken this save for ended, and removes or has removed its objects."""
        # In this order: the mark is deleted last.
        return self._store.exists(f"{_MARK}{self.attempt}") or not self._store.exists(self._begun)

    def _taken_over(self) -> CheckpointError:
        return CheckpointError(f"{self.path} was taken over by another job: this one did not answer for minutes")

    def publish(self, manifest: bytes) -> str:
        if self._lease is None or self._is_cleaned():
            raise self._taken_over()
        self._left = _WRITING
        if not self._store.create(MANIFEST, manifest):
            raise self._taken_over()
        is_cleaned = False
        with suppress(CheckpointError):  # it is published
            is_cleaned = self._is_cleaned()
        if is_cleaned:
            if self._store.get(MANIFEST) == manifest:
                self._store.delete([MANIFEST])
            raise self._taken_over()
        lease, self._lease = self._lease, None  # from now on there is nothing to discard
        try:
            Store(self.path.parent).put(_NEWEST, json.dumps({"newest": self.path.name}).encode())
            self._store.delete([self._begun])
        except CheckpointError as error:
            warn(f"{self.path} is saved, but what a save does afterwards failed: {error}")
        lease.release()
        return str(self.path.name)

    def discard(self, is_empty: bool = False) -> None:
        for each in self._under_way:
            each.cancel()
        lease, self._lease = self._lease, None
        if lease is None:
            return
        if is_empty:
            lease.release()
            return
        if self._left == _FAILED:  # otherwise its manifest may still arrive, and then it is whole
            with suppress(CheckpointError):  # a later save removes the rest, and what still arrives
                _delete_all(self._store, [name for name in self._store.list() if self.attempt in name])
        lease.leave(f"{self._left}{self.path.name}-")


class ObjectFiles:
    """The objects of a checkpoint."""

    def __init__(self, path: Location) -> None:
        self.path, self._store = path, Store(path)
        self._metadata: Future[bytes | None] | None = None

    def is_published(self) -> bool:
        """Whether it has a manifest, or is a checkpoint that DCP wrote."""
        return self.exists(MANIFEST) or (not number_of(self.path.name) and self.exists(METADATA))

    def pin(self, owner: object) -> Callable[[], object]:
        unpin: Callable[[], object] = lambda: None  # noqa: E731
        if not self._store.is_web:
            with suppress(CheckpointError, NotImplementedError):  # a store that this process may not write to
                unpin = weakref.finalize(owner, StoreLease(self._store, _READING).release)
        if number_of(self.path.name):  # what is read next, at the same time as the manifest
            self._metadata = _threads().submit(self._store.get, METADATA)
            _ = None if self._store.is_web else self._sizes
        return unpin

    def exists(self, name: str) -> bool:
        return self._store.exists(name)

    def read(self, name: str, most: int | None = None) -> bytes:
        data = self._store.get(name, 0 if most else None, most)
        if data is None:
            raise CorruptCheckpointError(f"{self.path / name} cannot be read: there is no such object")
        return data

    @cached_property
    def _sizes(self) -> Future[dict[str, int]]:
        return _threads().submit(self._store.sizes)

    def size(self, name: str, expected: int) -> int:
        if not self._store.is_web and self._sizes.result().get(name) == expected:
            return expected
        size = self._store.size(name)  # a listing may be late
        return expected if size is None else size

    def open(self, name: str, file: StoredFile) -> BlockReader:
        reader = _ObjectReader(self, self._store, name, file)
        if name == METADATA and self._metadata is not None:
            reader.ahead.append((0, file.size, self._metadata))
            self._metadata = None
        return reader

    def for_each(self, read: Callable[[str], object], files: Mapping[str, StoredFile]) -> None:
        """Reads small files at the same time, each in its thread, which has no more than that file in memory. Of a
        large one, ranges are read at the same time."""
        large = [name for name, file in files.items() if file.size >= 2 * _OBJECT]
        with ThreadPoolExecutor(_AT_A_TIME) as threads:
            deque(threads.map(read, sorted(files.keys() - large)), maxlen=0)
        for name in large:
            read(name)


class _ObjectWriter(BlockWriter):
    """Collects an object in memory, and gives it away when it is closed."""

    def _open(self, path: Location) -> None:
        self._data = io.BytesIO()

    def __init__(self, path: Location, put: Callable[[bytes], None]) -> None:
        super().__init__(path)
        self._put = put

    def _append(self, part: memoryview) -> int:
        return self._data.write(part)

    def _start_writing(self) -> None:
        pass

    def _finish(self) -> None:
        self._put(self._data.getvalue())  # bytes, as Azure's library takes no bytearray; it is not copied

    def abandon(self) -> None:
        self._data = io.BytesIO()


class _ObjectReader(BlockReader):
    """Reads ranges of an object. Those passed to :meth:`prefetch` are read ahead, several at a time."""

    def __init__(self, files: ObjectFiles, store: Store, name: str, file: StoredFile) -> None:
        self._files, self._store, self._name = files, store, name
        self._ranges: deque[tuple[int, int]] = deque()  # first and last byte of what is read next
        self.ahead: deque[tuple[int, int, Future[bytes | None]]] = deque()
        super().__init__(files.path / name, *file)

    def _open(self, path: Location) -> int:
        return self._files.size(self._name, self.size)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        if self.ahead:
            return  # it is being read already
        blocks = sorted({block for start, end in ranges for block in range(start // BLOCK, -(-end // BLOCK))})
        for block in blocks:
            start, end = block * BLOCK, min((block + 1) * BLOCK, self.size)
            if self._ranges and self._ranges[-1][1] == start and end - self._ranges[-1][0] < 2 * _OBJECT:
                start, _ = self._ranges.pop()
            self._ranges.append((start, end))
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._ranges and len(self.ahead) < _AT_A_TIME:
            start, end = self._ranges.popleft()
            from_, to = (start, end) if end - start < self.size else (None, None)  # ranges cost some servers a copy
            get = _threads().submit(partial(self._store.get, self._name, from_, to, end - start))
            self.ahead.append((start, end, get))

    def _fill(self, block: memoryview, start: int) -> int:
        while self.ahead and self.ahead[0][1] <= start:
            self.ahead.popleft()
        self._read_ahead()
        if self.ahead and self.ahead[0][0] <= start:
            first, last, future = self.ahead[0]
            data = future.result()
            if start + len(block) >= last:
                self.ahead.popleft()
        else:
            first, data = start, self._store.get(self._name, start, start + len(block))
        part = memoryview(data or b"")[start - first : start - first + len(block)]
        block[: len(part)] = part
        return len(part)

    def close(self) -> None:
        for *_, future in self.ahead:
            future.cancel()
        self.ahead.clear()
        self._ranges.clear()
