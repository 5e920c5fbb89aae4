"""torch alone: its state dicts, and what else of torch works beside its FSDPs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import row, run

#: What changes no number.
APART = ("full", "sharded", "flat", "recompute", "compile")


def test_trains_saves_and_resumes(tmp_path: Path) -> None:
    row("torch", tmp_path, "2-sharded", apart=APART)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "1-sharded",
        "1-sharded-flat",
        "1-full-recompute",
        "2-full-recompute-compile",
        "2-full-functional",
    ],
)
def test_options(tmp_path: Path, case: str) -> None:
    row("torch", tmp_path, case, apart=APART)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1-full-scaler", "2-sharded-scaler"])
def test_scaled_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """The first step overflows, and is skipped. With collectives of the backend, which round as torch's do."""
    monkeypatch.setenv("FULLSHARD_TRANSPORT", "collective")
    row("torch", tmp_path, case, apart=APART, close=1e-2)


@pytest.mark.slow
def test_named_optimizers(tmp_path: Path) -> None:
    row("torch", tmp_path, "1-named")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["2-sharded-replicas", "2-sharded-tensor_parallel"])
def test_on_two_meshes(tmp_path: Path, case: str) -> None:
    row("torch", tmp_path, case, apart=APART, ranks=4, others=2)


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "kind"), [("torch", "full"), ("fullshard", "sharded")])
def test_one_library_goes_on_where_the_other_stopped(tmp_path: Path, saved_by: str, kind: str) -> None:
    saved = run("torch", tmp_path, "2", kind, library=saved_by)
    loaded = run("torch", tmp_path, "2", kind, "resume", library="fullshard" if saved_by == "torch" else "torch")
    assert (loaded["resumed"], loaded["exported"]) == (saved["uninterrupted"], saved["exported"])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_pipelines(tmp_path: Path, schedule: str) -> None:
    row("pipeline", tmp_path, schedule, ranks=4, others=2)
