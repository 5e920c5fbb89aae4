"""Connections between processes (:mod:`fullshard.elastic.connections`)."""

from __future__ import annotations

import os
import queue
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

import pytest

from fullshard.elastic.connections import HANGS, SILENT, Connections, _socket_of, ask, host_address

KEY = b"key"


class End(Connections):
    def __init__(self, me: int, silence: float = 60.0) -> None:
        self.progress = (0.0, 0.0)
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        told = (
            lambda process, message: self.heard.put((process, message)),
            self.hear_end,
            lambda process, why: self.heard.put((process, why)),
        )
        self.ends: list[tuple[bool, bool]] = []
        self.welcomed = queue.SimpleQueue[set[int]]()
        welcome = (lambda: "welcome", lambda _: self.welcomed.put({*self.addresses}))
        super().__init__(me, KEY, "127.0.0.1", *told, silence, 5.0, lambda: self.progress, *welcome)

    def hear_end(self, process: int, is_read: bool, has_trusted: bool) -> None:
        self.ends.append((is_read, has_trusted))
        self.heard.put((process, "ended" if is_read else "ended, unread"))


def pair() -> tuple[End, End]:
    first, second = End(0), End(1)
    assert second.connect({0: first.address, 1: second.address}, 10) == set()
    assert first.connect({0: first.address, 1: second.address}, 10) == set()
    return first, second


def test_messages_come_in_order_and_the_end_after_the_last() -> None:
    first, second = pair()
    for number in range(100):
        first.send(1, number)
    first.close()
    assert [second.heard.get(timeout=10) for _ in range(101)] == [*((0, n) for n in range(100)), (0, "ended")]
    second.close()


def break_connection(process: End, other: int, is_reset: bool = False) -> None:
    """Ends a connection as the network may: neither of the two processes says goodbye. If it is reset, what is under
    way to the other process may be lost."""
    with _socket_of(process._of[other]) as broken, open(os.devnull, "r+b", buffering=0) as nothing:
        if is_reset:
            broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.dup2(nothing.fileno(), broken.fileno())  # the number is still that of the connection
        else:
            broken.shutdown(socket.SHUT_RDWR)


def test_the_network_may_break_a_connection_with_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose connection breaks is silent, and suspected no earlier than any other that is."""
    monkeypatch.setattr("fullshard.elastic.connections._REFUSES", 0.3)
    monkeypatch.setattr("fullshard.elastic.connections._BEAT", 0.1)
    first, second = End(0, 1.5), End(1)
    second.connect({0: first.address}, 10)
    first.connect({1: second.address}, 10)
    first.host_of[1] = "another"
    break_connection(first, 1)
    began = time.monotonic()
    assert second.heard.get(timeout=10) == (0, "ended")  # of this host, so it cannot be the network
    assert first.heard.get(timeout=10) == (1, SILENT)
    assert time.monotonic() - began > 1
    first.close()
    second.close()


def test_one_that_is_killed_on_this_host_counts_as_read_unless_it_suspected_this_one() -> None:
    """What it had queued is lost, perhaps a decision to go on without a process that it suspected."""
    for suspects, said in ((set[int](), "ended"), ({0}, "ended, unread")):
        first, second = pair()
        second.suspected |= suspects
        first._beats[1] = first._beats[1]._replace(has_suspected=bool(suspects))
        break_connection(second, 0)
        assert first.heard.get(timeout=10) == (1, said)
        first.close()
        second.close()


@pytest.mark.parametrize("is_reset", [False, True])
def test_one_of_another_host_has_ended_if_its_host_refuses_connections(is_reset: bool) -> None:
    first, second = pair()
    first.host_of[1], first.addresses[1] = "another", ("127.0.0.1", 1)
    break_connection(second, 0, is_reset)
    assert first.heard.get(timeout=10) == (1, "ended, unread" if is_reset else "ended")
    first.close()
    second.close()


@pytest.mark.parametrize(("silence", "suspects", "hangs"), [(60.0, 0, 0), (0.5, 0, 0), (60.0, 1, 0), (60.0, 0, 1)])
def test_one_that_has_ended_was_trusted_if_it_had_no_time_to_suspect_this_one(
    silence: float, suspects: int, hangs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fullshard.elastic.connections._BEAT", 0.05)
    first, second = End(0), End(1, silence)
    second.connect({0: first.address}, 10)
    first.connect({1: second.address}, 10)
    first.host_of[1], first.addresses[1], first.progress = "another", ("127.0.0.1", 1), (9.0 * hangs, 0.0)
    second.suspected.update([0][:suspects])
    time.sleep(0.5)
    if silence < 60:  # beats do not come any more
        second._outgoing.pop(0)
        time.sleep(0.7)
    break_connection(second, 0, is_reset=True)
    while first.heard.get(timeout=10) != (1, "ended, unread"):
        pass
    assert first.ends == [(False, silence == 60 and not suspects and not hangs)]
    first.close()
    second.close()


def test_a_connection_that_is_reset_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another host that is about to end may accept one, and reset it."""
    first, second = pair()
    first.host_of[1], answers = "another", [ConnectionResetError(), ConnectionRefusedError()]

    def create_connection(*_: Any) -> Any:
        raise answers.pop(0)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    break_connection(first, 1)
    assert first.heard.get(timeout=2) == (1, "ended, unread")  # it may have done something meanwhile
    assert not answers
    monkeypatch.undo()
    first.close()
    second.close()


