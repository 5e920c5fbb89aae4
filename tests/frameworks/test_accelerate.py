"""accelerate, with either of torch's FSDPs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import needs, row

needs("accelerate", "transformers")

#: What changes no number, or what torch's cannot do where there are CPUs only.
APART = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "recompute", "offload", "low_memory")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "1-FULL_STATE_DICT",
        "1-SHARDED_STATE_DICT",
        "1-SHARDED_STATE_DICT-flat",
        "1-FULL_STATE_DICT-flat",
        "1-SHARDED_STATE_DICT-recompute-tied",
        "1-FULL_STATE_DICT-accumulate",
        "1-SHARDED_STATE_DICT-offload",
        "1-FULL_STATE_DICT-compile",
        "2-FULL_STATE_DICT",
        "2-SHARDED_STATE_DICT",
        "2-FULL_STATE_DICT-low_memory",  # on CPUs accelerate leaves loading on one rank to fully_shard
        "2-SHARDED_STATE_DICT-recompute-tied",
        "2-FULL_STATE_DICT-accumulate",
        "2-SHARDED_STATE_DICT-offload",
        "2-FULL_STATE_DICT-compile",
    ],
)
def test_options(tmp_path: Path, case: str) -> None:
    row("accelerate", tmp_path, case, apart=APART)


@pytest.mark.slow
def test_local_state_dicts(tmp_path: Path) -> None:
    """Each rank reads what it saved itself."""
    row("accelerate", tmp_path, "1-LOCAL_STATE_DICT-flat", apart=APART, others=None)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("weights", ["accumulate", "bf16_weights"])
def test_low_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, weights: str) -> None:
    """With collectives of the backend, which round as torch's do; without, sums are rounded once."""
    monkeypatch.setenv("FULLSHARD_TRANSPORT", "collective")
    row("accelerate", tmp_path, f"{version}-FULL_STATE_DICT-bf16-{weights}", apart=APART, others=None)
