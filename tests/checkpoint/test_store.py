"""Requests to a store are repeated, and leases take the place of locks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fullshard.checkpoint import CheckpointError, store
from fullshard.checkpoint.storage import located
from fullshard.checkpoint.store import Store, StoreLease
from fullshard.comm.local_ranks import host_id
from tests.checkpoint.stores import faults


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(store, "PAUSES", (0.001,) * 5)
    return Store(located(f"faulty://{tmp_path}/run"))


def test_objects_are_put_read_listed_and_deleted(objects: Store) -> None:
    assert objects.get("a") is None
    assert objects.list() == []
    objects.put("a", b"0123")
    objects.put("b/c", b"")
    assert (objects.get("a"), objects.get("a", 1, 3), objects.get("b/c")) == (b"0123", b"12", b"")
    assert (objects.size("a"), objects.size("b/c"), objects.size("d")) == (4, 0, -1)
    assert sorted(objects.list()) == ["a", "b"]
    assert objects.sizes() == {"a": 4, "b/c": 0}
    objects.delete(["d", "a"])
    assert not objects.exists("a")


def test_one_of_several_creates_an_object(objects: Store) -> None:
    assert [objects.create("a", data) for data in (b"1", b"2", b"1")] == [True, False, True]
    assert objects.get("a") == b"1"


@pytest.mark.parametrize("fault", ["fail", "lost_answer"])
def test_requests_that_fail_now_and_then_succeed(objects: Store, fault: str) -> None:
    with faults(**{fault: 0.2}):
        for number in range(40):
            assert objects.create(f"{number}", b"x")
            objects.put(f"{number}", b"y")
            assert objects.get(f"{number}") == b"y"


def test_an_error_names_the_object_and_how_often_it_was_tried(objects: Store) -> None:
    with faults(fail=1.0), pytest.raises(CheckpointError, match=r"run/a: the store failed 6 times: Connection.*get"):
        objects.get("a")


def test_a_store_without_conditional_writes_is_used_too(objects: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put: Any = type(objects._fs).pipe_file

    def unconditional(self: Any, path: str, value: bytes) -> None:
        put(self, path, value)

    monkeypatch.setattr(type(objects._fs), "pipe_file", unconditional)
    assert objects.create("a", b"1")
    assert not objects.create("a", b"2")


def lease_of(objects: Store, **holder: Any) -> None:
    """A lease that somebody else holds."""
    objects.put("lease", json.dumps({"host": host_id(), "process": 1, "started": "", "lease": "x"} | holder).encode())


def test_a_lease_is_over_when_it_is_released(objects: Store) -> None:
    lease = StoreLease(objects, "lease-")
    assert objects.list() == [lease.name]
    assert not StoreLease.is_over(objects, lease.name)
    lease.release()
    lease.release()
    assert StoreLease.is_over(objects, lease.name)
    assert objects.list() == []


def test_a_lease_ends_with_its_process(objects: Store) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lease_of(objects, process=ended.pid, started="1")
    assert StoreLease.is_over(objects, "lease")
    lease_of(objects, process=1, started=store._started(1))
    assert not StoreLease.is_over(objects, "lease")
    lease_of(objects, process=1, started="another one of this number")
    assert StoreLease.is_over(objects, "lease")


def test_a_lease_of_another_host_ends_when_it_is_not_renewed(objects: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lease_of(objects, host="another")
    assert not StoreLease.is_over(objects, "lease")
    monkeypatch.setattr(store, "_EXPIRY", -1.0)
    assert StoreLease.is_over(objects, "lease")
    assert objects.list() == ["lease"]


def test_a_lease_that_is_left_expires(objects: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = StoreLease(objects, "lease-")
    lease.leave("left-")
    assert objects.list() == [f"left-{lease.key}"]
    assert not StoreLease.is_over(objects, f"left-{lease.key}")
    monkeypatch.setattr(store, "_EXPIRY", -1.0)
    assert StoreLease.is_over(objects, f"left-{lease.key}")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_lease_is_renewed_while_it_is_there(objects: Store, is_there: bool) -> None:
    lease = StoreLease(objects, "lease-")
    objects.put("newer", b"")
    assert objects.age(lease.name, "newer") >= 0
    if not is_there:
        objects.delete([lease.name])
    lease._renewed -= store._RENEWAL
    StoreLease._renew_once()
    assert objects.exists(lease.name) == is_there
    assert not is_there or objects.age(lease.name, "newer") < 0
    lease.release()


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_a_store_that_never_answers_is_an_error_in_time(
    objects: Store, monkeypatch: pytest.MonkeyPatch, is_asynchronous: bool
) -> None:
    monkeypatch.setattr(store, "LIMIT", 0.2)
    monkeypatch.setattr(store, "PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        if is_asynchronous:  # one that accepts connections
            url = f"http://127.0.0.1:{server.getsockname()[1]}/run"
            objects = Store(located(url))
        else:
            monkeypatch.setattr(type(objects._fs), "cat_file", lambda *_, **__: time.sleep(60))
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=r"run/a: the store failed \d times: no answer in"):
            objects.get("a", nbytes=1)
        assert time.monotonic() - began < 2


def test_a_web_server_that_ignores_ranges_is_read(objects: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(objects._fs), "cat_file", lambda *_, **__: b"0123456789")
    assert objects.get("a", 2, 5) == b"234"
