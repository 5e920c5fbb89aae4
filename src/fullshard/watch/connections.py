"""The network connections of this process: the watch's own to the store, and those of the backend to other ranks.

Owns what may be done to them from outside: to ask the store and not wait for ever, to see when something came last, and
whose ends they are. It leaves to :mod:`fullshard.watch.watch` which of them to close.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from fullshard.platforms import ready
from fullshard.torch_private import port_of

_log = logging.getLogger("fullshard")

#: Seconds after which the store counts as silent, and seconds after a failure until it is asked again.
_ANSWER, _AGAIN = 5.0, 30.0
#: Seconds between two probes of another host, and the number of unanswered ones after which the system itself closes a
#: connection: late, because the watch can say why it does. A few in a row are no accident.
_PROBE, _PROBES, _UNANSWERED = 5, 60, 3


class StoreConnection:
    """A connection to the store with a time limit, for when the store's process is stopped or busy.

    A request that is not answered in time is left to a thread. Nothing else is asked until it is answered.
    """

    def __init__(self, store: Any, rank: int) -> None:
        known, self._store = {ends for _, ends in connected_sockets()}, store.clone()
        self.port = port_of(self._store)
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._rank, self._lock, self._is_closed = rank, threading.Lock(), False
        self._silent_since: float | None = None
        self._not_before = 0.0  # time until which nothing is asked
        new = (each for each, ends in connected_sockets() if ends not in known and ends[1].endswith(f":{self.port}"))
        #: Those to its server, if it has one: a request to one that has gone prints the stack of C++.
        self._connections = [each.dup().detach() for each in new]
        threading.Thread(target=self._serve, name="fullshard-store", daemon=True).start()

    @property
    def has_gone(self) -> bool:
        """Whether the process that has the store has ended, as far as the system says."""
        return self._is_closed or bool(ready(self._connections, "POLLRDHUP"))

    @property
    def is_silent(self) -> bool:
        """Whether the store has not answered the last request."""
        return self._silent_since is not None

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
                found = do()
            except Exception as error:
                found = error
            with self._lock:
                answer.put(found)
                if self._silent_since is not None and not isinstance(found, Exception):
                    silence = time.monotonic() - self._silent_since
                    self._silent_since, self._not_before = None, 0.0
                    _log.warning("The store answers rank %d again, after %.0f s", self._rank, silence)

    def close(self) -> None:
        """Stop asking."""
        self._asked.put(None)
        self._is_closed = True
        for each in self._connections:
            os.close(each)

    def _ask(self, do: Callable[[], Any]) -> Any:
        if time.monotonic() < self._not_before or self.has_gone:
            raise NoAnswerError
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((do, answer))
        try:
            found = answer.get(timeout=_ANSWER)
        except queue.Empty:
            with self._lock:
                if answer.empty():
                    self._pause(float("inf"), f"has not answered rank {self._rank} for {_ANSWER:.0f} s")
                    raise NoAnswerError from None
            found = answer.get()
        if isinstance(found, Exception):
            if not self.has_gone:  # if it has gone, its program is over
                with self._lock:
                    self._pause(time.monotonic() + _AGAIN, f"failed rank {self._rank} ({str(found)[:200]})")
            raise NoAnswerError from found
        return found

    def _pause(self, until: float, why: str) -> None:
        """Stop asking for a while, and log that once."""
        self._not_before = until
        if self._silent_since is None:
            self._silent_since = time.monotonic()
            _log.warning(
                "The store in which ranks report what they do %s, for example because its process is stopped or busy, "
                "or its host cannot be reached. Until it answers, no rank can tell where this rank is, and this rank "
                "cannot tell where others are; training goes on",
                why,
            )


class NoAnswerError(Exception):
    """The store has gone, or does not answer."""


def connected_sockets() -> Iterator[tuple[socket.socket, tuple[str, str]]]:
    """Duplicates of this process's connected sockets, each with its own end and the other end. None on a system that
    does not list open files."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd" if os.path.exists("/proc/self/fd") else "/dev/fd"):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as found:
                        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                            here, there = found.getsockname()[:2], found.getpeername()[:2]
                            yield found, (f"{here[0]}:{here[1]}", f"{there[0]}:{there[1]}")


def _tcp_info(connection: socket.socket) -> bytes:
    """Linux's ``struct tcp_info``; empty on a system that does not tell."""
    if hasattr(socket, "TCP_INFO"):
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return b""


def quiet_seconds(connection: socket.socket) -> float:
    """Seconds since something was received; infinite if the system does not say."""
    with suppress(OSError, struct.error):
        info = _tcp_info(connection)
        return float(struct.unpack_from("I", info, 52)[0]) / 1000  # tcpi_last_data_recv
    return float("inf")


def probe(connection: socket.socket) -> None:
    """Let the system ask the other host every few seconds whether it is there."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", _PROBE), ("TCP_KEEPINTVL", _PROBE), ("TCP_KEEPCNT", _PROBES)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def unanswered_seconds(connection: socket.socket) -> float:
    """Seconds for which the other host has left data and probes unanswered; 0 if there are none, or the system does
    not say. The system of a host answers even if the process is stopped or busy."""
    with suppress(OSError, struct.error, IndexError):
        info = _tcp_info(connection)
        if info[2] + info[3] >= _UNANSWERED:  # tcpi_retransmits, tcpi_probes: since the last answer
            return float(struct.unpack_from("I", info, 56)[0]) / 1000  # tcpi_last_ack_recv
    return 0.0
