"""What a reader says of bytes that are not what was written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fullshard import checkpoint
from fullshard.checkpoint import Checkpoint, CheckpointError, latest
from fullshard.checkpoint.blocks import BLOCK
from tests.checkpoint.cases import flip

#: Elements of fp32 of three blocks and a half.
NUMEL = 7 * BLOCK // 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = torch.nn.Module()
    for name in "abc":
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(NUMEL)))
    saved = checkpoint.save(tmp_path, model, step=1)
    assert saved is not None
    return saved


def test_a_defect_names_the_tensors_that_lie_in_its_bytes_and_no_others(path: Path) -> None:
    pieces = {name: Checkpoint(path).tensors[f"model.{name}"].pieces[0] for name in "abc"}
    file = path / pieces["a"].file

    def said(at: int) -> str:
        flip(file, at)
        (sentence,) = Checkpoint(path).verify()
        flip(file, at)
        first, last = at // BLOCK * BLOCK, min((at // BLOCK + 1) * BLOCK, file.stat().st_size)
        head = f"{file}: bytes {first} to {last} are not what was written; they hold "
        assert sentence.startswith(head)
        return sentence.removeprefix(head)

    for name, piece in pieces.items():
        assert said(piece.data + 2 * BLOCK) == f"model.{name}"
    assert said(pieces["b"].data) == "model.a, model.b"
    assert said(pieces["c"].data) == "model.b, model.c"


def test_a_file_that_is_cut_names_the_tensors_that_it_lost(path: Path) -> None:
    piece = Checkpoint(path).tensors["model.b"].pieces[0]
    os.truncate(path / piece.file, piece.data + BLOCK)
    (sentence,) = Checkpoint(path, whole=False).verify()
    assert sentence.endswith("; parts of ['model.b', 'model.c'] are lost")


def test_a_directory_in_which_nothing_is_whole_is_not_an_empty_one(path: Path) -> None:
    (path / "manifest.json").unlink()
    (path.parent / "step-00000002").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: .*02/manifest.json .*01/manifest.json"):
        latest(path.parent)
