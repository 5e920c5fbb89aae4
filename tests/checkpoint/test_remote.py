"""Checkpoints in object stores: published whole or not at all, whatever fails, and read in parallel ranges."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint import Checkpoint, CheckpointError, LatestN, remote, store
from fullshard.checkpoint.storage import located
from fullshard.cli import main
from fullshard.comm.local_ranks import host_id
from tests.checkpoint.stores import (
    FAULTS,
    HOOKS,
    LOG,
    SERVERS,
    bucket_of,
    deliver,
    faults,
    in_a_fork,
    skip_without,
    web_server,
)
from tests.harness.slow import slow


@pytest.fixture(autouse=True)
def _short_pauses_and_no_hooks_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(store, "PAUSES", (0.001,) * 5)
    LOG.clear()
    yield
    HOOKS.clear()
    FAULTS.clear()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"faulty://{tmp_path}/run"


def model_of(step: int) -> nn.Module:
    torch.manual_seed(step)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))


def saved(url: str, *steps: int, seed: int | None = None, **options: Any) -> None:
    for step in steps:
        checkpoint.save(url, model_of(step if seed is None else seed), step=step, **options)


def loaded(url: str, **options: Any) -> int | None:
    """The step that is loaded; asserts that its values are those that were saved."""
    model = model_of(-1)
    state = checkpoint.load(url, model, **options)
    if state is None:
        return None
    expected = model_of(state["step"]).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    return int(state["step"])


def objects(url: str) -> list[str]:
    root = Path(located(url).path)
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".put")  # uploads that were killed
    return sorted(plain(str(path.relative_to(root))) for path in files)


def plain(name: str) -> str:
    """The name of an object without what makes it unique to a save."""
    return re.sub("-[0-9a-f]{15}", "", name)


def test_what_is_saved_is_listed_and_loaded(url: str) -> None:
    assert checkpoint.load(url, model_of(0)) is None
    saved(url, 1, 2, 3, keep_last=2)
    assert [path.name for path in checkpoint.list_checkpoints(url)] == ["step-00000003", "step-00000002"]
    assert loaded(url) == 3
    assert loaded(f"{url}/step-00000002") == 2
    names = ["newest.json"]
    names += [
        f"step-0000000{step}/{name}" for step in (2, 3) for name in (".metadata", "__0_0.distcp", "manifest.json")
    ]
    assert objects(url) == names


def test_objects_are_read_several_at_a_time_and_not_kept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.ObjectPartial, "largest", 4096.0)
    saved(url, 1)
    together = threading.Barrier(4)  # broken if fewer requests are under way
    first = [f"__0_{number}.distcp" for number in range(4)]

    def interfere(request: str, path: str) -> None:
        if request == "get" and plain(Path(path).name) in first:
            first.remove(plain(Path(path).name))
            together.wait(timeout=10)

    HOOKS.append(interfere)
    model = model_of(-1)
    with Checkpoint(f"{url}/step-00000001") as found:
        found.read((name, value.shape, (0,) * value.dim(), value) for name, value in named(model))
        readers = [each for each in found._readers.values() if isinstance(each, remote._ObjectReader)]
        assert len(readers) > 4
        assert not any(each.ahead or each._ranges for each in readers)
    HOOKS.clear()
    assert (first, together.broken) == ([], False)
    expected = model_of(1).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(f"model.{name}", value) for name, value in model.state_dict().items()]


def test_torch_reads_the_objects_into_which_large_tensors_are_split(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.ObjectPartial, "largest", 4096.0)
    saved(url, 1)
    assert len([name for name in objects(url) if name.endswith(".distcp")]) >= 64 * 64 * 4 // 4096
    assert loaded(url) == 1
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    found = {"model": model_of(-1).state_dict()}
    dcp.load(found, storage_reader=FsspecReader(f"{url}/step-00000001"), no_dist=True)
    for name, value in model_of(1).state_dict().items():
        assert torch.equal(found["model"][name], value)


def test_requests_that_fail_are_repeated(url: str) -> None:
    failed: dict[tuple[str, str], int] = {}

    def fail_twice(request: str, path: str) -> None:
        if failed.setdefault((request, path), 0) < 2:
            failed[request, path] += 1
            raise ConnectionResetError(f"{request} failed")

    HOOKS.append(fail_twice)
    saved(url, 1, 2, keep_last=1)
    assert loaded(url) == 2
    HOOKS.clear()
    assert {kind for kind, _ in failed} == {"put", "get", "list", "info", "delete"}
    assert [path.name for path in checkpoint.list_checkpoints(url)] == ["step-00000002"]


def test_a_store_that_is_out_of_reach_is_not_an_empty_one(url: str) -> None:
    """Otherwise a training would begin anew, or go on from an older checkpoint."""
    saved(url, 1, 2)
    with faults(fail=1.0):
        with pytest.raises(CheckpointError, match="the store failed 6 times: ConnectionResetError"):
            loaded(url)
        with pytest.raises(CheckpointError, match="the store failed 6 times"):
            saved(url, 3)
    assert loaded(url) == 2


def test_late_listings_do_not_hide_the_newest(url: str) -> None:
    saved(url, 1, 2)
    with faults(listing_lag=3600.0):
        assert loaded(url) == 2


def test_a_lost_answer_to_the_last_request_is_no_failure(url: str) -> None:
    with faults(lost_answer=0.3):
        saved(url, 1, 2, 3)
    assert loaded(url) == 3
    assert len(checkpoint.list_checkpoints(url)) == 3


@pytest.mark.parametrize("name", [".metadata", "manifest.json"])
def test_a_save_whose_objects_another_job_has_removed_is_not_published(
    url: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a pause of this process that is longer than its lease."""
    saved(url, 1)

    def take_over(request: str, path: str) -> None:
        if request == "put" and path.endswith(name):
            HOOKS.clear()
            other_saves(url, 3)

    HOOKS.append(take_over)
    with pytest.raises(CheckpointError, match="taken over by another job"):
        saved(url, 2)
    assert loaded(url) == 3
    shutil.rmtree(Path(located(url).path) / "step-00000003")
    assert loaded(url) == 1
    assert main(["checkpoint", "list", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    left = ["step-00000002"] if name == ".metadata" else []  # it arrived after the other job had cleaned up
    assert [line.split()[0] for line in lines[2:]] == ["step-00000001", *left]
    assert lines[-1].endswith("not finished") == bool(left)


def test_leases_of_processes_that_ended_are_removed(url: str) -> None:
    saved(url, 1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    key = "0123456789abcde"
    for name in (
        f".writing-step-00000002-{key}",
        f".removing-step-00000000-{key}",
        "step-00000001/.reading-x",
        ".now-y",
    ):
        lease = {"host": host_id(), "process": ended.pid, "started": "1", "lease": "x"}
        (Path(located(url).path) / name).write_text(json.dumps(lease))
    saved(url, 2)
    assert {Path(name).name for name in objects(url) if Path(name).name.startswith(".")} == {".metadata"}


@pytest.mark.parametrize("publishes", [False, *slow(True)])
def test_jobs_that_find_a_dead_lease_at_once_both_save(tmp_path: Path, publishes: bool) -> None:
    """One removes what the dead one has left. Wherever it is in that, the other one may begin a save and write."""
    at = 1
    while _both_save(f"faulty://{tmp_path}/{at}", at, publishes):
        at += 1
    assert at > 15


def _both_save(url: str, at: int, publishes: bool) -> bool:
    """Begins another save before a request of the first one. Returns whether there was such a request."""
    left = Path(located(url).path) / "step-00000001"
    left.mkdir(parents=True)
    lease = left.parent / ".writing-step-00000001-0123456789abcde"
    lease.write_text(json.dumps({"host": host_id(), "process": 1, "started": "1", "lease": "x"}))
    (left / "__0_7-0123456789abcde.distcp").write_bytes(b"left")
    count, others, names = 0, list[remote.ObjectPartial](), dict[str, bytes]()

    def other_begins(*_: str) -> None:
        nonlocal count
        count += 1
        if count == at:
            HOOKS.clear()
            others.append(begun(url, b"other"))
            if publishes:
                names[others[0].publish(b"other")] = b"other"

    HOOKS.append(other_begins)
    mine = begun(url, b"mine")
    HOOKS.clear()
    names[mine.publish(b"mine")] = b"mine"
    if others and not publishes:
        names[others[0].publish(b"other")] = b"other"
    assert len(names) == 1 + len(others)
    assert {name: (left.parent / name / "__0_0.distcp").read_bytes() for name in names} == names
    written = [f"{name}/{each}" for name in names for each in ("__0_0.distcp", "manifest.json")]
    assert objects(url) == ["newest.json", *sorted(written)]
    return bool(others)


def begun(url: str, data: bytes) -> remote.ObjectPartial:
    """A save that has written one object."""
    made = remote.ObjectStorage(located(url)).begin(1)
    made._put("__0_0.distcp", data)
    made.flush()
    return made


def test_a_copy_under_way_and_directories_of_other_programs_stay(url: str) -> None:
    saved(url, 1)
    root = Path(located(url).path)
    for name in ("step-00000005", "step-00000009"):
        (root / name).mkdir()
        (root / name / "__0_0.distcp").write_text("somebody writes this")
    checkpoint.save(url, model_of(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a lower step than the one before
        saved(url, 5, keep_last=1)
    names = [path.name for path in checkpoint.list_checkpoints(url)]
    assert names == ["step-00000010", "step-00000005.1"]
    assert all((root / name / "__0_0.distcp").read_text() for name in ("step-00000005", "step-00000009"))
    (root / "step-00000005" / "manifest.json").write_bytes((root / "step-00000010" / "manifest.json").read_bytes())
    assert checkpoint.list_checkpoints(url)[-1].name == "step-00000005"


def test_a_damaged_note_of_the_newest_is_told_and_the_listing_is_used(url: str) -> None:
    saved(url, 1)
    damaged = ("[" * 100_000, '{"newest":' * 2000, '{"newest": [' + "[" * 900, '{"newest": 5}', "")
    for step, text in enumerate(damaged, 1):
        (Path(located(url).path) / "newest.json").write_text(text)
        with pytest.warns(UserWarning, match=r"run/newest.json is ignored: it is not what was written"):
            assert loaded(url) == step
        with pytest.warns(UserWarning, match="is ignored"):
            saved(url, step + 1)
        assert loaded(url) == step + 1


def test_a_web_server_has_a_whole_checkpoint_or_it_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = checkpoint.save(tmp_path, model_of(1), step=1), model_of(-1)
    assert path is not None
    shutil.copytree(path, tmp_path / "renamed")
    with web_server(tmp_path) as url:
        assert checkpoint.load(f"{url}/{path.name}", model) == {"step": 1}
        assert all(torch.equal(value, model_of(1).state_dict()[name]) for name, value in model.state_dict().items())
        for wrong in ("typo", "step-00000002", f"{path.name}/manifest.json"):
            with pytest.raises(CheckpointError, match=f"{wrong} is not a checkpoint|no checkpoint .*{wrong}"):
                checkpoint.load(f"{url}/{wrong}", model)
        for name in (path.name, "renamed"):
            (tmp_path / name / "__0_0.distcp").write_bytes(b"")
            with pytest.warns(UserWarning, match="skipped"), pytest.raises(CheckpointError, match="has 0 bytes, but"):
                checkpoint.load(f"{url}/{name}", model)
    capsys.readouterr()
    assert main(["checkpoint", "show", url]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def other_saves(url: str, step: int, **options: Any) -> None:
    """A save by another host, which takes those of this process for ended."""

    def save() -> None:
        store.host_id, store._EXPIRY = lambda: "another", -1.0  # type: ignore[attr-defined]
        HOOKS.clear()
        saved(url, step, **options)

    assert in_a_fork(save) == 0


@pytest.mark.parametrize("name", ["__0_0", ".metadata", "manifest.json"])
def test_a_request_that_arrives_after_its_save_failed_changes_nothing(url: str, name: str) -> None:
    saved(url, 1)

    def fail(request: str, path: str) -> None:
        FAULTS["late put"] = float(request == "put" and Path(path).name.startswith(name))

    HOOKS.append(fail)
    with pytest.raises(CheckpointError, match="the store failed"):
        saved(url, 2, seed=7)
    HOOKS.clear()
    FAULTS.clear()
    saved(url, 2)
    assert deliver()
    assert loaded(url) == 2
    for path in checkpoint.list_checkpoints(url):
        with Checkpoint(path) as found:
            assert list(found.verify()) == []


@pytest.mark.parametrize("name", ["__0_0", ".metadata", "manifest.json", "newest.json", ".over"])
def test_a_save_that_sleeps_past_its_lease_leaves_that_of_another_alone(url: str, name: str) -> None:
    saved(url, 1)

    def sleep(request: str, path: str) -> None:
        if Path(path).name.startswith(name) and "run/step-00000001" not in path:
            HOOKS.clear()
            other_saves(url, 2, seed=7)

    HOOKS.append(sleep)
    try:
        saved(url, 2)
        is_saved = True
    except CheckpointError:
        is_saved = False
    HOOKS.clear()
    seeds = []
    for path in checkpoint.list_checkpoints(url):
        with Checkpoint(path) as found:
            assert list(found.verify()) == []
            weight = found.tensor("model.0.weight")
            seeds += [seed for seed in (1, 2, 7) if torch.equal(weight, model_of(seed).state_dict()["0.weight"])]
    assert sorted(seeds) == ([1, 2, 7] if is_saved else [1, 7])


def test_objects_that_arrive_late_are_removed_later(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = remote.ObjectStorage(located(url)).begin(1)
    with faults(late_put=1.0), pytest.raises(CheckpointError):
        begun._store.put(f"__0_0-{begun.attempt}.distcp", b"late")
    begun.discard()
    assert deliver()
    saved(url, 2)
    assert "step-00000001/__0_0.distcp" in objects(url)
    monkeypatch.setattr(store, "_EXPIRY", -1.0)
    saved(url, 3)
    assert [name for name in objects(url) if "step-00000001" in name] == []


def test_a_forked_process_leaves_the_leases_of_its_parent(url: str) -> None:
    saved(url, 1)
    with Checkpoint(f"{url}/step-00000001") as opened:

        def load() -> None:  # without the parent's threads
            opened.close()
            assert loaded(url) == 1

        assert in_a_fork(load) == 0
        saved(url, 2, keep_last=1)
    assert len(checkpoint.list_checkpoints(url)) == 2


@pytest.mark.parametrize("error", [PermissionError("AccessDenied"), *slow(ConnectionResetError("gone"))])
def test_what_fails_after_a_save_or_a_load_is_a_warning(
    url: str, error: Exception, recwarn: pytest.WarningsRecorder
) -> None:
    for number, refused in enumerate(("delete .reading", "delete .writing", "delete .begun", "put newest.json")):

        def refuse(request: str, path: str, refused: str = refused) -> None:
            if f"{request} {Path(path).name}".startswith(refused):
                raise error

        HOOKS.append(refuse)
        saved(f"{url}{number}", 1, 2)
        assert loaded(f"{url}{number}") == 2
        HOOKS.clear()
        assert any(type(error).__name__ in str(each.message) for each in recwarn), refused
        recwarn.clear()


def test_rights_that_are_revoked_in_a_save_are_an_error_of_the_checkpoint(url: str, tmp_path: Path) -> None:
    def revoke(request: str, path: str) -> None:
        if path.endswith(".distcp") or (request == "delete" and "/run/" in path):
            raise PermissionError("AccessDenied")

    HOOKS.append(revoke)
    saved(url, 1, wait=False)
    with pytest.raises(CheckpointError, match=r"__0_0-\w+.distcp: the store refused a request: PermissionError"):
        checkpoint.wait_until_finished()
    with pytest.raises(CheckpointError, match="the store refused"):
        saved(url, 1)
    HOOKS.clear()
    saved(url, 1)
    assert loaded(url) == 1


def _whole_after_kill(url: str, at: int) -> bool:
    """Kills a save at a request. Asserts that the older or the newer checkpoint is whole, and that the next save leaves
    nothing else. Returns whether the save was killed."""
    left = at

    def kill(*_: str) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def save() -> None:
        saved(url, 1)
        HOOKS.append(kill)
        saved(url, 2, keep_last=1)

    code = in_a_fork(save)
    assert code in (0, -signal.SIGKILL)
    assert loaded(url) in (1, 2)
    saved(url, 3, keep_last=1)
    assert loaded(url) == 3
    names = [f"step-00000003/{name}" for name in (".metadata", "__0_0.distcp", "manifest.json")]
    assert objects(url) == ["newest.json", *names]
    return code != 0


@pytest.mark.parametrize("every", [12, *slow(1)])
def test_wherever_a_save_is_killed_the_older_or_the_newer_one_is_whole(tmp_path: Path, every: int) -> None:
    at = 3 if every > 1 else 1
    while _whole_after_kill(f"faulty://{tmp_path}/{at}", at):
        at += every
    assert at > 20


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
def test_servers_keep_checkpoints(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(server)
    with bucket_of(server, tmp_path) as bucket:
        objects = store.Store(located(url := f"{bucket}/run"))
        assert [objects.create("a", data) for data in (b"1", b"2", b"1")] == [True, False, True]
        assert (objects.get("a"), objects.get("b"), objects.get("a", 0, 1)) == (b"1", None, b"1")
        time.sleep(1.1)
        objects.put("newer", b"")
        assert objects.age("a", "newer") > 0
        objects.delete(["a", "newer", "none"])
        saved(url, 1, 2, 2, 3, keep_last=2)
        assert [path.name for path in checkpoint.list_checkpoints(url)] == ["step-00000003", "step-00000002.1"]
        assert loaded(url) == 3
        assert len(objects.sizes()) == 1 + 2 * 3
        assert in_a_fork(lambda: loaded(url)) == 0  # the thread of its library is the parent's
        monkeypatch.setattr(remote.ObjectPartial, "largest", 4096.0)
        with Checkpoint(f"{url}/step-00000003") as found:
            assert list(found.verify()) == []
            saved(url, 4, keep_last=1)
            assert torch.equal(found.tensor("model.0.weight"), model_of(3).state_dict()["0.weight"])
        assert loaded(url) == 4
        assert [main(["checkpoint", command, url]) for command in ("verify", "list")] == [0, 0]
        assert checkpoint.load(f"{bucket}/new", model_of(1)) is None
        wrong = {url.replace("//bucket", "//none"): "there is no bucket or container 'none'"}
        wrong |= {f"{url}/newest.json": "is an object"} if server == "moto" else {}
        for where, problem in wrong.items():
            for use in (checkpoint.load, *([checkpoint.save] if server == "moto" else [])):
                with pytest.raises(CheckpointError, match=problem):
                    use(where, model_of(1))  # type: ignore[operator]
    for command in ("show", "verify", "list") if server == "moto" else ():
        assert main(["checkpoint", command, url]) == 1


def test_a_web_server_without_listings_and_ranges_is_loaded_from(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(url, 1, 2)
    monkeypatch.setattr(store, "PAUSES", (1.0,) * 5)  # nothing is repeated
    with web_server(tmp_path) as address:
        began = time.monotonic()
        assert loaded(f"{address}/run/step-00000001") == 1
        assert loaded(f"{address}/old/run/step-00000001") == 1
        assert loaded(f"{address}/run") == 2
        assert time.monotonic() - began < 4
    monkeypatch.setattr(store, "PAUSES", (0.001,) * 5)
    with pytest.raises(CheckpointError, match="the store failed"):
        loaded(f"{address}/run")


@pytest.mark.parametrize("older", [2, 12])
def test_requests_do_not_grow_with_older_checkpoints(url: str, older: int) -> None:
    saved(url, 0)
    for step in range(1, older):
        shutil.copytree(Path(located(url).path) / "step-00000000", Path(located(url).path) / f"step-{step:08}")
    LOG.clear()
    saved(url, 100)
    assert len(LOG) < 35
    LOG.clear()
    assert loaded(url) == 100
    assert len(LOG) < 12


def test_a_policy_reads_the_older_checkpoints_at_the_same_time(url: str) -> None:
    saved(url, 1, 2, 3)
    together = threading.Barrier(3)  # broken if fewer are read at a time
    left = [f"step-0000000{step}" for step in (1, 2, 3)]

    def interfere(request: str, path: str) -> None:
        if request == "get" and path.endswith("manifest.json") and (name := Path(path).parent.name) in left:
            left.remove(name)
            together.wait(timeout=10)

    HOOKS.append(interfere)
    saved(url, 4, keep=[LatestN(4)])
    HOOKS.clear()
    assert (left, together.broken) == ([], False)
    assert len(checkpoint.list_checkpoints(url)) == 4


def test_a_check_reads_an_object_in_one_request(url: str) -> None:
    saved(url, 1)
    LOG.clear()
    with Checkpoint(f"{url}/step-00000001") as found:
        assert list(found.verify()) == []
    names = [plain(Path(path).name) for request, path in LOG if request == "get"]
    assert sorted(names) == [".metadata", ".metadata", "__0_0.distcp", "manifest.json"]


def test_a_load_makes_few_requests_before_it_reads_tensors(url: str) -> None:
    """Each takes tens of milliseconds in a store that is far away. Those in one set are made at the same time."""
    saved(url, 1, 2)
    LOG.clear()
    assert loaded(url) == 2
    names = [(request, Path(path).name.partition("-")[0]) for request, path in LOG]
    at = names.index(("get", "__0_0"))
    assert [set(names[:2]), set(names[2:3]), set(names[3:4]), set(names[4:at])] == [
        {("list", "run"), ("get", "newest.json")},
        {("info", "manifest.json")},
        {("put", ".reading")},
        {("get", "manifest.json"), ("get", ".metadata"), ("list", "step")},
    ]
    assert names[at + 1 :] == [("delete", ".reading")]


def test_a_large_object_is_read_in_ranges(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = nn.Linear(600, 600), nn.Linear(600, 600)
    checkpoint.save(url, model, step=1)
    monkeypatch.setattr(remote, "_OBJECT", 1 << 18)
    LOG.clear()
    checkpoint.load(url, other)
    assert len([path for request, path in LOG if request == "get" and path.endswith(".distcp")]) == 5
    assert torch.equal(model.weight, other.weight)
