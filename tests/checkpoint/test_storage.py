"""Which storage a directory has: a path of the operating system, or a URL."""

from __future__ import annotations

import ntpath
import os
import sys
from pathlib import Path

import pytest
from torch import nn

import fullshard
from fullshard import checkpoint
from fullshard.checkpoint.local import LocalStorage
from fullshard.checkpoint.manifest import is_checkpoint
from fullshard.checkpoint.remote import ObjectStorage
from fullshard.checkpoint.storage import located, storage_of


def test_a_path_is_a_directory_of_the_operating_system() -> None:
    for directory in ("saves", "/tmp/saves", Path("saves"), "file:///tmp/saves", "file://localhost/tmp/saves"):
        found = located(directory)
        assert found == Path(str(directory).removeprefix("file://").removeprefix("localhost"))
        assert isinstance(storage_of(found), LocalStorage)


REFUSED = (Path("s3://bucket/run"), "s3:/bucket/run", "file:/data/run", "~/run", Path("~"), "file://host/run",
           "file://run", "local://host/run", "file:///data/a%20b")  # fmt: skip


def test_what_would_be_a_directory_below_the_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    for directory in REFUSED:
        with pytest.raises(ValueError, match=r": give (a URL as a string|os.path.expanduser\('~|a path such as)"):
            checkpoint.save(directory, model, step=1)
        if not str(directory).startswith(("file://", "local://")):
            with pytest.raises(ValueError, match=r"replicas is '.*', which would be below the working directory"):
                checkpoint.load(tmp_path, model, replicas=directory)
            with pytest.raises(ValueError, match=r"DiskOffloadPolicy.directory is '.*', which would be below"):
                fullshard.DiskOffloadPolicy(directory)
    with pytest.raises(ValueError, match=r"replicas is the URL s3://bucket/run; expected a path"):
        checkpoint.forget_replicas("s3://bucket/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("directory", ["C:/run", "C://run", Path("C://run"), "file:///C:/run"])
def test_a_drive_of_windows_is_no_protocol(directory: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "splitdrive", ntpath.splitdrive)
    assert located(directory) == Path("C:/run")


def test_a_url_is_in_a_store() -> None:
    found = located("memory://bucket/saves")
    assert str(found / "step-00000001") == "memory://bucket/saves/step-00000001"
    assert located(found) is found
    assert isinstance(storage_of(found), ObjectStorage)


def test_a_url_needs_universal_pathlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(ImportError, match=r"s3://bucket needs .* pip install 'fullshard\[storage\]'"):
        located("s3://bucket")


def test_a_directory_of_dcp_is_a_checkpoint(tmp_path: Path) -> None:
    for name, files in {"dcp": [".metadata"], "other": ["manifest.json"], "step-00000001": []}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    assert [name for name in ("dcp", "other", "step-00000001", "none") if is_checkpoint(tmp_path / name)] == [
        "dcp",
        "step-00000001",
    ]
