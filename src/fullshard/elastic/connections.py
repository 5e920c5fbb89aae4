"""The connections of a process of an elastic job to every other one, and the threads that serve them.

Messages between two processes arrive in order, and the end of a process comes after its last message. The end of a
connection is certain news of the end of the process if that said goodbye, or is on this host, or if its host refuses
another connection. Otherwise the network may have broken the connection, and the process is silent. Only a process that
said goodbye has surely sent all its messages: one that is killed loses those that are queued.

Silence is not certain: a process that has sent nothing for long, not even that it is alive, may be stopped, or the
network may be cut. Nor is a process that computes for long, while this one waits.
"""

from __future__ import annotations

import atexit
import copyreg
import io
import math
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from fullshard.elastic.packed import new_memory
from fullshard.platforms import host_id

Address = tuple[str, int]

SILENT, HANGS = "is silent: it is stopped, or the network is cut", "hangs: it computes, and others wait for it"
_END, _GOODBYE = object(), None
_PART = 1 << 22  # bytes of memory that are sent at a time
_BEAT = 1.0  # seconds between two messages that say that a process is alive
_CONNECTS = 30.0  # seconds in which a new process connects
_REFUSES = 3.0  # seconds in which the host of a process that has ended refuses another connection


class Beat(NamedTuple):
    """Says that the sender is alive. Times are in seconds."""

    computes: float  # for how long the sender has computed without a wait
    sent: float
    heard: float  # ``sent`` of the last beat that the sender got from the receiver
    has_suspected: bool  # whether the sender ever suspected the receiver
    silence: float  # the limits of the sender
    hang: float


