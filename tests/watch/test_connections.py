"""The watch asks the store and never waits for it for long, and sees when a connection was last used."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.watch import connections
from fullshard.watch.connections import NoAnswerError, StoreConnection, quiet_seconds
from fullshard.watch.watch import Watch


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when something came")
def test_a_connection_says_when_something_came() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            time.sleep(0.3)
            before = quiet_seconds(here)
            there.send(b"something")
            here.recv(20)
            assert before > 0.25 > quiet_seconds(here)


def test_nothing_is_asked_of_a_store_that_has_gone(capfd: pytest.CaptureFixture[str]) -> None:
    """The client of torch would print where in C++ it failed, in a program that is right."""
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    asked = StoreConnection(dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False), rank=0)
    asked.set("key", "value")
    assert asked.get("key") == "value"
    del server
    gc.collect()
    time.sleep(0.1)
    for _ in range(2):
        with pytest.raises(NoAnswerError):
            asked.set("key", "value")
    assert "TCPStore" not in capfd.readouterr().err


def test_connections_to_a_store_do_not_multiply(watcher: Watch, store: Any) -> None:
    """One process has many default process groups, one after the other."""
    before = len(os.listdir("/proc/self/fd"))
    watches = [Watch(store) for _ in range(8)]
    assert len(os.listdir("/proc/self/fd")) - before <= 3 * len(watches)  # of each both ends, and one to look at


class BusyStore:
    """A store that answers when it is told to."""

    def __init__(self) -> None:
        self.answers, self.asked = threading.Event(), 0

    def clone(self) -> BusyStore:
        return self

    def set(self, key: str, value: str) -> None:
        self.asked += 1
        self.answers.wait()


def test_a_store_that_is_silent_for_a_while_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process may be busy, or stopped by a debugger. Nobody waits for it meanwhile, and the log says so once."""
    monkeypatch.setattr(connections, "_ANSWER", 0.1)
    store = BusyStore()
    connection = StoreConnection(store, rank=3)
    for _ in range(3):
        with pytest.raises(NoAnswerError):
            connection.set("key", "value")
    assert store.asked == 1
    store.answers.set()
    while connection._silent_since is not None:
        time.sleep(0.01)
    connection.set("key", "value")
    assert store.asked == 2
    assert ["has not answered rank 3" in caplog.messages[0], "answers rank 3 again" in caplog.messages[1]] == [True] * 2
    assert len(caplog.messages) == 2
    connection.close()


def test_both_threads_may_ask_whether_the_store_has_gone(store: Any) -> None:
    """The one that trains looks for the reason of an error while the other watches."""
    asked = StoreConnection(dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False), rank=0)
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(lambda _: [asked.has_gone for _ in range(3000)].count(True), range(4)))
    asked.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what was answered")
def test_the_other_host_answers_though_its_process_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        connections.probe(here)
        assert here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        time.sleep(0.2)  # nobody accepts the connection
        assert connections.unanswered_seconds(here) == 0.0
