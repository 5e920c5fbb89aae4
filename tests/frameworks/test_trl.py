"""Trainers of TRL: fine-tuning, preferences with a frozen reference model, and rewards for what the model generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import needs, row

needs("trl")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", ["SFT-1-FULL", "SFT-1-SHARDED", "SFT-2-SHARDED", "DPO-1-SHARDED", "DPO-2-FULL"])
def test_trains_saves_and_resumes(tmp_path: Path, case: str) -> None:
    row("trl", tmp_path, case, close=1e-4)


@pytest.mark.parametrize("case", ["GRPO-1-FULL", "GRPO-2-SHARDED"])
def test_trains_on_what_it_generates(tmp_path: Path, case: str) -> None:
    """Another number of ranks draws other tokens."""
    row("trl", tmp_path, case, others=None)
