"""Lightning: Fabric and the Trainer, with FSDPStrategy and with ModelParallelStrategy (named with a 2 here)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import needs, row

needs("lightning")

pytestmark = pytest.mark.slow

#: What changes no number.
APART = ("full", "sharded", "flat")


@pytest.mark.parametrize(
    "case",
    [
        "fabric-sharded",
        "fabric-full",
        "fabric-sharded-flat",
        "fabric-full-flat",
        "fabric2-sharded",
        "fabric2-full",
        "trainer-sharded",
        "trainer-full",
        "trainer-sharded-flat",
        "trainer2-sharded",
        "trainer2-full",
    ],
)
def test_trains_saves_and_resumes(tmp_path: Path, case: str) -> None:
    """The Trainer saves whole states of optimizers by numbers of parameters, which flat ones have not."""
    row("lightning", tmp_path, case, apart=APART)
