"""Adapters of PEFT on models that are sharded with their frozen weights, without any trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import needs, row

needs("transformers", "peft")


@pytest.mark.parametrize("case", ["wrapped", pytest.param("fully_shard", marks=pytest.mark.slow)])
def test_trains_saves_adapters_and_resumes(tmp_path: Path, case: str) -> None:
    row("peft", tmp_path, case)


@pytest.mark.slow
def test_flat_parameters(tmp_path: Path) -> None:
    """PEFT's own policy keeps frozen and trained parameters apart."""
    row("peft", tmp_path, "wrapped-flat")
