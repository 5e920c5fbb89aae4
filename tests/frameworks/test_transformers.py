"""The Trainer of transformers, with either of torch's FSDPs, with and without adapters of PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import needs, row

needs("transformers", "accelerate", "peft")


pytestmark = pytest.mark.slow


def test_trains_generates_and_resumes(tmp_path: Path) -> None:
    """Losses, norms of gradients and tokens of ranks that generate different numbers of them are those of torch's."""
    row("transformers", tmp_path, "2-SHARDED", close=1e-4)


@pytest.mark.parametrize(
    "case",
    ["1-FULL-accumulate", "1-SHARDED-recompute", "2-FULL-accumulate", "2-SHARDED-recompute", "2-SHARDED-lora"],
)
def test_options(tmp_path: Path, case: str) -> None:
    row("transformers", tmp_path, case, close=1e-4)


def test_adapters_below_the_wrapper(tmp_path: Path) -> None:
    """PEFT finds none of its adapters there, to save or load them: their names are not those of modules."""
    row("transformers", tmp_path, "1-FULL-lora-trains", others=None)


@pytest.mark.parametrize("case", ["1-SHARDED-bf16-accumulate", "2-FULL-bf16-accumulate", "2-FULL-bf16-lora"])
def test_low_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """With collectives of the backend, which round as torch's do; without, sums are rounded once."""
    monkeypatch.setenv("FULLSHARD_TRANSPORT", "collective")
    row("transformers", tmp_path, case, others=None)
