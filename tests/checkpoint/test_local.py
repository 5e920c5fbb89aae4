"""What is special about checkpoints on a disk: their hidden directories, and the locks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    names = [".step-00000001.ab.partial", ".step-00000002.cd.removed", ".step-00000003.ef.partial", ".other", "step-x"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    with locked(tmp_path / names[2]):
        LocalStorage(tmp_path).begin(None).discard()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[2:])
    LocalStorage(tmp_path).begin(None).discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[3:])


def test_what_is_no_directory_does_not_keep_leftovers(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f".step-0000000{number}.file.partial").write_text("")
        (tmp_path / f".step-0000000{number}.dir.partial").mkdir()
    LocalStorage(tmp_path).begin(None).discard()
    assert {path.suffixes[-2] for path in tmp_path.iterdir()} == {".file"}
