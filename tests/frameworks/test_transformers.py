"""The Trainer of transformers, with either of torch's FSDPs, with and without adapters of PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import cases, run

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")


def test_trains_generates_and_resumes(tmp_path: Path) -> None:
    cases("transformers", tmp_path, ["2-SHARDED"])


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1", "2"])
def test_options(tmp_path: Path, version: str) -> None:
    """Losses, norms of gradients and tokens of ranks that generate different numbers of them are those of torch's.

    Below the wrapper PEFT finds none of its adapters, to save or load them: their names are not those of modules.
    """
    lora = "FULL-lora-trains" if version == "1" else "SHARDED-lora"
    options = ["FULL-accumulate", "SHARDED-recompute", lora]
    cases("transformers", tmp_path, [f"{version}-{each}" for each in options])


@pytest.mark.slow
def test_low_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With collectives of the backend, which round as torch's do; without, sums are rounded once."""
    monkeypatch.setenv("FULLSHARD_TRANSPORT", "collective")
    cases("transformers", tmp_path, ["1-SHARDED-bf16-accumulate", "2-FULL-bf16-accumulate", "2-FULL-bf16-lora"])


@pytest.mark.slow
def test_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """What two ranks saved, one reads; it has both ranks' batches in one."""
    names = ["1-FULL", "1-SHARDED", "2-FULL", "2-SHARDED"]
    two = run("transformers", tmp_path, *names)
    one = run("transformers", tmp_path, *names, "one-rank", ranks=1)
    for name in names:
        for ours, theirs in zip(one[name]["resumed"], two[name]["resumed"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
        assert one[name]["exported"] == pytest.approx(two[name]["exported"], rel=1e-4)
