"""torchtitan's debug models, parallelized by its own functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import needs, row

needs("torchtitan")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", ["llama3", "llama3-recompute", "deepseek_v3-experts"])
def test_trains_saves_and_resumes(tmp_path: Path, case: str) -> None:
    """torchtitan shards nothing on a single rank."""
    row("torchtitan", tmp_path, case, apart=("recompute",), others=4, close=1e-4)


@pytest.mark.parametrize("case", ["llama3-tensor_parallel", "llama3-replicas"])
def test_on_four_ranks(tmp_path: Path, case: str) -> None:
    """And resumed on two that only shard."""
    row("torchtitan", tmp_path, case, ranks=4, others=2, close=1e-4)
