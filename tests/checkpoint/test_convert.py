"""What becomes of values that are exported in another dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fullshard import checkpoint
from fullshard.checkpoint import Checkpoint
from fullshard.checkpoint.convert import export


@pytest.mark.parametrize("name", ["one.safetensors", "one.pt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_export_casts_no_values_of_8_bits_and_no_integers(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Values of 8 bits have their scales elsewhere: as bfloat16 they would be other numbers to whoever reads them."""
    model = torch.nn.Module()
    values = torch.tensor([0.5, -3.0, 448.0])
    wanted = {"quantized": torch.float8_e4m3fn, "low": torch.float16, "count": torch.int64, "plain": torch.float32}
    for key, own in wanted.items():
        model.register_buffer(key, values.to(own))
    path = checkpoint.save(tmp_path / "saves", model, step=1)
    assert path is not None
    out = tmp_path / name
    export(Checkpoint(path), out, dtype=dtype)
    read = load_file(out) if name == "one.safetensors" else torch.load(out, weights_only=True)
    assert {key: value.dtype for key, value in read.items()} == {**wanted, "low": dtype, "plain": dtype}
    for key, own in wanted.items():
        assert torch.equal(read[key].float(), values.to(own).float()), key
