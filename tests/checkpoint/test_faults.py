"""Nothing is ever lost: killed ranks, flipped bits, missing and short files, full disks, several jobs, fuzzed headers.

``--kills=500`` kills a rank at as many points of a save as that, one after the other.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pkgutil
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import fullshard
from fullshard import checkpoint
from fullshard.checkpoint import Checkpoint, CheckpointError, CorruptCheckpointError
from tests.checkpoint.cases import flip, rewrite_manifest, save_at, small_disk
from tests.harness import RankPool, World, failure_report, ranks
from tests.harness.models import MLP, seeded

#: Calls of the system and of gloo in a save, each of which may be the last thing that a rank does.
CALLS = ("os.write", "os.fsync", "os.rename", "os.open", "os.close", "pathlib.Path.mkdir", "fcntl.flock",
         "shutil.rmtree", "fullshard.checkpoint.ranks.gather_objects", "torch.distributed.gather")  # fmt: skip


class Filled(nn.Module):
    """Parameters that all have one number, so that a mixture of two saves is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(40, 30), nn.Linear(30, 20)])

    def fill(self, number: int) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(number)


def filled() -> Any:
    model = seeded(Filled)
    fullshard.fully_shard(model)
    return model


def assert_holds(saved: Checkpoint, number: int | None = None) -> None:
    """All tensors have the number of the save."""
    assert list(saved.verify()) == []
    for name in saved.tensors:
        assert saved.tensor(name).eq(saved.manifest.step if number is None else number).all(), name


@contextlib.contextmanager
def killed_at(moment: int, names: Iterable[str]) -> Iterator[None]:
    """Kill this process after so many calls of the functions with these names; never if ``moment`` is negative."""
    left = moment

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(name, dying(pkgutil.resolve_name(name)))
        yield


def save_until_killed(world: World, folder: Path, victim: int, moment: int, wait: bool) -> None:
    model = filled()
    model.fill(1)
    checkpoint.save(folder, model, step=1)
    with killed_at(moment if world.rank == victim else -1, CALLS):
        for step in (2, 3):
            model.fill(step)
            checkpoint.save(folder, model, step=step, keep_last=2, wait=wait)
        checkpoint.wait_until_finished()


