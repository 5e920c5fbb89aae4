"""Which storage a directory has: a path of the operating system, or a URL."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fullshard.checkpoint.local import LocalStorage
from fullshard.checkpoint.manifest import is_checkpoint
from fullshard.checkpoint.remote import ObjectStorage
from fullshard.checkpoint.storage import located, storage_of


@pytest.mark.parametrize("directory", ["saves", "/tmp/saves", Path("saves"), "file:///tmp/saves"])
def test_a_path_is_a_directory_of_the_operating_system(directory: str | Path) -> None:
    found = located(directory)
    assert found == Path(str(directory).removeprefix("file://"))
    assert isinstance(storage_of(found), LocalStorage)


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
