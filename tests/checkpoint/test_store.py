"""Requests to a store are repeated, and leases take the place of locks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fullshard.checkpoint import CheckpointError, store
from fullshard.checkpoint.storage import located
from fullshard.checkpoint.store import Lease, Store
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


def test_a_lease_is_held_by_one(objects: Store) -> None:
    first = Lease.taken(objects, "lease")
    assert first is not None
    assert Lease.taken(objects, "lease") is None
    assert not Lease.is_over(objects, "lease")
    first.release()
    first.release()
    assert Lease.is_over(objects, "lease")
    assert Lease.taken(objects, "lease") is not None


def test_a_lease_ends_with_its_process(objects: Store) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lease_of(objects, process=ended.pid, started="1")
    assert Lease.is_over(objects, "lease")
    lease_of(objects, process=1, started=store._started(1))
    assert not Lease.is_over(objects, "lease")
    lease_of(objects, process=1, started="another one of this number")
    assert Lease.is_over(objects, "lease")


def test_a_lease_of_another_host_ends_when_it_is_not_renewed(objects: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lease_of(objects, host="another")
    assert not Lease.is_over(objects, "lease")
    monkeypatch.setattr(store, "_EXPIRY", -1.0)
    assert Lease.is_over(objects, "lease")
    assert objects.list() == ["lease"]


def test_the_lease_of_a_process_that_ended_has_one_successor(objects: Store) -> None:
    lease_of(objects, started="another one of this number")
    assert Lease.taken(objects, "lease") is None
    first = Lease.taken(objects, "lease", succeed=True)
    assert first is not None
    assert Lease.taken(objects, "lease", succeed=True) is None
    Lease._held.pop(first._id)  # as if its process had ended, too
    second = Lease.taken(objects, "lease", succeed=True)
    assert second is not None
    assert not first.is_held()
    first.release()
    assert sorted(objects.list()) == sorted(second.names)
    second.release()
    assert objects.list() == []


def test_whoever_finds_a_dead_lease_late_leaves_the_next_one_alone(
    objects: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it looked, another process took the place of the dead one, released it, and took the lease anew."""
    lease_of(objects, started="another one of this number")
    is_over, later = Lease.is_over, list[Lease | None]()

    def slow(store: Store, name: str) -> bool:
        found = is_over(store, name)
        monkeypatch.setattr(Lease, "is_over", is_over)
        other = Lease.taken(objects, "lease", succeed=True)
        assert other is not None
        other.release()
        later.append(Lease.taken(objects, "lease"))
        return found

    monkeypatch.setattr(Lease, "is_over", slow)
    assert Lease.taken(objects, "lease", succeed=True) is None
    assert later[0] is not None
    assert later[0].is_held()
    assert objects.list() == ["lease"]


def test_a_lease_is_renewed(objects: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Lease.taken(objects, "lease")
    assert lease is not None
    objects.put("newer", b"")
    assert objects.age("lease", "newer") >= 0
    lease._renewed -= store._RENEWAL
    Lease._renew_once()
    assert objects.age("lease", "newer") < 0
    lease.release()


def test_a_lease_that_another_has_taken_is_left_to_it(objects: Store) -> None:
    lease = Lease.taken(objects, "lease")
    assert lease is not None
    lease_of(objects)
    lease._renewed -= store._RENEWAL
    Lease._renew_once()
    assert not lease.is_held()
    lease.release()
    assert json.loads(objects.get("lease") or b"")["lease"] == "x"