class Connections:
    """The connections of the process ``me`` to the other processes.

    These functions are called in threads of their own: ``on_message`` with the number of a process and what it sent, or
    the error of this process that kept it from reading that;
    ``on_end`` with the number of a process that has ended, whether its last message was read, and whether it surely
    never suspected this process; ``on_silence`` with the number of a process, and :data:`SILENT` if it has sent nothing
    for ``silence`` seconds, :data:`HANGS` if it hangs, or "" if neither is true any more. A process hangs if it
    computes for more than ``hang`` seconds while this process waits for as long. ``progress`` returns for how many
    seconds this process has computed without a wait, and waited. A new process that has no number yet gets what
    ``welcome`` returns; if that is not ``None``, ``on_welcomed`` is called with it once it has connected, has ended, or
    has taken too long.

    ``me`` is -1 while this process has no number. Processes that call it wait until :meth:`begin`, so no news is lost.

    Objects that are sent are pickled; the memory of a ``memoryview`` is sent as it is. A process must know the ``key``
    of the job to connect (HMAC, by the standard library).
    """

    def __init__(
        self,
        me: int,
        key: bytes,
        host: str,
        on_message: Callable[[int, Any], None],
        on_end: Callable[[int, bool, bool], None],
        on_silence: Callable[[int, str], None],
        silence: float,
        hang: float,
        progress: Callable[[], tuple[float, float]],
        welcome: Callable[[], Any],
        on_welcomed: Callable[[Any], None],
    ) -> None:
        self.me, self.key, self._on_message, self._on_end = me, key, on_message, on_end
        self._welcome, self._on_welcomed = welcome, on_welcomed
        self.addresses: dict[int, Address] = {}
        self.host_of: dict[int, str] = {}
        self._listener = Listener((host, 0), backlog=64)
        self.address: Address = self._listener.address
        self._on_silence, self._silence, self._hang, self._progress = on_silence, silence, hang, progress
        self._heard: dict[int, float] = {}  # when something came last
        self._beats: dict[int, Beat] = {}  # the last ones that came
        self.suspected: set[int] = set()  # processes that this one ever took for silent or hanging
        self._longest = 0.0  # for how long this process has computed at most: others may have suspected it
        self._of: dict[int, Connection] = {}
        self._unreached: set[int] = set()  # processes that this one called in vain
        self._outgoing: dict[int, queue.SimpleQueue[Any]] = {}
        self._writers: list[threading.Thread] = []
        self._changed, self._is_open = threading.Condition(), True
        self._pid = os.getpid()
        atexit.register(self.close)  # a program that ends by an error says goodbye too
        self._start(self._accept, "accept")
        self._start(self._beat, "beat")

    def _start(self, run: Callable[..., None], name: str, *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=arguments, name=f"fullshard-elastic-{name}", daemon=True)
        thread.start()
        return thread

    def begin(self, me: int) -> None:
        """Gives this process its number."""
        with self._changed:
            self.me = me
            self._changed.notify_all()

    def connect(self, addresses: Mapping[int, Address], patience: float) -> set[int]:
        """Connects with processes: this one calls those with smaller numbers, and waits for the calls of the others.
        Returns those with which there is no connection after ``patience`` seconds."""
        for process, address in addresses.items():
            if process < self.me:
                self._start(self._call, "call", process, address)
        with self._changed:
            others = {*addresses} - {self.me}
            self._changed.wait_for(lambda: others <= self._of.keys() | self._unreached, patience)
            return others - self._of.keys()

    def _call(self, process: int, address: Address) -> None:
        try:
            connection, now = Client(address, authkey=self.key), _now()
            connection.send((self.me, self.address, host_id()))
            self._serve(process, address, _receive(connection, lambda: None), connection, now)
        except (OSError, EOFError):  # it has ended
            with self._changed:
                self._unreached.add(process)
                self._changed.notify_all()

    def owns(self, ends: tuple[str, str]) -> bool:
        """Whether a socket with these two ends is one of the connections."""
        return any(f"{host}:{port}" in ends for host, port in (self.address, *self.addresses.values()))

    def send(self, process: int, message: Any) -> None:
        """Sends an object, in order. It is pickled later, in another thread, so it must not change any more."""
        if (outgoing := self._outgoing.get(process)) is not None:
            outgoing.put(message)

    def close(self) -> None:
        """Ends all connections, after what was sent."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:  # a fork has none of the threads
            return
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        for outgoing in [*self._outgoing.values()]:
            outgoing.put(_GOODBYE)
        deadline = time.monotonic() + 3 * _BEAT  # one that is stopped reads nothing
        for writer in self._writers:
            writer.join(max(0.0, deadline - time.monotonic()))
        with suppress(OSError):
            socket.create_connection(self.address, _BEAT).close()  # else its thread waits for one more call
        with suppress(OSError):
            self._listener.close()

    def _accept(self) -> None:
        while self._is_open:
            with suppress(OSError):
                self._start(self._greet, "greet", self._listener.accept())

    def _greet(self, connection: Connection) -> None:
        with suppress(Exception):  # a stranger, or one that has ended meanwhile
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            said = connection.recv()
            with self._changed:
                self._changed.wait_for(lambda: said is None or self.me >= 0 or not self._is_open)
            if not self._is_open:  # the call was under way before the end
                connection.close()
            elif said is None:
                welcome = self._welcome()
                with suppress(EOFError, OSError):
                    connection.send(welcome)
                    connection.poll(_CONNECTS if welcome is not None else 0.0)  # until it ends the connection
                if welcome is not None:
                    self._on_welcomed(welcome)
            elif said[0] not in self._of:
                self._serve(said[0], said[1], said[2], connection, _now(), host_id())

    def _serve(
        self, process: int, address: Address, host: str, connection: Connection, greeted: float, *first: Any
    ) -> None:
        """Begins to read and to write, the ``first`` messages before all others."""
        self._beats[process] = Beat(0.0, -math.inf, greeted, False, self._silence, self._hang)
        with _socket_of(connection) as found:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._heard[process], self.addresses[process], self.host_of[process] = time.monotonic(), address, host
        outgoing = queue.SimpleQueue[Any]()
        for message in first:
            outgoing.put(message)
        with self._changed:
            self._outgoing[process], self._of[process] = outgoing, connection
            self._start(self._read, "read", process, connection)
            self._writers.append(self._start(self._write, "write", connection, outgoing))
            self._changed.notify_all()
        if process in self.suspected:  # it did not answer at first
            self._on_silence(process, "")

    def _read(self, process: int, connection: Connection) -> None:
        said_goodbye = is_read = False
        while True:
            try:
                message = _receive(connection, partial(self._note_heard, process))
            except (EOFError, OSError) as error:
                is_read = not getattr(error, "errno", None)  # else the connection was reset, or nobody answered
                break
            except Exception as error:  # such as one of memory: the rest of what comes cannot be read either
                self._on_message(process, error)
                return
            if message is _GOODBYE:
                said_goodbye = True
            elif isinstance(message, Beat):
                heard = max(message.heard, self._beats[process].heard)  # a first beat has heard none of this process
                self._beats[process] = message._replace(heard=heard)
            else:
                self._on_message(process, message)
        if (outgoing := self._outgoing.pop(process, None)) is not None:
            outgoing.put(_END)
        is_near = self.host_of[process] == host_id()  # so the connection lost nothing
        seconds = 0.0 if said_goodbye or is_near else self._seconds_until_refusal(self.addresses[process])
        if seconds is not None:  # one that answered for long may have decided what cannot be read any more
            self._heard.pop(process, None)
            was_trusted = seconds < _BEAT and self._was_trusted(process)
            is_read = said_goodbye or (was_trusted and (is_near or (is_read and not seconds)))
            self._on_end(process, is_read, was_trusted)

    def _note_heard(self, process: int) -> None:
        self._heard[process] = time.monotonic()

    def _was_trusted(self, process: int) -> bool:
        """Whether a process that has ended surely never suspected this one: it said so, and has ended before it could
        have missed the beats of this one for as long as silence takes."""
        beat = self._beats[process]
        return not beat.has_suspected and self._longest <= beat.hang and _now() < beat.heard + beat.silence

    def _seconds_until_refusal(self, address: Address) -> float | None:
        """For how long a process answers before its host says that no process is at an address: one that ends may be
        there a moment longer. ``None`` if the host does not say so."""
        began, now = time.monotonic(), 0.0
        while self._is_open and now < began + _REFUSES:
            try:
                socket.create_connection(address, _REFUSES).close()
            except ConnectionRefusedError:
                return max(0.0, now - began)
            except ConnectionError:  # the process is about to end
                pass
            except OSError:  # nobody answers
                return None
            time.sleep(_REFUSES / 50)
            now = time.monotonic()
        return None

    def _beat(self) -> None:
        silent, last = dict[int, str](), time.monotonic()
        while self._is_open:
            computes, waits = self._progress()
            self._longest = max(self._longest, computes)
            for process, outgoing in [*self._outgoing.items()]:
                heard, limits = self._beats[process].sent, (self._silence, self._hang)
                outgoing.put(Beat(computes, _now(), heard, process in self.suspected, *limits))
            time.sleep(_BEAT)
            now = time.monotonic()
            if now - last > 3 * _BEAT:  # this process was stopped itself: what came meanwhile is not read yet
                self._heard = dict.fromkeys(self._heard, now)
            last = now
            for process, heard in [*self._heard.items()]:
                why = SILENT if now - heard > self._silence else ""
                why = why or (HANGS if min(waits, self._beats[process].computes) > self._hang else "")
                if why != silent.get(process, ""):
                    silent[process] = why
                    self.suspected.add(process)
                    self._on_silence(process, why)

    def _write(self, connection: Connection, outgoing: queue.SimpleQueue[Any]) -> None:
        with suppress(OSError, ValueError):
            while (message := outgoing.get()) is not _END:
                _send(connection, message)
                if message is _GOODBYE:
                    break
            with _socket_of(connection) as found:
                found.shutdown(socket.SHUT_WR)


def _now() -> float:
    """Seconds, with those in which this host sleeps if the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class _Pickler(pickle.Pickler):
    """Leaves the memory of a ``memoryview`` to ``buffer_callback``."""

    dispatch_table = copyreg.dispatch_table | {memoryview: lambda view: (memoryview, (pickle.PickleBuffer(view),))}


