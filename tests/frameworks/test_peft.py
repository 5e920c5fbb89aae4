"""Adapters of PEFT on models that are sharded with their frozen weights, without any trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import cases, run

pytest.importorskip("transformers")
pytest.importorskip("peft")


def test_trains_saves_adapters_and_resumes(tmp_path: Path) -> None:
    cases("peft", tmp_path, ["fully_shard", "wrapped"])


@pytest.mark.slow
def test_options(tmp_path: Path) -> None:
    """With flat parameters PEFT's own policy keeps frozen and trained parameters apart."""
    cases("peft", tmp_path, ["wrapped-flat"])


@pytest.mark.slow
def test_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """What two ranks saved, one reads; it has both ranks' batches in one."""
    names = ["fully_shard", "wrapped", "wrapped-flat"]
    two = run("peft", tmp_path, *names)
    one = run("peft", tmp_path, *names, "one-rank", ranks=1)
    for name in names:
        assert one[name]["resumed"] == pytest.approx(two[name]["resumed"], rel=1e-5)
        assert one[name]["exported"] == pytest.approx(two[name]["exported"], rel=1e-5)
