"""The network connections of this process: one of its own to the store, and those to other ranks, which others made.

Owns what may be done to them from outside: to ask the store and not wait for ever, to see when something came last, and
whose ends they are. It leaves to :mod:`fullshard.comm.watch` which of them to close.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from fullshard.torch_private import port_of

#: Seconds after which the store is taken for one that does not answer.
_ANSWER = 5.0


class StoreConnection:
    """A connection to the store that is given up when it does not answer, as where its rank is stopped."""

    def __init__(self, store: Any) -> None:
        known, self._store = {ends for _, ends in connected_sockets()}, store.clone()
        self.port = port_of(self._store)
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._is_silent = False
        #: Of the connections to its server, if it has one: a request to one that has gone prints the stack of C++.
        self._poll = select.poll()
        new = (each for each, ends in connected_sockets() if ends not in known and ends[1].endswith(f":{self.port}"))
        self._connections = [each.dup() for each in new]
        for each in self._connections:
            self._poll.register(each, getattr(select, "POLLRDHUP", 0))
        threading.Thread(target=self._serve, name="fullshard-store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> str | None:
        """The value of a key; ``None`` if there is none."""
        found = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else bytes(found).decode()

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            do, answer = asked
            try:
                answer.put(do())
            except Exception as error:
                answer.put(error)

    def close(self) -> None:
        """Ask nothing any more."""
        self._asked.put(None)
        self._is_silent = True
        for each in self._connections:
            each.close()

    def _ask(self, do: Callable[[], Any]) -> Any:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if not self._is_silent and not self._poll.poll(0):
            self._asked.put((do, answer))
            with suppress(queue.Empty):
                found = answer.get(timeout=_ANSWER)
                if isinstance(found, Exception):
                    self._is_silent = True
                    raise NoAnswerError from found
                return found
        self._is_silent = True
        raise NoAnswerError


class NoAnswerError(Exception):
    """The store has gone, or does not answer."""


def connected_sockets() -> Iterator[tuple[socket.socket, tuple[str, str]]]:
    """Duplicates of the connected sockets of this process, and their ends, this one and the other."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as found:
                        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                            here, there = found.getsockname()[:2], found.getpeername()[:2]
                            yield found, (f"{here[0]}:{here[1]}", f"{there[0]}:{there[1]}")


def quiet_seconds(connection: socket.socket) -> float:
    """Seconds since something came; infinite if the system does not say."""
    with suppress(OSError, AttributeError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return float(struct.unpack_from("I", info, 52)[0]) / 1000  # tcpi_last_data_recv
    return float("inf")