def test_one_of_another_host_has_ended_if_it_said_goodbye() -> None:
    first, second = pair()
    first.host_of[1] = "another"
    second.close()  # the process lives, and so does what listened
    assert first.heard.get(timeout=2) == (1, "ended")
    first.close()


def test_one_that_has_no_number_yet_hears_what_was_sent_before() -> None:
    first, second = End(-1), End(1)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(second.connect, {0: first.address}, 10)
        with pytest.raises(TimeoutError):
            connecting.result(0.3)
        first.begin(0)
        assert connecting.result() == set()
    second.close()
    assert first.heard.get(timeout=10) == (1, "ended")
    first.close()


def test_memory_is_sent_as_it_is_and_its_parts_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state takes longer than silence on a slow network. A program may set a timeout for its own sockets."""
    monkeypatch.setattr("fullshard.elastic.connections._BEAT", 0.05)
    socket.setdefaulttimeout(0.1)
    try:
        first, second = End(0), End(1, silence=1.0)
        second.connect({0: first.address}, 10)
        first.connect({1: second.address}, 10)
    finally:
        socket.setdefaulttimeout(None)
    monkeypatch.setattr("fullshard.elastic.connections._PART", 1 << 20)
    send_bytes = Connection.send_bytes

    def send_slowly(connection: Any, data: memoryview) -> None:
        time.sleep(0.5)
        send_bytes(connection, data)

    monkeypatch.setattr(Connection, "send_bytes", send_slowly)
    memory = bytearray(range(256)) * (1 << 14)
    first.send(1, ("state", memoryview(memory), [memoryview(b"")]))
    began = time.monotonic()
    (sender, (name, received, (empty,))) = second.heard.get(timeout=60)
    assert (sender, name, bytes(empty)) == (0, "state", b"")
    assert received == memory
    assert time.monotonic() - began > 1.5
    assert second.heard.empty()  # it was never taken for silent
    monkeypatch.undo()
    first.close()
    second.close()


def test_close_returns_after_the_last_message_was_sent() -> None:
    first, second = pair()
    for number in range(50):
        first.send(1, (number, bytes(1 << 20)))
    first.close()  # a process may end now
    assert not any(writer.is_alive() for writer in first._writers)
    assert [second.heard.get(timeout=10)[1][0] for _ in range(50)] == [*range(50)]
    second.close()


def test_a_program_that_ends_by_an_error_says_goodbye() -> None:
    first = End(0)
    program = f"""
