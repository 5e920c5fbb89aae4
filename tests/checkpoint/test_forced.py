"""What is on the disk before a checkpoint becomes visible: a power failure leaves it whole, or not there at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullshard import checkpoint
from fullshard.checkpoint import Checkpoint
from fullshard.checkpoint.convert import export
from tests.checkpoint.cases import save_at
from tests.checkpoint.test_faults import filled
from tests.harness import World, ranks

RENAMED = "renamed"
#: A call of ``os.fsync`` (the inode, and the size of the file at that moment), or a renaming.
Event = tuple[int, int] | str


@contextlib.contextmanager
def noted() -> Iterator[list[Event]]:
    """What this process forces to the disk and renames, in its order."""
    events: list[Event] = []
    force, rename = os.fsync, os.rename

    def fsync(file: int) -> None:
        events.append((os.fstat(file).st_ino, os.fstat(file).st_size))
        force(file)

    def renaming(old: Path, new: Path) -> None:
        rename(old, new)
        events.append(RENAMED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", renaming)
        yield events


def whole(path: Path) -> Event:
    return path.stat().st_ino, path.stat().st_size


def inodes(events: list[Event]) -> list[int]:
    return [each[0] for each in events if not isinstance(each, str)]


@ranks(2)
@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_is_forced_to_the_disk_before_it_is_visible_and_its_name_after(
    world: World, tmp_path: Path, wait: bool
) -> None:
    with noted() as events:
        checkpoint.save(tmp_path, filled(), step=1, wait=wait)
        checkpoint.wait_until_finished()
    path = tmp_path / "step-00000001"
    if world.rank == 1:
        assert events == [whole(path / "__1_0.distcp")]
        return
    at = events.index(RENAMED)
    before, after = events[:at], events[at + 1 :]
    assert before[:-1] == [whole(path / name) for name in ("__0_0.distcp", ".metadata", "manifest.json")]
    assert inodes(before[-1:]) == [path.stat().st_ino]  # the names of the files
    assert inodes(after) == [tmp_path.stat().st_ino]  # the new name of the directory


@ranks(2)
def test_a_replica_is_forced_like_any_other(world: World, tmp_path: Path) -> None:
    replicas = tmp_path / f"host {world.rank}"
    with noted() as events:
        checkpoint.save(tmp_path / "saves", filled(), step=1, replicas=replicas)
    dist.barrier()
    path = replicas / "step-00000001"
    before = events[: events.index(RENAMED)]
    assert {whole(path / f"__{rank}_0.distcp") for rank in range(2)} < set(before)
    assert before[-1] == (path.stat().st_ino, before[-1][1])


@pytest.mark.parametrize("name", ["one.safetensors", "one.pt", "folder"])
def test_exported_files_are_forced_to_the_disk_before_they_have_their_names(tmp_path: Path, name: str) -> None:
    path = save_at(tmp_path / "saves", torch.nn.Linear(64, 64), step=1)
    out = tmp_path / name
    with noted() as events:
        files = export(Checkpoint(path), out, max_shard=16_500 if name == "folder" else None)
    assert len(files) == (3 if name == "folder" else 1)
    assert events[: len(files)] == [whole(file) for file in files]
    assert events[len(files) : -1] == [RENAMED] * len(files)
    assert inodes(events[-1:]) == [files[0].parent.stat().st_ino]
