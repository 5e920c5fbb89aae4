"""Checkpoints in an object store, or in any other file system that fsspec knows.

There is no rename that publishes a directory, and there are no locks. So objects are written under their final names,
and the manifest publishes them. It is written last::

    step-00000010/.writing             a lease: the save that may write here
    step-00000010/__0_0.distcp  ...    from every rank, several at a time
    step-00000010/.metadata            for DCP
    step-00000010/manifest.json        from now on it is a checkpoint
    newest.json                        its name, because listings may be late

The process may end after any of them. What has no manifest, and the lease of a process that has ended, is a leftover,
and the next save removes it. What has neither belongs to others, such as a copy under way. A removal deletes the
manifest first. A reader holds a lease, too (``.reading-*``), so that nobody removes what it reads.
"""

from __future__ import annotations

import builtins
import itertools
import json
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, cached_property

from fullshard.checkpoint.blocks import BLOCK, BlockReader, BlockWriter, CheckpointError, CorruptCheckpointError
from fullshard.checkpoint.manifest import MANIFEST, METADATA, Location, StoredFile, entry_of, name_of, number_of
from fullshard.checkpoint.store import NOW, Lease, Store
from fullshard.policies import warn

#: The most bytes of an object, or of a range that is read at once. How many of them travel at a time.
_OBJECT, _AT_A_TIME = 32 << 20, 8
_WRITING, _READING, _NEWEST = ".writing", ".reading-", "newest.json"


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AT_A_TIME, "fullshard-store")


class ObjectStorage:
    """A directory of checkpoints in a store."""

    is_slow = True

    def __init__(self, directory: Location) -> None:
        self.directory, self._store = directory, Store(directory)

    def list(self) -> list[Location]:
        if number_of(self.directory.name):
            return self._those([self.directory])
        noted = _threads().submit(self._store.get, _NEWEST)
        names = {name for name in self._store.list() if number_of(name)}
        note = noted.result()
        newest = entry_of(note or b"", "newest")
        if note is not None and not number_of(newest):
            warn(f"{self.directory / _NEWEST} is ignored: it is not what was written")
        names |= {newest} if number_of(newest) else set()
        ordered = sorted(names, key=lambda name: number_of(name) or (), reverse=True)
        found = self._those([self.directory / name for name in ordered] or [self.directory])
        if not names and not found:
            self._store.refuse_missing()
        return found

    def unfinished(self) -> builtins.list[Location]:
        names = sorted(filter(number_of, self._store.list()))
        return self._those([self.directory / name for name in names], published=False)

    def _those(self, paths: builtins.list[Location], published: bool = True) -> builtins.list[Location]:
        """Those that are published, or those that are not."""
        found = _threads().map(lambda path: ObjectFiles(path).is_published(), paths)
        return [path for path, is_published in zip(paths, found, strict=True) if is_published == published]

    def begin(self, step: int | None) -> ObjectPartial:
        self._remove_leftovers()
        names = {*self._store.list(), *(path.name for path in self.list())}  # also those of other programs
        numbers = [number for name in names if (number := number_of(name))]
        step = max(numbers, default=(-1, 0))[0] + 1 if step is None else step
        first = max((again for at, again in numbers if at == step), default=-1) + 1
        for again in itertools.count(first):
            path = self.directory / name_of(step, again)
            if lease := Lease.taken(Store(path), _WRITING):
                if not ObjectFiles(path).is_published():
                    return ObjectPartial(path, step, lease)
                lease.release()
        raise AssertionError

    def join(self, name: str) -> ObjectPartial:
        return ObjectPartial(self.directory / name, 0)

    def remove(self, path: Location) -> bool:
        store = Store(path)
        lease = Lease.taken(store, _WRITING, succeed=True)  # so that no save begins here now
        if lease is None:
            return False
        try:
            names = MANIFEST, METADATA
            data = [*_threads().map(store.get, names)]
            if _is_pinned(store, store.list()):
                return False
            store.delete(names)
            objects = store.sizes()
            if _is_pinned(store, objects):  # a reader may have come in between
                for name, each in zip(reversed(names), reversed(data), strict=True):
                    if each is not None:
                        store.put(name, each)
                return False
            _delete_all(store, objects, lease)
            return True
        finally:
            lease.release()

    def _remove_leftovers(self) -> None:
        """Removes what saves, removals and readers have left that were interrupted."""
        names = [*filter(number_of, self._store.list())]
        stores = [Store(self.directory / name) for name in names]
        for name, store, found in zip(names, stores, _threads().map(Store.list, stores), strict=True):
            leases = [each for each in found if each.startswith((_READING, NOW))]
            store.delete([each for each in leases if Lease.is_over(store, each)])
            if not any(each.startswith(_WRITING) for each in found):
                continue  # published, or not ours, such as a copy under way
            if lease := Lease.taken(store, _WRITING, succeed=True):
                # In this order: a save publishes first, and then releases its lease.
                is_published = ObjectFiles(self.directory / name).is_published()
                left = [each for each in found if each.startswith(_WRITING)] if is_published else store.sizes()
                _delete_all(store, left, lease)
                lease.release()

    def files(self, path: Location) -> ObjectFiles:
        return ObjectFiles(path)

    def note(self, name: str) -> str:
        return (self._store.get(name) or b"").decode(errors="replace")

    def write_note(self, name: str, text: str) -> None:
        self._store.put(name, text.encode())


