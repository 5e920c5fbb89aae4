"""The training example: both front ends train alike, and each goes on from a checkpoint of the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def train(checkpoints: Path, steps: int, *flags: str) -> str:
    """Run a few steps of the smallest size on two ranks, and return what was printed."""
    arguments = ["--nproc-per-node=2", str(ROOT / "examples" / "train.py"), "--device=cpu", f"--steps={steps}"]
    arguments += ["--batch-size=4", "--seq-len=16", "--sample-tokens=0", f"--checkpoint-dir={checkpoints}", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def number_after(text: str, printed: str) -> float:
    found = re.search(rf"{text}: (\d[\d.e+-]*\d)", printed)
    assert found, printed
    return float(found.group(1))


def test_a_run_changes_its_front_end_twice_and_is_the_same_run(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 6)  # compares its first steps with the same steps unsharded
    assert number_after("Largest difference of a loss", whole) < 1e-5
    for api, steps in (("wrapper", 2), ("fully_shard", 4), ("wrapper", 6)):
        printed = train(tmp_path / "changes", steps, f"--api={api}", "--no-compare")
    assert f"Going on from {tmp_path / 'changes' / 'step-4'}" in printed
    assert abs(number_after("Validation loss", printed) - number_after("Validation loss", whole)) <= 0.001


def test_the_wrapper_trains_as_unsharded_steps_do_in_low_precision(tmp_path: Path) -> None:
    printed = train(tmp_path, 5, "--api=wrapper", "--precision=bf16", "--reshard-after-forward=no")
    assert number_after("Largest difference of a loss", printed) < 1e-2