from fullshard.elastic.connections import Connections
new = Connections(1, {KEY!r}, "127.0.0.1", *3 * [print], 60.0, 60.0, lambda: (0.0, 0.0), print, print)
new.connect({{0: {first.address}}}, 10)
new.send(0, "the last message")
raise SystemExit(1)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1
    first.host_of[1] = "another"
    assert [first.heard.get(timeout=10) for _ in range(2)] == [(1, "the last message"), (1, "ended")]
    first.close()


def test_close_does_not_wait_for_one_that_has_ended() -> None:
    first, second = pair()
    second.close()
    assert first.heard.get(timeout=10) == (1, "ended")
    began = time.monotonic()
    first.close()
    assert time.monotonic() - began < 1


def test_a_new_process_is_told_what_it_needs_and_a_stranger_nothing() -> None:
    first = End(0)
    assert ask(first.address, KEY, 10)[0] == "welcome"
    with pytest.raises(AuthenticationError):
        Client(first.address, authkey=b"another")
    assert ask(first.address, KEY, 10)[0] == "welcome"
    first.close()


def test_a_welcome_ends_once_the_new_process_has_connected_or_ended() -> None:
    first, second = End(0), End(1)
    _, welcomed = ask(first.address, KEY, 10)
    with pytest.raises(queue.Empty):
        first.welcomed.get(timeout=0.2)
    second.connect({0: first.address}, 10)
    welcomed.close()
    assert first.welcomed.get(timeout=10) == {1}  # its address is known by then
    ask(first.address, KEY, 10)[1].close()  # as one that is killed
    assert first.welcomed.get(timeout=10) == {1}
    first.close()
    second.close()


def test_processes_that_do_not_connect_are_named() -> None:
    second, began = End(1), time.monotonic()
    assert second.connect({0: ("127.0.0.1", 1), 1: second.address}, 10) == {0}
    assert time.monotonic() - began < 5  # its host says at once that nobody is there
    assert second.connect({0: ("127.0.0.1", 1), 1: second.address, 2: ("127.0.0.1", 1)}, 0.2) == {0, 2}
    second.close()


def test_silence_is_told_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullshard.elastic.connections._BEAT", 0.05)
    first, second = End(0, 0.4), End(1)
    second.connect({0: first.address}, 10)
    outgoing = second._outgoing.pop(0)  # it says nothing any more
    assert first.heard.get(timeout=10) == (1, SILENT)
    second._outgoing[0] = outgoing
    assert first.heard.get(timeout=10) == (1, "")
    first.close()
    second.close()


def test_one_that_computes_for_long_while_this_one_waits_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullshard.elastic.connections._BEAT", 0.05)
    first, second = pair()
    second.progress = (9.0, 0.0)
    with pytest.raises(queue.Empty):
        first.heard.get(timeout=0.5)  # it computes too
    first.progress = (0.0, 6.0)
    assert first.heard.get(timeout=10) == (1, HANGS)
    second.progress = (0.1, 0.0)
    assert first.heard.get(timeout=10) == (1, "")
    first.close()
    second.close()


def test_a_stranger_that_says_nothing_keeps_nobody_out() -> None:
    first = End(0)
    with socket.create_connection(first.address):
        assert ask(first.address, KEY, 10)[0] == "welcome"
    first.close()


def test_a_message_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair()

    def fail(_: int) -> Any:
        raise MemoryError

    monkeypatch.setattr("fullshard.elastic.connections.new_memory", fail)
    first.send(1, memoryview(b"data"))
    process, error = second.heard.get(timeout=10)
    assert (process, type(error)) == (0, MemoryError)
    first.close()
    second.close()


def test_a_number_is_taken_once() -> None:
    first, second, again = End(0), End(1), End(1)
    assert not second.connect({0: first.address}, 10)
    assert again.connect({0: first.address}, 0.5) == {0}
    for each in (first, second, again):
        each.close()


def test_the_address_is_one_that_the_other_host_reaches() -> None:
    assert host_address("127.0.0.1") == "127.0.0.1"
    assert host_address("localhost") == "127.0.0.1"
