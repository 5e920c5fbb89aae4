"""Lightning: Fabric and the Trainer, with FSDPStrategy and with ModelParallelStrategy (named with a 2 here)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import row

pytest.importorskip("lightning")

pytestmark = pytest.mark.slow

#: What changes no number.
APART = ("full", "sharded", "flat")


@pytest.mark.parametrize(
    "options",
    [
        ("fabric", "sharded", "flat"),
        ("fabric", "full", "flat"),
        ("fabric", "sharded"),
        ("trainer", "sharded", "flat"),
        ("fabric2", "sharded"),
        ("trainer2", "sharded"),
    ],
    ids=" ".join,
)
def test_trains_saves_and_resumes(tmp_path: Path, options: tuple[str, ...]) -> None:
    row("lightning", tmp_path, *options, apart=APART)
