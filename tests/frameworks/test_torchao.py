"""torchao's weights and optimizers of few bits, in programs that know fully_shard by its name in torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import row

pytest.importorskip("torchao")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["float8-ahead", "int8", "frozen-4", "frozen-8", "AdamW8bit", "AdamW4bit"])
def test_trains_saves_and_resumes(tmp_path: Path, kind: str) -> None:
    row("torchao", tmp_path, kind)
