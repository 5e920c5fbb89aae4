"""The progress of a long save: each rank notes its bytes in the process group's store, and the first rank logs them.

A short save notes nothing. The threads that train and write only count.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import suppress
from typing import Any, ClassVar

from fullshard.checkpoint.blocks import ON_WRITTEN
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.storage import Partial
from fullshard.text import bytes_text
from fullshard.torch_private import default_store

#: Seconds between two lines in the log. Ranks note their bytes twice as often.
PERIOD = 10.0
_log = logging.getLogger("fullshard")


class Progress:
    """A context in which this rank writes ``total`` bytes to ``partial``, or waits until the other ranks have written.
    ``key`` is the same on all ranks, and different for each save."""

    _now: ClassVar[Progress | None] = None
    _thread: ClassVar[threading.Thread | None] = None  # one for all saves: to start one takes as long as a small save

    def __init__(self, ranks: Ranks, partial: Partial, step: int, key: str, total: int) -> None:
        self._ranks, self._partial, self._step, self._key, self._total = ranks, partial, step, key, total
        self._written, self._began, self._notes = 0, time.monotonic(), 0

    def __enter__(self) -> None:
        self._also = ON_WRITTEN.get()
        self._token = ON_WRITTEN.set(self._count)
        Progress._now = self
        if self._thread is None or not self._thread.is_alive():
            Progress._thread = threading.Thread(target=self._run, name="fullshard.checkpoint.progress", daemon=True)
            Progress._thread.start()

    def __exit__(self, *_: object) -> None:
        ON_WRITTEN.reset(self._token)
        Progress._now = None

    def _count(self, nbytes: int) -> None:
        self._written += nbytes
        self._also(nbytes)

    @classmethod
    def _run(cls) -> None:
        while True:
            time.sleep(PERIOD / 10)
            now = cls._now
            if now is not None and time.monotonic() - now._began >= (now._notes + 1) * PERIOD / 2:
                with suppress(RuntimeError):  # the store is gone: the save itself says what happened
                    now._note()

    def _note(self) -> None:
        self._notes += 1
        found = self._exchange()
        if self._ranks.first and self._notes % 2 == 0 and self._now is self:
            _log.info(self._text(found))

    def _exchange(self) -> dict[int, list[int]]:
        """Notes the bytes of this rank. Returns on the first rank, by rank, the written bytes and all bytes."""
        own = [min(self._written - self._partial.unsent, self._total), self._total]
        if self._ranks.group is None:
            return {0: own}
        store, name = default_store(), f"fullshard/save/{self._ranks.group.group_name}"
        store.set(f"{name}/{self._ranks.rank}", json.dumps([self._key, *own]))
        keys = [f"{name}/{rank}" for rank in range(self._ranks.size if self._ranks.first else 0)]
        notes: list[list[Any]] = [json.loads(store.get(key)) if store.check([key]) else [""] for key in keys]
        return {rank: note[1:] for rank, note in enumerate(notes) if note[0] == self._key}

    def _text(self, found: dict[int, list[int]]) -> str:
        written, total = (bytes_text(sum(each)) for each in zip(*found.values(), strict=True))
        text = f"step {self._step}: {written} of {total} written after {time.monotonic() - self._began:.0f} s"
        if missing := [rank for rank in range(self._ranks.size) if rank not in found]:
            return f"{text} by the other ranks; rank {missing[0]} has not begun"
        last = min(found, key=lambda rank: found[rank][0] / max(1, found[rank][1]))
        written, total = map(bytes_text, found[last])
        return f"{text}; rank {last} is last with {written} of {total}" if self._ranks.size > 1 else text
