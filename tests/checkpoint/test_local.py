"""What is special about checkpoints on a disk: their hidden directories, and the locks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint import CheckpointError
from fullshard.checkpoint.local import LocalStorage


@contextmanager
def locked(path: Path) -> Iterator[None]:
    opened = os.open(path, os.O_RDONLY)
    fcntl.flock(opened, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(opened)


def test_leftovers_are_removed_unless_somebody_writes_to_them(tmp_path: Path) -> None:
    names = [".step-00000001.ab-1-0a0a0a0a.partial", ".step-00000002.1.0a0a0a0a.removed"]
    names += [".step-00000003.e-f-2-0a0a0a0a.partial", ".other", "step-x", "step-00000009"]
    names += [".step-00000001.partial", ".step-1.a-1-0a0a0a0a.partial", ".step-00000002.removed"]  # of other programs
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    with locked(tmp_path / names[2]):
        LocalStorage(tmp_path).begin(None).discard()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[2:])
    LocalStorage(tmp_path).begin(None).discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[3:])


def test_without_locks_leftovers_stay_and_what_the_system_does_not_rename_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint.save(tmp_path, nn.Linear(2, 2), step=1)
    assert isinstance(path, Path)
    (left := tmp_path / ".step-00000002.ab-1-0a0a0a0a.partial").mkdir()

    def refuse(*_: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(PermissionError):
            LocalStorage(tmp_path).remove(path)
        patch.setattr("fullshard.platforms._fcntl", None)
        assert not LocalStorage(tmp_path).remove(path)
        LocalStorage(tmp_path).begin(None).discard()
    assert sorted(tmp_path.iterdir()) == [left, path]


def test_what_is_no_directory_does_not_keep_leftovers(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f".step-0000000{number}.file-1-00000000.partial").write_text("")
        (tmp_path / f".step-0000000{number}.dir-1-00000000.partial").mkdir()
    LocalStorage(tmp_path).begin(None).discard()
    assert {path.suffixes[-2] for path in tmp_path.iterdir()} == {".file-1-00000000"}


def test_what_is_no_directory_is_not_an_empty_one(tmp_path: Path) -> None:
    cases = {"file": "Not a directory", "file/below": "Not a directory", "link/below": "link is a link to nothing",
             "loop": "Too many levels of symbolic links"}  # fmt: skip
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for name, problem in cases.items():
        with pytest.raises(CheckpointError, match=f"{name} cannot be read: .*{problem}"):
            checkpoint.load(tmp_path / name, nn.Linear(2, 2))
    assert checkpoint.list_checkpoints(tmp_path / "new" / "run") == []
