"""torchao's weights and optimizers of few bits, in programs that know fully_shard by its name in torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import needs, row

needs("torchao")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", ["float8_ahead", "int8", "frozen_4", "frozen_8", "AdamW8bit", "AdamW4bit"])
def test_trains_saves_and_resumes(tmp_path: Path, case: str) -> None:
    """In float8 each rank scales by the largest of its own activations, and a number has three bits after the first."""
    row("torchao", tmp_path, case, close=2**-4 if case.startswith("float8") else 1e-5)
