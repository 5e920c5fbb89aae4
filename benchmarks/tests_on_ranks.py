"""What tests on ranks cost: 100 parity tests of a small model on 2 to 8 ranks, and the first alone.

Counted from the start of pytest to its end, in a project of its own: `python benchmarks/tests_on_ranks.py`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = """
import copy

import pytest
import torch
from torch import nn

from fullshard import fully_shard
from fullshard.testing import assert_trains_like


def batch(step, rank):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.ranks(2, 3, 4, 6, 8)
@pytest.mark.parametrize("width", range(16, 36))
def test_parity(world, width):
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
    assert_trains_like(model, fully_shard(copy.deepcopy(model)), batch)
"""


def seconds(folder: Path, *arguments: str) -> float:
    """How long pytest takes for the tests of the folder. Raises if one fails."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=folder, check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Time all tests, and the first alone."""
    with tempfile.TemporaryDirectory() as path:
        (Path(path) / "test_parity.py").write_text(TESTS)
        first = seconds(Path(path), "test_parity.py::test_parity[W2-16]")
        whole = seconds(Path(path))
    print(f"the first test: {first:.1f} s; 100 tests on 2 to 8 ranks: {whole:.1f} s")


if __name__ == "__main__":
    main()
