"""What the commands say when all went well, in which order they list, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from fullshard import checkpoint, cli
from fullshard.checkpoint.convert import import_model


@pytest.mark.slow
def test_a_command_whose_output_nobody_reads_ends_as_shells_say_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, torch.nn.Linear(2, 2), step=1)
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "fullshard", "checkpoint", "show", str(tmp_path)]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")


def test_export_says_of_which_checkpoint_how_much_is_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint.save(tmp_path / "saves", torch.nn.Linear(2, 2), step=1)
    out = tmp_path / "one.safetensors"
    assert cli.main(["checkpoint", "export", str(tmp_path / "saves"), str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: 2 model tensors were written to",
        f"  {out} ({out.stat().st_size} B)",
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_dcp_wrote_last_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age, name in ((300, "first"), (100, "last"), (200, "middle")):
        dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / name, no_dist=True)
        then = (tmp_path / name / ".metadata").stat().st_mtime - age
        os.utime(tmp_path / name / ".metadata", (then, then))
    assert cli.main(["checkpoint", "list", str(tmp_path), "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["last", "middle", "first"]


def test_an_import_is_told_of_no_later_save(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1000)}, tmp_path / "one.pt")
    told: list[int] = []
    import_model(tmp_path / "one.pt", tmp_path / "saves", report=told.append)
    written = sum(told)
    assert written >= 4000
    checkpoint.save(tmp_path / "saves", torch.nn.Linear(20, 20))
    assert sum(told) == written