def _send(connection: Connection, message: Any) -> None:
    """Sends an object, then the memory of its views, which is not copied."""
    pickled, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(pickled, 5, buffer_callback=buffers.append).dump(message)
    views = [buffer.raw() for buffer in buffers]
    connection.send((pickled.getvalue(), [view.nbytes for view in views]))
    for view in views:
        for start in range(0, view.nbytes, _PART):
            connection.send_bytes(view[start : start + _PART])


def _receive(connection: Connection, on_part: Callable[[], None]) -> Any:
    """Receives what :func:`_send` sends. Calls ``on_part`` for each part of it that comes."""
    pickled, sizes = connection.recv()
    on_part()
    buffers = [new_memory(size) for size in sizes]
    for buffer in buffers:
        for start in range(0, buffer.nbytes, _PART):
            connection.recv_bytes_into(buffer, start)
            on_part()
    return pickle.loads(pickled, buffers=buffers)


@contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    """The socket of a connection, which stays open."""
    found = socket.socket(fileno=connection.fileno())
    found.setblocking(True)  # whatever socket.setdefaulttimeout() says
    try:
        yield found
    finally:
        found.detach()


def ask(address: Address, key: bytes, patience: float) -> tuple[Any, Connection]:
    """What a process tells one that has no number yet, and the connection, to be closed once this one has connected.
    Raises OSError or EOFError if the process has ended, or does not answer for ``patience`` seconds."""
    answer = Future[tuple[Any, Connection]]()

    def call() -> None:
        try:
            connection = Client(address, authkey=key)
            connection.send(None)
            answer.set_result((connection.recv(), connection))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, name="fullshard-elastic-ask", daemon=True).start()
    return answer.result(patience)


def answers(address: Sequence[Any], key: bytes, patience: float) -> bool:
    """Whether a process still is at an address."""
    with suppress(OSError, EOFError):
        ask((address[0], address[1]), key, patience)[1].close()
        return True
    return False


def host_address(towards: str = "192.0.2.1") -> str:
    """The address at which a host that this one reaches as ``towards``, by default any other, can reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):
        asked.connect((towards, 9))  # sends nothing
        return str(asked.getsockname()[0])
    return "127.0.0.1"
