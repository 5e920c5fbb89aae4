"""Trainers of TRL: fine-tuning, preferences with a frozen reference model, and rewards for what the model generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import cases, run

pytest.importorskip("trl")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1", "2"])
def test_trains_as_on_torchs(tmp_path: Path, version: str) -> None:
    cases("trl", tmp_path, [f"SFT-{version}", f"DPO-{version}", f"GRPO-{version}"])


@pytest.mark.slow
def test_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """What two ranks saved, one reads; it has both ranks' batches in one."""
    two = run("trl", tmp_path, "SFT-1", "DPO-2")
    one = run("trl", tmp_path, "SFT-1", "DPO-2", "one-rank", ranks=1)
    for name, found in one.items():
        for ours, theirs in zip(found["resumed"], two[name]["resumed"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