@pytest.mark.slow
def test_a_rank_killed_at_any_point_loses_nothing(
    rank_pool: RankPool, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    draw = random.Random(0)
    deaths = 0
    kills = pytestconfig.getoption("--kills") or 60
    for number in range(kills):
        folder, victim, moment = tmp_path / str(number), draw.randrange(2), draw.randrange(30)
        outcomes = rank_pool.run(save_until_killed, 2, folder, victim, moment, number % 3 > 0, timeout=30)
        kinds = [outcome.kind for outcome in outcomes]
        assert kinds[victim] in ("died", "returned"), failure_report(outcomes)
        assert "hung" not in kinds, failure_report(outcomes)
        deaths += kinds[victim] == "died"
        found = checkpoint.list_checkpoints(folder)
        assert found, f"moment {moment} of rank {victim}"
        for path in found:
            assert_holds(Checkpoint(path))
        shutil.rmtree(folder)
    assert deaths >= kills / 4


@ranks(1)
def test_what_a_killed_job_left_is_removed_by_the_next_save_and_not_by_a_job_beside_it(
    world: World, tmp_path: Path
) -> None:
    left = tmp_path / ".step-00000002.host-1-00000000.partial"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    writing = tmp_path / ".step-00000003.host-2-00000000.partial"
    writing.mkdir()
    code = "import fcntl, os, sys; d = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(d, fcntl.LOCK_EX); print(1)"
    other = subprocess.Popen(
        [sys.executable, "-c", f"{code}; sys.stdout.flush(); sys.stdin.read()", str(writing)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        checkpoint.save(tmp_path, filled(), step=4)
        assert sorted(path.name for path in tmp_path.iterdir()) == [writing.name, "step-00000004"]
    finally:
        other.kill()
        other.wait()


def save_beside(world: World, folder: Path, number: int) -> list[str]:
    model = filled()
    model.fill(number)
    paths = [checkpoint.save(folder, model, step=step) for step in (1, 1, 2)]
    return [path.name for path in paths if path]


@pytest.mark.slow
def test_two_jobs_in_one_directory_both_save(tmp_path: Path) -> None:
    with RankPool() as one, RankPool() as other:
        results: dict[int, Any] = {}
        threads = [
            threading.Thread(target=lambda n=n, pool=pool: results.update({n: pool.run(save_beside, 2, tmp_path, n)}))
            for n, pool in enumerate((one, other))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for outcomes in results.values():
        assert all(outcome.kind == "returned" for outcome in outcomes), failure_report(outcomes)
    names = [set(results[number][0].value) for number in range(2)]
    assert not names[0] & names[1]
    for path in checkpoint.list_checkpoints(tmp_path):
        assert_holds(Checkpoint(path), 0 if path.name in names[0] else 1)


def two_saves(folder: Path) -> Any:
    model = filled()
    for step in (1, 2):
        model.fill(step)
        checkpoint.save(folder, model, step=step)
    dist.barrier()
    model.fill(7)
    return model


def _flip_values(path: Path) -> None:
    flip(path / "__1_0.distcp", Checkpoint(path).tensors["model.blocks.0.weight"].pieces[1].data + 17)


def _flip_header(path: Path) -> None:
    flip(path / "__0_0.distcp", Checkpoint(path).tensors["model.blocks.0.weight"].pieces[0].start + 5)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "values": (_flip_values, r"tensor 'model\.blocks.*__1_0\.distcp: bytes .*wrong checksum"),
    "header": (_flip_header, r"__0_0\.distcp: bytes .*wrong checksum"),
    "manifest": (lambda path: flip(path / "manifest.json", 200), r"manifest\.json is not what was written"),
    "cut": (lambda path: os.truncate(path / "__1_0.distcp", 999), r"__1_0\.distcp has 999 bytes, but \d+ were written"),
    "missing": (lambda path: (path / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"manifest\.json cannot be read: No such file"),
    "cut metadata": (lambda path: os.truncate(path / ".metadata", 9), r"\.metadata has 9 bytes"),
    "flipped metadata": (lambda path: flip(path / ".metadata", 99), r"\.metadata: bytes 0 to \d+ are not"),
    "no files": (lambda path: [file.unlink() for file in path.iterdir()], r"manifest\.json cannot be read"),
}


@ranks(2)
def test_what_is_broken_is_named_and_the_one_before_is_loaded(world: World, tmp_path: Path) -> None:
    for damage, (break_it, reason) in DAMAGES.items():
        folder = tmp_path / damage
        model = two_saves(folder)
        if world.rank == 0:
            break_it(folder / "step-00000002")
        dist.barrier()
        with pytest.warns(UserWarning, match=f"step-00000002 is skipped, because it is not whole.*{reason}"):
            found = checkpoint.load(folder, model)
        assert found == {"step": 1}
        assert all(param.full_tensor().eq(1).all() for param in model.parameters())
        with pytest.raises(CheckpointError, match=f"no checkpoint in .* is whole.*{reason}"):
            checkpoint.load(folder / "step-00000002", model)


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    model = seeded(Filled)
    path = save_at(tmp_path, model, step=1, state={"note": [1, 2]})
    draw, files = random.Random(0), sorted(path.iterdir())
    for _ in range(200):
        file = draw.choice(files)
        at = draw.randrange(file.stat().st_size)
        flip(file, at)
        with pytest.raises(CorruptCheckpointError, match=file.name.replace(".", r"\.")):
            raise CorruptCheckpointError(next(Checkpoint(path).verify()))
        flip(file, at)
    assert list(Checkpoint(path).verify()) == []


def save_to_full_disk(world: World, disk: Path, wait: bool) -> str:
    model = seeded(lambda: MLP((1000, 1000, 1000)))
    fullshard.fully_shard(model)
    small = filled()
    checkpoint.save(disk, small, step=1)
    try:
        checkpoint.save(disk, model, step=2, wait=wait)
        checkpoint.wait_until_finished()
    except CheckpointError as error:
        checkpoint.save(disk, small, step=3)
        return str(error)
    return "saved"


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_nothing(
    rank_pool: RankPool, tmp_path: Path, wait: bool
) -> None:
    with small_disk(tmp_path):
        outcomes = rank_pool.run(save_to_full_disk, 2, tmp_path, wait)
        assert all(outcome.kind == "returned" for outcome in outcomes), failure_report(outcomes)
        assert all("No space left on device" in outcome.value for outcome in outcomes)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


@contextlib.contextmanager
def bounded_memory(more: int = 1 << 30) -> Iterator[None]:
    """No allocation above what is there and ``more`` bytes succeeds."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)

    def __init__(self, path: str) -> None:
        self.path = path


def test_a_refused_file_changes_no_class(tmp_path: Path) -> None:
    state = b"N}X\x0c\0\0\0planner_dataX\x04\0\0\0evils\x86"
    for name in ("Metadata", "BytesStorageMetadata"):
        named = b"ctorch.distributed.checkpoint.metadata\n%s\n" % name.encode()
        (tmp_path / ".metadata").write_bytes(b"\x80\x02" + named + state + b"b.")
        with pytest.raises(CorruptCheckpointError, match="is not DCP metadata"):
            Checkpoint(tmp_path)
    assert Metadata({}).planner_data is None
    assert not hasattr(BytesStorageMetadata, "planner_data")


@ranks(1)
def test_nothing_in_a_file_is_executed(world: World, tmp_path: Path) -> None:
    made = tmp_path / "made"
    dcp.save({"a": torch.ones(2), "n": [1]}, checkpoint_id=tmp_path / "one")
    metadata = tmp_path / "one" / ".metadata"
    whole = pickle.loads(metadata.read_bytes())
    metadata.write_bytes(pickle.dumps(Evil(str(made))))
    with pytest.raises(CorruptCheckpointError, match=r"names posix\.mkdir, which is not part of DCP's metadata"):
        Checkpoint(tmp_path / "one")
    torch.save(Evil(str(made)), tmp_path / "evil")
    data = (tmp_path / "evil").read_bytes()
    (tmp_path / "one" / "__0_0.distcp").write_bytes(data)
    for info in whole.storage_data.values():
        info.offset, info.length = 0, len(data)
    metadata.write_bytes(pickle.dumps(whole))
    with pytest.raises(CorruptCheckpointError, match="cannot be loaded"):
        Checkpoint(tmp_path / "one").value("n")
    assert not made.exists()


def kind(told: Any) -> Any:
    """What a manifest says of the tensors that are as one of them is: dtype, shape, pieces, where these begin."""
    return told["kinds"][told["kind"][told["tensors"].index("model.blocks.0.bias")]]


class Alike(nn.Module):
    """Layers of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(30, 30) for _ in range(3))


def two_on_one_box(kind: Any) -> None:
    """A hole, but the sum of elements is right."""
    kind[2] = [[*kind[2][0][:3], [0], [15]]] * 2
    kind[3] = kind[3][:1] * 2


def one_run_many_times(kind: Any) -> None:
    kind[1] = [30 * 50_000]
    kind[2] = [[*kind[2][0][:3], [30 * number], [30]] for number in range(50_000)]
    kind[3] = kind[3][:1] * 50_000


LIES: dict[str, Callable[[Any], Any]] = {
    "inside the directory": lambda told: told["files"].update({"../../secret": told["files"].pop("__0_0.distcp")}),
    "not inside": lambda told: told["files"].update({"/etc/passwd": [3, ["0" * 16]]}),
    "do not cover each element": lambda told: kind(told).__setitem__(1, [1 << 60]),
    "has a piece of": lambda told: kind(told)[2][0].__setitem__(4, [1 << 60]),
    r"has a piece of \d+ bytes in": lambda told: kind(told)[2][0].__setitem__(2, 1 << 60),
    "lies at bytes": lambda told: kind(told)[2][0].__setitem__(1, 1 << 60),
    "'model.blocks.2.bias' lies at": lambda told: kind(told)[3][0].__setitem__(2, 1 << 60),
    "do not lie at valid bytes": lambda told: kind(told)[3][0].__setitem__(1, -64),
    r"blocks.2.bias'\] do not lie at valid bytes": lambda told: kind(told)[3][0].pop(),
    "each element exactly once": lambda told: two_on_one_box(kind(told)),
    "some of its pieces overlap": lambda told: one_run_many_times(kind(told)),
    "lie at the same bytes of": lambda told: told["objects"].update({"state.n.1": told["objects"]["state.n.0"]}),
    "lacks a value of the state": lambda told: told["state"].update(n=[7]),
    "has the shape": lambda told: kind(told).__setitem__(1, [-30]),
    "is not a dtype": lambda told: kind(told).__setitem__(0, "os"),
    "has a name twice": lambda told: told["tensors"].__setitem__(0, told["tensors"][1]),
    "zip": lambda told: told["tensors"].pop(),
    "out of range": lambda told: told["kind"].__setitem__(0, 99),
    "fit its checksums": lambda told: told["files"]["__0_0.distcp"].__setitem__(0, 1 << 60),
    "is of format 99": lambda told: told.update(format=99),
    "does not describe": lambda told: told.pop("tensors"),
}


def test_a_manifest_that_lies_is_refused(tmp_path: Path) -> None:
    path = save_at(tmp_path, seeded(Alike), step=1, state={"n": 3})
    right = (path / "manifest.json").read_bytes()
    for reason, lie in LIES.items():
        rewrite_manifest(path, lie)
        with bounded_memory(), pytest.raises(CorruptCheckpointError, match=reason):
            Checkpoint(path)
        (path / "manifest.json").write_bytes(right)
    with pytest.raises(ValueError, match=r"has the shape \(31,\) here, but \(30,\)"):
        Checkpoint(path).read([("model.blocks.0.bias", (31,), (0,), torch.empty(31))])
    (path / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (path / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="not inside the directory"):
        Checkpoint(path)
