"""torchtitan's debug models, parallelized by its own functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import compare, row, run

pytest.importorskip("torchtitan")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", [("llama3", "recompute"), ("deepseek_v3", "experts")], ids=" ".join)
def test_trains_saves_and_resumes(tmp_path: Path, options: tuple[str, ...]) -> None:
    row("torchtitan", tmp_path, *options, apart=("recompute",))


@pytest.mark.parametrize("option", ["tensor-parallel", "replicas"])
def test_on_four_ranks(tmp_path: Path, option: str) -> None:
    theirs = run("torchtitan", tmp_path / "torch", "llama3", option, "train-only", library="torch", ranks=4)
    ours = run("torchtitan", tmp_path, "llama3", option, ranks=4)
    compare(ours, theirs)
    assert ours["resumed"] == ours["uninterrupted"]
