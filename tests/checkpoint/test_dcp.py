"""The format of torch.distributed.checkpoint: what torch.save writes around values, and what is refused of a file."""

from __future__ import annotations

import io
import pickle
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from fullshard.checkpoint.blocks import CorruptCheckpointError
from fullshard.checkpoint.dcp import ALIGNMENT, around, loaded, loaded_tensor, read_metadata, saved, write_metadata
from fullshard.checkpoint.manifest import Entry, Manifest, Stored, StoredPiece, Tensors
from fullshard.disk.file import bytes_of
from tests.checkpoint.test_plain import Harm


def archive(value: Any) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def test_what_is_around_values_is_what_torch_saves() -> None:
    for dtype, sizes in product(DTYPES, ((), (1,), (3, 5), (0, 4))):
        tensor = torch.ones(sizes).to(dtype)
        before, after, length = around(dtype, sizes)
        whole = before + bytes(bytes_of(tensor)) + after
        assert len(whole) % ALIGNMENT == 0
        assert len(whole) - length < ALIGNMENT
        found = torch.load(io.BytesIO(whole[:length]), weights_only=True)
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert torch.equal(found, tensor)
        assert torch.equal(loaded_tensor(whole[:length], dtype, sizes, "x"), tensor)


def test_values_come_back() -> None:
    value = {"n": 1, "list": [1.5, "text", None], "tensor": torch.arange(3), "dtype": torch.int8}
    found = loaded(saved(value, "state"), "state")
    assert torch.equal(found.pop("tensor"), value.pop("tensor"))
    assert found == value


def test_what_would_need_code_is_refused_with_its_place() -> None:
    cases: list[tuple[Any, str]] = [
        ({"a": [1, object()]}, r"x cannot be saved as numbers, .*: \['a'\]\[1\] is a builtins.object"),
        (object(), "x cannot be saved as numbers, .*: it is a builtins.object"),
        (Path("a"), r"it is a pathlib\.\w*"),
    ]
    for value, says in cases:
        with pytest.raises(TypeError, match=says):
            saved(value, "x")


def compressed() -> bytes:
    data = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive(torch.zeros(1000)))) as whole,
        zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for each in whole.infolist():
            packed.writestr(each.filename, whole.read(each))
    return data.getvalue()


def test_odd_archives_are_refused_and_nothing_in_them_is_called(tmp_path: Path) -> None:
    cases = [
        (b"no archive", "x cannot be loaded"),
        (compressed(), "compressed"),
        (b"\0" * 64 + archive(1), "does not begin like an archive of torch.save|directory is not where"),
        (archive(1) + b"more", "directory is not where torch.save puts it|cannot be loaded"),
        (archive(Harm(tmp_path / "made")), "x cannot be loaded"),
    ]
    for data, says in cases:
        with pytest.raises(CorruptCheckpointError, match=says):
            loaded(data, "x")
    assert not (tmp_path / "made").exists()


def test_a_tensor_of_another_shape_or_dtype_is_refused() -> None:
    data = archive(torch.zeros(2, 3))
    for dtype, sizes in ((torch.float32, (3, 2)), (torch.float64, (2, 3))):
        with pytest.raises(CorruptCheckpointError):
            loaded_tensor(data, dtype, sizes, "x")


def test_metadata_that_torch_wrote_describes_its_files(tmp_path: Path) -> None:
    torch_dcp.save({"model": {"w": torch.arange(6.0).view(2, 3)}, "n": 5}, checkpoint_id=tmp_path, no_dist=True)
    found = read_metadata((tmp_path / ".metadata").read_bytes(), tmp_path / ".metadata")
    assert list(found.tensors) == ["model.w"]
    entry = found.tensors["model.w"]
    assert (entry.dtype, tuple(entry.shape)) == (torch.float32, (2, 3))
    assert list(found.objects) == ["n"]
    assert found.paths["model.w"] == ("model", "w")
    assert {name: file.size for name, file in found.files.items()} == {
        path.name: path.stat().st_size for path in tmp_path.iterdir() if path.name != ".metadata"
    }


def test_metadata_that_is_written_is_what_torch_reads(tmp_path: Path) -> None:
    before, after, length = around(torch.float32, (2, 3))
    values, count = torch.arange(6.0).view(2, 3), archive(5)
    (tmp_path / "data").write_bytes(before + bytes(bytes_of(values)) + after + count)
    start = length + -length % ALIGNMENT
    piece = StoredPiece("data", 0, length, len(before), (0, 0), (2, 3))
    manifest = Manifest()
    manifest.tensors = Tensors.of({"model.w": Entry(torch.float32, (2, 3), [piece])})
    manifest.objects["n"] = Stored("data", start, len(count))
    data = write_metadata(manifest, {"model.w": ("model", "w"), "n": ("n",)})
    (tmp_path / ".metadata").write_bytes(data)
    into = {"model": {"w": torch.zeros(2, 3)}, "n": 0}
    torch_dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(into["model"]["w"], values)  # type: ignore[index]
    assert into["n"] == 5
    again = read_metadata(data, tmp_path / ".metadata")
    assert again.tensors["model.w"].pieces[0].sizes == (2, 3)
    assert again.objects == manifest.objects


def test_what_is_no_metadata_is_refused(tmp_path: Path) -> None:
    for data in (b"", pickle.dumps(5), pickle.dumps({"state_dict_metadata": {}})):
        with pytest.raises(CorruptCheckpointError, match=r"\.metadata is not DCP metadata"):
            read_metadata(data, tmp_path / ".metadata")
