"""Which files of a directory are imported, and what becomes of values that are exported in another dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fullshard.checkpoint import Checkpoint
from fullshard.checkpoint.convert import WrongUse, export, files_of
from tests.checkpoint.cases import save_at


@pytest.mark.parametrize("name", ["one.safetensors", "one.pt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_export_casts_no_values_of_8_bits_and_no_integers(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Values of 8 bits have their scales elsewhere: as bfloat16 they would be other numbers to whoever reads them."""
    model = torch.nn.Module()
    values = torch.tensor([0.5, -3.0, 448.0])
    wanted = {"quantized": torch.float8_e4m3fn, "low": torch.float16, "count": torch.int64, "plain": torch.float32}
    for key, own in wanted.items():
        model.register_buffer(key, values.to(own))
    path = save_at(tmp_path / "saves", model, step=1)
    out = tmp_path / name
    export(Checkpoint(path), out, dtype=dtype)
    read = load_file(out) if name == "one.safetensors" else torch.load(out, weights_only=True)
    assert {key: value.dtype for key, value in read.items()} == {**wanted, "low": dtype, "plain": dtype}
    for key, own in wanted.items():
        assert torch.equal(read[key].float(), values.to(own).float()), key


def test_of_a_directory_only_files_of_tensors_are_imported(tmp_path: Path) -> None:
    """A directory of transformers has a configuration and a tokenizer too."""
    for name in ("config.json", "tokenizer.model"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(WrongUse, match=r"neither a file nor a directory with files that end in one of \.bin"):
        files_of(tmp_path)
    (tmp_path / "b.pt").write_bytes(b"")
    (tmp_path / "a.bin").write_bytes(b"")
    assert files_of(tmp_path) == [tmp_path / "a.bin", tmp_path / "b.pt"]
    (tmp_path / "c.safetensors").write_bytes(b"")  # which many directories have beside the files of torch.save
    assert files_of(tmp_path) == [tmp_path / "c.safetensors"]
    assert files_of(tmp_path / "b.pt") == [tmp_path / "b.pt"]
