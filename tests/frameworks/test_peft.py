"""Adapters of PEFT on models that are sharded with their frozen weights, without any trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import needs, row

needs("transformers", "peft")


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", ["wrapped", "wrapped-flat", "fully_shard"])
def test_trains_saves_adapters_and_resumes(tmp_path: Path, case: str) -> None:
    """PEFT's own policy keeps frozen and trained parameters apart, where they are flat."""
    row("peft", tmp_path, case)