def _is_pinned(store: Store, names: Iterable[str]) -> bool:
    return any(not Lease.is_over(store, name) for name in names if name.startswith(_READING))


def _delete_all(store: Store, names: Iterable[str], lease: Lease) -> None:
    """Deletes objects, but not the lease under whose protection this is done."""
    deque(_threads().map(lambda name: store.delete([name]), set(names).difference(lease.names)), maxlen=0)


class ObjectPartial:
    """A checkpoint whose objects are being written."""

    largest = float(_OBJECT)

    def __init__(self, path: Location, step: int, lease: Lease | None = None) -> None:
        self.path, self.step = path, step
        self._store, self._lease = Store(path), lease
        self._under_way: dict[Future[None], int] = {}  # with the size of each object

    @property
    def unsent(self) -> int:
        return sum(size for put, size in self._under_way.copy().items() if not put.done())

    def open(self, name: str) -> BlockWriter:
        return _ObjectWriter(self.path / name, lambda data: self._put(name, data))

    def _put(self, name: str, data: bytearray) -> None:
        while len(self._under_way) >= _AT_A_TIME:
            self._wait(FIRST_COMPLETED)
        self._under_way[_threads().submit(self._store.put, name, data)] = len(data)

    def flush(self) -> None:
        self._wait(ALL_COMPLETED)

    def _wait(self, until: str) -> None:
        for each in wait(self._under_way, return_when=until).done:
            each.result()
            del self._under_way[each]  # until now it counts as unsent

    def publish(self, manifest: bytes) -> str:
        if self._lease is None or not self._lease.is_held() or not self._store.create(MANIFEST, manifest):
            raise CheckpointError(f"{self.path} was taken over by another job: this one did not answer for minutes")
        lease, self._lease = self._lease, None  # from now on there is nothing to discard
        Store(self.path.parent).put(_NEWEST, json.dumps({"newest": self.path.name}).encode())
        lease.release()
        return str(self.path.name)

    def discard(self) -> None:
        for each in self._under_way:
            each.cancel()
        with suppress(CheckpointError):  # then the next save removes the rest
            if self._lease is not None and self._lease.is_held():
                _delete_all(self._store, self._store.sizes(), self._lease)
                self._lease.release()


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
        with suppress(Exception):  # a store that cannot be written to
            unpin = weakref.finalize(owner, Lease.made(self._store, _READING).release)
        if number_of(self.path.name):  # what is read next, at the same time as the manifest
            self._metadata = _threads().submit(self._store.get, METADATA)
            _ = self._sizes
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
        listed = self._sizes.result().get(name)
        return listed if listed == expected else self._store.size(name)  # a listing may be late

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
        self._data = bytearray()

    def __init__(self, path: Location, put: Callable[[bytearray], None]) -> None:
        super().__init__(path)
        self._put = put

    def _append(self, part: memoryview) -> int:
        self._data += part
        return len(part)

    def _start_writing(self) -> None:
        pass

    def _finish(self) -> None:
        self._put(self._data)

    def abandon(self) -> None:
        self._data = bytearray()


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
            part = (start, end) if end - start < self.size else ()  # ranges cost some servers a copy
            self.ahead.append((start, end, _threads().submit(self._store.get, self._name, *part)))

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


__all__ = ["ObjectFiles", "ObjectPartial", "ObjectStorage"]
